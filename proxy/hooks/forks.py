"""Child processes that a hook creates with ``os.fork``.

Such a child is a copy of the daemon: one thread, the hook's, and all open descriptors. If nothing is done
about it, the child does harm in three ways. It keeps the daemon's lock and its connections, so the next
daemon cannot start and kubelet waits for answers that never come. It takes wake-ups from the event loop, with
which it shares an epoll instance. And when the hook returns, the child continues as if it were the daemon.

So the child closes at once the descriptors that it must not share: sockets, epoll instances and similar ones,
and locked files. It ends when it leaves the hook's code. Pipes and other files stay open, because children
write to them.

Programs started with ``subprocess`` are not affected: they do not inherit the daemon's descriptors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_SHARED = ("socket:", "anon_inode:")


class _Here:
    """The state of this process: whether a hook's thread forks, and whether it is a hook's child."""

    watched = False
    by_hook = False
    child = False


def watch() -> None:
    """Handle children from now on; the daemon itself never forks, so a forking thread runs a hook."""
    if not _Here.watched:
        _Here.watched = True
        os.register_at_fork(before=_before, after_in_child=_after)


def leave() -> None:
    """End the process if it is a child; called when a hook's code has ended."""
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
