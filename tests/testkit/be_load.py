"""CPU usage as events that cause the suppression of BE pods."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.engine.be_usage import UsageQuery, UsageReading
from proxy.engine.state import NodeState
from proxy.engine.suppression import BeUsageRead, SuppressionSettings
from proxy.model.koordinator import SuppressMode

SECOND_NS = 1_000_000_000
NO_PODS = UsageQuery({}, frozenset(), frozenset(), ())


def used_beside_be(state: NodeState, cpus: float) -> Iterator[BeUsageRead]:
    """Yield readings in which other pods than BE use this number of CPUs."""
    last, settings = state.facts.suppression.reading, SuppressionSettings(SuppressMode.CPUSET)
    if last is None:
        last = UsageReading(0, 0, {})
        yield BeUsageRead(0.0, settings, NO_PODS, last)
    yield BeUsageRead(
        0.0, settings, NO_PODS, UsageReading(last.at + SECOND_NS, last.node + int(cpus * SECOND_NS), {})
    )
