"""When pods come, and how long they stay."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass


class Arrival(enum.StrEnum):
    """A pattern in which pods come."""

    BURST = "burst"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True)
class ArrivalPattern:
    """When pods come, and how long they stay.

    Attributes:
        arrival: All at once, or each at a time that does not depend on the others.
        rate: Pods that come in a second, on average; for ``POISSON``.
        lifetime: Seconds for which a pod runs, on average (exponentially distributed); 0: it stays.
    """

    arrival: Arrival = Arrival.BURST
    rate: float = 10.0
    lifetime: float = 0.0

    def times(self, pods: int, chance: random.Random) -> Iterator[tuple[float, float]]:
        """Return for each pod when it comes and how long it runs, in seconds; an infinite time: it stays."""
        now = 0.0
        for _ in range(pods):
            if self.arrival is Arrival.POISSON:
                now += chance.expovariate(self.rate)
            yield now, chance.expovariate(1 / self.lifetime) if self.lifetime else float("inf")
