"""BE suppression: BE (best effort) pods use CPUs that others leave idle, up to a threshold of the node.

Theory of operation. In each round the counters of CPU time are read. From two readings follow the CPUs in use
(``be_usage``), and from these the budget of BE pods (``proxy.pools.be_suppression``). The budget takes effect
in one of two ways:

    cpuset      the BE pool of the state is narrowed; the effect ``Change`` has its containers follow
    cfs-quota   the group above all BE pods gets a quota, by what it has now:
                LimitQuota -> BeQuotaRead -> WriteBeQuota -> BeQuotaWritten

Without usage figures nothing changes for MISSED_ROUNDS rounds. Then every limit is removed, as with
``SuppressionEnded``, because BE pods must not starve under an outdated budget. A quota is recorded at
BeQuotaRead, before it is written, and stays recorded until BeQuotaRemoved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, structs

from proxy.engine.be_usage import UsageQuery, UsageReading, rates, shares_of, usage_of
from proxy.engine.enforcement import applies_to, observes_any
from proxy.model.idset import CpuSet
from proxy.model.koordinator import SuppressMode
from proxy.model.machine import Machine
from proxy.model.workload import CFS_PERIOD_US, Container, KubeQos, Pool, QosClass
from proxy.pools.be_suppression import THRESHOLD, Usage, budget, choose_cpus, cpu_count_for, is_be, quota_for
from proxy.pools.claims import UNLIMITED
from proxy.pools.cpu_location import CpuLocation, locations_of
from proxy.pools.published_pools import AnnotatedCpus, Withheld

if TYPE_CHECKING:
    from proxy.engine.state import NodeState

SUPPRESSION_RECORD = "b/suppress"
"""The ledger's key of the record of quotas that must be removed later."""
MISSED_ROUNDS = 10
"""Rounds without usage figures after which every limit is removed."""
NO_QUOTA = "no CFS quota"
SLACK_MILLI = 250
"""The budget must exceed a number of CPUs by this much to add one; if not, BE pods would move constantly."""


class SuppressionSettings(Struct, frozen=True):
    """The configuration of BE suppression.

    Attributes:
        mode: How BE pods are suppressed.
        threshold: Percent of the node's CPUs that all pods and the system may use together.
        least: Percent of the node's CPUs that BE pods always have; None for no minimum.
        period: Seconds between rounds.
    """

    mode: SuppressMode = SuppressMode.OFF
    threshold: int = THRESHOLD
    least: int | None = None
    period: float = 1.0


class SuppressionChange(Struct, frozen=True):
    """A change of the CPUs or quota of BE pods: seconds since the epoch, the values as text, the reason."""

    when: float
    before: str
    after: str
    reason: str


class BeSuppression(Struct, frozen=True):
    """The known facts about BE suppression.

    Attributes:
        reading: The last reading of the counters.
        failures: Rounds without usage figures since the last round with them.
        above: The cgroup above all BE pods; empty until it is known.
        figures: The budget of the last round in milli-CPUs, and the usage from which it was computed.
        quota: The CFS quota in effect above BE pods; None if it is unknown.
        written: Cgroups with a quota that topoproxy wrote and must remove again; the ledger has them.
        change: The last change of the CPUs or quota of BE pods.
        locations: A machine and the locations of its CPUs, computed once.
    """

    reading: UsageReading | None = None
    failures: int = 0
    above: str = ""
    figures: tuple[int, Usage] | None = None
    quota: int | None = None
    written: frozenset[str] = frozenset()
    change: SuppressionChange | None = None
    locations: tuple[Machine | None, tuple[CpuLocation, ...]] = (None, ())

    @staticmethod
    def load(record: object) -> frozenset[str]:
        """Return the cgroups that a ledger names."""
        paths = record if isinstance(record, list) else []
        return frozenset(path for path in paths if isinstance(path, str))

    def dump(self) -> dict[str, dict[str, object]]:
        """Return the ledger's record of the groups, if there are any, as plain data by its key."""
        return {SUPPRESSION_RECORD: {"quota": sorted(self.written)}} if self.written else {}


# -- events and effects -------------------------------------------------------------------------------------


class LimitQuota(Struct, frozen=True):
    """Limit BE pods to a budget by a quota; answered by ``BeQuotaRead``.

    Attributes:
        path: The cgroup above them.
        milli: The budget in milli-CPUs.
        before: The quota that was in effect there; None if it is unknown.
        reason: How the budget was computed.
        matters: Whether there are pods that are affected if this fails.
    """

    path: str
    milli: int
    before: int | None
    reason: str
    matters: bool


class WriteBeQuota(Struct, frozen=True):
    """Write the quota that follows from a budget, once the ledger has its record.

    Attributes:
        limit: The budget.
        quota: The quota.
    """

    limit: LimitQuota
    quota: int


class RemoveBeQuotas(Struct, frozen=True):
    """Remove quotas of topoproxy; each is answered by ``BeQuotaRemoved``.

    Attributes:
        paths: The groups.
        reason: Why BE is no longer suppressed; empty if it is still suppressed.
    """

    paths: tuple[str, ...]
    reason: str = ""


class ReportBeChange(Struct, frozen=True):
    """Report a change of the CPUs or quota of BE pods."""

    change: SuppressionChange


class ReportNoBeGroup(Struct, frozen=True):
    """Report that there are BE pods but no cgroup above them."""


class ReportUnreadable(Struct, frozen=True):
    """Count a round without usage figures, and report the cause if that lasts."""

    cause: str
    lasts: bool


class BeQuotasRead(Struct, frozen=True):
    """The ledger of an earlier run names groups with a quota of topoproxy."""

    paths: frozenset[str]


class BeUsageRead(Struct, frozen=True):
    """The counters of CPU time were read.

    Attributes:
        when: Seconds since the epoch.
        settings: The configuration.
        query: The counters that were read.
        reading: The values of the counters.
        above: The cgroup above all BE pods; empty if it was not found.
    """

    when: float
    settings: SuppressionSettings
    query: UsageQuery
    reading: UsageReading
    above: str = ""


class BeUsageUnreadable(Struct, frozen=True):
    """The counters could not be read."""

    when: float
    cause: str


class SuppressionEnded(Struct, frozen=True):
    """BE is no longer suppressed, or not for the time being."""

    when: float
    reason: str


class BeQuotaRead(Struct, frozen=True):
    """The group above BE pods has this quota now; the result of ``LimitQuota``."""

    limit: LimitQuota
    quota: int


class BeQuotaWritten(Struct, frozen=True):
    """A quota is in effect; the result of ``WriteBeQuota``."""

    when: float
    written: WriteBeQuota


class BeQuotaRemoved(Struct, frozen=True):
    """A quota of topoproxy was removed, or its group is gone; ``reason`` is that of ``RemoveBeQuotas``."""

    when: float
    path: str
    reason: str = ""


SuppressionEvent = (
    BeUsageRead | BeUsageUnreadable | SuppressionEnded | BeQuotaRead | BeQuotaWritten | BeQuotaRemoved
)
SuppressionEffect = (
    LimitQuota | WriteBeQuota | RemoveBeQuotas | ReportBeChange | ReportNoBeGroup | ReportUnreadable
)
SuppressionStep = tuple["NodeState", tuple[SuppressionEffect, ...]]


# -- transitions --------------------------------------------------------------------------------------------


def step(state: NodeState, event: SuppressionEvent) -> SuppressionStep:
    """Return the state after an event, and the effects besides the change of the pools."""
    known = state.facts.suppression
    match event:
        case BeUsageRead():
            return _measured(state, event)
        case BeUsageUnreadable(when, cause):
            if known.failures + 1 >= MISSED_ROUNDS:
                known = structs.replace(known, reading=None)  # later rates would be averages over the outage
            return _unreadable(state, known, when, cause)
        case SuppressionEnded(when, reason):
            # Rates that are computed from an old reading would be averages over the pause.
            ended = structs.replace(known, reading=None, figures=None, failures=0)
            return _given_back(state, ended, when, reason)
        case BeQuotaRead(limit, quota):
            return _quota_read(state, known, limit, quota)
        case BeQuotaWritten(when, WriteBeQuota(limit, quota)):
            change = SuppressionChange(when, quota_text(limit.before), quota_text(quota), limit.reason)
            known = structs.replace(known, quota=quota, change=change)
            return _knowing(state, known), (ReportBeChange(change),)
        case BeQuotaRemoved(when, path, reason):
            return _quota_removed(
                state, known, path, SuppressionChange(when, quota_text(known.quota), NO_QUOTA, reason)
            )


def _knowing(state: NodeState, known: BeSuppression) -> NodeState:
    return state.with_facts(suppression=known)


def _measured(state: NodeState, event: BeUsageRead) -> SuppressionStep:
    settings, query, before = event.settings, event.query, state.facts.suppression.reading
    above = event.above or state.facts.suppression.above
    known = structs.replace(state.facts.suppression, reading=event.reading, above=above)
    if before is None:
        return _knowing(state, known), ()
    usage_rates = rates(before, event.reading, len(state.node.machine.online))
    if usage_rates is None:
        return _unreadable(state, known, event.when, "the counters went backwards")
    usage = usage_of(state, query, usage_rates)
    milli = budget(usage, settings.threshold, settings.least)
    known = structs.replace(known, failures=0, figures=(milli, usage))
    reason, matters = budget_reason(known, settings), bool(query.inside)
    if settings.mode is not SuppressMode.QUOTA:
        return _narrowed(state, known, event.when, milli, reason)
    if not above:
        return _knowing(state, known), ((ReportNoBeGroup(),) if matters else ())
    limit = LimitQuota(above, milli, known.quota, reason, matters)
    return _knowing(state, known), (*_removal(known.written - {above}), limit)


def _narrowed(
    state: NodeState, known: BeSuppression, when: float, milli: int, reason: str
) -> SuppressionStep:
    pool, current, machine = state.pools.be, state.pools.cpus_of(Pool.BE), state.node.machine
    if known.locations[0] is not machine:
        known = structs.replace(known, locations=(machine, locations_of(machine)))
    count = cpu_count_for(milli, len(current), len(machine.online))
    if count > len(current) >= cpu_count_for(milli - SLACK_MILLI, len(current), len(machine.online)):
        return _knowing(state, known), ()
    if count >= len(pool):
        return _limited(state, known, None, when, reason)
    lsr = [
        AnnotatedCpus(QosClass.LSR, owner.cpus) for owner in state.owners.values() if not owner.excludes_be
    ]
    limit = choose_cpus(known.locations[1], lsr, Withheld(reserved=machine.online - pool), milli, current)
    return _limited(state, known, limit, when, reason) if limit else (_knowing(state, known), ())


def _limited(
    state: NodeState, known: BeSuppression, limit: CpuSet | None, when: float, reason: str
) -> SuppressionStep:
    """Narrow the BE pool to a limit; None restores it."""
    after = state.with_be_limit(limit)
    pool_before, pool_after = state.pools.cpus_of(Pool.BE), after.pools.cpus_of(Pool.BE)
    if pool_before == pool_after:
        return _knowing(after, known), ()
    change = SuppressionChange(when, f"CPUs {pool_before}", f"CPUs {pool_after}", reason)
    return _knowing(after, structs.replace(known, change=change)), (ReportBeChange(change),)


def _unreadable(state: NodeState, known: BeSuppression, when: float, cause: str) -> SuppressionStep:
    failures = known.failures + 1
    known = structs.replace(known, failures=failures)
    report = ReportUnreadable(cause, lasts=failures >= MISSED_ROUNDS)
    if not report.lasts:
        return _knowing(state, known), (report,)
    known = structs.replace(known, figures=None)
    if failures > MISSED_ROUNDS and not known.written:
        return _knowing(state, known), (report,)
    after, effects = _given_back(state, known, when, "their usage cannot be read")
    return after, (report, *effects)


def _given_back(state: NodeState, known: BeSuppression, when: float, reason: str) -> SuppressionStep:
    after, effects = _limited(state, known, None, when, reason)
    return after, (*effects, *_removal(known.written, reason))


def _removal(paths: frozenset[str], reason: str = "") -> tuple[RemoveBeQuotas, ...]:
    return (RemoveBeQuotas(tuple(sorted(paths)), reason),) if paths else ()


def _quota_read(state: NodeState, known: BeSuppression, limit: LimitQuota, quota: int) -> SuppressionStep:
    target = quota_for(limit.milli, len(state.node.machine.online), quota)
    known = structs.replace(known, quota=quota)
    if target is None or target == quota:
        return _knowing(state, known), ()
    known = structs.replace(known, written=known.written | {limit.path})
    return _knowing(state, known), (WriteBeQuota(limit, target),)


def _quota_removed(
    state: NodeState, known: BeSuppression, path: str, change: SuppressionChange
) -> SuppressionStep:
    written = known.written - {path}
    if written:
        return _knowing(state, structs.replace(known, written=written)), ()
    known = structs.replace(known, written=written, quota=None)
    if not change.reason:
        return _knowing(state, known), ()
    return _knowing(state, structs.replace(known, change=change)), (ReportBeChange(change),)


# -- questions ----------------------------------------------------------------------------------------------


def suppression_obstacle(state: NodeState, settings: SuppressionSettings) -> str:
    """Return why BE must not be suppressed now, as text; empty if it may be."""
    if state.mode.in_release:
        return "the node is released"
    if not applies_to(state, None):
        return "the node is observed"
    above = [pod for pod in state.pods.values() if pod.kube_qos is KubeQos.BEST_EFFORT]
    if settings.mode is SuppressMode.QUOTA and observes_any(state, above):
        return "the quota would limit BE pods that are observed"
    return ""


# -- words --------------------------------------------------------------------------------------------------


def quota_text(quota: int | None) -> str:
    """Return a quota as text."""
    return NO_QUOTA if quota in (None, UNLIMITED) else f"a CFS quota of {quota / CFS_PERIOD_US:.2f} CPUs"


def budget_reason(known: BeSuppression, settings: SuppressionSettings) -> str:
    """Explain how the budget was computed."""
    if known.figures is None:
        return "usage is not known"
    milli, usage = known.figures
    shares, whole = shares_of(usage), usage.capacity / 1000
    withheld = max(usage.capacity - usage.allocatable, usage.reservation, 0) / 1000
    system = (
        f"{withheld:.1f} are kept back"
        if withheld > shares.system
        else f"the system uses {shares.system:.1f}"
    )
    bound = ""
    if settings.least is not None and milli > budget(usage, settings.threshold):
        bound = f"at least {settings.least} % of {whole:.0f}, because "
    return (
        f"the budget is {milli / 1000:.1f} CPUs: {bound}{settings.threshold} % of {whole:.0f} are"
        f" {whole * settings.threshold / 100:.1f}, other pods use {shares.others:.1f}, {system}"
    )


def suppression_note(
    known: BeSuppression, settings: SuppressionSettings, state: NodeState, container: Container
) -> str:
    """Return how a container is suppressed; empty if it is not."""
    if not applies_to(state, container.pod):
        return ""
    reason, pod = budget_reason(known, settings), container.pod
    if container.placement.pool is Pool.BE and state.pools.be_now is not None:
        current = state.desired_cpus(container)
        return f"BE is suppressed: it runs on {current} now, of {state.pools.be}; {reason}."
    if known.quota not in (None, UNLIMITED) and is_be(pod.qos, pod.kube_qos):
        return f"BE is suppressed: all BE pods together have {quota_text(known.quota)}; {reason}."
    return ""
