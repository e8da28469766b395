"""Messages for errors of the cpuset controller, with advice.

Each number was seen on a real cpuset mount (kernel 6.18, v1) and, for v2, in a virtual machine; the contract
test checks them again wherever it may.
"""

from __future__ import annotations

import errno
import os

_WORDS = {
    errno.EACCES: "the parent group does not hold all of them, or this process may not write (run as root)",
    errno.EPERM: "this process may not write here (run as root)",
    errno.EROFS: "the cgroup file system is mounted read-only",
    errno.EBUSY: "a group below still holds what would be taken away, or the group is in use",
    errno.ENOSPC: "tasks would be left without any CPU or memory node",
    errno.ERANGE: "an id is beyond what this kernel can have",
    errno.EINVAL: "an id is not online here, or the list is malformed",
    errno.EOPNOTSUPP: "the cpuset controller is not enabled here (see cgroup.subtree_control of the parents)",
    errno.ENOENT: "the group is gone",
    errno.ENODEV: "the group is gone",
    errno.ENXIO: "what is at its path is not a kernel file",
    errno.ESPIPE: "what is at its path is not a kernel file",
}


def explain(number: int) -> str:
    """Return the cause for an error number, with the kernel's own name for it."""
    words = _WORDS.get(number)
    name = errno.errorcode.get(number, str(number))
    return f"{words} ({name})" if words else f"{os.strerror(number)} ({name})"
