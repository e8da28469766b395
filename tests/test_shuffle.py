"""Random test order: complete and repeatable, with the end-to-end tests in their original order."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.testkit.shuffle import RANDOM, seed_of, shuffle

NAMES = [f"tests/{module}/test_{module}.py::test_{n}" for module in "abcd" for n in range(20)]
KEPT = [f"tests/e2e/test_node.py::test_{n}" for n in range(20)]


@dataclass(frozen=True)
class Item:
    """A stand-in for a pytest item, with the attributes that the order needs."""

    nodeid: str


def ordered(names: list[str], seed: int) -> list[str]:
    items: list[Any] = [Item(name) for name in names]
    shuffle(items, seed)
    return [item.nodeid for item in items]


def test_every_test_runs_once_and_modules_stay_together() -> None:
    order = ordered(NAMES, 1)
    assert sorted(order) == sorted(NAMES)
    assert order != NAMES
    modules = [name.partition("::")[0] for name in order]
    assert len([1 for a, b in itertools.pairwise(modules) if a != b]) == 3
    first = [name for name in order if modules[0] in name]
    assert first != sorted(first, key=NAMES.index)


def test_a_seed_repeats_the_order() -> None:
    mixed = random.Random(7).sample(NAMES, len(NAMES))
    assert ordered(NAMES, 1) == ordered(mixed, 1)
    assert ordered(NAMES, 1) != ordered(NAMES, 2)


def test_end_to_end_tests_keep_their_order_and_come_last() -> None:
    order = ordered(KEPT + NAMES, 3)
    assert order[-len(KEPT) :] == KEPT


def test_the_option_is_a_number_or_random() -> None:
    assert seed_of("42") == 42
    assert len({seed_of(RANDOM) for _ in range(5)}) > 1
    with pytest.raises(pytest.UsageError, match="--shuffle: 'tests' is neither a number nor 'random'"):
        seed_of("tests")
