"""Samples by measure and target, and their evaluation: medians over rounds, differences, ratios."""

from __future__ import annotations

import statistics
from collections import defaultdict


class Figures:
    """The measurements: one list of samples for each (measure, target)."""

    def __init__(self) -> None:
        self.samples: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, measure: str, target: str, value: float) -> None:
        self.samples[measure][target].append(value)

    def median(self, measure: str, target: str) -> float | None:
        found = self.samples[measure][target]
        return statistics.median(found) if found else None

    def total(self, measure: str, target: str) -> int:
        return int(sum(self.samples[measure][target]))

    def added(self, measure: str, target: str, direct: str) -> float | None:
        """Median of the target minus median of the direct connection, over the same rounds."""
        through, straight = self.median(measure, target), self.median(measure, direct)
        return None if through is None or straight is None else through - straight

    @staticmethod
    def ratio(value: float | None, base: float | None) -> float | None:
        return value / base if value is not None and base is not None and base > 0 else None

    def plain(self) -> dict[str, dict[str, list[float]]]:
        """Everything, for JSON."""
        return {measure: dict(by_target) for measure, by_target in self.samples.items()}
