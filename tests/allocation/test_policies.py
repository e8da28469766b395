from __future__ import annotations

import pytest

from proxy.allocation.demand import Demand
from proxy.allocation.distance import Distances
from proxy.allocation.hint_family import Family
from proxy.allocation.hint_lists import hint_lists
from proxy.allocation.merge import Decided
from proxy.allocation.policies import POLICIES, decide
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy
from proxy.model.workload import Verdict
from tests.oracles.policy_parts import unpreferred

TWO = Mask([0, 1])
REFUSED = Verdict(9, "TopologyAffinityError", "Resources cannot be allocated with Topology locality")


def hint(nodes: list[int] | None, preferred: bool = True) -> TopologyHint:
    return TopologyHint(None if nodes is None else Mask(nodes), preferred)


ONE_NODE: Hints = {"cpu": [hint([0]), hint([1]), hint([0, 1], False)]}
BOTH_NODES: Hints = {"gpu": [hint([0, 1])]}
IMPOSSIBLE: Hints = {"nic": []}


def test_the_three_kinds_of_empty_hints() -> None:
    lists = hint_lists([None, {}, {"a": None, "b": [], "c": [hint([0])]}])
    assert [(entry.resource, list(entry.hints), entry.unsatisfiable) for entry in lists] == [
        ("", [hint(None)], False),
        ("", [hint(None)], False),
        ("a", [hint(None)], False),
        ("b", [hint(None, False)], True),
        ("c", [hint([0])], False),
    ]


@pytest.mark.parametrize(
    ("providers", "policy", "expected", "verdict"),
    [
        ([ONE_NODE], TopologyPolicy.NONE, hint(None, False), Verdict()),
        ([ONE_NODE], TopologyPolicy.BEST_EFFORT, hint([0]), Verdict()),
        ([ONE_NODE], TopologyPolicy.RESTRICTED, hint([0]), Verdict()),
        ([ONE_NODE], TopologyPolicy.SINGLE_NUMA_NODE, hint([0]), Verdict()),
        ([BOTH_NODES], TopologyPolicy.RESTRICTED, hint([0, 1]), Verdict()),
        ([BOTH_NODES], TopologyPolicy.SINGLE_NUMA_NODE, hint(None, False), REFUSED),
        ([ONE_NODE, BOTH_NODES], TopologyPolicy.BEST_EFFORT, hint([0, 1], False), Verdict()),
        ([ONE_NODE, BOTH_NODES], TopologyPolicy.RESTRICTED, hint([0, 1], False), REFUSED),
        ([ONE_NODE, IMPOSSIBLE], TopologyPolicy.BEST_EFFORT, hint([0], False), Verdict()),
        ([ONE_NODE, IMPOSSIBLE], TopologyPolicy.RESTRICTED, hint([0], False), REFUSED),
        ([ONE_NODE, IMPOSSIBLE], TopologyPolicy.SINGLE_NUMA_NODE, hint(None, False), REFUSED),
        ([IMPOSSIBLE], TopologyPolicy.RESTRICTED, hint([0, 1], False), REFUSED),
        ([None, {}], TopologyPolicy.RESTRICTED, hint([0, 1]), Verdict()),
        ([None, {}], TopologyPolicy.SINGLE_NUMA_NODE, hint(None), Verdict()),
        ([], TopologyPolicy.SINGLE_NUMA_NODE, hint(None), Verdict()),
    ],
)
def test_a_policy_decides_the_hint_and_whether_it_admits(
    providers: list[Hints], policy: TopologyPolicy, expected: TopologyHint, verdict: Verdict
) -> None:
    decision = decide(policy, providers, TWO)
    assert (decision.hint, decision.verdict) == (expected, verdict)
    assert POLICIES[policy].admits(decision.hint) == verdict.admitted


def test_one_node_under_single_numa_node() -> None:
    decision = decide(TopologyPolicy.SINGLE_NUMA_NODE, [{"cpu": [hint([0])]}], Mask([0]))
    assert decision.hint == hint(None), "a mask of all nodes is not a preference"
    assert decision.merged is not None
    assert decision.merged.hint == hint([0])


def test_single_numa_keeps_preferred_hints_of_one_node() -> None:
    wide, poor = hint([0, 1]), hint([0], False)
    hints = [hint(None), hint([1]), wide, poor, hint(None, False), hint([])]
    policy = POLICIES[TopologyPolicy.SINGLE_NUMA_NODE]
    assert [each for each in hints if policy.usable(each)] == [hint(None), hint([1])]


def test_every_policy_has_rules_and_the_strict_ones_refuse() -> None:
    assert list(POLICIES) == list(TopologyPolicy)
    assert [name for name in TopologyPolicy if name.is_strict] == [
        TopologyPolicy.RESTRICTED,
        TopologyPolicy.SINGLE_NUMA_NODE,
    ]
    for name, policy in POLICIES.items():
        assert policy.admits(hint([0]))
        assert policy.admits(hint([0], False)) is not name.is_strict


def test_distances_count_except_on_a_single_node() -> None:
    near = Distances({a: {b: 10 + 10 * abs(a - b) for b in range(4)} for a in range(4)})
    pairs: Hints = {"gpu": [hint([0, 2]), hint([2, 3])]}
    assert decide(TopologyPolicy.RESTRICTED, [pairs], Mask(range(4)), near).hint == hint([2, 3])
    assert decide(TopologyPolicy.RESTRICTED, [pairs], Mask(range(4))).hint == hint([0, 2])
    uneven = Distances({0: {0: 20}, 1: {1: 10}})
    assert decide(TopologyPolicy.BEST_EFFORT, [ONE_NODE], TWO, uneven).hint == hint([1])
    assert decide(TopologyPolicy.SINGLE_NUMA_NODE, [ONE_NODE], TWO, uneven).hint == hint([0])


def test_hints_that_are_too_many_are_listed_by_the_decision() -> None:
    nodes = tuple(range(40))
    memory = Family((), nodes, 2, (Demand(3, tuple((1 << i, 1) for i in nodes)),), 3)
    few: Hints = {"gpu": [hint([7, 20, 30]), hint([1], False)]}
    decision = decide(TopologyPolicy.RESTRICTED, [{"memory": memory}, few], Mask(nodes))
    assert decision.hint == hint([7, 20, 30])
    assert [entry.family for entry in decision.lists] == [memory, None]
    assert all(isinstance(entry.hints, (tuple, list)) for entry in decision.lists)
    alone = decide(TopologyPolicy.RESTRICTED, [{"memory": memory}], Mask(nodes))
    assert alone.hint == hint([0, 1, 2])
    single = decide(TopologyPolicy.SINGLE_NUMA_NODE, [{"memory": memory}, few], Mask(nodes))
    assert (single.verdict, unpreferred(single)) == (REFUSED, ("memory", "gpu"))


def test_conflicting_resources_are_named() -> None:
    providers = [ONE_NODE, BOTH_NODES, IMPOSSIBLE, None]
    restricted = decide(TopologyPolicy.RESTRICTED, providers, TWO)
    assert (restricted.unsatisfiable, unpreferred(restricted)) == (("nic",), ("nic",))
    single = decide(TopologyPolicy.SINGLE_NUMA_NODE, providers, TWO)
    assert unpreferred(single) == ("gpu", "nic")
    assert single.merged is not None
    assert single.merged.decided is Decided.NOTHING_COMMON
    assert decide(TopologyPolicy.NONE, providers, TWO).merged is None
