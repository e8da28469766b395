"""The state of each hook file, for ``topoproxy hooks list`` and the status page."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.StrEnum):
    """The state of a file."""

    RUNNING = "running"
    OLD = "old version running"
    WAITING = "being read"
    BROKEN = "broken"
    UNTRUSTED = "untrusted"
    DISABLED = "disabled"
    MASKED = "masked"


@dataclass(frozen=True, slots=True)
class HookFileEntry:
    """One file.

    Attributes:
        name: The hook's name.
        path: The file.
        state: Its state.
        error: Why it is not in use, or not in use as it is now; empty if it is.
        points: What the version in use handles, sorted.
        policy: ``Fail`` or ``Ignore``; empty where no version is in use.
        timeout: Seconds for one answer; 0 where no version is in use.
        server: It names a server; else it is Python.
    """

    name: str
    path: str
    state: State
    error: str = ""
    points: tuple[str, ...] = ()
    policy: str = ""
    timeout: float = 0.0
    server: bool = False
