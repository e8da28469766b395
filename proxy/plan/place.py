"""Deciding a CreateContainer: event and node state in, plan out.

The order is: claim (what the pod's class and request entitle it to), CPUs (named by somebody, kept from an
earlier attempt, or picked), verdict (nobody else owns them, the shared pool keeps at least one CPU), memory
nodes, and who has to move. Nothing here changes anything: the plan holds the whole next state.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.workload import (
    Container,
    KubeQos,
    Phase,
    Placement,
    Pod,
    Pool,
    Request,
    Verdict,
)
from proxy.place.mems import memory_for
from proxy.place.packed import NotEnoughCpus
from proxy.place.pick import pick
from proxy.plan.state import NodeState, moves
from proxy.pools.claims import STRICT, Claim, claim, whole_cpus

INVALID_ARGUMENT, FAILED_PRECONDITION = 3, 9


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to one event.

    Attributes:
        verdict: Admit or refuse; on a refusal ``state`` is the state before.
        state: The whole next state.
        container: The container as placed; None on a refusal.
        shrink: Ids of containers that must leave CPUs before the request goes on.
        problem: What was wrong with what was asked, said to the operator; empty if nothing was.
    """

    verdict: Verdict
    state: NodeState
    container: Container | None = None
    shrink: tuple[str, ...] = ()
    problem: str = ""


_ADMITTED = Verdict()


class _RefusedError(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


def place(
    state: NodeState,
    pod: Pod,
    name: str,
    attempt: int,
    request: Request,
    token: str,
    there: CpuSet | None = None,
) -> Plan:
    """Decide where a container goes.

    Args:
        state: The node as it is.
        pod: The container's pod.
        name: Container name.
        attempt: Its attempt.
        request: What it asks for.
        token: The id that it has until the runtime names it.
        there: CPUs that may be named; the online ones if None.
    """
    placement = _at_once(state, pod, request)
    if placement is not None:
        container = Container(token, name, pod, request, placement, Phase.CREATING, attempt)
        return Plan(_ADMITTED, state.renamed("", container), container)
    online = state.node.machine.online
    wish = claim(pod, request, there or online, static=state.node.static)
    try:
        placement, owner, problem = _placement(state, pod, name, request, wish)
    except _RefusedError as refused:
        return Plan(refused.verdict, state, problem=wish.problem)
    container = Container(token, name, pod, request, placement, Phase.CREATING, attempt, owner)
    after = state.changed(put=(container,))
    shrink: tuple[str, ...] = ()
    if placement.pool is Pool.OWN:
        if not after.pools.shared:
            message = (
                f"cannot give CPUs {placement.own} to {container.ref}: the shared pool would be left empty"
            )
            return Plan(Verdict(FAILED_PRECONDITION, "SharedPoolExhausted", message), state, problem=problem)
        shrink, _ = moves(state, after)
    return Plan(Verdict(), after, container, shrink, problem)


def _at_once(state: NodeState, pod: Pod, request: Request) -> Placement | None:
    """Give the placement of a container that can only go to a pool; None where there is more to think about.

    Most containers are like that, and for them only their class matters; so this is the same answer that the
    long way would give, looked up.
    """
    if pod.cpuset is not None or pod.problem or request.cpuset_mems:
        return None
    if pod.kube_qos is KubeQos.GUARANTEED and whole_cpus(request):
        return None
    key = (pod.qos, pod.kube_qos)
    known = state.node.alike.get(key)
    if known is None:
        wish = claim(pod, request, state.node.machine.online, static=state.node.static)
        known = state.node.alike[key] = pooled(wish.pool, state.node.machine.memory_nodes, wish.why)
    return known


def _placement(
    state: NodeState, pod: Pod, name: str, request: Request, wish: Claim
) -> tuple[Placement, str, str]:
    ref = f"{pod.ref}/{name}"
    if wish.fatal:
        raise _RefusedError(Verdict(INVALID_ARGUMENT, "InvalidCPUSet", f"cannot place {ref}: {wish.problem}"))
    if wish.pool is not Pool.OWN:
        mems = named_mems(state, request)
        return pooled(wish.pool, mems, wish.why), "", wish.problem
    owner = pod.key if wish.per_pod else f"{pod.key}/{name}"
    others = CpuSet.from_bits(0)
    for key, held in state.owners.items():
        if key != owner:
            others |= held.cpus
    if wish.cpus is not None:
        obstacle = _obstacle(state, wish.cpus, others, owner)
        if obstacle is not None:
            return _without(state, pod, request, wish, obstacle, ref)
        cpus, why = wish.cpus, wish.why
    else:
        cpus, why = _pick(state, owner, others, wish, ref)
    mems, said = _own_mems(state, request, cpus, f"{owner} {name}")
    return Placement(Pool.OWN, cpus, mems, (why, *said), wish.hard), owner, wish.problem


def _own_mems(state: NodeState, request: Request, cpus: CpuSet, me: str) -> tuple[Mask, tuple[str, ...]]:
    """Give the memory nodes of an owner, and what there is to say about them."""
    machine = state.node.machine
    named = _named(machine, request)
    if named is not None:
        return named, (f"memory of nodes {named}, which the request names",)
    if not state.node.follow_mems:
        return machine.memory_nodes, ()
    promised = [
        (c.placement.mems, c.request.memory_limit)
        for c in state.containers.values()
        if c.placement.pool is Pool.OWN and c.phase is not Phase.EXITED and f"{c.owner} {c.name}" != me
    ]
    near = memory_for(machine, cpus)
    mems = memory_for(machine, cpus, request.memory_limit, promised)
    if mems == near:
        return mems, ()
    return mems, (
        f"memory of nodes {mems}: nodes {near} cannot hold its limit beside what is promised there",
    )


def _obstacle(state: NodeState, cpus: CpuSet, others: CpuSet, owner: str) -> tuple[str, str] | None:
    """Tell why somebody cannot have the CPUs that he was given elsewhere: reason and words."""
    clash = cpus & others
    if clash:
        holders = {
            c.ref if "/" in c.owner else c.pod.ref
            for c in state.containers.values()
            if c.owner not in ("", owner)
            and c.owner in state.owners
            and not c.placement.own.isdisjoint(clash)
        }
        return "CPUsInUse", f"CPUs {clash} are owned by {', '.join(sorted(holders))} already"
    if state.node.machine.online <= cpus | others:
        return "SharedPoolExhausted", "the shared pool would be left empty"
    return None


def _without(
    state: NodeState, pod: Pod, request: Request, wish: Claim, obstacle: tuple[str, str], ref: str
) -> tuple[Placement, str, str]:
    """Go on without the CPUs: strict pods are refused, the others run on the shared pool."""
    reason, words = obstacle
    if pod.qos in STRICT:
        message = f"cannot give CPUs {wish.cpus} to {ref}: {words}"
        raise _RefusedError(Verdict(FAILED_PRECONDITION, reason, message))
    why = f"{wish.why}, but {words}: it runs on the shared pool"
    return pooled(Pool.SHARED, named_mems(state, request), why), "", words


def _pick(state: NodeState, owner: str, others: CpuSet, wish: Claim, ref: str) -> tuple[CpuSet, str]:
    node = state.node
    had = state.had(owner)
    if len(had) == wish.count and had.isdisjoint(others) and had <= node.machine.online:
        return had, f"{wish.why}; keeps the CPUs of its earlier attempt"
    available = node.machine.online - node.reserved - others
    unpromised = available - state.promised(owner)
    try:
        cpus = pick(
            node.machine,
            node.topology,
            unpromised if len(unpromised) >= wish.count else available,
            wish.count,
        )
    except NotEnoughCpus as short:
        raise _RefusedError(
            Verdict(FAILED_PRECONDITION, "UnexpectedAdmissionError", f"cannot give CPUs to {ref}: {short}")
        ) from short
    nodes = node.machine.nodes_of(cpus)
    where = f"NUMA node {nodes}" if len(nodes) == 1 else f"NUMA nodes {nodes}"
    return cpus, f"{wish.why}; picked {cpus} on {where}, whole cores first"


@functools.lru_cache(maxsize=64)
def pooled(pool: Pool, mems: Mask, why: str) -> Placement:
    """Give the placement of a container that owns no CPUs; the same value for the many that are alike."""
    return Placement(pool, CpuSet(), mems, (why,))


def named_mems(state: NodeState, request: Request) -> Mask:
    """Give the memory nodes that a request names (kubelet's memory manager does), else all with memory."""
    named = _named(state.node.machine, request)
    return state.node.machine.memory_nodes if named is None else named


def _named(machine: Machine, request: Request) -> Mask | None:
    if not request.cpuset_mems:
        return None
    try:
        named = Mask.parse(request.cpuset_mems)
    except ValueError:
        return None
    return named if named and named <= Mask(machine.node_by_id) else None
