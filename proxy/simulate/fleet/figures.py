"""The results of a run, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.simulate.fleet.fleet_run import FleetRun, PodFate


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """What decisions took, in milliseconds of real time."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """A run in numbers; numbers of pods unless stated otherwise.

    Attributes:
        scheduler: What it is called.
        pods: How many came.
        placed: How many were admitted by a node, those that have left included.
        rejected: How many were bound to a node that rejected them, by reason.
        waiting: How many no node had room for until the end.
        exclusive: How many request CPUs of their own.
        possible: For how many of these a node had room on one NUMA node when they were last decided on.
        on_one: How many of these have been placed on one NUMA node.
        free_cpus: CPUs that could still be given to one container alone, at the end.
        useless_cpus: Of these, by size of container, those that no container of that size can use.
        decisions: What the decisions took.
    """

    scheduler: str
    pods: int
    placed: int
    rejected: Mapping[str, int]
    waiting: int
    exclusive: int
    possible: int
    on_one: int
    free_cpus: int
    useless_cpus: Mapping[int, int]
    decisions: DecisionTimes


def figures_of(run: FleetRun) -> FleetFigures:
    """Count the results of a run."""
    fates = Counter(record.fate for record in run.records)
    rejected = Counter(record.reason for record in run.records if record.fate is PodFate.REJECTED)
    last = run.samples[-1]
    return FleetFigures(
        run.name,
        len(run.records),
        fates[PodFate.PLACED],
        dict(rejected.most_common()),
        fates[PodFate.WAITING],
        sum(bool(record.pod.kind.sizes) for record in run.records),
        sum(record.possible for record in run.records),
        sum(record.on_one for record in run.records),
        last.free,
        last.useless,
        _times(run.decisions),
    )


def _times(decisions: Sequence[float]) -> DecisionTimes:
    taken = sorted(decisions) or [0.0]
    p50, p99 = (taken[min(len(taken) - 1, int(len(taken) * part))] for part in (0.5, 0.99))
    return DecisionTimes(
        len(decisions),
        round(1000 * p50, 3),
        round(1000 * p99, 3),
        round(1000 * taken[-1], 3),
        round(1000 * sum(decisions), 1),
    )
