"""How much a choice of nodes costs: most are decided by weighing alone, the rest by short searches."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from proxy.allocation import set_cover
from proxy.allocation.demand import Demand, best_mask, covers
from proxy.allocation.set_cover import choose

Problem = tuple[dict[int, tuple[int, ...]], tuple[int, ...]]
NODES = range(14)


def problem(seed: int, things: int, share: int) -> Problem:
    """Nodes that are all different, and needs that the ``share``-th part of all would meet."""
    found = random.Random(seed)
    rows = [(found.randint(1, 60), found.randint(1, 10**12), found.randint(1, 9)) for _ in NODES]
    needs = tuple(sum(row[i] for row in rows) // share for i in range(things))
    return {node: row[:things] for node, row in enumerate(rows)}, needs


def pick(given: Problem, size: int) -> int | None:
    amounts, needs = given
    found = choose(NODES, amounts, needs, size, lambda _: True)
    if found is not None:
        assert found.bit_count() <= size
        taken = [amounts[node] for node in NODES if found >> node & 1]
        assert all(sum(row[i] for row in taken) >= need for i, need in enumerate(needs))
    return found


def least(given: Problem) -> int:
    return next(size for size in range(len(NODES) + 1) if pick(given, size) is not None)


@pytest.mark.parametrize(
    ("steps", "rounds", "things", "share", "enough"),
    [
        (0, 1, 2, 2, 35),  # by score alone, each resource weighted by the required amount
        (0, 2, 2, 2, 49),  # scarce resources weigh more
        (0, 12, 2, 2, 56),
        (0, 12, 3, 2, 52),
        (0, 12, 3, 3, 51),
        (5, 1, 2, 3, 57),  # a short search after one round
        (10, 1, 2, 2, 50),
        (20, 1, 3, 3, 56),
        (20, 3, 2, 2, 60),
        (50, 1, 3, 2, 59),
    ],
)
def test_most_of_sixty_problems_are_decided_quickly(
    steps: int, rounds: int, things: int, share: int, enough: int
) -> None:
    solved = 0
    for seed in range(60):
        given = problem(seed, things, share)
        size = least(given)
        with mock.patch.multiple(set_cover, STEPS=steps, _ROUNDS=rounds):
            solved += pick(given, size) is not None
    assert solved >= enough


def test_most_infeasible_problems_are_detected_without_a_search() -> None:
    searched = 0
    for seed in range(60):
        given = problem(seed, 2, 2)
        size = least(given) - 1
        with mock.patch.object(set_cover._CoverSearch, "walk", return_value=None) as walk:
            assert pick(given, size) is None
        searched += walk.called
    assert searched <= 6


def test_a_single_sufficient_node_is_found() -> None:
    assert choose((3, 4), {3: (1, 2), 4: (2, 2)}, (2, 1), 1, lambda _: True) == 1 << 4
    assert choose((3, 4), {3: (1, 2), 4: (2, 0)}, (2, 1), 1, lambda _: True) is None


def test_a_single_need_is_decided_at_once() -> None:
    amounts = {node: (node,) for node in NODES}
    with mock.patch.object(set_cover._CoverSearch, "walk", side_effect=AssertionError):
        assert choose(NODES, amounts, (25,), 2, lambda _: True) == 1 << 13 | 1 << 12
        assert choose(NODES, amounts, (26,), 2, lambda _: True) is None


def test_equal_nodes_are_tried_once() -> None:
    tried: list[int] = []

    def never(bits: int) -> bool:
        tried.append(bits)
        return False

    amounts = dict.fromkeys(NODES, (1, 1))
    assert choose(NODES, amounts, (3, 3), 5, never) is None
    assert len(tried) <= 20, "equal nodes are tried by their number only"
    tried.clear()
    assert choose(NODES, amounts, (3, 3), 5, never, frozenset([2, 5, 9])) is None
    assert {bits >> 2 & 1 for bits in tried} == {0, 1}, "but distinguished nodes are each tried"
    assert {tuple(bits >> node & 1 for node in (2, 5, 9)) for bits in tried} >= {
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
    }


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_fittest_with_a_floor_after_few_rounds(rounds: int) -> None:
    """Searches then give fewer nodes than there is room for; the lowest ones fill it."""
    every = sorted(range(1, 1 << 8), key=lambda bits: (bits.bit_count(), bits))
    for seed in range(60):
        found = random.Random(seed)
        demands = []
        for top in (9, 10**6):
            amounts = [
                (1 << found.randrange(8) | 1 << found.randrange(8), found.randint(1, top)) for _ in range(9)
            ]
            demands.append(Demand(sum(n for _, n in amounts) * 2 // 3, tuple(amounts)))
        base, floor = found.choice([0, 0, 1 << found.randrange(8)]), found.randint(2, 6)
        able = (
            bits for bits in every if not base & ~bits and bits.bit_count() >= floor and covers(demands, bits)
        )
        with mock.patch.object(set_cover, "_ROUNDS", rounds):
            assert best_mask(range(8), demands, base, floor) == next(able, None)
