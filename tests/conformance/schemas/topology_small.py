"""The single rules that a merge is made of."""

from __future__ import annotations

import math

from proxy.allocation.policies import POLICIES
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.hints import distances, hint, hints, plain
from tests.oracles.merge_parts import first_of, target_count


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    got = _KINDS[kind](case)
    expected = case.value("expected", (int, float, bool, str, list))
    if isinstance(got, float) and math.isclose(got, expected):
        got = expected
    return Outcome(expected, got)


def _target(case: Case) -> object:
    return target_count([hints(raw or ()) for raw in case.value("lists", list)])


def _compare(case: Case) -> object:
    both = {
        name: hint(raw) for name in ("current", "candidate") if (raw := case.optional(name, dict)) is not None
    }
    masks = {
        good: [h.affinity.bits for h in both.values() if h.affinity is not None and h.preferred == good]
        for good in (True, False)
    }
    target = case.value("best_non_preferred_affinity_count", int)
    winners = first_of(masks[True], masks[False], target, None, most=1)
    return next((name for name, value in both.items() if [value] == winners), "current")


def _closest(case: Case) -> object:
    table = case.optional("distances", (dict, list))
    masks = {name: Mask(case.value(name, list)) for name in ("current", "candidate")}
    (best,) = first_of(
        [mask.bits for mask in masks.values()], (), 0, None if table is None else distances(table), most=1
    )
    return next(name for name, mask in masks.items() if mask == best.affinity)


def _filter(case: Case) -> object:
    policy = POLICIES[TopologyPolicy.SINGLE_NUMA_NODE]
    return [[plain(h) for h in hints(raw or ()) if policy.usable(h)] for raw in case.value("lists", list)]


def _admits(case: Case) -> object:
    return POLICIES[TopologyPolicy(case.value("policy", str))].admits(hint(case.value("hint", dict)))


def _average(case: Case) -> object:
    mask = Mask(case.value("mask", list))
    return distances(case.value("distances", (dict, list))).total(mask) / len(mask) ** 2 if mask else 0.0


_KINDS = {
    "max_of_min_affinity_counts": _target,
    "compare": _compare,
    "closest": _closest,
    "filter_single_numa": _filter,
    "can_admit": _admits,
    "average_distance": _average,
}
