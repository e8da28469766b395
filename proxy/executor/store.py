"""The state of the node, and the one place where it changes.

Theory of operation. ``NodeStore.state`` is a value (``proxy.engine.state``). Workers read it from their
threads. Only the event loop replaces it, and only with ``NodeStore.handle``, in the same steps each time:

1. The engine (``proxy.engine.handle``) returns the state after an event, and effects. The new state replaces
   the old one: every later decision uses it, and so does every kernel write that is already queued.
2. The effects are performed in their order. Records go to the ledger writer. If pools or rules differ, or if
   something has happened to a container or a pod, the observers are notified in the order in which they
   subscribed (``node_executor``): the kernel first, hooks last.

A change that an observer causes is notified after the change that it observes, so that all observers see
everything in the same order. A fault in one observer is reported and does not keep the others from following:
the state has changed already.

Besides the state, the store holds the futures of calls in flight, and the events that wake tasks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args

from msgspec import structs

from proxy.engine import node_effects as to_do
from proxy.engine.call_answers import CallAnswer
from proxy.engine.call_events import CallCompleted, CallSent, StartRequested, UpdateRequested
from proxy.engine.container_events import (
    ContainerFound,
    CpusNotFreed,
    CreateNotReserved,
    CreateResumed,
    CreateWithoutDevices,
)
from proxy.engine.handle import handle
from proxy.engine.inflight import InflightCall
from proxy.engine.node_effects import (
    Change,
    NodeEffect,
    NodeEffects,
    Notice,
    PlanDecided,
    PodDecided,
    PutRecord,
)
from proxy.engine.node_events import NodeEvent
from proxy.engine.partition import PartitionEffect
from proxy.engine.quotas import QuotaEffect
from proxy.engine.reservation_effects import RequestReconcile
from proxy.engine.state import NodeState
from proxy.engine.suppression import SuppressionEffect
from proxy.engine.systemd_masks import ReportReversedMask
from proxy.engine.write_conflicts import DriftEffect
from proxy.executor.ledger_writer import LedgerWriter
from proxy.executor.observer import Observer
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode


class InflightCallRegistry:
    """Registers calls in flight, and wakes the tasks that wait for their end."""

    def __init__(self, state: Callable[[], NodeState], handle: Callable[[NodeEvent], object]) -> None:
        """Start with no call.

        Args:
            state: Returns the current state of the node.
            handle: Applies an event to the state.
        """
        self._newest = state
        self._handle = handle
        self._number = 0
        self._waits: dict[int, asyncio.Future[None]] = {}

    def track(
        self,
        container_id: str,
        carries: CpuSet,
        *,
        is_start: bool = False,
        orphaned_since: float | None = None,
        suspected: bool = False,
        relayed: bool = False,
    ) -> InflightCall:
        """Register a call that carries a cpuset to a container; its end is an event with the result.

        Args:
            container_id: The container.
            carries: The cpuset.
            is_start: Whether the call is a start, not an update.
            orphaned_since: When this daemon found that an earlier run had sent the call; None if the call is
                sent now.
            suspected: Whether the call may not exist.
            relayed: Whether the call is sent while the node is released.
        """
        loop = asyncio.get_running_loop()
        self._number += 1
        call = InflightCall(
            self._number,
            container_id,
            carries,
            is_start,
            loop.time(),
            orphaned_since=orphaned_since,
            resend=not suspected,
            suspected=suspected,
            relayed=relayed,
        )
        self._waits[call.number] = loop.create_future()
        self._handle(CallSent(call))
        return call

    def complete(self, call: InflightCall) -> None:
        """Record that a call is over, without a result for its container."""
        self._handle(CallCompleted(call))

    def wake_waiters(self, effect: to_do.CallOver) -> None:
        """Wake the tasks that wait for a call."""
        self._waits.pop(effect.number).set_result(None)

    def has_completed(self, call: InflightCall) -> bool:
        """Return whether a call is over."""
        return call.number not in self._waits

    def on_completion(self, call: InflightCall, callback: Callable[[], None]) -> None:
        """Call a function once a call in flight is over."""
        self._waits[call.number].add_done_callback(lambda _: callback())

    async def wait(self, calls: Iterable[InflightCall], timeout: float) -> None:
        """Wait until calls are over.

        Args:
            calls: The calls.
            timeout: Seconds to wait at most.
        """
        waits = [wait for call in calls if (wait := self._waits.get(call.number)) is not None]
        if waits:
            await asyncio.wait(waits, timeout=timeout)

    async def wait_for_updates(self, container_id: str, cpus: CpuSet, timeout: float) -> bool:
        """Wait until no update is in flight that carries another cpuset to a container.

        Args:
            container_id: The container.
            cpus: The cpuset that it should have.
            timeout: Seconds to wait at most.

        Returns:
            False if such an update is still in flight.
        """
        calls = self._newest().inflight.conflicting_updates(container_id, cpus)
        await self.wait(calls, timeout)
        return all(map(self.has_completed, calls))


E = TypeVar("E", to_do.WriteCpusets, to_do.CompareCpusets, to_do.CompareUnits, ReportReversedMask)
_NOTICES: dict[type[Notice], Callable[..., None]] = {
    Change: Observer.changed,
    to_do.NotifyCreated: Observer.created,
    to_do.NotifyFailed: Observer.failed,
    to_do.NotifyEntered: Observer.entered,
    to_do.NotifyCpusAssigned: Observer.cpus_assigned,
    to_do.NotifyRemoved: Observer.removed,
    to_do.NotifyPodFound: Observer.pod_found,
    to_do.NotifyPodStopped: Observer.pod_stopped,
    to_do.NotifyPodRemoved: Observer.pod_removed,
    to_do.NotifyListed: Observer.listed,
}
"""The methods of observers, by the effect; the fields of the effect are the arguments."""


class NodeStore:
    """Holds the state of the node. For the event loop; ``state`` may be read from any thread.

    Attributes:
        state: The node as it is now; read-only.
        ledger_writer: Writes changes to the ledger.
        inflight_calls: Registers calls at the runtime that may write a container's cpuset, and waits for
            them.
        reconciled: Set once all running containers are known. Before, CPUs that seem free may be owned.
        reconcile_requested: Set to request a reconcile with the runtime's lists.
        runtime_sync_due: Set when there are more containers that await a sync.
    """

    # A property without a function in Python: each call reads it several times.
    state = cast("NodeState", property(attrgetter("_state"), doc="The node as it is now."))

    def __init__(
        self,
        state: NodeState,
        ledger_writer: LedgerWriter,
        fault: Callable[[BaseException], None],
        mode: NodeMode = NodeMode.ENFORCE,
    ) -> None:
        """Start with a state that nothing depends on yet.

        Args:
            state: The node at the start.
            ledger_writer: Writes changes to the ledger.
            fault: Called with the exception that an observer raises.
            mode: The mode of the node at first.
        """
        self._state = structs.replace(state, mode=mode)
        self.ledger_writer = ledger_writer
        self._fault = fault
        self._observers: list[Observer] = []
        self._handlers: dict[type[Notice], tuple[Callable[..., None], ...]] = {}
        self._due: deque[Notice] = deque()
        self._is_notifying = False
        self.inflight_calls = InflightCallRegistry(lambda: self._state, self.handle)
        self.reconciled = asyncio.Event()
        self.reconcile_requested = asyncio.Event()
        self.runtime_sync_due = asyncio.Event()
        # None: the sender of the event takes the effect from the result.
        self._perform: dict[type[NodeEffect], Callable[[Any], None] | None] = {
            **dict.fromkeys(_NOTICES, self._notify),
            PutRecord: self._put_record,
            RequestReconcile: lambda effect: self.reconcile_requested.set(),
            to_do.SyncRuntimeSoon: lambda effect: self.runtime_sync_due.set(),
            to_do.CallOver: self.inflight_calls.wake_waiters,
            to_do.OrphanOver: None,
            PlanDecided: None,
            PodDecided: None,
            **dict.fromkeys(get_args(CallAnswer)),
            to_do.EnforcementStep: None,
            to_do.NodePolicyApplied: None,
            to_do.KubeletCpusChanged: None,
            to_do.LossesChanged: None,
            **dict.fromkeys(get_args(DriftEffect)),
            **dict.fromkeys(get_args(QuotaEffect)),
            **dict.fromkeys(get_args(PartitionEffect)),
            **dict.fromkeys(get_args(SuppressionEffect)),
        }

    @property
    def mode(self) -> NodeMode:
        """The current mode of the node. May be read from any thread."""
        return self._state.mode

    def handle(self, event: NodeEvent) -> NodeEffects:
        """Apply an event to the state, and perform the effects; returns the effects."""
        self._state, effects = handle(self._state, event)
        for effect in effects:
            perform = self._perform[type(effect)]
            if perform is not None:
                perform(effect)
        return effects

    def decide(self, event: CpusNotFreed | ContainerFound) -> PlanDecided | None:
        """Call the engine for a decision on a container; returns None if nothing was decided."""
        effects = self.handle(event)
        decided = effects[-1] if effects else None
        return decided if type(decided) is PlanDecided else None

    def answer(
        self,
        event: CreateResumed | CreateNotReserved | CreateWithoutDevices | StartRequested | UpdateRequested,
    ) -> CallAnswer:
        """Call the engine for the answer to a call."""
        return cast("CallAnswer", self.handle(event)[-1])  # as the rules of these events end

    def perform_by(self, kind: type[E], perform: Callable[[E], None]) -> None:
        """Register the function that performs effects of a kind."""
        self._perform[kind] = perform

    def subscribe(self, observer: Observer) -> None:
        """Notify an observer from now on, after those that have subscribed before."""
        self._observers.append(observer)
        self._handlers.clear()

    # -- effects ------------------------------------------------------------------------------------------

    def _put_record(self, effect: PutRecord) -> None:
        self.ledger_writer.put(effect.key, effect.record)

    def _notify(self, effect: Notice) -> None:
        """Notify the observers that handle an effect, in their order."""
        kind = type(effect)
        if kind not in self._handlers:
            self._handlers[kind] = tuple(self._handled(_NOTICES[kind]))
        if not self._handlers[kind]:
            return
        self._due.append(effect)
        if self._is_notifying:
            return
        self._is_notifying = True
        try:
            while self._due:
                due = self._due.popleft()
                values: tuple[object, ...] = (due,) if type(due) is Change else structs.astuple(due)
                for handler in self._handlers[type(due)]:
                    try:
                        handler(*values)
                    except Exception as error:  # noqa: BLE001  the other observers must follow
                        self._fault(error)
        finally:
            self._is_notifying = False

    def _handled(self, notice: Callable[..., None]) -> Iterator[Callable[..., None]]:
        """Yield the methods that handle a notice, in the order of the observers."""
        for observer in self._observers:
            handler = getattr(observer, notice.__name__)
            if getattr(handler, "__func__", None) is not notice:
                yield handler
