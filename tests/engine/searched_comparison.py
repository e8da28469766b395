"""Reconciles with the runtime's lists on a searched node, and the node after a crash."""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy.engine.call_events import CallConfined, CallSent, OrphanListed, RuntimeSyncDue
from proxy.engine.container_events import (
    ContainerCreated,
    ContainerFound,
    ContainerIsBack,
    ContainersRemoved,
    CreateFailed,
    PhaseChanged,
)
from proxy.engine.inflight import InflightCall
from proxy.engine.node_events import LedgerRead
from proxy.engine.state import NodeState
from proxy.model.workload import Phase, Pod, Request
from tests.engine.searched_clients import ONE_CPU, at_runtime, pod_of
from tests.engine.searched_node import (
    ALL,
    NODE,
    ClientCall,
    KernelJob,
    RuntimeRequest,
    SearchedNode,
)
from tests.testkit.changed_copy import changed_copy

RECONCILES = 3
"""Reconciles of a daemon that starts after a crash; the time between two lets orphans end."""
GRACE_S = 2.0
BEFORE_IT_RUNS = (Phase.CREATED, Phase.STARTING)


@dataclass(frozen=True, slots=True)
class RuntimeListing:
    """What the runtime has listed.

    Attributes:
        phases: Containers by id.
        began: The number of the newest change at the time of the request.
        requested_at: The time of the request.
        known: The containers that were known at that time.
    """

    phases: tuple[tuple[str, Phase], ...]
    began: int
    requested_at: float
    known: frozenset[str]


def compare_lists(node: SearchedNode) -> None:
    """The lists of the runtime are compared with the state; then the cpusets in the kernel."""
    listing = node.listing
    assert isinstance(listing, RuntimeListing)
    node.listing, phases = None, dict(listing.phases)
    resolve_lost_creates(node, listing)
    end_orphans(node, listing)
    for container_id in sorted(listing.known - phases.keys()):
        container = node.state.containers.get(container_id)
        if (
            container is not None
            and container.phase is not Phase.CREATING
            and is_new_in_list(node, container_id, listing)
        ):
            node.handle(ContainersRemoved((container_id,)))
    for container_id, phase in phases.items():
        if is_new_in_list(node, container_id, listing):
            record_phase(node, container_id, phase)
    adopt(node, listing)
    if not node.reconciled:
        register_suspected_calls(node)
    confine_orphaned_calls(node)
    node.jobs = (*node.jobs, KernelJob("all"))
    if not node.reconciled:
        perform_postponed_work(node)


def is_new_in_list(node: SearchedNode, container_id: str, listing: RuntimeListing) -> bool:
    """Return whether a list is up to date for a container: the container has not changed since."""
    return node.state.runtime.changes.is_unchanged(container_id, listing.began)


def end_orphans(node: SearchedNode, listing: RuntimeListing) -> None:
    """End calls that are over and have no waiting client."""
    phases = dict(listing.phases)
    for call in node.state.inflight.orphans():
        there = call.container_id
        phase = phases.get(there) if is_new_in_list(node, there, listing) else None
        current = node.state.inflight.current(call)
        held = call.is_start and current is not None and current.confined and there in node.groups
        node.handle(OrphanListed(call, phase, listing.requested_at, node.clock, held))


def record_phase(node: SearchedNode, container_id: str, phase: Phase) -> None:
    """Record the phase that a list shows for a container."""
    container = node.state.containers.get(container_id)
    if container is None or node.state.inflight.of(container_id):
        return
    if container.phase is Phase.EXITED and phase is not Phase.EXITED:
        node.handle(ContainersRemoved((container_id,)))
        node.handle(ContainerIsBack(container_id))
    elif not (container.phase is Phase.RUNNING and phase is Phase.CREATED):
        node.handle(PhaseChanged(container_id, phase))


def adopt(node: SearchedNode, listing: RuntimeListing) -> None:
    """Adopt containers that are not known."""
    creating = {c.pod.sandbox_id for c in node.state.containers.values() if c.phase is Phase.CREATING}
    for container_id, phase in listing.phases:
        pod = pod_of(node, container_id)
        is_new = container_id not in node.state.containers and is_new_in_list(node, container_id, listing)
        if is_new and phase is not Phase.EXITED and pod.sandbox_id not in creating:
            cpus = node.saved_cpusets[container_id]
            request = changed_copy(Request() if pod.uid == "a" else ONE_CPU, cpuset_cpus=str(cpus))
            node.handle(ContainerFound(container_id, pod, "c", 0, request, phase, cpus))


def resolve_lost_creates(node: SearchedNode, listing: RuntimeListing) -> None:
    """Determine the outcome of creates whose answers were lost."""
    there = {pod_of(node, i).sandbox_id: i for i, _ in listing.phases}
    for token, since in node.state.runtime.lost_creates.items():
        container = node.state.containers.get(token)
        if container is None:
            node.handle(CreateFailed(token))
            continue
        found = there.get(container.pod.sandbox_id)
        if found is not None and not is_new_in_list(node, found, listing):
            continue
        if found is not None and found not in node.state.containers:
            node.handle(ContainerCreated(token, found))
        elif node.clock - since > GRACE_S:
            node.handle(CreateFailed(token))


def register_suspected_calls(node: SearchedNode) -> None:
    """Assume calls of an earlier daemon."""
    for container in list(node.state.containers.values()):
        if container.phase not in (*BEFORE_IT_RUNS, Phase.RUNNING) or node.state.inflight.of(container.id):
            continue
        for is_start in (False, True) if container.phase is not Phase.RUNNING else (False,):
            node.last_number += 1
            call = InflightCall(
                node.last_number,
                container.id,
                ALL,
                is_start,
                node.clock,
                orphaned_since=node.clock,
                resend=False,
                suspected=True,
            )
            node.handle(CallSent(call))


def confine_orphaned_calls(node: SearchedNode) -> None:
    """Confine created containers that have a cgroup, and may have a start that hangs."""
    starts = [
        call
        for call in node.state.inflight.orphans()
        if call.is_start and not call.confined and call.container_id in node.groups
        if node.state.containers[call.container_id].phase in BEFORE_IT_RUNS
    ]
    for call in starts:
        node.handle(CallConfined(call, confined=True))
    if starts:
        node.jobs = (*node.jobs, KernelJob("narrow", tuple(call.container_id for call in starts)))


def perform_postponed_work(node: SearchedNode) -> None:
    """All running containers are known: perform the actions that were postponed."""
    node.reconciled = True
    node.write_later([i for i in sorted(node.postponed_writes) if i in node.state.containers])
    node.postponed_writes = frozenset()
    for token, one in node.restorations()[2]:
        if any(i in node.state.containers for i in one.containers):
            node.reserve("move b", one.containers[0], one, token)
    running = tuple(c.id for c in node.state.containers.values() if c.phase is Phase.RUNNING)
    node.handle(RuntimeSyncDue(running))


def node_after_crash(before: SearchedNode, *, done: bool) -> SearchedNode:
    """Return the node with the next daemon on it.

    Args:
        before: The node with a daemon that is killed.
        done: Whether the runtime completes its current call.
    """
    node, calls = before.copied(), before.calls.values()
    waiting = (
        *(replace(call, gone=True) for call in calls if at_runtime(call)),
        *(ghost for ghost in before.abandoned_calls if isinstance(ghost, ClientCall | RuntimeRequest)),
        *(
            replace(r, task="")
            for r in before.requests
            if r.inflight_call is not None and r.answered_cpus is None
        ),
    )
    node.abandoned_calls = waiting if done else ()
    node.calls, node.tasks, node.jobs, node.queue, node.requests = {}, {}, (), (), ()
    node.remaining_calls, node.listing, node.postponed_writes, node.unanswered_targets = (
        {"a": (), "b": ()},
        None,
        frozenset(),
        frozenset(),
    )
    node.reconciled = node.may_move = False
    node.faults, node.crashes, node.lists_left, node.reconciles_left = 0, before.crashes - 1, 0, RECONCILES
    node.state = NodeState.empty(NODE)
    holds, containers, _ = node.restorations()
    pods = tuple(record for record in node.durable.values() if type(record) is Pod)
    tokens = tuple(key[2:] for key in node.durable if key.startswith("i/"))
    node.handle(LedgerRead(pods, tuple(containers), holds, tokens, node.clock))
    node.jobs = ()
    register_suspected_calls(node)
    return node
