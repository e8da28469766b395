"""Waits for calls in flight (``proxy.engine.inflight``), which the state holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from proxy.engine.call_events import CallDeparted, CallLanded
from proxy.engine.inflight import InflightCall
from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from proxy.engine.node_effects import CallOver
    from proxy.engine.node_events import NodeEvent
    from proxy.engine.state import NodeState


class CallWaits:
    """Registers calls in flight, and wakes what waits for their end."""

    def __init__(self, state: Callable[[], NodeState], handle: Callable[[NodeEvent], object]) -> None:
        """Start with no call.

        Args:
            state: Returns the current state of the node.
            handle: Applies an event to the state.
        """
        self._state = state
        self._handle = handle
        self._number = 0
        self._waits: dict[int, asyncio.Future[None]] = {}

    def depart(
        self,
        container_id: str,
        carries: CpuSet,
        *,
        is_start: bool = False,
        stray_since: float | None = None,
        suspected: bool = False,
        relayed: bool = False,
    ) -> InflightCall:
        """Register a call that carries a cpuset to a container; its end is an event with the result.

        Args:
            container_id: The container.
            carries: The cpuset.
            is_start: Whether the call is a start, not an update.
            stray_since: When it was found that an earlier run of the daemon has sent it; None where it is
                sent now.
            suspected: Whether it is not known that there is such a call.
            relayed: Whether it is sent while the node is released.
        """
        loop = asyncio.get_running_loop()
        self._number += 1
        call = InflightCall(
            self._number,
            container_id,
            carries,
            is_start,
            loop.time(),
            stray_since=stray_since,
            resend=not suspected,
            suspected=suspected,
            relayed=relayed,
        )
        self._waits[call.number] = loop.create_future()
        self._handle(CallDeparted(call))
        return call

    def land(self, call: InflightCall) -> None:
        """Note that a call is over, without a result for its container."""
        self._handle(CallLanded(call))

    def over(self, effect: CallOver) -> None:
        """Wake what waits for a call."""
        self._waits.pop(effect.number).set_result(None)

    def has_landed(self, call: InflightCall) -> bool:
        """Return whether a call is over."""
        return call.number not in self._waits

    def then(self, call: InflightCall, done: Callable[[], None]) -> None:
        """Call a function once a call in flight is over."""
        self._waits[call.number].add_done_callback(lambda _: done())

    async def wait(self, calls: Iterable[InflightCall], timeout: float) -> None:
        """Wait until calls are over.

        Args:
            calls: The calls.
            timeout: Seconds to wait at most.
        """
        waits = [wait for call in calls if (wait := self._waits.get(call.number)) is not None]
        if waits:
            await asyncio.wait(waits, timeout=timeout)

    async def updated(self, container_id: str, cpus: CpuSet, timeout: float) -> bool:
        """Wait until no update is in flight that carries another cpuset to a container.

        Args:
            container_id: The container.
            cpus: The cpuset that it is to have.
            timeout: Seconds to wait at most.

        Returns:
            False where such an update is still in flight.
        """
        calls = self._state().inflight.others(container_id, cpus)
        await self.wait(calls, timeout)
        return all(map(self.has_landed, calls))
