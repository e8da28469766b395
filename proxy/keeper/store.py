"""What is true about the node, and the one place where its state changes.

Theory of operation. ``NodeStore.state`` is a value (``proxy.plan.state``). Workers read it from their
threads. Only the event loop replaces it, and only with ``NodeStore.change``, in the same steps each time:

1. The new state replaces the old one. Every later decision and every kernel write that is already queued uses
   the new one.
2. The records of the change go to the journal.
3. If pools or rules differ, the containers whose CPUs change are computed, and the observers are notified in
   the order in which they subscribed. ``keeper`` subscribes hooks first, then the reports about narrowed
   containers, then the kernel.

A change that an observer makes is notified after the one that it observes, so that all observers see changes
in the same order. A fault in one observer is reported and does not keep the others from following: the state
has changed already.

Beside the state the store holds what the calls of clients and of the daemon itself leave behind: what the
runtime has saved for each container, calls in flight, creates without an answer, and the sequence of changes
that dates the runtime's lists.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from proxy.keeper.flights import Flights
from proxy.keeper.journal import Journal, Record
from proxy.keeper.news import News
from proxy.keeper.retries import Retries
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.plan.moves import moves
from proxy.plan.state import NodeState

_NO_RECORDS: Mapping[str, Record | None] = {}


class Follow(Enum):
    """Which containers are written in the kernel after a change, and by which side."""

    MOVED = "the containers whose CPUs change, in the background"
    ALL = "all containers, in the background"
    CALLER = "none: the caller writes the kernel itself, because it waits for the result"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the state.

    Attributes:
        before: The state that was replaced.
        after: The state that replaced it.
        reason: What happened, in a few words.
        follow: Which containers the kernel backend writes.
        shrink: Ids of containers that must leave CPUs, because a pool or the machine changed.
        grow: Ids of containers that only gain CPUs by it.
    """

    before: NodeState
    after: NodeState
    reason: str
    follow: Follow = Follow.MOVED
    shrink: tuple[str, ...] = ()
    grow: tuple[str, ...] = ()

    @property
    def is_felt(self) -> bool:
        """Report whether pools or rules may differ. Most containers own nothing, and change neither."""
        return self.before.pools is not self.after.pools or self.before.node is not self.after.node

    @property
    def moved(self) -> list[str]:
        """Give the ids of containers whose CPUs change, those that lose some first."""
        return [*self.shrink, *self.grow]


class StateObserver(Protocol):
    """Is notified of changes, on the event loop."""

    def changed(self, change: Change) -> None:
        """Pools or rules may differ from before. The store holds ``change.after``, or a later state."""


class NodeStore:
    """What is true about the node. For the event loop; ``state`` may be read from any thread.

    Attributes:
        journal: Has changes written to the ledger.
        saved: By container id (or token of a create), the CPUs that the runtime uses when it next starts or
            updates the container. A container whose value is not known is not in it.
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
        self._observers: list[StateObserver] = []
        self._due: deque[Change] = deque()
        self._notifies = False
        self.saved: dict[str, CpuSet] = {}
        self.lost: dict[str, float] = {}
        self.unsettled: dict[str, None] = {}
        self.news = News()
        self.flights = Flights()
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

    def subscribe(self, observer: StateObserver) -> None:
        """Notify an observer of changes from now on, after those that have subscribed before."""
        self._observers.append(observer)

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
            self._notify(change)
        return change

    def _notify(self, change: Change) -> None:
        self._due.append(change)
        if self._notifies:
            return
        self._notifies = True
        try:
            while self._due:
                change = self._due.popleft()
                for observer in self._observers:
                    try:
                        observer.changed(change)
                    except Exception as error:  # noqa: BLE001  the other observers must follow
                        self._fault(error)
        finally:
            self._notifies = False

    def settle_later(self, container_id: str) -> None:
        """Have the runtime sent the CPUs of a container, some time."""
        self.unsettled[container_id] = None
        self.to_settle.set()
