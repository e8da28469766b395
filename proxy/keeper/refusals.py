"""What to do when the kernel refuses to take CPUs away from somebody. Pure.

Theory. An owner starts only on CPUs that nobody else is on, so a refused write leaves three ways: the same
write again, other CPUs, or no container. Which of them can help depends on why the kernel refused:

* ENOENT, ENODEV: the group is gone. Its container has just left, or its group is another one now: it is
  looked for again, and who has no group is in nobody's way.
* EBUSY, EAGAIN, EINTR, and a value that reads back as another one (0): somebody else was at it (a group was
  made inside a container between our two looks, another writer, a cpuset partition that is just being made).
  The same write may succeed a moment later.
* EINVAL: a CPU went away under the plan; the machine is looked at again. ENOSPC: the container would be left
  with nothing. EACCES, EPERM: its group is not ours to write. The same write fails for ever, and other CPUs
  may be free of it.
* EROFS: no group can be written any more, neither now nor when the owner is to be kept apart later.

The numbers are those that ``proxy.apply.words`` explains.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from enum import Enum

TRIES = 3
"""So often is a write made that may succeed a moment later."""
PAUSE_S = 0.01
"""Seconds before the second try; each further one waits four times as long."""
ELSEWHERE = 2
"""So many other decisions are made for one create."""


class Way(Enum):
    """What is left to do, the most hopeful first."""

    LOOK = "look for the group again"
    RETRY = "write again"
    ELSEWHERE = "take other CPUs"
    REFUSE = "refuse the create"


_WAYS = {
    errno.ENOENT: Way.LOOK,
    errno.ENODEV: Way.LOOK,
    0: Way.RETRY,
    errno.EBUSY: Way.RETRY,
    errno.EAGAIN: Way.RETRY,
    errno.EINTR: Way.RETRY,
    errno.EROFS: Way.REFUSE,
}


def way(number: int) -> Way:
    """Tell what to do about an error number; 0 where a value read back differs from the one written."""
    return _WAYS.get(number, Way.ELSEWHERE)


def pause(tried: int, numbers: Iterable[int]) -> float | None:
    """Tell how long to wait before the same writes are made again.

    Args:
        tried: How often they were made already.
        numbers: Why they were refused.

    Returns:
        Seconds; None where they are not to be made again.
    """
    if tried >= TRIES or not any(way(number) is Way.RETRY for number in numbers):
        return None
    return PAUSE_S * 4.0 ** (tried - 1)
