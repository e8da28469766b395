from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation import intersections as meeting
from proxy.allocation.intersections import bits_of, meet, meet_all

families = st.sets(st.integers(0, 31), max_size=32)
WAYS = {"plain": {"_PLAIN_PAIRS": 1 << 30}, "counted": {"_PLAIN_PAIRS": 0}, "divided": {"DENSE_NODES": 0}}
WAYS["divided"]["_PLAIN_PAIRS"] = 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gap", [0, 70])
@given(left=families, right=families)
def test_all_intersection_methods_agree(way: str, gap: int, left: set[int], right: set[int]) -> None:
    left, right = ({m & 7 | m >> 3 << 3 + gap for m in family} for family in (left, right))
    with mock.patch.multiple(meeting, **WAYS[way]):
        assert meet(left, right, 7 | 3 << 3 + gap) == {a & b for a in left for b in right}


def test_large_families_are_counted_and_narrow_ones_divided() -> None:
    large = set(range(1, 1 << 10))
    with mock.patch.object(meeting, "_divided", side_effect=AssertionError):
        assert meet(large, large, 1023) == large | {0}
    narrow = {1 << a | 1 << b for a in range(100) for b in range(100)}
    with mock.patch.object(meeting, "_counted", side_effect=AssertionError):
        assert meet(narrow, narrow, (1 << 100) - 1) == narrow | {0}


def test_wide_members_of_a_divided_family() -> None:
    whole = (1 << 80) - 1
    wide = {whole ^ 1 << n for n in range(80)}
    assert meet(wide, wide, whole) == {a & b for a in wide for b in wide}


@given(st.lists(families, max_size=4), st.integers(0, 3))
def test_intersections_below_the_floor_are_left_out(groups: list[set[int]], floor: int) -> None:
    everything = {31}
    for group in groups:
        everything = {a & b for a in everything for b in group}
    assert meet_all(groups, 31, floor) == {m for m in everything if m.bit_count() >= max(floor, 1)}


def test_a_floor_of_all_nodes() -> None:
    assert meet_all([{0b111, 0b11}], 0b111, 3) == meet_all([], 0b111, 3) == {0b111}
    assert meet_all([], 0b111, 4) == set()


def test_bits_outside_the_universe_do_not_count() -> None:
    assert meet_all([{0b1101, 0b1000}], 0b101) == {0b101}


def test_an_intersection_search_gives_up_at_its_limit() -> None:
    wide = {(1 << 60) - 1 ^ 1 << n for n in range(60)}
    assert meet_all([wide, wide], (1 << 60) - 1, most=100) is None
    found = meet_all([wide, wide], (1 << 60) - 1, most=2000)
    assert found is not None
    assert len(found) == 60 * 61 // 2


def test_bits_of_a_mask_are_returned_from_the_lowest() -> None:
    assert list(bits_of(0b10110)) == [2, 4, 16]
