"""Families of hints against the plain definition, and lists that represent them in a merge."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import proxy.allocation.demand as demand_room
import proxy.allocation.hint_family as family_room
import proxy.allocation.hint_sampling as listing_room
from proxy.allocation.demand import Demand, best_mask, covers, least_node_count, masks, sums, to_bits
from proxy.allocation.distance import Distances
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.hint_sampling import listable
from proxy.allocation.merge import merge
from proxy.allocation.policies import decide
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy

NODES = (0, 1, 3, 4, 7)
EVERY = Mask(NODES)

LOTS = st.lists(
    st.tuples(st.sets(st.sampled_from(NODES), min_size=1, max_size=2).map(to_bits), st.integers(0, 4)),
    max_size=6,
)
DEMANDS = st.lists(st.builds(Demand, st.integers(0, 9), LOTS.map(tuple)), min_size=1, max_size=2).map(tuple)


def plain_masks(nodes: tuple[int, ...]) -> list[int]:
    sizes = range(1, len(nodes) + 1)
    return [to_bits(taken) for size in sizes for taken in itertools.combinations(nodes, size)]


@st.composite
def families(draw: st.DrawFn) -> Family:
    demands, floor = draw(DEMANDS), draw(st.integers(1, 2))
    nodes = tuple(sorted(draw(st.sets(st.sampled_from(NODES), max_size=5))))
    opened = {b for b in plain_masks(nodes) if b.bit_count() >= floor and covers(demands, b)}
    others = [b for b in plain_masks(NODES) if b not in opened]
    explicit = tuple(draw(st.sets(st.sampled_from(others), max_size=3))) if others else ()
    sizes = [b.bit_count() for b in opened.union(explicit)]
    # A mask is preferred if no smaller mask is enough: never more nodes than the narrowest.
    return Family(explicit, nodes, floor, demands, draw(st.integers(1, min(sizes, default=1))))


def plain(family: Family) -> list[TopologyHint]:
    found = [
        bits
        for bits in plain_masks(NODES)
        if bits in family.explicit
        or (
            not bits & ~to_bits(family.nodes)
            and bits.bit_count() >= family.floor
            and all(sum(n for at, n in d.amounts if at & bits) >= d.required for d in family.demands)
        )
    ]
    return [TopologyHint(Mask.from_bits(bits), bits.bit_count() == family.size) for bits in found]


@given(DEMANDS, st.sets(st.sampled_from(NODES)).map(to_bits), st.integers(1, 5))
def test_fewest_nodes_are_found(demands: tuple[Demand, ...], base: int, floor: int) -> None:
    able = [b for b in [0, *plain_masks(NODES)] if covers(demands, b | base)]
    assert least_node_count(NODES, demands, base) == min(
        (  # in addition to the base
            (b & ~base).bit_count() for b in able
        ),
        default=None,
    )
    around = [
        b for b in plain_masks(NODES) if not base & ~b and b.bit_count() >= floor and covers(demands, b)
    ]
    expected = min(around, key=lambda b: (b.bit_count(), b), default=None)
    assert best_mask(NODES, demands, base, floor) == expected


@given(DEMANDS)
def test_sums_are_those_of_each_mask(demands: tuple[Demand, ...]) -> None:
    nodes = NODES[1:]
    for each in demands:
        table = sums(nodes, each)
        assert {b: table[b] for b in plain_masks(nodes)} == {b: each.amount_on(b) for b in plain_masks(nodes)}


def test_masks_come_by_size_and_then_by_nodes() -> None:
    assert [str(Mask.from_bits(b)) for b in masks((0, 2, 3))] == ["0", "2", "3", "0,2", "0,3", "2-3", "0,2-3"]


@given(families(), st.booleans())
def test_a_family_yields_its_hints_in_order(family: Family, few: bool) -> None:
    expected = plain(family)
    with pytest.MonkeyPatch.context() as patch:
        if not few:
            patch.setattr(family_room, "MOST_LISTED_NODES", 0)
        assert list(iter(family)) == expected
        assert bool(family) == bool(expected)
        assert list(family[1:3]) == expected[1:3]
        assert (family.listed() == tuple(expected)) if few or not expected else (family.listed() is family)
    held = {h.affinity.bits for h in expected if h.affinity}
    assert {b for b in plain_masks(NODES) if family.holds(b)} == held
    assert {n for b in held for n in Mask.from_bits(b)} <= set(family.possible_nodes)


@given(families(), st.sets(st.sampled_from(NODES), max_size=2))
def test_the_best_hint_around_some_nodes(family: Family, around: set[int]) -> None:
    inside = [h for h in plain(family) if h.affinity and Mask(around) <= h.affinity]
    expected = min(
        inside,
        key=lambda h: (not h.preferred, h.affinity and (len(h.affinity), h.affinity.bits)),
        default=None,
    )
    assert family.best(Mask(around)) == expected
    if not around:
        assert family.best() == expected


def test_a_family_too_large_to_count() -> None:
    family = Family((), tuple(range(40)), 1, (Demand(2, tuple((1 << i, 1) for i in range(40))),), 2)
    with pytest.raises(OverflowError, match="40 nodes"):
        len(family)
    assert str(family[0].affinity) == "0-1", "the first of 2^40 hints is found at once"
    with pytest.raises(IndexError):
        Family((), (), 1, (), 0)[0]


TABLES = st.none() | st.lists(st.integers(10, 13), min_size=25, max_size=25).map(
    lambda ds: Distances({a: {b: ds[5 * i + j] for j, b in enumerate(NODES)} for i, a in enumerate(NODES)})
)


@given(
    st.lists(families(), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.sets(st.sampled_from(NODES), min_size=1).map(to_bits), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    TABLES,
)
def test_through_a_window_a_merge_sees_the_same(
    members: list[Family], window: list[tuple[int, bool]], table: Distances | None
) -> None:
    seen = [hint(bits, preferred) for bits, preferred in window]
    whole = {"window": seen, **{f"f{i}": plain(f) for i, f in enumerate(members)}}
    short = {"window": seen, **{f"f{i}": f if f else () for i, f in enumerate(members)}}
    assert _merged(whole, table) == _merged(listable([short])[0], table)


@given(st.lists(families(), min_size=1, max_size=3), TABLES)
def test_without_a_window_a_preferred_result_is_the_same(
    members: list[Family], table: Distances | None
) -> None:
    assume(all(members))
    whole = _merged({f"f{i}": plain(f) for i, f in enumerate(members)}, table)
    answer = {f"f{i}": f for i, f in enumerate(members)}
    result = _merged(listable([answer], closest=table is not None)[0], table)
    assert result.preferred == whole.preferred
    if whole.preferred or len(members) == 1:
        assert result == whole
    elif all(any(h.affinity == result.affinity for h in plain(f)) for f in members):
        return  # all agree on it
    else:
        shared = set.intersection(*({h.affinity for h in plain(f)} for f in members))
        assert not shared, "a mask that satisfies all members is taken if there is one"


def test_the_closest_of_many_nodes() -> None:
    nodes = tuple(range(64))
    pair = Family((), nodes, 1, (Demand(2, tuple((1 << i, 1) for i in nodes)),), 2)
    table = Distances({a: {b: 10 + (0 if {a, b} == {61, 63} else 20) for b in nodes} for a in nodes})
    answer = {"cpu": pair, "memory": pair}
    decided = decide(TopologyPolicy.RESTRICTED, [answer], Mask(nodes), table)
    assert decided.hint == hint(1 << 61 | 1 << 63, preferred=True)
    assert decide(TopologyPolicy.RESTRICTED, [answer], Mask(nodes)).hint == hint(0b11, preferred=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing_room, "TRIES", 5)
        assert decide(TopologyPolicy.RESTRICTED, [answer], Mask(nodes), table).hint.preferred


def _merged(answer: dict[str, object], table: Distances | None = None) -> TopologyHint:
    impossible = (TopologyHint(None, preferred=False),)
    return merge([hints or impossible for hints in answer.values()], EVERY, table).hint  # type: ignore[misc]


def test_other_answers_pass_unchanged() -> None:
    answers = [None, {}, {"a": None, "b": ()}, {"c": (TopologyHint(None, preferred=True),)}]
    assert listable(answers) == answers


def test_a_list_that_does_not_care_is_not_a_window() -> None:
    family = Family((), tuple(range(40)), 1, (Demand(2, tuple((1 << i, 1) for i in range(40))),), 2)
    result = listable([{"m": family, "o": (TopologyHint(None, preferred=True),)}])[0]
    assert result is not None
    assert result["m"] == (hint(0b11, preferred=True),)


def test_the_limit_is_one_number() -> None:
    assert demand_room.MOST_LISTED_NODES is family_room.MOST_LISTED_NODES


def test_a_list_with_an_open_hint_is_not_a_window() -> None:
    family = Family((), tuple(range(40)), 1, (Demand(3, tuple((1 << i, 1) for i in range(40))),), 3)
    mixed = (hint(0b10, preferred=True), TopologyHint(None, preferred=False))
    result = listable([{"m": family, "o": mixed}])[0]
    assert result is not None
    assert result["m"] == (hint(0b111, preferred=True),)
    assert listable([{"m": family, "o": mixed[:1]}])[0] != result, "without it there is one"
