"""Families at their limits: the number of listed nodes, tried masks, and masks that represent others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from proxy.allocation import hint_sampling as listing_room
from proxy.allocation.demand import (
    MOST_LISTED_NODES,
    Demand,
    _Pool,
    best_mask,
    lowest_masks,
    masks,
    masks_meeting,
    masks_of_size,
    to_bits,
)
from proxy.allocation.distance import Distances
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.hint_sampling import TRIES, listable, lists_of
from proxy.allocation.merge import merge
from proxy.allocation.policies import decide
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy


def amounts(want: int, *each: int) -> Demand:
    return Demand(want, tuple((1 << i, n) for i, n in enumerate(each)))


def free(nodes: int, want: int, floor: int = 1, explicit: tuple[int, ...] = ()) -> Family:
    """Any ``want`` of some nodes."""
    return Family(explicit, tuple(range(nodes)), floor, (amounts(want, *[1] * nodes),), want)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the evaluations of masks."""
    counted: list[int] = []
    amount_on = Demand.amount_on

    def count(demand: Demand, bits: int) -> int:
        counted.append(bits)
        return amount_on(demand, bits)

    with mock.patch.object(Demand, "amount_on", count):
        yield counted


def test_twelve_nodes_are_listed_and_thirteen_are_not() -> None:
    assert MOST_LISTED_NODES == 12
    assert len(free(12, 2).listed()) == 2**12 - 1 - 12
    assert isinstance(free(12, 2).listed(), tuple)
    assert len(free(12, 2)) == 2**12 - 1 - 12
    many = free(13, 2)
    assert many.listed() is many
    far = free(11, 2, explicit=(1 << 40, 1 << 41))
    assert far.listed() is far, "explicit masks count too"
    assert Family((), tuple(range(40)), 1, (amounts(1),), 1).listed() == ()
    assert list(masks(tuple(range(13)))) == list(
        itertools.chain.from_iterable(masks_of_size(range(13), size) for size in range(1, 14))
    )


def test_infeasible_families_are_not_enumerated() -> None:
    demands = [amounts(12, *[1, 0] * 12), amounts(66, *range(12), *[0] * 12)]
    with counting() as counted:
        assert list(masks_meeting(range(24), 12, demands[:1])) == [to_bits(range(0, 24, 2))]
        assert len(counted) <= 110
        counted.clear()
        assert list(lowest_masks(range(24), 12, demands[:1], 1000)) == [to_bits(range(0, 24, 2))]
        assert len(counted) <= 95
        counted.clear()
        assert list(masks_meeting(range(24), 11, demands[1:])) == [to_bits(range(1, 12))]
        assert list(lowest_masks(range(24), 11, demands[1:], 1000)) == [to_bits(range(1, 12))]
        assert len(counted) <= 190
        counted.clear()
        assert list(masks_meeting(range(24), 12, demands)) == []
        assert len(counted) <= 30


def test_the_fittest_is_found_node_by_node() -> None:
    with counting() as counted:
        assert best_mask(range(64), [amounts(40, *[1] * 64)], floor=45) == (1 << 45) - 1
        assert best_mask(range(64), [amounts(4, *[1] * 60, 4, 0, 0, 0)]) == 1 << 60
        assert best_mask(range(64), [amounts(4, *[1] * 64)], 1 << 63, 6) == 0b11111 | 1 << 63
        assert len(counted) <= 12


def test_only_nodes_that_share_an_amount_are_kept_apart() -> None:
    shared = Demand(9, ((1 << 0, 1), (1 << 2, 5), (1 << 3, 7), (0b110000, 3), (0b10010, 2), (1 << 9, 4)))
    pool = _Pool(range(7), [shared, amounts(2, 2), amounts(3, 2, 0, 1, 1)], 1)
    assert pool.needs == [8, 1], "node 0 meets the second demand"
    assert pool.amounts == {0: (0, 0), 1: (2, 0), 2: (5, 1), 3: (7, 1), 4: (5, 0), 5: (3, 0), 6: (0, 0)}
    assert pool.apart == {1, 4, 5}
    assert _Pool(range(7), [shared], 1 << 1).apart == {4, 5}, "what the base has is nowhere else"


def test_a_floor_is_kept_if_the_lower_nodes_are_enough_before_it_is_reached() -> None:
    demand = amounts(10, 0, 0, 1, 6, 6, 10)
    assert [best_mask(range(6), [demand], floor=floor) for floor in range(1, 7)] == [
        0b100000,
        0b11000,
        0b11001,
        0b11011,
        0b11111,
        0b111111,
    ]
    assert best_mask(range(8), [amounts(10, 0, 0, 0, 1, 1, 6, 6, 10)], floor=4) == 0b1100011


def test_hints_of_many_nodes_come_without_delay() -> None:
    one = Family((1 << 70, 0b11 << 71), tuple(range(64)), 2, (amounts(50, *range(64)),), 1)
    with counting() as counted:
        first = [str(h.affinity) for h in itertools.islice(one, 4)]
        assert first == ["70", "0,50", "0,51", "0,52"]
        assert one.best() == hint(1 << 70, preferred=True)
        assert [str(h.affinity) for h in one.best_few(3)] == ["70"]
        assert len(counted) <= 150
    assert list(one.possible_nodes) == [*range(64), 70, 71, 72]
    assert [one.holds(bits) for bits in (1 << 70, 1 << 51, 1 << 51 | 1, 1 << 49 | 1, 0b11 << 70)] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert Family((0b111,), (0, 1), 3, (), 3).best() == hint(0b111, preferred=True)
    assert Family((0b100,), (0, 1), 3, (), 3).best(Mask([0])) is None
    assert Family((0b100,), (0, 1), 3, (), 3).best(Mask([1])) is None
    assert not Family((), (0, 1), 3, (), 3)


def test_a_few_of_the_least_size() -> None:
    family = free(20, 3, explicit=(0b11 << 30 | 1 << 32, 1 << 33 | 0b11 << 40))
    assert [str(h.affinity) for h in family.best_few(5)] == ["0-2", "0-1,3", "0,2-3", "1-3", "0-1,4"]
    assert len(family.best_few(100)) == 100
    assert family.best_few(0) == ()
    assert Family((), (0, 1), 3, (), 3).best_few(4) == ()
    wide = Family((1 << 30,), tuple(range(20)), 2, (amounts(2, *[1] * 20),), 1)
    assert wide.best_few(4) == (hint(1 << 30, preferred=True),), "smaller than any open mask"


def test_explicit_masks_of_the_least_size_come_with_the_best() -> None:
    family = Family(
        (0b111, 0b1011), tuple(range(5, 20)), 2, (Demand(3, tuple((1 << i, 1) for i in range(5, 20))),), 3
    )
    assert [str(h.affinity) for h in family.best_few(3)] == ["0-2", "0-1,3", "5-7"]


def test_a_preferred_mask_inside_a_window_stands_for_others() -> None:
    family = Family((0b11 | 1 << 30, 0b11, 0b11 | 1 << 29, 1 << 31), (), 1, (), 2)
    seen = family.for_window(Mask([0, 1]))
    assert seen == (hint(1 << 31, preferred=False), hint(0b11, preferred=True))


def test_nodes_outside_a_window_that_make_a_part_just_large_enough_are_in_its_hint() -> None:
    family = Family((1 << 5,), (0, 1), 2, (amounts(1, 1, 1),), 1)
    assert [str(h.affinity) for h in family.for_window(Mask([0]))] == ["5", "0-1"]


def test_equally_good_masks_are_listed_only_for_distances() -> None:
    answer, nodes = {"a": free(13, 2), "b": free(14, 2)}, Mask(range(14))
    table = Distances({a: dict.fromkeys(nodes, 10) for a in nodes})

    def read(policy: TopologyPolicy, distances: Distances | None) -> set[int]:
        return {len(entry.hints) for entry in decide(policy, [answer], nodes, distances).lists}

    assert read(TopologyPolicy.RESTRICTED, table) == {13 * 12 // 2}
    assert read(TopologyPolicy.RESTRICTED, None) == read(TopologyPolicy.SINGLE_NUMA_NODE, table) == {1}


def test_families_without_a_preferred_hint_report_the_best_hint() -> None:
    family = Family((), tuple(range(40)), 1, (amounts(3, *[1] * 40),), 2)
    (answer,) = listable([{"m": family}])
    assert answer == {"m": (hint(0b111, preferred=False),)}


def test_families_without_a_common_mask_report_the_best_mask_of_each() -> None:
    low = Family((), tuple(range(20)), 1, (amounts(1, *[1] * 20),), 1)
    high = Family((), tuple(range(20, 40)), 1, (Demand(1, tuple((1 << i, 1) for i in range(20, 40))),), 1)
    (answer,) = listable([{"a": low, "b": high}])
    assert answer == {"a": (hint(1, preferred=True),), "b": (hint(1 << 20, preferred=True),)}
    (answer,) = listable(
        [
            {"a": low, "b": ()},
        ]
    )
    assert answer == {"a": (hint(1, preferred=True),), "b": ()}


def window(nodes: int, at: int = 0) -> tuple[TopologyHint, ...]:
    return tuple(hint(1 << at + i, preferred=True) for i in range(nodes))


def test_a_list_within_twelve_nodes_is_a_window() -> None:
    family = free(40, 2)

    def listed(*others: tuple[TopologyHint, ...]) -> Sequence[TopologyHint]:
        (answer,) = listable([{"m": family, **{str(i): other for i, other in enumerate(others)}}])
        assert answer is not None
        return answer["m"] or ()

    assert len(listed(window(12))) == 2**12 - 1
    assert len(listed(window(3, at=5))) == 2**3, "and a narrowest hint"
    assert len(listed(window(13))) == 1, "the window is too wide, and has no effect"
    assert len(listed(window(12), window(3))) == 2**3 - 1, "the narrowest list is the window"
    assert {h.affinity.bits & 0b111 for h in listed(window(3)) if h.affinity} == set(range(1, 8))


def test_the_whole_family_stays_known() -> None:
    family, answers = free(40, 2), [{"m": free(40, 2), "n": None}, None, {"d": window(2)}]
    entries = lists_of(answers)
    assert [entry.resource for entry in entries] == ["m", "n", "", "d"]
    assert [entry.family for entry in entries] == [family, None, None, None]
    assert [entry.unsatisfiable for entry in lists_of([{"m": free(40, 41)}])] == [True]
    plain: list[Hints] = [{"d": window(2)}]
    (entry,) = lists_of(plain)
    assert (entry.hints, entry.family) == (window(2), None)


def test_masks_as_good_as_the_first_come_with_it_when_distances_decide() -> None:
    def agreed(*families: Family) -> list[str]:
        (answer,) = listable([{str(i): f for i, f in enumerate(families)}], closest=True)
        assert answer is not None
        lists = [[str(h.affinity) for h in hints or ()] for hints in answer.values()]
        assert all(each == lists[0] for each in lists)
        return lists[0]

    pairs = agreed(free(13, 2), free(14, 2))
    assert len(pairs) == 13 * 12 // 2
    assert (pairs[0], pairs[1], pairs[-1]) == ("0-1", "0,2", "11-12")
    assert len(agreed(free(14, 2, floor=2), free(14, 1))) == 14 * 13 // 2
    single = Family((1 << 3, 1 << 5), tuple(range(8, 30)), 2, (amounts(1, *[1] * 30),), 1)
    assert agreed(single, single) == ["3", "5"], "open masks begin with two nodes"
    with mock.patch.object(listing_room, "TRIES", 0):
        assert agreed(free(13, 2), free(14, 2)) == ["0-1"]
    assert TRIES > 64 * 63 // 2, "enough for all pairs of 64 nodes"


def test_the_best_of_two_lists_is_preferred_by_both() -> None:
    """Explicit masks that both prefer win over open ones that only one does."""
    explicit = (1 << 3,)
    one = Family(explicit, tuple(range(8, 30)), 2, (amounts(1, *[1] * 30),), 1)
    two = Family(explicit, tuple(range(8, 30)), 2, (amounts(1, *[1] * 30),), 1)
    three = Family((), tuple(range(30)), 1, (amounts(2, *[1] * 30),), 2)
    merged = merge(
        [hints or () for hints in (listable([{"a": one, "b": two}])[0] or {}).values()], Mask(range(40))
    )
    assert merged.hint == hint(1 << 3, preferred=True)
    (answer,) = listable([{"a": one, "b": three}])
    assert answer == {"a": (hint(0b11 << 8, preferred=False),), "b": (hint(0b11 << 8, preferred=True),)}
