"""A call that another proxy makes to the runtime, with the interface of one that passes through us."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

from proxy.model.errors import TopoproxyError

SERVICE = "runtime.v1.RuntimeService"


class HookCallRefusedError(TopoproxyError):
    """The call is refused; ``code`` is a gRPC status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Wire(Protocol):
    """What decides on calls: ``proxy.frontends.cri.interceptors``."""

    def request(self, call: ForeignCall) -> None:
        """A call waits for ``release`` or ``refuse``, now or later."""

    def response(self, call: ForeignCall, message: bytes) -> None:
        """What the runtime has answered."""

    def finished(self, call: ForeignCall, status: int | None) -> None:
        """The call is over; None where no answer is known."""


class ForeignCall:
    """One call; attributes as ``InterceptedCall``, and ``original``, the unchanged body.

    Releasing it answers the peer, which then makes the call; ``answered``, ``over`` and ``lost`` are set by
    what happened to it at the runtime.
    """

    __slots__ = (
        "_outcome", "_wire", "body", "decided", "done", "method", "original", "path", "service", "state",
    )  # fmt: skip

    def __init__(self, wire: Wire, method: str, body: bytes) -> None:
        self._wire = wire
        self.method = method
        self.service = SERVICE
        self.path = f"/{SERVICE}/{method}"
        self.original = self.body = body
        self.state: object | None = None
        self.decided = False
        self.done = False
        self._outcome: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def decide(self) -> bytes:
        """Have the call decided.

        Returns:
            The message that is to go to the runtime.

        Raises:
            RefusedError: It is not to be made.
        """
        try:
            self._wire.request(self)
            return await self._outcome
        except asyncio.CancelledError:
            self.lost()  # the peer does not wait any more
            raise

    # -- called by what decides calls ---------------------------------------------------------------------

    def change(self, body: bytes) -> None:
        """Have another message from now on."""
        self.body = body

    def release(self, body: bytes | None = None) -> None:
        """Let the call go on; once decided nothing happens."""
        if not self.decided:
            self.decided = True
            self._outcome.set_result(self.body if body is None else body)

    def refuse(self, code: int, message: str) -> None:
        """Have the call not be made."""
        if not self.decided:
            self._end(None)
            self._outcome.set_exception(HookCallRefusedError(code, message))

    # -- the outcome -------------------------------------------------------------------------------------

    def answered(self, message: bytes) -> None:
        """The runtime has done it, and this is its answer."""
        if not self.done:
            self._wire.response(self, message)
            self._end(0)

    def over(self, status: int) -> None:
        """The runtime has done it (0), or not."""
        self._end(status)

    def lost(self) -> None:
        """The outcome of the call will never be known."""
        self._end(None)

    @contextlib.contextmanager
    def or_lost(self) -> Iterator[None]:
        """Lose the call if what is done with its decision fails."""
        try:
            yield
        except BaseException:
            self.lost()
            raise

    def _end(self, status: int | None) -> None:
        if not self.done:
            self.decided = self.done = True
            self._wire.finished(self, status)
