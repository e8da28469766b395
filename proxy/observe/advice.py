"""Explains a rejected request: what prevented it, and what would have made it fit."""

from __future__ import annotations

from proxy.model.admission import SHARED_POOL_EXHAUSTED, AdmissionRule
from proxy.model.explanation import Explanation, ProviderAnswer, Shortfall
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy
from proxy.model.phrases import counted
from proxy.model.requests import in_bytes
from proxy.model.workload import TOPOLOGY_AFFINITY
from proxy.observe.value_text import (
    bytes_text,
    clean,
    cpus,
    join_first,
    join_with_and,
    node_set,
    nodes,
    sentence,
    sentences,
)

_BY_REASON = {
    "SMTAlignmentError": (
        "Only whole cores are given (full-pcpus-only): ask for a multiple of the threads of a core"
    ),
    "InvalidCPUSet": "Correct the annotation that the reason names, or remove it",
    "InvalidCPURequest": (
        "Let its containers together request a whole number of CPUs and be limited to the same,"
        " or give it the class LS: then it shares CPUs"
    ),
    "CPUsInUse": (
        "Wait until their owner has ended, or let the scheduler place the pod again: it named these CPUs"
    ),
    SHARED_POOL_EXHAUSTED: "Ask for fewer CPUs: at least one must stay for the containers that own none",
    "EmptyPodSharedPoolError": (
        "Ask for more CPUs for the pod than its containers own, or for CPUs in every container"
    ),
    **{
        rule.reason: f"{text}; docs/admission.md describes which pods may own CPUs"
        for rule, text in {
            AdmissionRule.NAMESPACE: (
                "Run the pod in a namespace of admission.namespaces, or let it share CPUs"
            ),
            AdmissionRule.SYSTEM_NAMESPACE: (
                "Run the pod in a namespace of admission.systemNamespaces, or give it another class"
            ),
            AdmissionRule.REQUEST: (
                "Let the pod request as many whole CPUs as its annotation names, or let the scheduler write"
                " the annotation"
            ),
            AdmissionRule.WHOLE_CPUS: "Let its containers request whole CPUs and be limited to the same",
            AdmissionRule.RESERVED_CPUS: (
                "Let the scheduler choose other CPUs: its picture of the node may be old"
            ),
            AdmissionRule.POD_LIMIT: "Ask for fewer CPUs, or raise admission.maxCPUsPerPod",
            AdmissionRule.NAMESPACE_LIMIT: (
                "Wait until other pods of the namespace have ended, or raise admission.maxCPUsPerNamespace"
            ),
            AdmissionRule.NODE_LIMIT: "Wait until other owners have ended, or raise admission.maxCPUsPerNode",
            AdmissionRule.SHARED_FLOOR: (
                "Ask for fewer CPUs, wait until other owners have ended, or lower the floor that is named"
            ),
        }.items()
    },
    "RefusedByHook": (
        "If the named hook has rejected it, do as its message says; if it has failed, topoproxy hooks list"
        " shows why, and topoproxy hooks disable stops its use"
    ),
}

_EVERYWHERE_REASONS = (
    "InvalidCPUSet",
    "InvalidCPURequest",
    "RefusedByHook",
    *(rule.reason for rule in (AdmissionRule.NAMESPACE, AdmissionRule.REQUEST, AdmissionRule.WHOLE_CPUS)),
)
"""Reasons that lie in the pod's own fields, or apply to every node: all nodes reject such a pod."""


def causes_against(record: Explanation) -> tuple[str, ...]:
    """Return the causes that prevented a preferred result; empty if there are none, or none is known.

    The causes in the record are used; if it has none, they are derived from the providers' answers.
    """
    merge = record.merge
    if merge is None or merge.best.preferred or merge.policy == TopologyPolicy.NONE:
        return ()
    if merge.conflicts:
        return sentences([f"Reason: {join_first([clean(b).rstrip('.') for b in merge.conflicts], gap='; ')}"])
    single = merge.policy == TopologyPolicy.SINGLE_NUMA_NODE
    short = [
        s for s in record.answers if s.nothing != "no preference" and not _may_be_preferred(s, single=single)
    ]
    if short:
        cannot = [resource_name(s) for s in short if _is_impossible(s)]
        others = [resource_name(s) for s in short if not _is_impossible(s)]
        requirement = "a single NUMA node" if single else "as few NUMA nodes as its amount should need"
        return sentences(
            [
                f"No NUMA nodes have what it requests of {join_with_and(cannot)}" if cannot else "",
                f"What it requests of {join_with_and(others)} is not available on {requirement}"
                if others
                else "",
            ]
        )
    places = [f"{resource_name(s)} on {_places(s)}" for s in record.answers if _places(s)]
    if len(places) < 2:
        return ()
    return (
        sentence(
            f"Each resource has nodes that it prefers, but not the same: {join_first(places, gap='; ')}"
        ),
    )


def help_for(record: Explanation) -> tuple[str, ...]:
    """Return sentences about what would have made a rejected request fit."""
    least = _smallest(record.shortfalls)
    exact = _needed_text(least, aligned=record.verdict.reason == TOPOLOGY_AFFINITY)
    reason = record.verdict.reason
    texts = [exact, _holders_text(least), _BY_REASON.get(reason, "")]
    if reason not in _BY_REASON and not exact:
        texts.append(_smaller(record))
    if (
        record.merge is not None
        and reason == TOPOLOGY_AFFINITY
        and not any(_is_impossible(answer) for answer in record.answers)
    ):
        texts.append(_other_policy(record.merge.policy, record.merge.best))
    if reason not in _EVERYWHERE_REASONS:
        texts.append("Another node of the cluster may have room for it")
    return sentences(texts)


def resource_name(answer: ProviderAnswer) -> str:
    """Return the resource of a provider's answer; the provider's name if there is none."""
    return clean(answer.resource or answer.provider)


def _may_be_preferred(answer: ProviderAnswer, *, single: bool) -> bool:
    """Return whether a resource has a hint that could be part of a preferred result.

    A record keeps only some hints, and the preferred ones with the fewest nodes come first.
    """
    if _is_impossible(answer) or answer.preferred == 0:
        return False
    if not single or not answer.hints:
        return True
    first = answer.hints[0]
    return first.preferred and (first.affinity is None or len(first.affinity) == 1)


def _is_impossible(answer: ProviderAnswer) -> bool:
    return answer.nothing == "impossible" or (not answer.nothing and answer.count == 0)


def _places(answer: ProviderAnswer) -> str:
    masks = [hint.affinity for hint in answer.hints if hint.preferred and hint.affinity is not None]
    return join_first([node_set(mask) for mask in masks], 4)


def _smallest(shortfalls: tuple[Shortfall, ...]) -> list[Shortfall]:
    """Return the smallest shortfalls, with their nodes."""
    grouped: dict[Mask | None, list[Shortfall]] = {}
    for shortfall in shortfalls:
        if shortfall.missing:
            grouped.setdefault(shortfall.nodes, []).append(shortfall)

    def gap(group: list[Shortfall]) -> tuple[int, float]:
        return len(group), max(shortfall.missing / max(shortfall.wanted, 1) for shortfall in group)

    return min(grouped.values(), key=gap, default=[])


def _needed_text(shortfalls: list[Shortfall], *, aligned: bool) -> str:
    """Return what would have to be free.

    If resources must be aligned (``aligned``), more CPUs anywhere on the machine may not be enough.
    """
    if not shortfalls:
        return ""
    first = shortfalls[0]
    if first.named:
        return f"It would fit if {cpus(first.named)} were free"
    if first.most is not None and first.wanted > first.most:
        where = "this machine has no" if first.nodes is None else "no NUMA node has"
        return f"Ask for at most {counted(first.most, 'CPU')}: {where} more that can be owned"
    holder = "the machine" if first.nodes is None else nodes(first.nodes)
    gaps = "; ".join(
        f"of {_amount(shortfall, shortfall.wanted)} requested, {_amount(shortfall, shortfall.free)} were free"
        f"{f', and {shortfall.kept} must stay in the shared pool' if shortfall.kept else ''}"
        for shortfall in shortfalls
    )
    more = join_with_and([_more(shortfall) for shortfall in shortfalls])
    if aligned and first.most is not None:
        return f"It needs at least {more} ({gaps})"
    return f"It would fit if {holder} had {more} ({gaps})"


def _holders_text(shortfalls: list[Shortfall]) -> str:
    """Name the containers that have the CPUs."""
    shortfall = next((shortfall for shortfall in shortfalls if shortfall.holders), None)
    if shortfall is None or (shortfall.most is not None and shortfall.wanted > shortfall.most):
        return ""
    named = [f"{clean(holder.ref)} ({cpus(holder.cpus)})" for holder in shortfall.holders]
    where = "" if shortfall.nodes is None else f" of {nodes(shortfall.nodes)}"
    more = [f"{shortfall.more_holders} more"] if shortfall.more_holders else []
    subject = "They" if shortfall.named else f"CPUs{where}"
    return f"{subject} are owned by {join_with_and([*named, *more])}"


def _amount(shortfall: Shortfall, number: int) -> str:
    return bytes_text(number) if in_bytes(shortfall.resource) else str(number)


def _more(shortfall: Shortfall) -> str:
    if shortfall.resource == "cpu":
        return counted(shortfall.missing, "more free CPU")
    return f"{_amount(shortfall, shortfall.missing)} more of {clean(shortfall.resource)}"


def _smaller(record: Explanation) -> str:
    single = record.merge is not None and record.merge.policy == TopologyPolicy.SINGLE_NUMA_NODE
    names = [
        resource_name(s)
        for s in record.answers
        if s.nothing != "no preference" and not _may_be_preferred(s, single=single)
    ]
    if names:
        enough = ", so that one NUMA node has enough" if single else ""
        return f"Ask for less of {join_with_and(list(dict.fromkeys(names)))}{enough}"
    if record.verdict.reason == TOPOLOGY_AFFINITY:
        return "Ask for less, so that it fits on nodes that all its resources prefer"
    return "Ask for less, or for no whole CPUs, so that it shares CPUs with others"


def _other_policy(policy: str, best: TopologyHint) -> str:
    if policy not in tuple(TopologyPolicy) or not TopologyPolicy(policy).is_strict:
        return ""
    where = "" if best.affinity is None else f"; it would have looked on {nodes(best.affinity)} first"
    return f"The topology policy best-effort rejects no pod for alignment{where}"
