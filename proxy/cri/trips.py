"""A held call as those who decide on it see it, and what they remember of it until its answer has passed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from proxy.keeper.flights import Flight
from proxy.model.workload import Pod


class Call(Protocol):
    """One held call; see ``proxy.cri.wire``."""

    method: str
    body: bytes
    state: object
    done: bool

    def change(self, body: bytes) -> None:
        """Have another message from now on."""

    def release(self, body: bytes | None = None) -> None:
        """Let the call go on, with another body where one is given."""

    def refuse(self, code: int, message: str) -> None:
        """Answer the call with a gRPC status."""


@dataclass(slots=True)
class Trip:
    """What we remember of a call until its answer has passed.

    Attributes:
        target: Container id or sandbox id that the call is about; a create's token.
        pod: The pod, for RunPodSandbox.
        token: What the pod was admitted under, where it was decided as a whole.
        flight: Set while the call may write the container's cpuset.
        named: Set once the runtime has named what was created.
        body: Where there are hooks, the message with what they have set, without what is decided here.
    """

    target: str = ""
    pod: Pod | None = None
    token: str = ""
    flight: Flight | None = None
    named: bool = False
    body: bytes = b""


Hold = Callable[[Call, Coroutine[object, object, None]], None]
"""Holds a call while a coroutine decides on it."""
Request = Callable[[Call], None]
Finished = Callable[[Trip, int | None], None]
