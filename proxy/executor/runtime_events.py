"""Events of the runtime: the CPUs of a container that exits are free at once, before the next reconcile.

A thread reads the runtime's events into a bounded queue, and the event loop handles a few at a time. What an
event means:

- Exit of a known container: the container has exited. This is final, because the CRI never starts a container
  twice. Its CPUs go back to the pools, and the kernel follows.
- Exit of a sandbox's own process: a reconcile is requested if the sandbox still has something to free.
- Start of an unknown container or sandbox, deletion of a known one: usually this belongs to a call that is
  passing through the proxy, and its answer is about to arrive. So such an event waits for a moment. If the
  state still disagrees with any of these events then, one reconcile is requested for all of them.
- Exit of an unknown container: it holds no CPUs. It may become known soon (the answer to its create was lost,
  or a reconcile is adopting it at this moment). So exits are remembered, and each reconcile applies them at
  its end.

An event may be ahead of the runtime's own lists: a list that is requested after an exit may still report the
container as running. Such a list must not revive the container, so lists are corrected by the exits that are
remembered. After a while the list is right. The exit of a container that was removed is forgotten: the
runtime may use its id again, and a list from before the removal is detected by the engine
(``proxy.engine.runtime_knowledge``).

Events from before the subscription are never delivered, and an overflow of the queue loses events. In both
cases a reconcile is requested. If all of this fails, the reconciles on the timer still find every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.engine.container_events import ContainerTouched
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.context import NodeContext
from proxy.executor.observer import Observer
from proxy.executor.runtime_ports import RuntimeEvent, RuntimeEventStream
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.executor.listing import Listing

NO_EVENTS = "cannot receive the runtime's events"
QUEUE_LIMIT = 1024
"""Events that may wait for the event loop. Further ones are dropped, and a reconcile is requested."""
AT_ONCE = 16
"""Events that are handled in one turn of the event loop."""
MOMENT_S, LATER_S = 0.5, 3.0
"""Seconds to wait for a call's answer after its event; the second value applies if unresolved events
requested a reconcile within the last ``LATER_S`` seconds."""
UNCLEAR_LIMIT = 256
BEHIND_S = 60.0
"""Seconds for which the runtime's list may be behind its events."""
EXITS_LIMIT = 2048
PAUSES = Backoff(0.1, 2.0, steady=10.0)
"""Seconds before the next subscription after the stream has ended."""
REFUSED_S, NOT_OFFERED_S = 30.0, 300.0
"""The same after an error, and if the runtime does not offer events."""
JOIN_S = 2.0


class EventsState(Enum):
    """The state of the stream of the runtime's events."""

    OFF = "off"
    WAITING = "waiting"
    CONNECTED = "connected"
    NOT_OFFERED = "not offered"


class RuntimeEvents(Observer):
    """Receives the runtime's events and updates the executor's state."""

    def __init__(
        self, context: NodeContext, lifecycle: ContainerLifecycle, events: RuntimeEventStream | None
    ) -> None:
        """Prepare; the subscription begins with ``start``.

        Args:
            context: The node.
            lifecycle: Records which containers have exited.
            events: The source of the runtime's events; None if they are not used.
        """
        self._context = context
        self._lifecycle = lifecycle
        self._events = events
        if events is not None:
            events.report_unread = self.report_unreadable_event
        self.events_state = EventsState.OFF if events is None else EventsState.WAITING
        self._queue: deque[RuntimeEvent | EventsState] = deque()
        self._lock = threading.Lock()
        self._woken = self._overflown = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self._exits: dict[str, float] = {}
        self._unclear: dict[str, RuntimeEvent] = {}
        self._resolve_timer: asyncio.TimerHandle | None = None
        self._unclear_overflown = False  # more events are unclear than are remembered
        self._queried_at = float("-inf")

    # -- the thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that receives events."""
        if self._events is not None and self._thread is None:
            self._thread = threading.Thread(
                target=self._listen, args=(self._events,), name="events", daemon=True
            )
            self._thread.start()

    def _listen(self, events: RuntimeEventStream) -> None:
        """Receive events until ``close``; runs in the thread."""
        pauses = RetryDelays(PAUSES)
        while not self._closing.is_set():
            began = self._context.clock()
            refused = self._receive(events)
            pause = pauses.next(self._context.clock() - began)
            self._closing.wait(refused or pause)

    def _receive(self, events: RuntimeEventStream) -> float:
        """Receive events until the stream ends.

        Returns:
            Seconds during which another attempt is of no use; 0 if one may succeed soon.
        """
        try:
            stream = events.listen()
            self._put(EventsState.CONNECTED)
            for event in stream:
                self._put(event)
        except UnavailableError:
            pass  # the reconcile reports that the runtime cannot be reached
        except RuntimeCallError as error:
            if error.code == GrpcStatus.UNIMPLEMENTED:
                self._put(EventsState.NOT_OFFERED)
                return NOT_OFFERED_S
            self._put(EventsState.WAITING)
            self._context.telemetry.problem(NO_EVENTS, err=error)
            return REFUSED_S
        except Exception as error:  # noqa: BLE001  whatever the error, the reconciles continue
            self._put(EventsState.WAITING)
            self._context.report_internal_error(error)
            return REFUSED_S
        self._put(EventsState.WAITING)
        return 0

    def report_unreadable_event(self, message: str) -> None:
        """Report an event that cannot be read, and request a reconcile; called from the thread."""
        self._context.report_unreadable(message)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._context.reconcile_requested.set)

    def _put(self, item: RuntimeEvent | EventsState) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            if len(self._queue) >= QUEUE_LIMIT and isinstance(item, RuntimeEvent):
                self._overflown = True
                return
            self._queue.append(item)
            if self._woken:
                return
            self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is closed
            self._closing.set()

    # -- the loop -----------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Handle queued events, a few in each turn of the loop, so that calls of clients run in between."""
        with self._lock:
            if self._closing.is_set():
                return
            batch = [self._queue.popleft() for _ in range(min(AT_ONCE, len(self._queue)))]
            more = self._woken = bool(self._queue)
            overflown, self._overflown = self._overflown, False
        if more:
            self._loop.call_soon(self._take)
        if overflown:
            self._context.telemetry.count(metrics.RUNTIME_EVENT_OVERFLOWS)
            self._context.reconcile_requested.set()
        for item in batch:
            try:
                if isinstance(item, EventsState):
                    self._enter(item)
                else:
                    self._handle(item)
            except Exception as error:  # noqa: BLE001  a fault in one event must not affect the others
                self._context.report_internal_error(error)
                self._context.reconcile_requested.set()

    def _enter(self, now: EventsState) -> None:
        context = self._context
        if now is EventsState.CONNECTED:
            context.telemetry.count(metrics.RUNTIME_EVENT_STREAMS)
            context.telemetry.resolved(NO_EVENTS)
            context.reconcile_requested.set()  # events from before the subscription were not delivered
        if now is not self.events_state:
            self.events_state = now
            context.telemetry.debug("the runtime's event stream changed", state=now.value)

    def removed(self, container: Container) -> None:
        """Forget the exit of a container that has been removed."""
        self._exits.pop(container.id, None)

    def _handle(self, event: RuntimeEvent) -> None:
        found, state = event.container_id, self._context.state
        if event.kind == "delete" and self._exits.pop(found, None) is not None:
            self._context.store.handle(ContainerTouched(found))
        if event.kind == "exit" and found not in state.pods:
            self._exits.pop(found, None)
            self._exits[found] = self._context.clock()
            if len(self._exits) > EXITS_LIMIT:
                del self._exits[next(iter(self._exits))]
            self._exited(found)
        elif self._contradicts_state(event):
            self._recheck_later(event)

    def _exited(self, container_id: str) -> None:
        context = self._context
        container = context.state.containers.get(container_id)
        if container is not None and container.phase is not Phase.EXITED:
            context.telemetry.count(metrics.EXITS_BY_EVENT)
            context.telemetry.debug("the runtime reported that a container exited", **subject(container))
            self._lifecycle.phase(container_id, Phase.EXITED)

    def _contradicts_state(self, event: RuntimeEvent) -> bool:
        """Return whether an event disagrees with the current state."""
        found, state = event.container_id, self._context.state
        if event.kind == "exit":
            pod = state.pods.get(found)
            live = any(c.phase is not Phase.EXITED for c in state.in_sandbox(found))
            return pod is not None and (live or pod.reserved_for_pod is not None)
        known = found in state.containers or found in state.pods
        return known if event.kind == "delete" else not known

    def _recheck_later(self, event: RuntimeEvent) -> None:
        if len(self._unclear) < UNCLEAR_LIMIT:
            self._unclear[event.container_id] = event
        else:
            self._unclear_overflown = True
        if self._resolve_timer is None:
            lately = self._loop.time() - self._queried_at < LATER_S
            self._resolve_timer = self._loop.call_later(LATER_S if lately else MOMENT_S, self._resolve)

    def _resolve(self) -> None:
        """Request a reconcile if some event still disagrees with the state after the wait."""
        self._resolve_timer = None
        unclear, self._unclear = self._unclear, {}
        overflown, self._unclear_overflown = self._unclear_overflown, False
        if overflown or any(map(self._contradicts_state, unclear.values())):
            self._queried_at = self._loop.time()
            self._context.reconcile_requested.set()

    # -- for the reconcile --------------------------------------------------------------------------------

    def corrected(self, listing: Listing) -> Listing:
        """Return the list, with containers marked as exited if an exit event has arrived for them."""
        oldest = self._context.clock() - BEHIND_S
        while self._exits and next(iter(self._exits.values())) < oldest:
            del self._exits[next(iter(self._exits))]
        late = [
            c
            for i in self._exits
            if (c := listing.containers.get(i)) is not None and c.phase is not Phase.EXITED
        ]
        if not late:
            return listing
        ended = {c.id: structs.replace(c, state="EXITED") for c in late}
        return structs.replace(listing, containers={**listing.containers, **ended})

    def caught_up(self) -> None:
        """Apply the remembered exits to containers that a reconcile has just adopted."""
        for container_id in self._exits:
            self._exited(container_id)

    # -- the end ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the subscription and the thread."""
        with self._lock:
            self._closing.set()
            self._queue.clear()
        if self._resolve_timer is not None:
            self._resolve_timer.cancel()
        if self._events is not None:
            await asyncio.to_thread(self._events.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, JOIN_S)
