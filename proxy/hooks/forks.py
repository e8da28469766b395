"""Child processes that a hook creates with ``os.fork``.

Such a child is a copy of the daemon: one thread, the hook's, and all open descriptors. Left alone it keeps
the daemon's lock and its connections, so the next daemon cannot start and kubelet waits for answers that
never come; it takes wake-ups from the event loop, with which it shares an epoll instance; and where the hook
returns, it continues as if it were the daemon.

So descriptors that it must not share are closed in it at once: sockets, epoll instances and the like, and
locked files. The child ends where it leaves the hook's code. Pipes and files stay open: children write there.

Programs started with ``subprocess`` are not affected: they do not inherit the daemon's descriptors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_SHARED = ("socket:", "anon_inode:")


class _Here:
    """What is known of this process: which thread may fork, and whether it is a child of a hook."""

    watched = False
    by_hook = False
    child = False


def watch() -> None:
    """Handle children from now on; the daemon itself never forks, so a forking thread runs a hook."""
    if not _Here.watched:
        _Here.watched = True
        os.register_at_fork(before=_before, after_in_child=_after)


def leave() -> None:
    """End the process if it is a child; to be called where a hook's code has ended."""
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
    """Return whether the daemon is affected if the child holds or uses a descriptor."""
    if str(entry.readlink()).startswith(_SHARED):
        return True
    text = Path("/proc/self/fdinfo", entry.name).read_text()
    return any(line.startswith("lock:") for line in text.splitlines())
