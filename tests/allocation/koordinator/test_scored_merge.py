"""The merge of scored hints, against trying every combination."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.koordinator.hints import Answer, ScoredHint, digits, single_numa
from proxy.allocation.koordinator.scored_merge import NodeStatus, Tenancy, align, allowed, merge
from proxy.model.idset import Mask
from proxy.model.koordinator import NumaExclusive
from proxy.model.options import TopologyPolicy


def every_combination(lists: Sequence[Sequence[ScoredHint]], nodes: Mask, tenancy: Tenancy) -> ScoredHint:
    found = [ScoredHint(nodes)]
    for combination in itertools.product(*lists):
        masks = [hint.affinity for hint in combination if hint.affinity is not None]
        met = nodes
        for mask in masks:
            met &= mask
        if met:
            preferred = all(hint.preferred for hint in combination) and len(set(masks)) <= 1
            narrower = any(len(mask) != len(met) for mask in masks)
            found.append(
                ScoredHint(
                    met,
                    preferred and allowed(met, tenancy),
                    narrower or any(hint.unsatisfied for hint in combination),
                    sum(hint.score for hint in combination if hint.affinity == met),
                )
            )
    return min(
        found, key=lambda h: (not h.preferred, len(h.affinity or ()), -h.score, bits(h), h.unsatisfied)
    )


def bits(hint: ScoredHint) -> int:
    return hint.affinity.bits if hint.affinity is not None else 0


hints = st.builds(
    ScoredHint,
    st.one_of(st.none(), st.integers(1, 15).map(Mask.from_bits)),
    st.booleans(),
    st.sampled_from((False, False, False, True)),
    st.sampled_from((0, 0, 1, 2, 5)),
).map(lambda hint: hint if hint.affinity else ScoredHint(None, hint.preferred, hint.unsatisfied))
many = st.lists(st.lists(hints, max_size=4), max_size=3)
tenancies = st.builds(
    Tenancy, st.sampled_from(NumaExclusive), st.dictionaries(st.integers(0, 3), st.sampled_from(NodeStatus))
)


@given(many, st.integers(1, 4).map(lambda n: Mask(range(n))), tenancies)
def test_the_best_of_all_combinations(lists: list[list[ScoredHint]], nodes: Mask, tenancy: Tenancy) -> None:
    expected = every_combination(lists, nodes, tenancy)
    assert merge(lists, nodes, tenancy) == expected
    assert merge(lists[::-1], nodes, tenancy) == expected, "the order does not matter"


@given(many, tenancies, st.sampled_from(TopologyPolicy))
def test_a_merged_hint_satisfies_its_policy(
    lists: list[list[ScoredHint]], tenancy: Tenancy, policy: TopologyPolicy
) -> None:
    nodes = Mask(range(3))
    done = align(policy, [{f"r{i}": each} for i, each in enumerate(lists)], nodes, tenancy)
    assert done.admitted == (
        done.hint.preferred or policy in (TopologyPolicy.NONE, TopologyPolicy.BEST_EFFORT)
    )
    assert bool(done.reasons) == (not done.admitted)
    if policy is TopologyPolicy.SINGLE_NUMA_NODE and done.hint.affinity is not None:
        assert len(done.hint.affinity) == 1
    if policy is TopologyPolicy.BEST_EFFORT:
        assert not done.hint.unsatisfied
        assert done.hint.affinity


def test_tenancy_decides_which_pods_may_share_a_node() -> None:
    status = {0: NodeStatus.SHARED, 1: NodeStatus.SINGLE}
    required = Tenancy(NumaExclusive.REQUIRED, status)
    results = {nodes: allowed(Mask.parse(nodes), required) for nodes in ("0", "1", "2", "0-1", "0,2", "1-2")}
    assert results == {"0": False, "1": True, "2": True, "0-1": False, "0,2": True, "1-2": False}
    assert not allowed(None, required)
    assert allowed(Mask([0]), Tenancy(NumaExclusive.PREFERRED, status))
    assert allowed(Mask([0]), Tenancy(NumaExclusive.REQUIRED))


def test_a_hint_that_is_not_enough_counts_with_its_score() -> None:
    short, anywhere = ScoredHint(Mask([0]), unsatisfied=True, score=2), ScoredHint(None)
    named = [ScoredHint(Mask([0]))]
    assert merge([[short, anywhere], named], Mask([0, 1])) == short
    assert merge([[ScoredHint(Mask([0]), unsatisfied=True), anywhere], named], Mask([0, 1])) == named[0]


def test_one_node_or_any() -> None:
    some = [ScoredHint(Mask([1]), True), ScoredHint(Mask([0, 1]), True), ScoredHint(None, True)]
    assert single_numa([[*some, ScoredHint(Mask([0])), ScoredHint(None)]]) == [[some[0], some[2]]]


def test_no_preference_is_not_impossible() -> None:
    nodes = Mask([0, 1])
    nothing: list[Answer] = [None, {}, {"r": None}]
    for answer in nothing:
        done = align(TopologyPolicy.RESTRICTED, [answer, {"s": [ScoredHint(Mask([1]), True)]}], nodes)
        assert done.hint == ScoredHint(Mask([1]), True)
        alone = align(TopologyPolicy.SINGLE_NUMA_NODE, [answer, {"s": [ScoredHint(Mask([1]), True)]}], nodes)
        assert (alone.hint, alone.reasons) == (ScoredHint(Mask([1]), True), ())
    assert align(TopologyPolicy.RESTRICTED, [{"r": []}], nodes).reasons == ("Unsatisfied NUMA r",)
    assert align(TopologyPolicy.BEST_EFFORT, [{"r": []}], nodes).hint == ScoredHint(nodes)


def test_many_hints_of_many_nodes_are_merged_quickly() -> None:
    """Six resources with all sets of ten nodes: 10**18 combinations."""
    every = [
        ScoredHint(Mask.from_bits(mask), mask.bit_count() == 2, score=mask % 7) for mask in range(1, 1024)
    ]
    wide = [hint for hint in every if len(hint.affinity or ()) > 3]
    nodes = Mask(range(10))
    started = time.process_time()
    assert len(merge([every] * 6, nodes).affinity or ()) == 2
    assert merge([every, wide, wide, wide, wide, wide], nodes).affinity is not None
    assert time.process_time() - started < 20


def test_a_mask_is_written_as_binary_digits_of_at_least_two_places() -> None:
    results = {text: digits(Mask(nodes)) for text, nodes in {"0": [0], "1": [1], "3": [3], "4": [4]}.items()}
    assert results == {"0": "01", "1": "10", "3": "1000", "4": "10000"}
    assert [digits(Mask(nodes)) for nodes in ([0, 4], [2, 3], [64])] == ["010001", "1100", "1" + "0" * 64]
    assert digits(None) == "<nil>"


def test_a_preferred_hint_whose_nodes_may_not_be_shared_is_not_chosen() -> None:
    lists = [[ScoredHint(Mask([node]), preferred=True) for node in (0, 1)]]
    required = Tenancy(NumaExclusive.REQUIRED, {0: NodeStatus.SHARED})
    nodes = Mask([0, 1])
    assert merge(lists, nodes) == lists[0][0]
    assert merge(lists, nodes, required) == lists[0][1]
