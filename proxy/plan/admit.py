"""Deciding a RunPodSandbox: scope ``pod`` decides once, for all containers of the pod.

Theory (kubelet 1.36, reference B.5). The providers are asked for the pod as a whole, one hint is made of
their answers, and every container is served under it, in the order of the pod. Since the containers come
later, one by one, what they will get is *set aside*: nobody else owns these CPUs or this memory while the
sandbox is there. Pools go on using the CPUs until a container that owns them is created.

Where kubelet told what the containers ask for, each has its part. Where only the CRI is known, its sum for
the sandbox is set aside as a whole, and containers take theirs from it as they come.

An LSE or LSR pod for which no scheduler chose CPUs gets them here in any scope, as a whole: its containers
own them together (``owning``). So is a pod decided here that wants to be aligned by itself (``alignment``).

A sandbox that is made anew for a pod that is known keeps what was decided for it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from proxy.model.admission import Breach, Rule
from proxy.model.asks import PodAsk
from proxy.model.explanation import Explanation, Step
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.options import Scope
from proxy.model.wording import listed
from proxy.model.workload import Fault, Part, Pod, Request, SetAside, Verdict
from proxy.place import cpu_static
from proxy.place.binding.wish import BindError, PolicyConflictError
from proxy.place.cpu_request import MILLI, container_cpus, pod_cpus
from proxy.place.devices import hints as device_hints
from proxy.place.memory import hints as memory_hints
from proxy.place.memory import request as memory_request
from proxy.place.policies import UNALIGNED
from proxy.plan.admission import believed, rejection, rejects, shared_instead
from proxy.plan.aligned import bound, shared_milli, wants
from proxy.plan.cases import asks_of, case_of
from proxy.plan.desk import (
    ANYWHERE,
    DEVICES,
    FAILED_PRECONDITION,
    Case,
    Ruling,
    grant,
    judge,
    near_hints,
    refused,
)
from proxy.plan.lacks import lacks_of
from proxy.plan.limits import beyond, headroom
from proxy.plan.node import Node
from proxy.plan.owning import owned_asks, owned_cpus, owning_problem, owns_as_a_whole, tells
from proxy.plan.record import explain
from proxy.plan.state import NodeState
from proxy.plan.wishes import wished
from proxy.pools.claims import may_own, whole_cpus

EVENT = "RunPodSandbox"
INVALID_ARGUMENT = 3
AFFINITY = UNALIGNED.reason


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a sandbox.

    Attributes:
        verdict: Admit or refuse.
        pod: The pod with what was set aside for it; as it came where nothing was.
        state: The state with it; the state before where nothing was set aside, or on a refusal.
        explanation: Why; None where there was nothing to decide.
        problem: What could not be met, said to the operator; empty if nothing was.
        limit: The rule of admission beyond which the claim went; None where it went beyond none.
    """

    verdict: Verdict
    pod: Pod
    state: NodeState
    explanation: Explanation | None = None
    problem: str = ""
    limit: Rule | None = None


def admit(state: NodeState, pod: Pod, total: Request) -> Admission:
    """Decide about a pod before its sandbox is made.

    Args:
        state: The node as it is.
        pod: The pod; ``sandbox_id`` is what it is known by until the runtime names it.
        total: What the CRI says of the pod as a whole, and the devices of all its containers.
    """
    if not concerns(state.node, pod):
        return Admission(Verdict(), pod, state)
    counts, breach = believed(state.node, pod)
    if breach is not None and rejects(state.node):
        verdict = rejection(breach, f"place {pod.ref}")
        why = explain(EVENT, pod, "", pod.attempt, total, verdict)
        return Admission(verdict, pod, state, why, limit=breach.rule)
    if counts is not pod:
        return _as_it_counts(state, pod, counts, total, breach)
    before = next((p for p in state.pods.values() if p.key == pod.key and p.aside is not None), None)
    if before is not None:
        known = as_decided(pod, before)
        return Admission(Verdict(), known, state.with_pod(known))
    if owns_as_a_whole(state.node, pod) and tells(pod, total):
        if problem := owning_problem(pod, total):
            verdict = Verdict(INVALID_ARGUMENT, "InvalidCPURequest", f"cannot place {pod.ref}: {problem}")
            return Admission(verdict, pod, state, explain(EVENT, pod, "", pod.attempt, total, verdict))
        count = owned_cpus(pod, total)
        return _decide(state, pod, total, owned_asks(pod, total, count), count, owns=True, whole=True)
    if not state.node.decides_pods and not wants(pod):
        return Admission(Verdict(), pod, state)
    owns = state.node.static and may_own(pod) and pod.cpuset is None
    asks = asks_of(pod, "", total, whole_cpus(total) if owns else 0)
    wanted = pod_cpus(asks) if owns else 0
    owns = owns and (wanted > 0 or any(container_cpus(asks, ask) for ask in asks.containers))
    return _decide(state, pod, total, asks, wanted, owns=owns, whole=False)


def _as_it_counts(
    state: NodeState, pod: Pod, counts: Pod, total: Request, breach: Breach | None
) -> Admission:
    """Decide about a pod without what it may not claim; the pod goes on saying what its author wrote."""
    done = admit(state, counts, total)
    problem, limit = done.problem, done.limit
    if breach is not None:
        problem, limit = problem or shared_instead(breach), limit or breach.rule
    if done.pod is counts:
        return dataclasses.replace(done, pod=pod, problem=problem, limit=limit)
    given = done.pod
    known = dataclasses.replace(
        pod,
        aside=given.aside,
        nodes=given.nodes or pod.nodes,
        cpuset=given.cpuset if given.chosen else pod.cpuset,
        chosen=given.chosen,
    )
    return dataclasses.replace(done, pod=known, state=state.with_pod(known), problem=problem, limit=limit)


def as_decided(pod: Pod, before: Pod) -> Pod:
    """Give a pod with what was decided for an earlier sandbox of it, or before more of it was known."""
    known = dataclasses.replace(pod, aside=before.aside, nodes=pod.nodes or before.nodes)
    return dataclasses.replace(known, cpuset=before.cpuset, chosen=True) if before.chosen else known


def concerns(node: Node, pod: Pod) -> bool:
    """Tell whether a pod is decided as a whole, before its containers come."""
    pod, breach = believed(node, pod)
    if breach is not None:
        return True
    return node.decides_pods or owns_as_a_whole(node, pod) or wants(pod)


def _decide(
    state: NodeState, pod: Pod, total: Request, asks: PodAsk, count: int, *, owns: bool, whole: bool
) -> Admission:
    """Ask the providers about a pod, and set aside what they give, within the limits of the node."""
    asked = Asked(state, pod, total, asks, count, owns=owns, whole=whole)
    done = _decide_once(asked, None)
    if done.limit is Rule.SHARED_FLOOR:
        other = _decide_once(asked, headroom(state, pod))
        done = other if other.verdict.admitted else done
    if done.limit is None or rejects(state.node):
        return done
    words = done.verdict.message.partition(": ")[2]
    problem = shared_instead(Breach(done.limit, words))
    return Admission(Verdict(), pod, state, problem=problem, limit=done.limit)


@dataclass(frozen=True, slots=True)
class Asked:
    """A pod that is being decided.

    Attributes:
        state: The node as it is.
        pod: The pod.
        total: What the CRI says of it.
        asks: What it asks for; one container without a name stands for the pod.
        count: Exclusive CPUs that are wanted.
        owns: True where CPUs may be given to it alone.
        whole: True where its containers own the CPUs together.
    """

    state: NodeState
    pod: Pod
    total: Request
    asks: PodAsk
    count: int
    owns: bool
    whole: bool


def _decide_once(asked: Asked, avoid: CpuSet | None) -> Admission:
    """Ask the providers about a pod, and set aside what they give, but for CPUs that are not to be chosen."""
    state, pod, total, count, owns = asked.state, asked.pod, asked.total, asked.count, asked.owns
    try:
        case = case_of(state, pod, asked.asks, "", count, total, owns=owns, avoid=avoid)
    except PolicyConflictError as conflict:
        return _refuse(state, pod, total, Ruling(refused(conflict), ANYWHERE), None)
    # Memory that no node could hold makes no hint, and yet has to be refused.
    asks = asked.asks
    binds = case.memory is not None and memory_request.served(asks) and memory_request.pod_amounts(asks)
    milli = count * MILLI if owns else shared_milli(pod, total)
    aligns = wants(pod) and (milli > 0 or bool(case.near))
    if not binds and not aligns and not any(hints for _, hints in _answers(case)):
        return Admission(Verdict(), pod, state)
    unmet: Fault | None = None
    if aligns:
        ruling = _aligned(state, pod, case, milli)
    else:
        ruling, unmet = wished(case, pod, _ruled)
    if not ruling.verdict.admitted:
        return _refuse(state, pod, total, ruling, case)
    promised = _promised(asked, ruling, aligned=aligns)
    after = state.with_pod(promised)
    what = f"set CPUs {listed(ruling.cpus)} aside for {pod.ref}"
    if not after.pools.shared - after.aside():
        words = f"cannot {what}: the shared pool would be left empty"
        verdict = Verdict(FAILED_PRECONDITION, "SharedPoolExhausted", words)
        return _refuse(state, pod, total, dataclasses.replace(ruling, verdict=verdict), case)
    breach = beyond(state, after, promised, "", ruling.cpus)
    if breach is not None:
        ruling = dataclasses.replace(ruling, verdict=rejection(breach, what))
        return dataclasses.replace(_refuse(state, pod, total, ruling, case), limit=breach.rule)
    why = explain(EVENT, promised, "", pod.attempt, total, Verdict(), ruling)
    return Admission(Verdict(), promised, after, why, unmet or "")


def _promised(asked: Asked, ruling: Ruling, *, aligned: bool) -> Pod:
    """Give the pod with what is set aside for it."""
    hint = ruling.hint
    aside = SetAside(hint.affinity, hint.preferred, ruling.cpus, ruling.blocks, ruling.parts)
    promised = dataclasses.replace(asked.pod, aside=aside)
    if aligned and not asked.owns:
        promised = bound(promised, hint, asked.state.node.nodes)
    if asked.whole:
        promised = dataclasses.replace(promised, cpuset=ruling.cpus, chosen=True)
    return promised


def _ruled(case: Case) -> Ruling:
    """Decide a pod by the node's policy, and serve its containers."""
    hint, verdict, said, merge = judge(case, _answers(case), Scope.POD)
    ruling = Ruling(verdict, hint, said=said, merge=merge)
    return _serve(case, ruling) if verdict.admitted else ruling


def _aligned(state: NodeState, pod: Pod, case: Case, milli: int) -> Ruling:
    """Decide a pod by its own policy, and serve its containers."""
    from proxy.plan.alignment import evenly, judge_aligned  # most nodes never see such a pod

    try:
        judged = judge_aligned(state, pod, case, milli)
    except BindError as error:
        return Ruling(refused(error), ANYWHERE)
    ruling = Ruling(judged.verdict, judged.hint, said=judged.said, merge=judged.merge)
    return _serve(evenly(case, judged.hint), ruling) if judged.verdict.admitted else ruling


def _refuse(state: NodeState, pod: Pod, total: Request, ruling: Ruling, case: Case | None) -> Admission:
    verdict = worded(ruling.verdict, pod.ref, ruling)
    lacks = lacks_of(case, "") if case is not None and verdict.reason == AFFINITY else ()
    why = explain(EVENT, pod, "", pod.attempt, total, verdict, ruling, lacks=lacks)
    return Admission(verdict, pod, state, why)


def worded(verdict: Verdict, ref: str, ruling: Ruling) -> Verdict:
    """Give kubelet's reason and text, and then ours: who it is about, and what stood against it."""
    if verdict.message.startswith("cannot "):
        return verdict
    blame = f": {'; '.join(ruling.merge.blame)}" if ruling.merge and ruling.merge.blame else ""
    return dataclasses.replace(verdict, message=f"{verdict.reason}: {verdict.message} ({ref}{blame})")


def _answers(case: Case) -> list[tuple[str, Hints]]:
    node = case.node
    answers: list[tuple[str, Hints]] = [
        (DEVICES, device_hints.pod_hints(case.devices, case.asks, node.nodes)),
        (DEVICES, near_hints(case.near, node.nodes)),
        ("cpu", cpu_static.pod_hints(node.cpu, case.cpu, case.asks) if case.owns else None),
    ]
    if case.memory is not None:
        answers.append(("memory", memory_hints.pod_hints(case.memory, case.asks)))
    return answers


def _serve(case: Case, ruling: Ruling) -> Ruling:
    """Serve the containers one after the other, as they will come, under the pod's hint."""
    hint = TopologyHint(ruling.hint.affinity, ruling.hint.preferred)
    parts: list[Part] = []
    steps: list[Step] = []
    cpus = CpuSet()
    for ask in case.asks.containers:
        served = grant(case, ask.name, hint)
        prefix = f"{ask.name}: " if ask.name else ""
        steps += [Step(step.provider, prefix + step.what) for step in served.steps]
        if not served.verdict.admitted:
            return dataclasses.replace(ruling, verdict=served.verdict, steps=tuple(steps))
        cpus |= served.cpus
        parts.append(Part(ask.name, served.cpus, served.blocks))
        assert served.cpu is not None
        assert served.given is not None
        case = dataclasses.replace(case, cpu=served.cpu, memory=served.memory, devices=served.given)
    ruling = dataclasses.replace(ruling, cpus=cpus, steps=tuple(steps))
    if len(parts) == 1 and not parts[0].name:
        return dataclasses.replace(ruling, blocks=parts[0].blocks)
    return dataclasses.replace(ruling, parts=_as_they_ended(case, parts))


def _as_they_ended(case: Case, parts: list[Part]) -> tuple[Part, ...]:
    """Give the parts with what init containers hold in the end, after others took memory over from them."""
    if case.memory is None:
        return tuple(parts)
    memory, uid = case.memory, case.asks.uid
    return tuple(dataclasses.replace(p, blocks=memory.blocks(uid, p.name) or ()) for p in parts)
