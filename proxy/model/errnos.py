"""Groups of error numbers that are handled alike."""

from __future__ import annotations

import errno
from typing import Final

GONE: Final = (errno.ENOENT, errno.ENODEV)
"""A cgroup has been removed: before its file was opened, or since."""
ABSENT: Final = (*GONE, errno.ENOTDIR)
"""As above, or a part of the path is not a directory."""
DENIED: Final = (errno.EACCES, errno.EPERM)
"""The process lacks the permission."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""A disk, or this user's part of it, is full."""
UNWRITABLE_OUTPUT: Final = (errno.EFBIG, errno.EIO, *FULL)
"""Standard output takes nothing more: a limit on its size, a terminal that is gone, a full disk."""
UNREADABLE_PROC: Final = (errno.ENOENT, errno.ENOTDIR, errno.ESRCH, *DENIED)
"""A file of procfs cannot be read: it is not mounted, hidden, or the process has ended."""
UNWRITABLE: Final = (errno.EROFS, errno.EACCES)
"""No file of the kernel can be written from here."""
UNMOVABLE_IRQ: Final = (errno.EIO, errno.EINVAL, errno.ENOSPC, errno.EPERM)
"""The kernel does not move this interrupt."""
NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
"""The process, or the system, has no file descriptor left."""
