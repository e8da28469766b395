"""Deciding a CreateContainer: event and node state in, plan out.

The order is: claim (what the pod's class and request entitle it to), CPUs (named by somebody, or chosen by
the topology manager, see ``desk``), verdict (nobody else owns them, the shared pool keeps at least one CPU),
memory nodes, and who has to move. Nothing here changes anything: the plan holds the whole next state.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from proxy.model.explanation import Explanation, Lack
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.wording import nodes as named
from proxy.model.workload import (
    Container,
    Fault,
    KubeQos,
    Phase,
    Placement,
    Pod,
    Pool,
    Request,
    Verdict,
)
from proxy.place.binding.wish import PolicyConflictError
from proxy.place.cpu_request import container_cpus
from proxy.plan.admit import AFFINITY, worded
from proxy.plan.cases import asks_of, case_of
from proxy.plan.desk import ANYWHERE, FAILED_PRECONDITION, Case, Ruling, grant, refused, rule
from proxy.plan.found import Found, RefusedError, named_cpus
from proxy.plan.lacks import lacks_of
from proxy.plan.moves import moves
from proxy.plan.nodes import bound_to, counted, own_mems, pool_mems
from proxy.plan.quotas import unlimited, without_quota
from proxy.plan.record import explain, moved
from proxy.plan.sharing import constrained, pooled, unmet
from proxy.plan.state import NodeState
from proxy.plan.wishes import wished
from proxy.pools.claims import STRICT, Claim, claim, pool_of, whole_cpus

INVALID_ARGUMENT = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to one event.

    Attributes:
        verdict: Admit or refuse; on a refusal ``state`` is the state before.
        state: The whole next state.
        container: The container as placed; None on a refusal.
        shrink: Ids of containers that must leave CPUs before the request goes on.
        problem: What was wrong with what was asked, said to the operator; empty if nothing was.
        explanation: Why; None for a container that could only go to a pool (``record.of_pool`` tells).
    """

    verdict: Verdict
    state: NodeState
    container: Container | None = None
    shrink: tuple[str, ...] = ()
    problem: str = ""
    explanation: Explanation | None = None


_ADMITTED = Verdict()


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
    if there is None and pod.cpuset and pod.cpuset & online and pod.cpuset <= state.had(pod.key):
        there = pod.cpuset | online  # what is away of its CPUs comes back, and it goes on with the rest
    wish = claim(pod, request, there or online, static=state.node.static, exact=_exact(pod, name))

    def no(verdict: Verdict, ruling: Ruling | None, problem: str, lacks: tuple[Lack, ...] = ()) -> Plan:
        why = explain("CreateContainer", pod, name, attempt, request, verdict, ruling, lacks=lacks)
        return Plan(verdict, state, problem=problem, explanation=why)

    try:
        found = _find(state, pod, name, request, wish)
    except RefusedError as refused:
        return no(refused.verdict, refused.ruling, wish.problem, refused.lacks)
    placement = found.placement
    if unlimited(state, pod, name, placement.pool):
        placement = without_quota(placement, request)
    container = Container(token, name, pod, request, placement, Phase.CREATING, attempt, found.owner)
    after = state.changed(put=(container,))
    shrink: tuple[str, ...] = ()
    if placement.pool is Pool.OWN:
        if not after.pools.shared - after.aside(pod.key):
            return no(_exhausted(placement.own, container.ref), found.ruling, found.problem)
        shrink, _ = moves(state, after)
    verdict = Verdict()
    why = explain("CreateContainer", pod, name, attempt, request, verdict, found.ruling, placement, after)
    if shrink:
        who, more = moved(state, after, shrink)
        why = dataclasses.replace(why, moved=who, more_moved=more)
    return Plan(verdict, after, container, shrink, found.problem, why)


def _exact(pod: Pod, name: str) -> int | None:
    """Give the CPUs that a container may own by what kubelet told of its pod; None where it told nothing."""
    known = next((ask for ask in pod.asks.containers if ask.name == name), None) if pod.asks else None
    return None if known is None or pod.asks is None else container_cpus(pod.asks, known)


def _exhausted(cpus: CpuSet, ref: str) -> Verdict:
    message = f"cannot give CPUs {cpus} to {ref}: the shared pool would be left empty"
    return Verdict(FAILED_PRECONDITION, "SharedPoolExhausted", message)


def _at_once(state: NodeState, pod: Pod, request: Request) -> Placement | None:
    """Give the placement of a container that can only go to a pool; None where there is more to think about.

    Most containers are like that, and for them only their class matters; so this is the same answer that the
    long way would give, looked up.
    """
    if pod.cpuset is not None or pod.problem or request.cpuset_mems or request.devices or state.node.devices:
        return None
    if pod.nodes is not None or pod.wish_nodes is not None or pod.bind_required or pod.bind_preferred:
        return None
    if pod.aside is not None:
        return None  # what is set aside for it may end here
    if pod.kube_qos is KubeQos.GUARANTEED and (
        state.node.memory is not None or pod.asks is not None or whole_cpus(request)
    ):
        return None
    key = (pod.qos, pod.kube_qos)
    known = state.node.alike.get(key)
    if known is None:
        wish = claim(pod, request, state.node.machine.online, static=state.node.static)
        known = state.node.alike[key] = pooled(wish.pool, state.node.machine.memory_nodes, wish.why)
    return known


def _find(state: NodeState, pod: Pod, name: str, request: Request, wish: Claim) -> Found:
    ref = f"{pod.ref}/{name}"
    if wish.fatal:
        raise RefusedError(Verdict(INVALID_ARGUMENT, "InvalidCPUSet", f"cannot place {ref}: {wish.problem}"))
    if wish.pool is Pool.OWN and wish.cpus is not None:
        given = named_cpus(state, pod, name, request, wish, wish.cpus)
        if isinstance(given, Found):
            return given
        wish = given
    wish = constrained(state, pod, request, wish)
    nowhere = unmet(state, wish)
    if nowhere and pod.qos in STRICT:
        words = f"cannot place {ref}: {nowhere.partition(':')[0]}"
        raise RefusedError(Verdict(FAILED_PRECONDITION, "SharedPoolExhausted", words))
    try:
        case = _case(state, pod, name, request, wish)
    except PolicyConflictError as conflict:
        verdict = refused(conflict)
        raise RefusedError(worded(verdict, ref, Ruling(verdict, ANYWHERE))) from conflict
    if case is None:
        mems = pool_mems(state, request, wish.nodes)
        placement = pooled(wish.pool, mems, wish.why, wish.within, wish.nodes)
        return Found(placement, problem=wish.problem or nowhere)
    ruling, unmet_wish = _ruling(case, pod, name, wish.count)
    if not ruling.verdict.admitted and wish.count and wish.problem:
        # kubelet pinned it where others are, and there are no CPUs to take their place.
        instead, _ = pool_of(pod)
        why = f"{wish.why}; there are not enough: it runs on the {instead} pool"
        return _find(state, pod, name, request, Claim(instead, why, problem=wish.problem))
    if not ruling.verdict.admitted:
        lacks = lacks_of(case, name) if ruling.verdict.reason == AFFINITY else ()
        raise RefusedError(worded(ruling.verdict, ref, ruling), ruling, lacks)
    placement = _placed(state, pod, name, request, wish, ruling)
    owner = f"{pod.key}/{name}" if placement.pool is Pool.OWN else ""
    return Found(placement, owner, wish.problem or unmet_wish or nowhere, ruling)


def _case(state: NodeState, pod: Pod, name: str, request: Request, wish: Claim) -> Case | None:
    """Give what the topology manager is to decide about a container; None where that is nothing."""
    node, wanted = state.node, wish.count
    counted = node.memory is not None and pod.kube_qos is KubeQos.GUARANTEED
    if not wanted and not counted and not request.devices and not node.devices:
        return None
    asks = asks_of(pod, name, request, wanted)
    return case_of(state, pod, asks, name, wanted, request, owns=wanted > 0)


def _ruling(case: Case, pod: Pod, name: str, wanted: int) -> tuple[Ruling, Fault | None]:
    aside = pod.aside
    if aside is None:
        return wished(case, pod, lambda case: rule(case, name))
    hint = TopologyHint(aside.affinity, aside.preferred)
    if wanted <= len(aside.cpus):
        return grant(case, name, hint), None
    # The sum of the pod did not tell that it owns CPUs, so they were no part of what was decided.
    return rule(dataclasses.replace(case, pod=hint), name), None


def _placed(
    state: NodeState, pod: Pod, name: str, request: Request, wish: Claim, ruling: Ruling
) -> Placement:
    blocks = ruling.blocks
    if wish.pool is not Pool.OWN:
        bound = bound_to(pod, blocks)
        mems = bound or pool_mems(state, request, wish.nodes)
        reasons = (wish.why, counted(bound)) if bound else (wish.why,)
        placement = Placement(wish.pool, CpuSet(), mems, reasons, False, blocks, ruling.devices)
        return dataclasses.replace(placement, within=wish.within, nodes=wish.nodes)
    cpus = ruling.cpus
    mems, said = own_mems(state, request, cpus, f"{pod.key}/{name} {name}", bound_to(pod, blocks))
    where = named(state.node.machine.nodes_of(cpus))
    if cpus == state.had(f"{pod.key}/{name}"):
        why = f"{wish.why}; keeps the CPUs of its earlier attempt"
    elif pod.aside is not None and cpus <= pod.aside.cpus:
        why = f"{wish.why}; {cpus} on {where}, set aside for its pod"
    else:
        why = f"{wish.why}; picked {cpus} on {where}"
    return Placement(Pool.OWN, cpus, mems, (why, *said), wish.hard, blocks, ruling.devices)
