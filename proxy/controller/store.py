"""What is true about the node, and the one place where its state changes.

Theory of operation. ``NodeStore.state`` is a value (``proxy.engine.state``). Workers read it from their
threads. Only the event loop replaces it, and only with ``NodeStore.change``, in the same steps each time:

1. The new state replaces the old one. Every later decision and every kernel write that is already queued uses
   the new one.
2. The records of the change go to the journal.
3. If pools or rules differ, the containers whose CPUs change are computed, and the observers are notified in
   the order in which they subscribed (``controller``): the kernel first, hooks last.

What happens to containers and pods without a change of pools (``lifecycle``, ``sandboxes``) goes to the same
observers. What an observer causes is notified after what it observes, so that all observers see everything in
the same order. A fault in one observer is reported and does not keep the others from following: the state
has changed already.

Beside the state the store holds what the calls of clients and of the daemon itself leave behind: calls in
flight, creates without an answer, and the sequence of changes that dates the runtime's lists.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Concatenate, ParamSpec

from proxy.controller.change_sequence import ChangeSequence
from proxy.controller.inflight import InflightCalls
from proxy.controller.journal import Journal, Record
from proxy.controller.observer import Change, Follow, Observer
from proxy.controller.retries import Retries
from proxy.engine.handle import handle
from proxy.engine.node_events import NodeEvent
from proxy.engine.rebalance import moves
from proxy.engine.state import NodeState
from proxy.model.mode import NodeMode

__all__ = ["Change", "Follow", "NodeStore"]

P = ParamSpec("P")
_NO_RECORDS: Mapping[str, Record | None] = {}


class NodeStore:
    """What is true about the node. For the event loop; ``state`` may be read from any thread.

    Attributes:
        journal: Has changes written to the ledger.
        lost: By token, when a create lost its client, by the clock. The runtime may have made its container.
        unsettled: Ids of containers that the runtime is to be sent their CPUs for, in order.
        news: The sequence of what happened to each container, to detect stale lists of the runtime.
        flights: Calls at the runtime that may write a container's cpuset.
        retries: Creates that failed here, and perhaps not at the runtime.
        synced: Set once all running containers are known. Until then, free-looking CPUs may have an owner.
        attention: Set to have the runtime's lists compared soon.
        to_settle: Set when ``unsettled`` has got more.
    """

    def __init__(
        self,
        state: NodeState,
        journal: Journal,
        fault: Callable[[BaseException], None],
        mode: NodeMode = NodeMode.ENFORCE,
    ) -> None:
        """Begin with a state that nothing depends on yet.

        Args:
            state: The node at the start.
            journal: Has changes written to the ledger.
            fault: Called with what an observer raises.
            mode: What is done with the node at first.
        """
        self._state = state
        self._mode = mode
        self.journal = journal
        self._fault = fault
        self._observers: list[Observer] = []
        self._handlers: dict[str, tuple[Callable[..., None], ...]] = {}
        self._due: deque[tuple[str, tuple[object, ...]]] = deque()
        self._notifies = False
        self.lost: dict[str, float] = {}
        self.unsettled: dict[str, None] = {}
        self.news = ChangeSequence()
        self.flights = InflightCalls()
        self.retries = Retries()
        self.synced = asyncio.Event()
        self.attention = asyncio.Event()
        self.to_settle = asyncio.Event()

    @property
    def state(self) -> NodeState:
        """The node as it is now."""
        return self._state

    @property
    def mode(self) -> NodeMode:
        """What is done with the node now. May be read from any thread."""
        return self._mode

    def enter(self, mode: NodeMode) -> None:
        """Change what is done with the node. Jobs that are queued for the kernel follow it, too."""
        self._mode = mode

    def handle(self, event: NodeEvent) -> None:
        """Have something happen to the node."""
        self._state = handle(self._state, event)

    def subscribe(self, observer: Observer) -> None:
        """Notify an observer from now on, after those that have subscribed before."""
        self._observers.append(observer)
        self._handlers.clear()

    def change(
        self,
        after: NodeState,
        reason: str,
        *,
        records: Mapping[str, Record | None] = _NO_RECORDS,
        follow: Follow = Follow.MOVED,
    ) -> Change:
        """Replace the state, record the change, and have everything that depends on it follow.

        Args:
            after: The new state, derived from ``state`` without a wait in between.
            reason: What happened, in a few words.
            records: What the ledger stores of it, by key (None: delete); see ``Journal``.
            follow: Which containers are written in the kernel.
        """
        before, self._state = self._state, after
        for key, record in records.items():
            self.journal.put(key, record)
        change = Change(before, after, reason, follow)
        if change.is_felt:
            change = Change(before, after, reason, follow, *moves(before, after))
            self.notify(Observer.changed, change)
        return change

    def notify(
        self, event: Callable[Concatenate[Observer, P], None], *args: P.args, **none: P.kwargs
    ) -> None:
        """Notify all observers of an event, in their order.

        Args:
            event: The method of ``Observer``.
            args: Its arguments.
            none: No arguments are given by name.
        """
        assert not none
        if event.__name__ not in self._handlers:
            self._handlers[event.__name__] = tuple(self._handled(event))
        if not self._handlers[event.__name__]:
            return  # no observer does anything about it
        self._due.append((event.__name__, args))
        if self._notifies:
            return
        self._notifies = True
        try:
            while self._due:
                name, values = self._due.popleft()
                for handler in self._handlers[name]:
                    try:
                        handler(*values)
                    except Exception as error:  # noqa: BLE001  the other observers must follow
                        self._fault(error)
        finally:
            self._notifies = False

    def _handled(self, event: Callable[..., None]) -> Iterator[Callable[..., None]]:
        """Give the methods that do something about an event, in the order of the observers."""
        for observer in self._observers:
            handler = getattr(observer, event.__name__)
            if getattr(handler, "__func__", None) is not getattr(Observer, event.__name__):
                yield handler

    def settle_later(self, container_id: str) -> None:
        """Have the runtime sent the CPUs of a container, some time."""
        self.unsettled[container_id] = None
        self.to_settle.set()
