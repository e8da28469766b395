"""What to do when the kernel refuses to take CPUs away from a container. Pure.

Theory. An owner starts only on CPUs that no other container is on, so a refused write leaves three ways: the
same write again, other CPUs, or no container. Which of them can help depends on why the kernel refused:

* ENOENT, ENODEV: the cgroup is gone. Its container has just exited, or its cgroup is another one now: it is
  looked up again, and a container without a cgroup prevents nothing.
* EBUSY, EAGAIN, EINTR, and a value that reads back as another one (0): another program was at it (a cgroup
  was made inside a container between our two looks, another writer, a cpuset partition that is just being
  made). The same write may succeed a moment later.
* EINVAL: a CPU went away under the plan; the machine is read again. ENOSPC: the container would be left
  with nothing. EACCES, EPERM: its cgroup is not ours to write. The same write fails for ever, and other CPUs
  may be free of it.
* EROFS: no cgroup can be written any more, neither now nor when the owner is to be kept apart later.

The numbers are those that ``proxy.backends.cgroup.files`` explains.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from enum import Enum

TRIES = 3
"""How often a write is made that may succeed a moment later."""
PAUSE_S = 0.01
"""Seconds before the second try; each further one waits four times as long."""
ELSEWHERE = 2
"""How many other placements are tried for one create."""


class WriteAction(Enum):
    """What is left to do, the most hopeful first."""

    LOOK = "look for the cgroup again"
    RETRY = "write again"
    ELSEWHERE = "take other CPUs"
    REFUSE = "refuse the create"


_ACTIONS = {
    errno.ENOENT: WriteAction.LOOK,
    errno.ENODEV: WriteAction.LOOK,
    0: WriteAction.RETRY,
    errno.EBUSY: WriteAction.RETRY,
    errno.EAGAIN: WriteAction.RETRY,
    errno.EINTR: WriteAction.RETRY,
    errno.EROFS: WriteAction.REFUSE,
}


def action_for(number: int) -> WriteAction:
    """Return what to do about an error number; 0 where a value read back differs from the one written."""
    return _ACTIONS.get(number, WriteAction.ELSEWHERE)


def retry_pause(tried: int, numbers: Iterable[int]) -> float | None:
    """Return how long to wait before the same writes are made again.

    Args:
        tried: How often they were made already.
        numbers: Why they were refused.

    Returns:
        Seconds; None where they are not to be made again.
    """
    if tried >= TRIES or not any(action_for(number) is WriteAction.RETRY for number in numbers):
        return None
    return PAUSE_S * 4.0 ** (tried - 1)
