"""Compares the runtime's list with the state, and records in the state what the list shows.

A list is already old when it arrives: what has changed since it was requested (``ListRequest``) is left as it
is, and the next list shows it.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct, structs

from proxy.engine.container_events import ContainerIsBack
from proxy.engine.pod_events import PodLearned
from proxy.executor.background import TimeSlices
from proxy.executor.call_tracker import CallTracker
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.context import NodeContext
from proxy.executor.listing import Listing
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.executor.sandboxes import Sandboxes
from proxy.model.pod_selection import selectable_labels
from proxy.model.workload import Container, Phase

GRACE_S = 2.0
"""Seconds for which a create with a lost answer may still turn up in the runtime's list."""
REMOVED_AT_ONCE = 64
"""Containers that are removed in one turn of the event loop."""


class ListParts(Protocol):
    """The parts of the executor that the comparison with the runtime's list uses."""

    lifecycle: ContainerLifecycle
    sandboxes: Sandboxes
    call_tracker: CallTracker


class ListRequest(Struct, frozen=True):
    """What was known when the runtime's list was requested: a list is already old when it arrives.

    Attributes:
        change: The number of the last change of the state.
        at: The time.
        containers: The ids of the known containers.
        pods: The ids of the known sandboxes, without those whose create is under way.
        ended_sandbox_calls: Tokens of sandboxes whose calls an earlier daemon relayed, if these calls are
            over.
    """

    change: int
    at: float
    containers: frozenset[str]
    pods: frozenset[str]
    ended_sandbox_calls: frozenset[str]


class ListComparison:
    """Records in the state what the runtime's list shows about known containers and sandboxes."""

    def __init__(self, context: NodeContext, parts: ListParts) -> None:
        self._context = context
        self._parts = parts

    def request(self) -> ListRequest:
        """Return what is known now, before the list is requested."""
        state = self._context.state
        return ListRequest(
            state.runtime.changes.number,
            self._context.clock(),
            frozenset(state.containers),
            frozenset(state.pods) - state.runtime.arriving_sandboxes,
            self._parts.call_tracker.former_calls.ended_sandbox_calls,
        )

    async def record(self, listing: Listing, request: ListRequest, turns: TimeSlices) -> None:
        """Record what a list shows, with turns of the event loop in between."""
        self._resolve_lost_creates(listing, request.change)
        self._end_relayed(listing, request.ended_sandbox_calls)
        await self._update_phases(listing, request, turns)

    def unknown(self, listing: Listing) -> list[RuntimeContainer]:
        """Return the listed containers that the state has neither by id nor as creates without an answer."""
        containers = self._context.state.containers
        new = [c for c in listing.containers.values() if c.id not in containers]
        creating = {
            (c.pod.sandbox_id, c.name, c.attempt) for c in containers.values() if c.phase is Phase.CREATING
        }
        return [
            c
            for c in new
            if c.phase is not Phase.EXITED
            and (c.sandbox_id, c.name, c.attempt) not in creating
            and not listing.is_dead(c)
        ]

    def learn_labels(self, listing: Listing) -> None:
        """Learn the labels of pods that were read from a ledger without labels."""
        context = self._context
        for sandbox_id, seen in listing.pods.items():
            pod = context.state.pods.get(sandbox_id)
            if pod is not None and not pod.labels and (labels := selectable_labels(seen.labels)):
                context.store.handle(PodLearned(structs.replace(pod, labels=labels)))
        context.enforcement_step_due.set()

    def _resolve_lost_creates(self, listing: Listing, began: int) -> None:
        """Find out how creates ended if their answer was lost."""
        context = self._context
        listed = {(c.sandbox_id, c.name, c.attempt): c.id for c in listing.containers.values()}
        for token, since in context.state.runtime.lost_creates.items():
            container = context.state.containers.get(token)
            if container is None:
                self._parts.lifecycle.failed(token)
                continue
            found = listed.get((container.pod.sandbox_id, container.name, container.attempt))
            if found is not None and not context.state.runtime.changes.is_unchanged(found, began):
                continue  # it may have been removed since: the next list decides
            if found is not None and found not in context.state.containers:
                self._parts.lifecycle.created(token, found)
            elif listing.unread_containers:
                continue  # it may be one of the entries that could not be read
            elif self._is_late(token, since) or self._is_over(container, listing):
                self._parts.lifecycle.failed(token)

    def _is_late(self, token: str, since: float) -> bool:
        """Return whether a create without an answer would have been carried out by now."""
        since = self._parts.call_tracker.former_calls.lost_since(token, since)
        return self._context.clock() - since > GRACE_S

    def _is_over(self, container: Container, listing: Listing) -> bool:
        """Return whether a create that was recorded before a crash can no longer succeed.

        That is so if its sandbox has ended or is gone. The list shows this only in the first reconcile:
        later, a list may be older than the sandbox of a create.
        """
        sandbox_id = container.pod.sandbox_id
        pod = listing.pods.get(sandbox_id)
        over = listing.lacks_pod(sandbox_id) if pod is None else not pod.ready
        return not self._context.reconciled.is_set() and over

    def _end_relayed(self, listing: Listing, ended_sandbox_calls: frozenset[str]) -> None:
        """Record what became of sandboxes whose calls an earlier daemon relayed, if the list shows it."""
        if listing.unread_pods:
            return
        for token in ended_sandbox_calls:
            self._parts.sandboxes.resolve_relayed(token, listing.pods.values())
        self._parts.call_tracker.former_calls.ended_sandbox_calls -= ended_sandbox_calls

    async def _update_phases(self, listing: Listing, request: ListRequest, turns: TimeSlices) -> None:
        """Update the phases in the state from the list.

        A list is already old when it arrives. So it is ignored for containers that have changed since it was
        requested, and only a container that was known at that time can have vanished.
        """
        context = self._context
        # A container that was created while its sandbox was stopped never starts, and must keep no CPUs.
        phases = {
            i: Phase.EXITED if listing.is_dead(c) else phase
            for i, c in listing.containers.items()
            if (phase := c.phase) is not None
        }

        def phase_of(container_id: str) -> Phase | None:
            return (
                phases.get(container_id)
                if context.state.runtime.changes.is_unchanged(container_id, request.change)
                else None
            )

        await turns.through(self._parts.call_tracker.end_orphans(phase_of, request.at))
        await self._remove_absent([i for i in request.containers if listing.lacks_container(i)], turns)
        for container_id, phase in phases.items():
            await turns.turn()
            self._take_phase(container_id, phase, request.change)
        await self._update_sandboxes(listing, request.pods, turns)

    async def _remove_absent(self, ids: list[str], turns: TimeSlices) -> None:
        """Remove containers that the runtime no longer has, a few in one turn of the event loop."""
        for at in range(0, len(ids), REMOVED_AT_ONCE):
            containers = self._context.state.containers
            batch = [i for i in ids[at : at + REMOVED_AT_ONCE] if i in containers]
            self._parts.lifecycle.removed([i for i in batch if containers[i].phase is not Phase.CREATING])
            await turns.turn()

    def _take_phase(self, container_id: str, phase: Phase, began: int) -> None:
        """Record the phase that the list has for a container, unless the state is newer."""
        context = self._context
        recorded = context.state.containers.get(container_id)
        if (
            recorded is None
            or not context.state.runtime.changes.is_unchanged(container_id, began)
            or context.state.inflight.of(container_id)
        ):
            return
        if recorded.phase is Phase.EXITED and phase is not Phase.EXITED:
            # The container lives after all: it is adopted like an unknown one.
            self._parts.lifecycle.removed([container_id])
            context.store.handle(ContainerIsBack(container_id))
        elif not (recorded.phase is Phase.RUNNING and phase is Phase.CREATED):
            self._parts.lifecycle.phase(container_id, phase)

    async def _update_sandboxes(self, listing: Listing, known: frozenset[str], turns: TimeSlices) -> None:
        """Record which sandboxes have stopped or are missing in the list."""
        # A sandbox's own process may die before its containers, which keep their CPUs until they end.
        alive = {c.sandbox_id for c in listing.containers.values() if c.phase is Phase.RUNNING}
        for sandbox_id in known:
            await turns.turn()
            pod = listing.pods.get(sandbox_id)
            if pod is None:
                if listing.lacks_pod(sandbox_id):
                    self._parts.sandboxes.handle_missing(sandbox_id, listing.pods.values())
            elif not pod.ready and sandbox_id not in alive:
                self._parts.sandboxes.stopped(sandbox_id)
