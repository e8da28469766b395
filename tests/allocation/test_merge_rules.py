"""Edge cases of the merge: its target, when its search stops, and its result in that case."""

from __future__ import annotations

import itertools
from unittest import mock

from proxy.allocation import intersections as meeting
from proxy.allocation import merge as merging
from proxy.allocation.distance import Distances
from proxy.allocation.intersections import DENSE_NODES, meet, meet_all
from proxy.allocation.merge import Decided, merge
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from tests.oracles.merge_parts import first_of


def hint(*nodes: int, preferred: bool = False) -> TopologyHint:
    return TopologyHint(Mask(nodes), preferred)


def every(nodes: int, size: int) -> list[TopologyHint]:
    return [hint(*taken) for taken in itertools.combinations(range(nodes), size)]


def test_without_masks_the_target_is_none() -> None:
    assert merge([], Mask([0, 1])).target == 0
    lists = [[hint(0, 1), hint(2)], [hint(0, 1), hint(1, 2)], [TopologyHint(None, True)]]
    assert merge(lists, Mask(range(3))).target == 2


def test_a_preferred_mask_and_one_that_is_wider_than_the_target() -> None:
    result = merge([[hint(0, preferred=True), hint(0, 1, 2, preferred=True)]], Mask(range(3)))
    assert (result.runner_up, result.decided) == (hint(0, 1, 2, preferred=True), Decided.FEWER_NODES)
    table = Distances({a: {b: 10 + (a - b) ** 2 for b in range(4)} for a in range(4)})
    near = merge([[hint(0, 3, preferred=True), hint(2, 3, preferred=True)]], Mask(range(4)), table)
    assert (near.hint, near.decided) == (hint(2, 3, preferred=True), Decided.CLOSER)
    same = merge([[hint(1, 2, preferred=True), hint(2, 3, preferred=True)]], Mask(range(4)), table)
    assert (same.hint, same.decided) == (hint(1, 2, preferred=True), Decided.LOWER_IDS)


def test_with_many_nodes_too_small_masks_are_dropped_early() -> None:
    whole = Mask(range(40))
    lists = [[hint(*range(n, n + 20)) for n in range(21)], [hint(*range(n, n + 21)) for n in range(20)]]
    floors: list[int] = []
    plain = meet_all

    def watched(families: list[set[int]], possible_nodes: int, floor: int = 1) -> object:
        floors.append(floor)
        return plain(families, possible_nodes, floor)

    with mock.patch.object(merging, "meet_all", watched):
        result = merge(lists, whole)
    assert floors == [21 - 1], "some combination keeps that many"
    assert (result.target, result.hint) == (21, hint(*range(20)))
    assert result.runner_up == hint(*range(1, 21))


def test_a_runner_up_that_may_come_after_what_was_dropped_is_not_named() -> None:
    whole = Mask(range(40))
    lists = [[hint(*range(20)), hint(*range(39))], [hint(*range(20)), hint(*range(39)), hint(*range(19))]]
    result = merge(lists, whole)
    assert (result.hint, result.target) == (hint(*range(20)), 20)
    assert (result.runner_up, result.decided) == (None, Decided.NEAREST_COUNT)


def test_the_order_of_the_remaining_hints() -> None:
    masks = [0b1, 0b110, 0b11, 0b111, 0b1111]
    found = first_of([], masks, 2, None, most=5)
    assert [str(each.affinity) for each in found] == ["0-1", "1-2", "0", "0-2", "0-3"]
    assert [str(each.affinity) for each in first_of([], [0b1, 0b111], 2, None)] == ["0", "0-2"]
    assert [str(each.affinity) for each in first_of(masks, [0b1], 9, None, most=9)] == [
        "0",
        "0-1",
        "1-2",
        "0-2",
        "0-3",
    ]
    assert len(first_of(masks, [], 2, None)) == 2
    assert [len(each.affinity or ()) for each in first_of([0b1], [0b1, 0b11], 1, None)] == [1, 2]


def test_how_families_are_intersected() -> None:
    """Few pairs are tried, pairs over few nodes are counted; otherwise the narrow masks are divided."""
    ways: list[str] = []

    def watch(name: str) -> mock._patch[object]:
        real = getattr(meeting, name)

        def called(*args: object) -> object:
            ways.append(name)
            return real(*args)

        return mock.patch.object(meeting, name, called)

    def way(left: set[int], right: set[int], whole: int) -> list[str]:
        ways.clear()
        assert meet(left, right, whole) == {a & b for a in left for b in right}
        return list(ways)

    with watch("_counted"), watch("_divided"):
        assert way(set(range(32)), set(range(64)), 63) == [], "2048 pairs"
        assert way(set(range(33)), set(range(64)), 63) == ["_counted"]
        assert way({5}, set(range(3000)), 4095) == [], "one against many"
        sixteen = (1 << 16) - 1
        assert DENSE_NODES == 16
        large = set(range(0, 1 << 16, 120))
        assert way(large, large, sixteen) == ["_counted"]
        assert way(set(range(50)), set(range(50)), sixteen) == ["_divided"], "few pairs over many nodes"
        assert way(set(range(60)), set(range(60)), sixteen << 1 | 1) == ["_divided"]


def test_a_division_stops_when_there_is_too_much() -> None:
    wide = {(1 << 60) - 1 ^ 1 << n for n in range(60)}
    assert 100 < len(meet(wide, wide, (1 << 60) - 1, most=100)) <= 160
    assert len(meet(wide, wide, (1 << 60) - 1, most=60 * 61 // 2)) == 60 * 61 // 2
    assert meet_all([wide, wide], (1 << 60) - 1, most=60 * 61 // 2) is not None
    assert meet_all([wide, wide], (1 << 60) - 1, most=60 * 61 // 2 - 1) is None
