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


class _ProcessState:
    """The state of this process, as far as forks of hooks concern it."""

    has_handlers = False
    is_fork_of_hook = False
    is_child_of_hook = False


def install_fork_handlers() -> None:
    """Handle children from now on; the daemon itself never forks, so a forking thread runs a hook."""
    if not _ProcessState.has_handlers:
        _ProcessState.has_handlers = True
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def exit_if_child() -> None:
    """End the process if it is a child; called when a hook's code has ended."""
    if _ProcessState.is_child_of_hook:
        os._exit(0)


def _before_fork() -> None:
    _ProcessState.is_fork_of_hook = threading.current_thread() is not threading.main_thread()


def _after_fork_in_child() -> None:
    if not _ProcessState.is_fork_of_hook:
        return
    _ProcessState.is_child_of_hook = True
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
