"""Calls of an earlier run of the daemon that the runtime may still carry out.

What this daemon knows about them depends on how that run ended. After a crash, or a stop, its connections
have ended: a runtime cancels the calls that it was carrying out, and a call that it does not cancel takes
milliseconds. So each container that may be changed has an update that is *suspected*, for ``ORPHAN_GRACE_S``,
and a start too if it may be starting (``call_tracker.register_suspected_calls``).

A daemon that was replaced (``proxy.succession``) still relays: its clients wait, and a start or an update may
hang for minutes and is carried out anyway. It names these calls when it hands over, and names each call again
when that call is over. Until then, the call is an orphan that time alone does not end, and the record of a
relayed create is kept. When the answer has passed, or the connection has ended, the ordinary grace period
begins. What was set aside for a sandbox stays so as long as the call that makes the sandbox is relayed. After
that, the runtime's next list shows whether the sandbox exists, unless a create in it arrives earlier.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.engine.call_events import CallOrphaned
from proxy.engine.inflight import InflightCall
from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from proxy.executor.context import NodeContext


class RelayedCall(Struct, frozen=True):
    """A call that a daemon still relays after it has handed over.

    Attributes:
        name: Its name in the messages of the two processes.
        method: The CRI method.
        target: The id of the container; for a create or a sandbox, the token under which the ledger has it.
        carries: The CPUs that it brings, as text; empty for a create or a sandbox.
        released: It was forwarded while the node was released.
    """

    name: str
    method: str
    target: str
    carries: str = ""
    released: bool = False


class FormerCalls:
    """The calls of earlier runs.

    Attributes:
        possible: Whether there may be such calls.
        ended_sandbox_calls: Tokens of sandboxes whose calls are over, until the runtime's list has shown the
            outcome.
    """

    def __init__(self, context: NodeContext) -> None:
        """Begin as after a crash.

        Args:
            context: The node.
        """
        self.possible = True
        self._context = context
        self._relayed: dict[str, RelayedCall] = {}
        self._inflight_calls: dict[str, InflightCall] = {}
        self._created: dict[str, float] = {}
        self.ended_sandbox_calls = frozenset[str]()
        self._report: Callable[[str], None] = lambda name: None
        self._ended = asyncio.Event()
        self._ended.set()

    def expect(self, relayed: Iterable[RelayedCall]) -> None:
        """Record the calls that the replaced daemon still relays; before the ledger is read."""
        for call in relayed:
            self._relayed[call.name] = call
            if call.method == "CreateContainer":
                self._created[call.target] = math.inf
        if self._relayed:
            self._ended.clear()

    @property
    def relayed(self) -> Collection[RelayedCall]:
        """The calls that are not over."""
        return self._relayed.values()

    @property
    def sandboxes(self) -> frozenset[str]:
        """The tokens of the sandboxes whose creation is relayed."""
        return frozenset(call.target for call in self._relayed.values() if call.method == "RunPodSandbox")

    def track(self, container_id: str) -> list[InflightCall]:
        """Count the calls that are relayed for a container as in flight; returns those newly counted."""
        context, found = self._context, list[InflightCall]()
        for name, call in self._relayed.items():
            if call.target != container_id or name in self._inflight_calls:
                continue
            try:
                carries = CpuSet.parse(call.carries)
            except ValueError:
                carries = context.state.node.machine.online
            inflight_call = context.inflight_calls.track(
                container_id,
                carries,
                is_start=call.method == "StartContainer",
                orphaned_since=context.clock(),
                relayed=call.released,
            )
            self._inflight_calls[name] = inflight_call
            found.append(inflight_call)
        return found

    def is_relayed(self, call: InflightCall) -> bool:
        """Return whether a call is still relayed: the passing of time does not end it."""
        return call in self._inflight_calls.values()

    def lost_since(self, token: str, since: float) -> float:
        """Return since when nothing waits for the answer to a create any more.

        Args:
            token: Its token.
            since: The time that this daemon knows by itself.
        """
        return max(since, self._created.get(token, since))

    def over(self, name: str) -> None:
        """Record that a call is no longer relayed: it was answered, or its connection has ended."""
        call = self._relayed.pop(name, None)
        if call is None:
            return
        context, now = self._context, self._context.clock()
        inflight_call = self._inflight_calls.pop(name, None)
        if inflight_call is not None:
            context.store.handle(CallOrphaned(inflight_call, now))
        if call.method == "CreateContainer":
            self._created[call.target] = now
        elif call.method == "RunPodSandbox":
            self.ended_sandbox_calls |= {call.target}
        context.reconcile_requested.set()
        self._report(name)
        if not self._relayed:
            self._ended.set()

    def all_over(self) -> None:
        """Record that the replaced daemon has ended."""
        for name in list(self._relayed):
            self.over(name)

    def report_ends_to(self, report: Callable[[str], None]) -> None:
        """Pass the name of each call that is over to a function: this daemon is being replaced, too."""
        self._report = report

    async def wait(self) -> None:
        """Wait until no call is relayed any more."""
        await self._ended.wait()
