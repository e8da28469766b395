"""What a fuzzer reports, and how long each step took."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

GROSS_S: Final = 1.0
"""A step that takes longer fails. The aim is 20 ms; a loaded machine needs more now and then."""


class FuzzError(AssertionError):
    """A property does not hold; the error has everything that reproduces it."""

    def __init__(self, fuzzer: str, seed: int, turn: int, step: int, cause: BaseException) -> None:
        super().__init__(
            f"{fuzzer}: seed {seed}, round {turn}, step {step}: {type(cause).__name__}: {cause}\n"
            f"again: python -m tests.fuzz --only {fuzzer} --seed {seed} --round {turn}"
        )


@dataclass
class Outcome:
    """What was tried."""

    fuzzer: str
    rounds: int = 0
    steps: int = 0
    slowest: float = 0.0
    slow: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + number

    def timed(self, work: Callable[[], object]) -> None:
        """Do one step, and note how long it took."""
        self.steps += 1
        start = time.perf_counter()
        try:
            work()
        finally:
            took = time.perf_counter() - start
            self.slowest = max(self.slowest, took)
            self.slow += took > 0.02
        assert took < GROSS_S, f"it took {took:.2f} s"

    def __str__(self) -> str:
        seen = ", ".join(f"{number} {what}" for what, number in sorted(self.seen.items()))
        return (
            f"{self.fuzzer}: {self.rounds} rounds, {self.steps} steps, "
            f"the slowest {self.slowest * 1000:.1f} ms, {self.slow} above 20 ms; {seen}"
        )


def run(
    fuzzer: str,
    one: Callable[[random.Random, Outcome], None],
    seed: int,
    seconds: float | None,
    *,
    first: int = 0,
    only: bool = False,
) -> Outcome:
    """Run rounds, each of which depends on seed and number alone.

    Args:
        fuzzer: Its name.
        one: Runs one round.
        seed: Of all rounds.
        seconds: When to stop; None: never.
        first: The first round.
        only: Run that one alone.

    Raises:
        FuzzError: A property does not hold.
    """
    outcome, start = Outcome(fuzzer), time.monotonic()
    turn = first
    while seconds is None or time.monotonic() - start < seconds:
        before = outcome.steps
        try:
            one(random.Random(f"{fuzzer} {seed} {turn}"), outcome)
        except Exception as error:
            raise FuzzError(fuzzer, seed, turn, outcome.steps - before, error) from error
        outcome.rounds += 1
        turn += 1
        if only:
            break
    return outcome
