"""Choosing few nodes for several needs, against every way to choose them."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation import set_cover
from proxy.allocation.demand import Demand, best_mask, covers, least_node_count, to_bits
from proxy.allocation.set_cover import choose

NODES = (0, 2, 3, 5, 6, 9, 11, 12)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    things = draw(st.integers(1, 3))
    each = st.tuples(*[st.integers(0, 9)] * things)
    amounts = {node: draw(each) for node in NODES}
    return amounts, tuple(draw(st.integers(1, 30)) for _ in range(things))


def enough(amounts: dict[int, tuple[int, ...]], needs: tuple[int, ...], bits: int) -> bool:
    return all(sum(amounts[n][i] for n in NODES if bits >> n & 1) >= need for i, need in enumerate(needs))


@given(problems(), st.integers(0, 8), st.integers(1, 12))
def test_a_choice_is_found_exactly_if_one_exists(
    problem: tuple[dict[int, tuple[int, ...]], tuple[int, ...]], size: int, rounds: int
) -> None:
    amounts, needs = problem
    possible = any(enough(amounts, needs, to_bits(taken)) for taken in itertools.combinations(NODES, size))
    with mock.patch.object(set_cover, "_ROUNDS", rounds):
        found = choose(NODES, amounts, needs, size, lambda _: True)
    assert (found is not None) == possible
    if found is not None:
        assert found.bit_count() <= size
        assert enough(amounts, needs, found)


@given(problems(), st.integers(1, 8), st.sets(st.sampled_from(NODES), min_size=1, max_size=2))
def test_a_choice_satisfies_the_filter(
    problem: tuple[dict[int, tuple[int, ...]], tuple[int, ...]], size: int, never: set[int]
) -> None:
    amounts, needs = problem
    ban = to_bits(never)
    free = [n for n in NODES if n not in never]
    sizes = range(size + 1)
    possible = any(
        enough(amounts, needs, to_bits(taken)) for k in sizes for taken in itertools.combinations(free, k)
    )
    found = choose(NODES, amounts, needs, size, lambda bits: not bits & ban, frozenset(never))
    assert (found is not None) == possible
    assert found is None or not found & ban


def test_no_needs_and_no_permitted_nodes() -> None:
    assert choose(NODES, {}, (), 0, lambda _: True) == 0
    assert choose((1,), {1: (5,)}, (1,), 0, lambda _: True) is None
    assert choose((), {}, (1,), 3, lambda _: True) is None


def unlike(nodes: int, seed: int) -> list[Demand]:
    """Two demands on nodes that are all different, each node good for one of them."""
    found = random.Random(seed)
    rows = [(found.randint(1, 60), found.randint(1, 10**12)) for _ in range(nodes)]
    return [
        Demand(sum(row[i] for row in rows) // 3, tuple((1 << n, row[i]) for n, row in enumerate(rows)))
        for i in range(2)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_the_fewest_of_unlike_nodes(seed: int) -> None:
    demands = unlike(11, seed)
    sizes = range(1, 12)
    every = (to_bits(taken) for size in sizes for taken in itertools.combinations(range(11), size))
    able = [bits for bits in every if covers(demands, bits)]
    best = min(able, key=lambda bits: (bits.bit_count(), bits))
    assert least_node_count(range(11), demands) == best.bit_count()
    assert best_mask(range(11), demands) == best


@pytest.mark.parametrize("seed", range(3))
def test_a_limited_search_never_returns_an_insufficient_mask(seed: int) -> None:
    demands = unlike(64, seed)
    exact = best_mask(range(64), demands)
    with mock.patch.multiple(set_cover, STEPS=0, _ROUNDS=1):
        soon = best_mask(range(64), demands)
    assert exact is not None
    assert soon is not None
    assert covers(demands, exact)
    assert covers(demands, soon)
    assert exact.bit_count() <= soon.bit_count()


def test_a_search_is_bounded() -> None:
    tried: list[int] = []

    def never(bits: int) -> bool:
        tried.append(bits)
        return False

    amounts = {node: (node,) for node in range(40)}
    with mock.patch.object(set_cover, "STEPS", 50):
        assert choose(range(40), amounts, (1,), 20, never, frozenset(range(40))) is None
    assert len(tried) <= 52
