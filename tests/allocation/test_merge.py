from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation import intersections as meeting
from proxy.allocation import merge as merging
from proxy.allocation.distance import Distances
from proxy.allocation.merge import Decided, Merged, merge
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from tests.oracles.merge_parts import first_of, target_count

NODES = (0, 1, 3, 8, 70)
"""Node ids with gaps; 70 needs more than a machine word."""
D = Mask(NODES)
Lists = Sequence[Sequence[TopologyHint]]


def hint(nodes: Iterable[int] | None, preferred: bool = False) -> TopologyHint:
    return TopologyHint(None if nodes is None else Mask(nodes), preferred)


# The rule as kubelet's documents give it: every combination, compared with the best so far.


def fitter(one: Mask, other: Mask, table: Distances | None) -> Mask:
    """Return the better of two masks; of equal masks the first."""
    if len(one) != len(other):
        return min(one, other, key=len)
    if table is not None and table.total(one) != table.total(other):
        return min(one, other, key=table.total)
    return one if one.bits <= other.bits else other


def better(current: TopologyHint, candidate: TopologyHint, target: int, table: Distances | None) -> bool:
    """Whether the candidate takes the place of the current best."""
    if current.preferred != candidate.preferred:
        return candidate.preferred
    assert current.affinity is not None
    assert candidate.affinity is not None
    have, offer = len(current.affinity), len(candidate.affinity)
    finer = fitter(current.affinity, candidate.affinity, table) != current.affinity
    if current.preferred or have > target:
        return finer
    if have == target:
        return offer == target and finer
    if offer > target:
        return False
    return offer == target or offer > have or (offer == have and finer)


def combined(hints: Sequence[TopologyHint]) -> TopologyHint:
    masks = [h.affinity for h in hints if h.affinity is not None]
    common = D
    for mask in masks:
        common &= mask
    return hint(common, all(h.preferred for h in hints) and all(mask == masks[0] for mask in masks))


def narrowest(hints: Sequence[TopologyHint]) -> int:
    return min((len(h.affinity) for h in hints if h.affinity is not None), default=0)


def product(lists: Lists, table: Distances | None, without: Mask | None = None) -> TopologyHint | None:
    """Return the best combination, or the best one with a mask other than ``without``."""
    best: TopologyHint | None = None
    for hints in itertools.product(*lists):
        candidate = combined(hints)
        if not candidate.affinity or candidate.affinity == without:
            continue
        if best is None or better(best, candidate, max(map(narrowest, lists), default=0), table):
            best = candidate
    return best


masks = st.sets(st.sampled_from((*NODES, 9)), max_size=5).map(Mask)  # node 9 is not on the machine
hints = st.builds(TopologyHint, st.none() | masks, st.booleans())
few = st.lists(st.lists(hints, max_size=6), max_size=3)
full = [Mask.from_bits(b) for b in range(1, 1 << 9) if not b & 0b11110100]  # all masks of 0, 1, 3 and 8
preferring = st.integers(0, 4).map(lambda n: [TopologyHint(m, len(m) == n) for m in full])
inputs = few | st.lists(preferring | st.lists(hints, max_size=6), max_size=2)
tables = st.none() | st.lists(st.integers(10, 13), min_size=25, max_size=25).map(
    lambda ds: Distances({a: {b: ds[5 * i + j] for j, b in enumerate(NODES)} for i, a in enumerate(NODES)})
)


def check_against_product(lists: Lists, table: Distances | None) -> Merged:
    result = merge(lists, D, table)
    assert result.hint == (product(lists, table) or hint(D))
    assert result.target == target_count(lists) == max(map(narrowest, lists), default=0)
    if result.decided not in (Decided.NOTHING_COMMON, Decided.NO_PREFERENCE):
        expected = product(lists, table, without=result.hint.affinity)
        assert result.runner_up in (expected, None)
        assert (result.decided is Decided.ONLY) == (expected is None)
    return result


@given(inputs, tables)
def test_the_fold_equals_the_product(lists: Lists, table: Distances | None) -> None:
    result = check_against_product(lists, table)
    if result.decided not in (Decided.NOTHING_COMMON, Decided.NO_PREFERENCE):
        assert result.runner_up == product(lists, table, without=result.hint.affinity), (
            "with few nodes always found"
        )


@given(inputs, tables)
def test_the_way_for_many_nodes_equals_the_product(lists: Lists, table: Distances | None) -> None:
    with (
        mock.patch.object(merging, "DENSE_NODES", 0),
        mock.patch.multiple(meeting, DENSE_NODES=0, _PLAIN_PAIRS=0),
    ):
        result = merge(lists, D, table)
    assert result.hint == (product(lists, table) or hint(D))
    if result.runner_up is not None:
        assert result.runner_up == product(lists, table, without=result.hint.affinity)
    elif result.decided is Decided.ONLY:
        assert product(lists, table, without=result.hint.affinity) is None


@given(inputs, st.randoms(use_true_random=False))
def test_order_does_not_matter(lists: Lists, dice: Random) -> None:
    shuffled = [dice.sample(list(row), len(row)) for row in dice.sample(list(lists), len(lists))]
    assert merge(shuffled, D) == merge(lists, D)


RING = Distances({0: {0: 10, 1: 30, 2: 20}, 1: {0: 30, 1: 10, 2: 20}, 2: {0: 20, 1: 20, 2: 10}})


@pytest.mark.parametrize(
    ("lists", "table", "best", "runner_up", "decided"),
    [
        ([], None, hint([0, 1, 2], True), None, Decided.NO_PREFERENCE),
        ([[hint(None, True)]], None, hint([0, 1, 2], True), None, Decided.NO_PREFERENCE),
        ([[hint(None)]], None, hint([0, 1, 2]), None, Decided.ONLY),
        ([[hint(None, True)], []], None, hint([0, 1, 2]), None, Decided.NOTHING_COMMON),
        ([[hint([0], True)], [hint([1], True)]], None, hint([0, 1, 2]), None, Decided.NOTHING_COMMON),
        ([[hint([9], True)]], None, hint([0, 1, 2]), None, Decided.NOTHING_COMMON),
        ([[hint([1], True)]], None, hint([1], True), None, Decided.ONLY),
        ([[hint([1], True), hint([0])]], None, hint([1], True), hint([0]), Decided.PREFERRED),
        (
            [[hint([1], True)], [hint([1], True), hint([0, 1], True)]],
            None,
            hint([1], True),
            None,
            Decided.ONLY,
        ),
        (
            [[hint([0, 1], True), hint([2], True)]],
            None,
            hint([2], True),
            hint([0, 1], True),
            Decided.FEWER_NODES,
        ),
        ([[hint([0]), hint([1]), hint([0, 1])]], None, hint([0]), hint([1]), Decided.LOWER_IDS),
        (
            [[hint([0, 1])], [hint([0]), hint([0, 1, 2])]],
            None,
            hint([0, 1]),
            hint([0]),
            Decided.NEAREST_COUNT,
        ),
        (
            [[hint([0, 1], True), hint([0, 2], True)]],
            RING,
            hint([0, 2], True),
            hint([0, 1], True),
            Decided.CLOSER,
        ),
        (
            [[hint([0, 2], True), hint([1, 2], True)]],
            RING,
            hint([0, 2], True),
            hint([1, 2], True),
            Decided.LOWER_IDS,
        ),
    ],
)
def test_the_deciding_criterion_is_named(
    lists: Lists,
    table: Distances | None,
    best: TopologyHint,
    runner_up: TopologyHint | None,
    decided: Decided,
) -> None:
    result = merge(lists, Mask([0, 1, 2]), table)
    assert (result.hint, result.runner_up, result.decided) == (best, runner_up, decided)


def every(nodes: int, size: int, **preferred: bool) -> list[TopologyHint]:
    return [hint(c, **preferred) for c in itertools.combinations(range(nodes), size)]


def test_all_hints_of_eight_nodes_in_many_lists() -> None:
    full = [hint(c, n == 2) for n in range(1, 9) for c in itertools.combinations(range(8), n)]
    result = merge([full] * 12, Mask(range(8)))
    assert (result.hint, result.runner_up) == (hint([0, 1], True), hint([0, 2], True))
    clash = [hint(h.affinity, len(h.affinity or ()) == 3) for h in full]
    assert merge([full, clash] * 6, Mask(range(8))).hint == hint([0])


def test_merges_with_more_than_64_nodes() -> None:
    whole = Mask(range(100))
    pairs = every(100, 2, preferred=True)
    result = merge([pairs[-5:], [hint(None, True)], pairs], whole)
    assert (result.hint, result.runner_up) == (hint([96, 98], True), hint([97, 98], True))


def test_a_merge_without_preferred_hints_on_many_nodes() -> None:
    whole = Mask(range(100))
    result = merge([every(100, 2, preferred=True), every(100, 1, preferred=True)], whole)
    assert (result.hint, result.target) == (hint([0]), 2), (
        "no pair is in both lists, and they have only single nodes in common"
    )
    wide = [hint(whole - Mask([n])) for n in range(100)]
    assert merge([wide] * 2, whole).hint == hint(range(99))


def test_nodes_that_a_list_never_names_cost_nothing() -> None:
    whole = Mask(range(64))
    window = [hint(c, n == 3) for n in range(1, 9) for c in itertools.combinations(range(8), n)]
    wide = [hint([*(h.affinity or ()), *range(20, 60)]) for h in window]
    with mock.patch.object(meeting, "_divided", side_effect=AssertionError):
        result = merge([window, wide, wide], whole)
    assert (result.hint, result.runner_up, result.target) == (hint(range(8)), hint(range(7)), 41)
    assert merge([[hint([1, 2])], [hint([3])]], whole).decided is Decided.NOTHING_COMMON


def test_a_runner_up_is_not_worth_everything() -> None:
    whole = Mask(range(100))
    wide = [hint(whole - Mask(pair)) for pair in itertools.combinations(range(40), 2)]
    lists = [[*wide, hint([7], True)]] * 2
    with mock.patch.object(merging, "_RUNNER_UP_PAIRS", 100):
        result = merge(lists, whole)
    assert (result.hint, result.runner_up, result.decided) == (hint([7], True), None, Decided.PREFERRED)
    assert merge(lists, whole).runner_up is not None


def test_the_first_of_an_order() -> None:
    assert first_of([0b110, 0b1, 0], [0b1, 0b11, 0b111], 2, None, most=9) == [
        hint([0], True),
        hint([1, 2], True),
        hint([0, 1]),
        hint([0, 1, 2]),
    ]
    assert first_of([], [0b1, 0b11, 0b111, 0b1111], 2, None) == [hint([0, 1]), hint([0])]
    assert first_of([], [0], 0, None) == []
