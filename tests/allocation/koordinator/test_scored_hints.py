"""Hints of a pod, scores, and the policy that holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.koordinator.bind_request import PolicyConflictError
from proxy.allocation.koordinator.hints import ScoredHint, summed_up
from proxy.allocation.koordinator.node_shares import InsufficientError, divide
from proxy.allocation.koordinator.scored_hints import ALL_SETS, node_status, policy_of, score_of, scored_hints
from proxy.allocation.koordinator.scored_merge import NodeStatus, align
from proxy.model.idset import Mask
from proxy.model.koordinator import NumaPolicy, NumaStrategy
from proxy.model.options import TopologyPolicy

NONE, BEST, RESTRICTED, SINGLE = NumaPolicy


@pytest.mark.parametrize(
    ("pod", "node", "expected"),
    [
        (NONE, NONE, TopologyPolicy.NONE),
        (NONE, BEST, TopologyPolicy.BEST_EFFORT),
        (SINGLE, NONE, TopologyPolicy.SINGLE_NUMA_NODE),
        (RESTRICTED, RESTRICTED, TopologyPolicy.RESTRICTED),
    ],
)
def test_the_policy_of_a_pod_that_has_one(
    pod: NumaPolicy, node: NumaPolicy, expected: TopologyPolicy
) -> None:
    assert policy_of(pod, node) is expected


def test_pod_and_node_must_agree() -> None:
    with pytest.raises(PolicyConflictError, match="the pod requires Restricted and the node has BestEffort"):
        policy_of(RESTRICTED, BEST)


def test_nodes_with_a_pod_that_spans_nodes_are_shared() -> None:
    masks = [Mask([0]), Mask([1]), Mask([1, 2]), Mask([2]), Mask()]
    expected = {0: NodeStatus.SINGLE, 1: NodeStatus.SHARED, 2: NodeStatus.SHARED}
    assert node_status(masks) == node_status(masks[::-1]) == expected


def test_a_summary_leaves_out_nodes_that_are_not_enough() -> None:
    hints = [ScoredHint(Mask([0]), preferred=True), ScoredHint(Mask([1]), preferred=True, unsatisfied=True)]
    assert summed_up("cpu", [*hints, ScoredHint(Mask([0, 1]))]) == "cpu prefer [01] among [01 11]"


AVAILABLE = {0: {"cpu": 2000, "memory": 8}, 1: {"cpu": 4000, "memory": 0}, 2: {"cpu": 3000, "memory": 4}}


def fits(requests: dict[str, int]) -> list[Mask]:
    """Return the nodes on which a request fits, tried one by one."""
    tried: list[Mask] = []

    def fit(nodes: Mask) -> bool:
        tried.append(nodes)
        try:
            divide(requests, AVAILABLE, nodes)
        except InsufficientError:
            return False
        return True

    hints = scored_hints(requests, AVAILABLE, fit, TopologyPolicy.NONE)
    assert tried == [Mask(nodes) for nodes in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2])]
    return [hint.affinity for hint in hints["cpu"] if hint.affinity is not None]


def test_node_sets_that_fit_are_found() -> None:
    assert fits({"cpu": 3500}) == [Mask(n) for n in ([1], [0, 1], [0, 2], [1, 2], [0, 1, 2])]
    assert fits({"cpu": 3500, "memory": 5}) == [Mask(n) for n in ([0, 1], [0, 2], [0, 1, 2])]
    assert fits({"cpu": 9001}) == []


def test_hints_of_each_resource() -> None:
    wanted = {"cpu": 3500, "memory": 5, "gpu": 1}

    def fit(nodes: Mask) -> bool:
        return nodes in (Mask([0, 1]), Mask([0, 2]), Mask([0, 1, 2]))

    hints = scored_hints(wanted, AVAILABLE, fit, TopologyPolicy.BEST_EFFORT, lambda nodes: 10 * len(nodes))
    assert hints == {
        "cpu": [
            ScoredHint(Mask([0, 1]), preferred=True, score=20),
            ScoredHint(Mask([0, 2]), preferred=True, score=20),
            ScoredHint(Mask([0, 1, 2]), preferred=False, score=30),
        ],
        "memory": [ScoredHint(Mask([0, 2]), preferred=True, score=20)],
    }
    strict = scored_hints(wanted, AVAILABLE, fit, TopologyPolicy.RESTRICTED)
    assert all(hint.preferred for each in strict.values() for hint in each)
    assert align(TopologyPolicy.RESTRICTED, [strict], Mask(range(3))).hint.affinity == Mask([0, 2])
    refused = align(
        TopologyPolicy.RESTRICTED,
        [scored_hints(wanted, AVAILABLE, lambda _: False, TopologyPolicy.RESTRICTED)],
        Mask(range(3)),
    )
    assert refused.reasons == ("Unsatisfied NUMA cpu", "Unsatisfied NUMA memory")


def test_a_node_without_a_resource_is_in_no_hint_of_it() -> None:
    found = scored_hints(
        {"cpu": 1, "gpu": 1}, {0: {"cpu": 1, "gpu": 1}, 1: {"cpu": 1}}, lambda _: True, TopologyPolicy.NONE
    )
    assert [hint.affinity for hint in found["gpu"]] == [Mask([0])]
    assert len(found["cpu"]) == 3


def test_on_large_machines_the_search_ends_with_the_first_size_that_fits() -> None:
    many = {node: {"cpu": 1000} for node in range(ALL_SETS + 1)}
    tried: list[int] = []

    def fit(nodes: Mask) -> bool:
        tried.append(len(nodes))
        return len(nodes) >= 2

    hints = scored_hints({"cpu": 2000}, many, fit, TopologyPolicy.BEST_EFFORT)["cpu"]
    assert (tried.count(2), tried.count(3), tried[-1]) == (36, 0, 9)
    assert [hint.preferred for hint in hints] == [True] * 36 + [False]
    few = {node: many[node] for node in range(ALL_SETS)}
    assert len(scored_hints({"cpu": 2000}, few, lambda _: True, TopologyPolicy.BEST_EFFORT)["cpu"]) == 255


@pytest.mark.parametrize(("nodes", "pairs"), [(36, 36 * 35 // 2), (37, 37)])
def test_all_pairs_are_tried_on_up_to_36_nodes(nodes: int, pairs: int) -> None:
    tried: list[Mask] = []

    def fit(mask: Mask) -> bool:
        tried.append(mask)
        return len(mask) >= 2

    available = {node: {"cpu": 1000} for node in range(nodes)}
    scored_hints({"cpu": 2000}, available, fit, TopologyPolicy.BEST_EFFORT)
    assert len({mask for mask in tried if len(mask) == 2}) == pairs


MANY = {node: {"cpu": 14_000, "memory": 1 + node % 5} for node in range(36)}


@pytest.mark.parametrize(
    "policy", [TopologyPolicy.BEST_EFFORT, TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE]
)
@pytest.mark.parametrize(
    "requests",
    [
        *({"cpu": 1000 * cpus} for cpus in (1, 14, 15, 28, 29, 100, 252, 504, 505)),
        {"cpu": 60_000, "memory": 90},
        {"memory": 109},
        {"cpu": 1, "disk": 1},
        {"disk": 1},
        {},
    ],
)
def test_no_pod_takes_long_on_a_machine_with_36_nodes(
    policy: TopologyPolicy, requests: dict[str, int]
) -> None:
    tried: list[Mask] = []

    def fit(nodes: Mask) -> bool:
        tried.append(nodes)
        return all(sum(MANY[n].get(r, 0) for n in nodes) >= amount for r, amount in requests.items())

    found = scored_hints(requests, MANY, fit, policy)
    assert len(tried) <= 2500
    assert found.keys() == requests.keys() & {"cpu", "memory"}
    for hints in found.values():
        assert len({hint.affinity for hint in hints}) == len(hints)
        assert bool(hints) == fit(Mask(MANY))
        assert all(hint.affinity is not None and fit(hint.affinity) for hint in hints)


ROOMS = st.lists(st.integers(0, 9), min_size=ALL_SETS + 1, max_size=11)


@given(ROOMS, st.integers(1, 60), st.sampled_from([1, 10, 50]))
def test_few_nodes_are_found_however_few_sets_are_tried(rooms: list[int], amount: int, most: int) -> None:
    available = {3 * at: {"cpu": room} for at, room in enumerate(rooms)}

    def fit(nodes: Mask) -> bool:
        return sum(available[n]["cpu"] for n in nodes) >= amount

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxy.allocation.koordinator.scored_hints.MOST_SETS", most)
        hints = scored_hints({"cpu": amount}, available, fit, TopologyPolicy.BEST_EFFORT)["cpu"]
    sums = itertools.accumulate(sorted(rooms, reverse=True))
    fewest = next((count for count, total in enumerate(sums, 1) if total >= amount), None)
    without_empty = fewest is not None and rooms.count(0) == 0
    assert {len(h.affinity or ()) for h in hints if h.preferred} == ({fewest} if fewest else set())
    assert (Mask(available) in [h.affinity for h in hints]) == without_empty


def test_the_tightest_of_many_node_sets_are_tried() -> None:
    rooms = (9, 9, 9, 9, 9, 9, 5, 4, 3, 9, 9, 9)
    available = {node: {"cpu": room} for node, room in enumerate(rooms)}

    def fit(nodes: Mask) -> bool:
        return sum(rooms[n] for n in nodes) >= 22

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxy.allocation.koordinator.scored_hints.MOST_SETS", 12)
        hints = scored_hints(
            {"cpu": 22}, available, fit, TopologyPolicy.RESTRICTED, lambda ns: 99 - sum(rooms[n] for n in ns)
        )
    assert max(hint.score for hint in hints["cpu"]) == 99 - 22


@pytest.mark.parametrize(
    ("requests", "nodes", "strategy", "expected"),
    [
        ({"cpu": 1000}, [0], NumaStrategy.MOST_ALLOCATED, (50 + 0) // 2),
        ({"cpu": 1000, "memory": 3}, [0], NumaStrategy.MOST_ALLOCATED, (50 + 30) // 2),
        ({"cpu": 1000, "memory": 3}, [0], NumaStrategy.LEAST_ALLOCATED, (50 + 70) // 2),
        ({"cpu": 9000}, [0], NumaStrategy.MOST_ALLOCATED, 50),
        ({"cpu": 9000}, [0], NumaStrategy.DISTRIBUTE_EVENLY, 50),
        ({"cpu": 1000}, [0, 1], NumaStrategy.MOST_ALLOCATED, (33 + 0) // 2),
        ({"cpu": 1000}, [1], NumaStrategy.LEAST_ALLOCATED, 50),
        ({}, [1], NumaStrategy.LEAST_ALLOCATED, 100),
        ({"cpu": 1000}, [7], NumaStrategy.LEAST_ALLOCATED, 0),
    ],
)
def test_numa_nodes_are_scored_by_the_strategy(
    requests: dict[str, int], nodes: list[int], strategy: NumaStrategy, expected: int
) -> None:
    total = {0: {"cpu": 4000, "memory": 10}, 1: {"cpu": 2000}}
    left = {0: {"cpu": 3000, "memory": 10}, 1: {"cpu": 2000}}
    assert score_of(requests, left, total, Mask(nodes), strategy) == expected
