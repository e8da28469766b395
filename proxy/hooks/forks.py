"""Children that a hook makes with ``os.fork``.

Such a child is a copy of the daemon: one thread, the hook's, and all that the daemon has open. Left alone it
keeps the daemon's lock and its connections, so that the next daemon cannot start and kubelet waits for
answers that nobody gives; it takes wake-ups from the event loop, with which it shares an epoll; and it goes
on where the hook returns, as if it were the daemon.

So what it must not share is closed in it at once, which is sockets, epoll and its like, and files that are
locked; and it ends where it comes out of the hook's code. Pipes and files stay: children write into those.

Programs that are started (``subprocess``) are no such children: the daemon's descriptors are not handed on.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_SHARED = ("socket:", "anon_inode:")


class _Here:
    """What is known of this process: who forks, and whether it is a child of a hook."""

    watched = False
    by_hook = False
    child = False


def watch() -> None:
    """See to children from now on; the daemon itself makes none, so who forks is a hook."""
    if not _Here.watched:
        _Here.watched = True
        os.register_at_fork(before=_before, after_in_child=_after)


def leave() -> None:
    """End the process if it is a child; to be called where a hook's code has come to its end."""
    if _Here.child:
        os._exit(0)


def _before() -> None:
    _Here.by_hook = threading.current_thread() is not threading.main_thread()


def _after() -> None:
    if not _Here.by_hook:
        return
    _Here.child = True
    with contextlib.suppress(OSError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError):
                if int(entry.name) > 2 and _is_shared(entry):
                    os.close(int(entry.name))


def _is_shared(entry: Path) -> bool:
    """Tell of a descriptor whether what the child does with it, or that it has it, is felt by the daemon."""
    if str(entry.readlink()).startswith(_SHARED):
        return True
    said = Path("/proc/self/fdinfo", entry.name).read_text()
    return any(line.startswith("lock:") for line in said.splitlines())
