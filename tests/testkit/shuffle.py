"""Random test order: ``--shuffle`` shuffles modules, and the tests within each module, by a seed.

A test that passes only because another one ran before it hides a fault of one of the two. The seed is printed
at the start of the run, and again below failures; ``--shuffle=SEED`` repeats that order. The end-to-end tests
keep their order and come last: they share one container runtime, which takes most of the time to start.
"""

from __future__ import annotations

import random
from pathlib import PurePath

import pytest

RANDOM = "random"
LIMIT = 1_000_000
ORDERED_DIRECTORY = "e2e"
"""The directory of the tests that keep their order."""


def seed_of(option: str) -> int:
    """Return the seed that the option names: a number, or a new one for ``random``.

    Raises:
        pytest.UsageError: The option is something else.
    """
    if option == RANDOM:
        return random.SystemRandom().randrange(LIMIT)
    if not option.isdecimal():
        raise pytest.UsageError(f"--shuffle: {option!r} is neither a number nor {RANDOM!r}")
    return int(option)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Shuffle modules and the tests of each, in place.

    The order depends on the seed and on the names of the tests, and not on the order in which they come.
    """
    chance = random.Random(seed)
    modules: dict[str, list[pytest.Item]] = {}
    last: list[pytest.Item] = []
    for item in items:
        path = item.nodeid.partition("::")[0]
        (last if ORDERED_DIRECTORY in PurePath(path).parts else modules.setdefault(path, [])).append(item)
    names = sorted(modules)
    chance.shuffle(names)
    for name in names:
        modules[name].sort(key=lambda item: item.nodeid)
        chance.shuffle(modules[name])
    items[:] = [item for name in names for item in modules[name]] + last
