"""Every interleaving of a few calls for two pods on three CPUs, with faults and crashes in between.

The search works on plain values (``searched_node``). The possible next actions (a client's call, a job of the
kernel worker, a write of the ledger, the runtime executing a call, its answer, a timer, a reconcile, a
fault) are a list, and the search follows each action from each node that it reaches. Two nodes are the same
node when everything that the future depends on is equal.

Pod ``a`` shares CPUs: its container is started or updated. Pod ``b`` gets a container with a CPU of its own,
which is started or stopped; or cpusets are saved at the runtime meanwhile; or the container is moved. A list
of the runtime is requested at some moment, and used at a later one. On each path some faults may happen: a
kernel write is refused, the ledger cannot be written, a call fails at the runtime, or fails and is executed
all the same, a client disconnects and the runtime executes its call later, an update of the daemon is
abandoned and executed later, an answer arrives twice. In every node the daemon may crash, which is a crash
after every effect: the current call of the runtime is executed later or never, and a new daemon starts on the
remaining state, again with everything in any order.

A start that hangs is a sequence of its own: the runtime creates the container's cgroup with the set that the
start carries, writes that set again later, which the kernel reports, and executes the program last. Like
docs/applying.md, the model makes no promise for the time between the runtime's write and the daemon's answer
to the report: only the runtime's own init is in the cgroup then. So a program is not executed before a living
daemon has answered, and only a container that has begun its program can be on an owner's CPUs.

In every node: no other container is on the CPU of a running owner, and no container is without CPUs. In the
end no owner is lost, and each container is on its CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from proxy.engine import handle as engine
from proxy.engine import reservation as reservations
from proxy.engine import reservation_effects as to_do
from proxy.engine import reservation_events as seen
from proxy.engine.call_events import CallCompleted, CallOrphaned
from proxy.engine.inflight import InflightCall, InflightCalls
from proxy.engine.invariants import violations
from proxy.engine.pod_events import PodLearned
from proxy.engine.reservation_state import Reservation, ReservationKind, ReservationPhase
from proxy.engine.runtime_knowledge import ChangeSequence
from proxy.engine.start_step import StartStep
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase
from tests.engine import searched_comparison, searched_node
from tests.engine.searched_actions import ACTIONS, Action, actions, node_after
from tests.engine.searched_clients import PODS, next_call
from tests.engine.searched_comparison import RuntimeListing, node_after_crash
from tests.engine.searched_node import (
    ClientCall,
    DaemonTask,
    RuntimeRequest,
    SearchedNode,
)
from tests.testkit.changed_copy import changed_copy

SEQUENCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (("Start",), ("Create", "Start")),
    "update": (("Start", "|", "Update"), ("Create", "Start")),
    "stop": (("Start",), ("Create", "Start", "|", "Stop")),
    "sync": (("Start", "|"), ("Create", "Start", "Stop")),
    "hang": (("Start",), ("Create", "Start")),
    "move": (("Start", "|"), ("Create", "Start", "|", "Update")),
}
"""The calls of the two clients; those before a bar are done when the search begins."""
LIMIT = 400_000
"""More nodes than there are."""

# -- invariants ---------------------------------------------------------------------------------------------


def check(node: SearchedNode, *, moves: bool) -> None:
    """Check the invariants of every node."""
    assert violations(node.state) == []
    assert all(node.groups.values()), "a container has no CPU"
    owner = node.groups.get("b-1", CpuSet()) if moves else node.owner_cpus
    if owner and node.has_sharer_begun and "a-1" in node.groups:
        assert node.groups["a-1"].isdisjoint(owner), f"a runs on {node.groups['a-1']}, b owns {owner}"


def check_end(node: SearchedNode, *, moves: bool) -> None:
    """Check a node without pending work after a crash: each container is on its CPUs."""
    state = node.state
    if node.phases.get("b-1") in (Phase.CREATED, Phase.RUNNING):
        own = node.groups["b-1"] if moves else node.saved_cpusets["b-1"]
        assert [owner.cpus for owner in state.owners.values()] == [own], "an owner is lost"
    else:
        assert not state.owners
    for container_id, cpus in node.groups.items():
        assert cpus == state.desired_cpus(state.containers[container_id]), f"{container_id} runs on {cpus}"
    assert not [key for key in node.durable if key.startswith(("i/", "m/"))]
    assert not state.reservation_cpus


def check_rest(node: SearchedNode, *, is_disturbed: bool) -> None:
    """Check a node without pending work.

    Args:
        node: The node.
        is_disturbed: Whether there was a fault: the next reconciles then determine unknown outcomes.
    """
    state = node.state
    creating = {c.id for c in state.containers.values() if c.phase is Phase.CREATING}
    assert creating <= state.runtime.lost_creates.keys(), (
        "a create is over, but its container is still in phase creating"
    )
    assert not state.reservation_cpus
    if not is_disturbed:
        assert {c.id: c.phase for c in state.containers.values()} == node.phases
        assert not state.inflight.calls
        assert all(cpus == state.desired_cpus(state.containers[i]) for i, cpus in node.groups.items())


# -- the search ---------------------------------------------------------------------------------------------


def container_key(c: Container) -> tuple[object, ...]:
    return c.id, c.phase, c.placement.pool, c.placement.exclusive.bits


def node_key(node: SearchedNode) -> int:
    """Return a key of all that the future depends on."""
    state, listing = node.state, node.listing
    numbers = {n: at for at, n in enumerate(sorted(node.inflight_numbers()))}

    def inflight_key(call: InflightCall | None) -> object:
        return None if call is None else (numbers.get(call.number, -1), call.carries.bits)

    def call_key(call: object) -> object:
        if isinstance(call, ClientCall):
            return (
                *(call.pod, call.method, call.stage, call.target, call.cpus),
                inflight_key(call.inflight_call),
                call.failed,
            )
        if isinstance(call, RuntimeRequest):
            return call.target, call.task, inflight_key(call.inflight_call), call.answered_cpus
        return type(call).__name__, inflight_key(getattr(call, "call", None))

    inflight_calls = [
        (
            *(numbers[c.number], c.container_id, c.carries.bits, c.is_start, c.overlapped),
            *(c.orphaned_since is None, c.answered_at is None, c.refused, c.resend, c.suspected, c.confined),
        )
        for calls in state.inflight.calls.values()
        for c in calls
    ]
    tasks = [
        (
            *(t.name, t.target, t.waits_for, t.confine_attempts, t.reservation),
            tuple(numbers.get(n, -1) for n in t.calls),
        )
        for _, t in sorted(node.tasks.items())
    ]
    runtime = state.runtime
    return hash(
        (
            tuple(sorted(container_key(c) for c in state.containers.values())),
            tuple(sorted(inflight_calls)),
            tuple(tasks),
            tuple(sorted((i, cpus.bits) for i, cpus in runtime.saved.items())),
            (
                tuple(runtime.awaiting_sync),
                tuple(runtime.lost_creates),
                tuple(runtime.failed_creates),
                tuple(
                    (token, held.owner, held.cpus.bits, held.excludes_be)
                    for token, held in state.reservation_cpus.items()
                ),
            ),
            tuple(map(call_key, node.calls.values())),
            tuple(map(call_key, node.abandoned_calls)),
            tuple(map(call_key, node.requests)),
            (node.jobs, tuple((k, r and (type(r) is Container and container_key(r))) for k, r in node.queue)),
            tuple(sorted((k, type(r) is Container and container_key(r)) for k, r in node.durable.items())),
            tuple(
                tuple(sorted((i, cpus.bits) for i, cpus in each.items()))
                for each in (node.groups, node.saved_cpusets)
            ),
            (
                tuple(node.phases.items()),
                tuple(node.remaining_calls.items()),
                node.owner_cpus.bits,
                node.has_sharer_begun,
            ),
            (node.reconciled, node.faults, node.crashes, node.lists_left, node.reconciles_left),
            (node.may_move, node.postponed_writes, node.unanswered_targets),
            None
            if not isinstance(listing, RuntimeListing)
            else (
                listing.phases,
                listing.known,
                tuple(runtime.changes.is_unchanged(i, listing.began) for i in ("a-1", "b-1")),
            ),
        )
    )


def initial_node(kind: str, sequence: str) -> SearchedNode:
    """Return a node with two pods, with which the search of a sequence begins."""
    node = SearchedNode(dict(zip("ab", SEQUENCES[sequence], strict=True)), sequence)
    for pod in (PODS["a"], PODS[kind]):
        node.handle(PodLearned(pod))
    node.remaining_calls = {"a": ("Create", *node.remaining_calls["a"]), "b": node.remaining_calls["b"]}
    done = {
        "a": ("Create", *SEQUENCES[sequence][0])[: 1 + _before_bar(SEQUENCES[sequence][0])],
        "b": SEQUENCES[sequence][1],
    }
    done["b"] = done["b"][: _before_bar(SEQUENCES[sequence][1])]
    for pod, methods in done.items():
        node.remaining_calls = {
            **node.remaining_calls,
            pod: tuple(m for m in node.remaining_calls[pod] if m != "|"),
        }
        for _ in methods:
            next_call(node, pod)
            complete_all(node)
    return node


def _before_bar(methods: tuple[str, ...]) -> int:
    return methods.index("|") if "|" in methods else 0


def complete_all(node: SearchedNode) -> None:
    """Complete everything that is in progress."""
    node.continue_tasks()
    while True:
        if node.jobs:
            node.do_kernel_job()
        elif node.queue:
            node.write_ledger()
        elif node.requests:
            ACTIONS["request" if node.requests[0].answered_cpus is None else "response"](node, "0")
        elif call := next(iter(node.calls.values()), None):
            ACTIONS["answer" if call.stage == "answer" else "do"](node, call.pod)
        else:
            return
        node.continue_tasks()


@dataclass(slots=True)
class SearchResult:
    """The result of a search."""

    nodes: int = 0
    steps: int = 0
    crashes: int = 0


ActionPath = tuple["ActionPath", Action] | None


def description(path: ActionPath) -> str:
    steps = []
    while path is not None:
        path, action = path
        steps.append("/".join(action))
    return " ".join(reversed(steps))


def search(kind: str, sequence: str, faults: int, *, crashes: bool) -> SearchResult:
    """Follow every action from every node."""
    first = initial_node(kind, sequence)
    first.faults, first.crashes, first.lists_left = faults, int(crashes), int(faults < 2)
    known, found, moves = set[int](), SearchResult(), sequence == "move"
    ahead: list[tuple[SearchedNode, ActionPath]] = [(first, None)]
    while ahead:
        node, path = ahead.pop()
        key = node_key(node)
        if key in known:
            continue
        known.add(key)
        assert len(known) < LIMIT
        try:
            check(node, moves=moves)
            choices = list(actions(node))
            if not choices and node.reconciled:
                if node.crashes < crashes:
                    check_end(node, moves=moves)
                check_rest(node, is_disturbed=node.faults < faults or node.crashes < crashes)
            ahead += [(node_after(node, action), (path, action)) for action in choices]
            found.steps += len(choices)
            if node.crashes:
                outcomes = (False, True) if node.abandoned_calls or node.calls or node.requests else (False,)
                ahead += [
                    (node_after_crash(node, done=done), (path, ("crash", str(done)))) for done in outcomes
                ]
                found.crashes += len(outcomes)
        except Exception as error:
            raise AssertionError(f"after {description(path)}: {error!r}") from error
    found.nodes = len(known)
    return found


# CPUs that an annotation names are not moved.
KINDS = tuple(
    (kind, sequence)
    for kind in ("named", "chosen")
    for sequence in SEQUENCES
    if (kind, sequence) != ("named", "move")
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "sequence"), KINDS)
def test_no_interleaving_violates_an_invariant(kind: str, sequence: str) -> None:
    """With ``TOPOPROXY_EXPLORE=1`` there are two faults on each path, which takes some minutes."""
    # What follows from a decision is alike for CPUs that are named and CPUs that are chosen.
    faults = 1 if kind == "named" or sequence == "move" else 0
    found = search(kind, sequence, 2 if os.environ.get("TOPOPROXY_EXPLORE") else faults, crashes=True)
    print(f"{kind}, {sequence}: {found.nodes} nodes, {found.steps} steps, {found.crashes} crashes")
    assert found.nodes > 1_000
    assert found.crashes > 500


# -- faults that are planted --------------------------------------------------------------------------------

After = tuple[Reservation, tuple[to_do.Effect, ...]]


def _no_barrier(patch: pytest.MonkeyPatch) -> None:
    """Other containers are not moved before an owner is created or started."""

    def commit(one: Reservation, event: object) -> After:
        return changed_copy(one, phase=ReservationPhase.COMMITTED), (to_do.Commit(),)

    at = ReservationPhase.WAITING, seen.InflightCompleted
    patch.setitem(reservations._TRANSITIONS, at, commit)


def _no_wait(patch: pytest.MonkeyPatch) -> None:
    """Calls in flight that carry an owner's CPUs to other containers are not waited for."""
    patch.setattr(InflightCalls, "exceeding", lambda *_: [])


def _no_wait_in_a_move(patch: pytest.MonkeyPatch) -> None:
    """Calls in flight that carry the old CPUs to an owner that is moved are not waited for."""
    wait = SearchedNode.wait_for_calls

    def short(self: SearchedNode, task: DaemonTask, calls: list[InflightCall], cpus: CpuSet) -> DaemonTask:
        return wait(self, task, calls if cpus else [], cpus)

    patch.setattr(SearchedNode, "wait_for_calls", short)


def _clients_end_calls(patch: pytest.MonkeyPatch) -> None:
    """A disconnected client ends the wait for its call."""

    def completed(state: NodeState, event: CallOrphaned) -> engine.Handled:
        return engine.handle(state, CallCompleted(event.call))

    patch.setitem(engine._RULES, CallOrphaned, completed)


def _held_too_short(patch: pytest.MonkeyPatch) -> None:
    """The old CPUs of an owner that is moved are free before it has left them."""
    at = ReservationPhase.SHRINKING, seen.CpusetsWritten
    shrunk = reservations._TRANSITIONS[at]

    def early(one: Reservation, event: seen.Event) -> After:
        after, effects = shrunk(one, event)
        return after, tuple(
            to_do.AssignOwn(each.cpus, CpuSet()) if isinstance(each, to_do.AssignOwn) else each
            for each in effects
        )

    patch.setitem(reservations._TRANSITIONS, at, early)


def _unrecorded(patch: pytest.MonkeyPatch) -> None:
    """The barrier begins before the placement is in the ledger."""

    def waiting(one: Reservation, event: object) -> After:
        hold = (to_do.ReserveCpus(one.cpus),) if one.kind is ReservationKind.MOVE else ()
        wanted = (*hold, to_do.AwaitInflight(one.cpus))
        return changed_copy(one, phase=ReservationPhase.WAITING), wanted

    at = ReservationPhase.REQUESTED, seen.ReservationRequested
    patch.setitem(reservations._TRANSITIONS, at, waiting)


def _refusals_ignored(patch: pytest.MonkeyPatch) -> None:
    """Cpusets that the kernel has refused to write are not read back."""
    at = ReservationPhase.SHRINKING, seen.CpusetsWritten
    patch.setitem(reservations._TRANSITIONS, at, lambda one, _: reservations._free(one))


def _placements_stay(patch: pytest.MonkeyPatch) -> None:
    """An abandoned create keeps its CPUs."""

    def kept(one: Reservation) -> After:
        return changed_copy(one, phase=ReservationPhase.ABORTED), (to_do.Abort(one.reason),)

    patch.setattr(reservations, "_abort", kept)


def _nothing_suspected(patch: pytest.MonkeyPatch) -> None:
    """A daemon does not expect calls that an earlier daemon has sent."""
    patch.setattr(searched_comparison, "register_suspected_calls", lambda _: None)


def _old_specs(patch: pytest.MonkeyPatch) -> None:
    """A container is started with any cpuset that the runtime has saved."""
    step = searched_node.start_step

    def unsent(state: NodeState, container_id: str) -> StartStep:
        found = step(state, container_id)
        return StartStep.READY if found is StartStep.SEND else found

    patch.setattr(searched_node, "start_step", unsent)


def _old_lists(patch: pytest.MonkeyPatch) -> None:
    """A list counts even for containers that have changed since."""
    patch.setattr(ChangeSequence, "is_unchanged", lambda *_: True)


@pytest.mark.parametrize(
    ("plant", "kind", "sequence", "faults"),
    [
        (_no_barrier, "named", "start", 0),
        (_no_wait, "named", "start", 0),
        (_no_wait, "named", "hang", 0),
        (_no_wait_in_a_move, "chosen", "move", 0),
        (_clients_end_calls, "named", "start", 1),
        (_held_too_short, "chosen", "move", 0),
        (_unrecorded, "chosen", "move", 0),
        (_refusals_ignored, "chosen", "move", 1),
        (_placements_stay, "named", "start", 1),
        (_nothing_suspected, "named", "hang", 0),
        (_old_specs, "named", "start", 0),
        (_old_lists, "named", "stop", 0),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    sequence: str,
    faults: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"^after "):
        search(kind, sequence, faults, crashes=True)
