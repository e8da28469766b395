"""The parts of a search for an even split: levelling, choices in list order, rounds, and when it ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.even_split import (
    KUBELET_NODES,
    LIMIT,
    Split,
    _SplitSearch,
    first_choices,
    hand_out,
    split,
)


@given(st.lists(st.integers(4, 30), min_size=2, max_size=7), st.integers(1, 3), st.data())
def test_levelling_takes_from_the_fullest(counts: list[int], group: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(2, len(counts)))
    n = group * data.draw(st.integers(k, max(k, sum(sorted(counts)[-k:]) // group // 2)))
    search = _SplitSearch(counts, n, group, k)
    members = tuple(data.draw(st.permutations(range(len(counts))))[:k])
    found, squares = search.level(members)
    left = [count - found.per_node * (i in members) for i, count in enumerate(counts)]
    for i in found.extra:
        assert left[i] == max(left[j] for j in members), "each CPU is taken from the fullest node"
        assert i == min(j for j in members if left[j] == left[i]), "the first of equally full nodes"
        left[i] -= group
    assert sum(counts) - sum(left) == n
    assert squares == sum(count * count for count in left)


@given(st.lists(st.integers(1, 3), max_size=7), st.integers(0, 4))
def test_choices_that_stand_for_others(counts: list[int], k: int) -> None:
    """A choice is left out if it skips a node just before an equal one that it takes."""
    expected = [
        taken
        for taken in itertools.combinations(range(len(counts)), k)
        if not any(i and counts[i] == counts[i - 1] and i - 1 not in taken for i in taken)
    ]
    assert list(first_choices(counts, k)) == expected


def test_the_rest_is_taken_in_rounds_of_one_group() -> None:
    left = {3: 5, 1: 2, 2: 9}
    assert hand_out(left, (2, 1, 3), 10, 2) == [2, 1, 3, 2, 3]
    assert left == {3: 1, 1: 0, 2: 5}
    assert hand_out({0: 9}, (0,), 3, 3) == [0]
    assert hand_out({0: 9}, (0,), 0, 3) == []


@pytest.mark.parametrize(
    ("counts", "n", "group", "k", "found", "scored"),
    [
        ([9, 9, 9, 9, 5], 10, 2, 3, Split(2, (0, 1, 2), (0, 1)), 2),
        ([9, 9, 9], 7, 1, 3, Split(2, (0, 1, 2), (0,)), 2),
        ([7, 12, 8], 11, 1, 3, Split(3, (0, 1, 2), (1, 1)), 7),
        ([5, 4, 9, 9], 9, 1, 2, Split(4, (2, 3), (2,)), 10),
        ([3, 3], 6, 2, 2, None, 0),
        ([3, 9], 8, 1, 2, None, 0),
    ],
)
def test_a_search_ends_when_no_split_can_be_more_even(
    counts: list[int], n: int, group: int, k: int, found: Split | None, scored: int
) -> None:
    search = _SplitSearch(counts, n, group, k)
    assert search.best() == found
    assert search.scored == scored


def test_only_machines_beyond_kubelets_limit_have_one() -> None:
    unlike = [23, 12, 26, 37, 32, 37, 17, 24]
    assert len(unlike) == KUBELET_NODES
    patient = _SplitSearch(unlike, 78, 2, 6)
    assert patient.best() is not None
    assert patient.scored > LIMIT
    hurried = _SplitSearch([*unlike, 29], 78, 2, 6)
    assert hurried.best() is not None
    assert hurried.scored == LIMIT + 1


@pytest.mark.parametrize(
    ("counts", "n", "group", "fewest", "expected"),
    [
        ([5000, 8, 8, 8], 8, 1, 2, Split(4, (0, 1))),
        (
            [3, 5000, 5, 6],
            4,
            1,
            2,
            Split(2, (0, 1)),
        ),  # alike to three decimals: the first in list order
        ([4, 50, 51, 52], 8, 1, 2, Split(4, (2, 3))),
        ([1, 800, 2, 3], 2, 1, 2, Split(1, (1, 2))),  # one CPU fewer is as even, two fewer are not
        ([8, 8], 8, 1, 0, Split(8, (0,))),
        ([8, 8], 8, 1, 5, None),
        ([2, 2, 2], 6, 2, 1, Split(2, (0, 1, 2))),
        ([2, 2, 2], 8, 2, 1, None),
        ([1, 1], 1, 1, 1, Split(1, (0,))),
    ],
)
def test_as_few_nodes_as_permitted_give_equal_parts(
    counts: list[int], n: int, group: int, fewest: int, expected: Split | None
) -> None:
    assert split(counts, n, group, fewest) == expected
