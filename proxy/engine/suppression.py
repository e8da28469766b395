"""BE suppression: BE (best effort) pods live on what the others leave, up to a threshold of the node.

Theory of operation. In each round the counters of CPU time are read; two readings make the CPUs in use
(``be_usage``), these the budget of BE pods (``proxy.pools.be_suppression``), and the budget takes effect in
one of two ways:

    cpuset      the BE pool of the state is narrowed                                   LimitPool
    cfs-quota   the group above all BE pods gets a quota, by what it has now           LimitQuota

Each function takes what is known and something that happened, and returns what is known then and the
effects. Without a figure nothing changes for PATIENCE rounds; then everything is given back (``GiveBack``):
BE pods must not starve on a figure that is no longer true.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, structs

from proxy.engine.be_usage import UsageQuery, UsageReading, rates, shares_of, usage_of
from proxy.engine.enforcement import applies_to
from proxy.model.idset import CpuSet
from proxy.model.koordinator import SuppressMode
from proxy.model.machine import Machine
from proxy.model.workload import Container, Pool, QosClass
from proxy.pools.be_suppression import THRESHOLD, Usage, budget, choose_cpus, cpu_count_for, is_be
from proxy.pools.cpu_location import CpuLocation, locations_of
from proxy.pools.quota import PERIOD, UNLIMITED
from proxy.pools.shared import AnnotatedCpus, Withheld

if TYPE_CHECKING:
    from proxy.engine.state import NodeState

KEY = "b/suppress"
"""The ledger's record of the quotas that have to be removed."""
PATIENCE = 10
"""Rounds without a figure after which everything is given back."""
SLACK_MILLI = 250
"""A budget must exceed whole CPUs by so much to add one: otherwise BE pods would move with every flutter."""


class SuppressionSettings(Struct, frozen=True):
    """What is configured.

    Attributes:
        mode: How BE pods are suppressed.
        threshold: Percent of the node's CPUs that all may use together.
        least: Percent of the node's CPUs that BE pods have in any case; None for nothing.
        period: Seconds between rounds.
    """

    mode: SuppressMode = SuppressMode.OFF
    threshold: int = THRESHOLD
    least: int | None = None
    period: float = 1.0


class SuppressionChange(Struct, frozen=True):
    """A change of what BE pods have: seconds since the epoch, and both in words."""

    when: float
    before: str
    after: str
    why: str


class BeSuppression(Struct, frozen=True):
    """What is known about BE suppression.

    Attributes:
        reading: The last reading of the counters.
        failures: Rounds without a figure since the last one.
        above: The group above all BE pods; empty until it is known.
        figures: The budget of the last round in milli-CPUs, and what it was computed from.
        quota: The CFS quota in effect above BE pods; None where that is not known.
        written: Groups with a quota of ours, which has to be removed; the ledger has them.
        change: The last change of what BE pods have.
        locations: A machine and its CPUs, computed once.
    """

    reading: UsageReading | None = None
    failures: int = 0
    above: str = ""
    figures: tuple[int, Usage] | None = None
    quota: int | None = None
    written: frozenset[str] = frozenset()
    change: SuppressionChange | None = None
    locations: tuple[Machine | None, tuple[CpuLocation, ...]] = (None, ())

    @classmethod
    def load(cls, record: object) -> BeSuppression:
        """Begin with the groups that a ledger names."""
        paths = record if isinstance(record, list) else []
        written = frozenset(path for path in paths if isinstance(path, str))
        return cls(above=min(written, default=""), written=written)

    def dump(self) -> dict[str, dict[str, object]]:
        """Return the ledger's record of the groups, where there are any, as plain data by its key."""
        return {KEY: {"quota": sorted(self.written)}} if self.written else {}


class LimitPool(Struct, frozen=True):
    """Narrow the BE pool to some CPUs (None: no longer)."""

    cpus: CpuSet | None
    why: str


class LimitQuota(Struct, frozen=True):
    """Have BE pods keep to a budget in milli-CPUs by a quota.

    Attributes:
        milli: The budget.
        why: Where it comes from.
        matters: Whether there are pods that a failure concerns.
    """

    milli: int
    why: str
    matters: bool


class ReportUnreadable(Struct, frozen=True):
    """Count that there is no figure, and where it lasts report why."""

    cause: str
    lasts: bool


class GiveBack(Struct, frozen=True):
    """Give BE pods back all that they had."""

    why: str


SuppressionEffect = LimitPool | LimitQuota | ReportUnreadable | GiveBack
SuppressionStep = tuple[BeSuppression, tuple[SuppressionEffect, ...]]


def measured(
    known: BeSuppression,
    settings: SuppressionSettings,
    state: NodeState,
    query: UsageQuery,
    reading: UsageReading,
) -> SuppressionStep:
    """The counters were read."""
    before, known = known.reading, structs.replace(known, reading=reading)
    if before is None:
        return known, ()
    found = rates(before, reading, len(state.node.machine.online))
    if found is None:
        return unreadable(known, "the counters went backwards")
    usage = usage_of(state, query, found)
    milli = budget(usage, settings.threshold, settings.least)
    known = structs.replace(known, failures=0, figures=(milli, usage))
    why = reason(known, settings)
    if settings.mode is SuppressMode.QUOTA:
        return known, (LimitQuota(milli, why, matters=bool(query.inside)),)
    return _narrow(known, state, milli, why)


def _narrow(known: BeSuppression, state: NodeState, milli: int, why: str) -> SuppressionStep:
    pool, now, machine = state.pools.be, state.pools.of(Pool.BE), state.node.machine
    if known.locations[0] is not machine:
        known = structs.replace(known, locations=(machine, locations_of(machine)))
    count = cpu_count_for(milli, len(now), len(machine.online))
    if count > len(now) >= cpu_count_for(milli - SLACK_MILLI, len(now), len(machine.online)):
        return known, ()
    if count >= len(pool):
        return known, (LimitPool(None, why),)
    lsr = [AnnotatedCpus(QosClass.LSR, owner.cpus) for owner in state.owners.values() if not owner.hard]
    limit = choose_cpus(known.locations[1], lsr, Withheld(reserved=machine.online - pool), milli, now)
    return known, (LimitPool(limit, why),) if limit else ()


def unreadable(known: BeSuppression, cause: str) -> SuppressionStep:
    """There is no figure this time."""
    failures = known.failures + 1
    if failures < PATIENCE:
        return structs.replace(known, failures=failures), (ReportUnreadable(cause, lasts=False),)
    known = structs.replace(known, failures=failures, figures=None)
    report = ReportUnreadable(cause, lasts=True)
    if failures > PATIENCE and not known.written:
        return known, (report,)
    return known, (report, GiveBack("their usage cannot be read"))


def removed(known: BeSuppression, path: str) -> BeSuppression:
    """A quota of ours was removed from a group."""
    written = known.written - {path}
    return structs.replace(known, written=written, quota=known.quota if written else None)


# -- words --------------------------------------------------------------------------------------------------


def quota_words(quota: int | None) -> str:
    """Name a quota."""
    return "no CFS quota" if quota in (None, UNLIMITED) else f"a CFS quota of {quota / PERIOD:.2f} CPUs"


def reason(known: BeSuppression, settings: SuppressionSettings) -> str:
    """Say where the budget comes from."""
    if known.figures is None:
        return "usage is not known"
    milli, usage = known.figures
    shares, whole = shares_of(usage), usage.capacity / 1000
    kept = max(usage.capacity - usage.allocatable, usage.reservation, 0) / 1000
    system = f"{kept:.1f} are kept back" if kept > shares.system else f"the system uses {shares.system:.1f}"
    return (
        f"the budget is {milli / 1000:.1f} CPUs: {settings.threshold} % of {whole:.0f} are"
        f" {whole * settings.threshold / 100:.1f}, other pods use {shares.others:.1f}, {system}"
    )


def suppression_note(
    known: BeSuppression, settings: SuppressionSettings, state: NodeState, container: Container
) -> str:
    """Return how a container is suppressed; empty where it is not."""
    if not applies_to(state, container.pod):
        return ""
    why, pod = reason(known, settings), container.pod
    if container.placement.pool is Pool.BE and state.pools.be_now is not None:
        return f"BE is suppressed: it runs on {state.wanted(container)} now, of {state.pools.be}; {why}."
    if known.quota not in (None, UNLIMITED) and is_be(pod.qos, pod.kube_qos):
        return f"BE is suppressed: all BE pods together have {quota_words(known.quota)}; {why}."
    return ""
