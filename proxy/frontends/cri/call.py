"""An intercepted call, what handlers see of it, and what they keep of it until its answer has passed.

``InterceptedCall`` is a call on a connection. Handlers see a ``HeldCall``: a ``InterceptedCall``, or a
question of a hook client.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.model.quoting import message as fit
from proxy.relay.events import Unusual

if TYPE_CHECKING:
    from proxy.controller.inflight import Flight
    from proxy.model.idset import CpuSet
    from proxy.model.workload import Pod


class _Owner(Protocol):
    """The link that a call belongs to."""

    def release(self, stream: int, body: bytes | None) -> None: ...

    def refuse(self, stream: int, code: int, message: str) -> None: ...


class InterceptedCall:
    """One intercepted call.

    Attributes:
        path: The full path, ``/runtime.v1.RuntimeService/CreateContainer``, perhaps without its first slash.
        service: The part before the last slash, without the leading one.
        method: The part behind it.
        body: The request message as the client sent it, or as it has been changed.
        state: Free for the interceptor.
        done: The call is over.
    """

    __slots__ = (
        "_changed", "_link", "_stream", "body", "decided", "done", "method", "path", "service", "state",
    )  # fmt: skip

    def __init__(self, link: _Owner, stream: int, path: str, body: bytes) -> None:
        self._link = link
        self._stream = stream
        self.path = path
        service, _, self.method = path.rpartition("/")
        self.service = service.removeprefix("/")
        self.body = body
        self._changed = False
        self.state: object | None = None
        self.decided = False
        self.done = False

    def __repr__(self) -> str:
        return f"Call({self.path}, stream {self._stream}, {len(self.body)} bytes)"

    def change(self, body: bytes) -> None:
        """Have another message from now on."""
        self.body, self._changed = body, True

    def release(self, body: bytes | None = None) -> None:
        """Let the call go on to the runtime, from the loop's thread; once decided nothing happens.

        Args:
            body: The message instead of the call's own; None: its own, byte for byte the original one unless
                it was changed.
        """
        if not self.decided:
            self.decided = True
            if body is None and self._changed:
                body = self.body
            self._link.release(self._stream, body)

    def refuse(self, code: int, message: str) -> None:
        """Answer the call with a gRPC status; from the loop's thread. ``finished`` comes first.

        Args:
            code: The status.
            message: Its text, which may quote input: it is escaped, and cut to 2,000 bytes.
        """
        if not self.decided:
            self.decided = True
            self._link.refuse(self._stream, code, fit(message))


class Interceptor(Protocol):
    """Who decides on intercepted calls. What it raises is logged and lets the call pass as it came."""

    def request(self, call: InterceptedCall) -> None:
        """A call waits for ``release`` or ``refuse``, now or later."""

    def unusual(self, path: str, kind: Unusual) -> tuple[int, str] | None:
        """A request is not one plain message; gives a refusal or None, see ``Handler.unusual``."""

    def response(self, call: InterceptedCall, message: bytes) -> None:
        """The first message of the answer, on its way to the client; nothing has been read since."""

    def finished(self, call: InterceptedCall, status: int | None) -> None:
        """The call is over; comes once for every ``request``.

        Args:
            call: The call.
            status: grpc-status of the runtime, or None where none came (refused by us, cancelled, connection
                lost).
        """


class HeldCall(Protocol):
    """One call while a handler decides on it; methods as those of ``InterceptedCall``."""

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
        sent: The CPUs that a create brings to the runtime.
        flight: Set while the call may write the container's cpuset.
        named: Set once the runtime has named what was created.
        body: Where there are hooks, the message with what they have set, without what is decided here.
    """

    target: str = ""
    pod: Pod | None = None
    token: str = ""
    sent: CpuSet | None = None
    flight: Flight | None = None
    named: bool = False
    body: bytes = b""


Hold = Callable[[HeldCall, Coroutine[object, object, None]], None]
"""Holds a call while a coroutine decides on it."""
Request = Callable[[HeldCall], None]
Finished = Callable[[Trip, int | None], None]
