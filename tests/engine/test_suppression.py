"""What a round of BE suppression decides: 16 CPUs; a test prescribes their use."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.be_usage import UsageQuery, UsageReading
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.engine.suppression import (
    PATIENCE,
    BeSuppression,
    GiveBack,
    LimitPool,
    LimitQuota,
    ReportUnreadable,
    SuppressionSettings,
    measured,
    quota_words,
    reason,
    removed,
    unreadable,
)
from proxy.model.koordinator import SuppressMode
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy

S = 1_000_000_000
CPUSET, QUOTA = SuppressionSettings(SuppressMode.CPUSET), SuppressionSettings(SuppressMode.QUOTA)
MACHINE = described(1, 2, 4, 2)
STATE = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))
PODS = UsageQuery({}, frozenset(), frozenset({"be"}), ())


def read(known: BeSuppression, used: float, settings: SuppressionSettings = CPUSET, state: NodeState = STATE):
    """A second after the last reading, with so many CPUs in use by pods that are not BE."""
    last = known.reading or UsageReading(0, 0, {"ls": {"x": 0}})
    counter = last.groups["ls"]["x"] + int(used * S)
    return measured(known, settings, state, PODS, UsageReading(last.at + S, counter, {"ls": {"x": counter}}))


def running(settings: SuppressionSettings = CPUSET) -> BeSuppression:
    known, effects = read(BeSuppression(), 0, settings)
    assert effects == (), "one reading says nothing"
    return known


@pytest.mark.parametrize(
    ("used", "cpus"), [pytest.param(0, 11, id="idle"), (6, 5), (9, 2), pytest.param(15, 2, id="never less")]
)
def test_be_gets_what_the_others_leave_up_to_the_threshold(used: float, cpus: int) -> None:
    known, (limit,) = read(running(), used)
    assert isinstance(limit, LimitPool)
    assert limit.cpus is not None
    assert (len(limit.cpus), limit.why) == (cpus, reason(known, CPUSET))
    assert known.figures is not None
    assert known.figures[0] == 10400 - 1000 * used


def test_a_pool_that_is_small_enough_is_not_narrowed() -> None:
    known, effects = read(running(), 0, changed_copy(CPUSET, threshold=100))
    assert effects == (LimitPool(None, reason(known, changed_copy(CPUSET, threshold=100))),)


def test_a_budget_a_little_above_whole_cpus_adds_none() -> None:
    known, (limit,) = read(running(), 4.45)
    assert isinstance(limit, LimitPool)
    narrowed = STATE.suppressing(limit.cpus)
    known, effects = read(known, 4.35, state=narrowed)
    assert effects == (), "6.05 CPUs"
    _, (limit,) = read(known, 4.1, state=narrowed)
    assert isinstance(limit, LimitPool)
    assert len(limit.cpus or ()) == 7


@pytest.mark.parametrize("inside", [frozenset({"be"}), frozenset()])
def test_a_quota_is_for_the_executor_to_compare(inside: frozenset[str]) -> None:
    query = changed_copy(PODS, inside=inside)
    known = running(QUOTA)
    known, effects = measured(known, QUOTA, STATE, query, UsageReading(2 * S, 4 * S, {}))
    assert effects == (LimitQuota(6400, reason(known, QUOTA), matters=bool(inside)),)


def test_without_figures_everything_is_given_back_after_a_while() -> None:
    known, _ = read(running(), 6)
    for _ in range(PATIENCE - 1):
        known, effects = unreadable(known, "no")
        assert effects == (ReportUnreadable("no", lasts=False),)
        assert known.figures is not None
    give_back = GiveBack("their usage cannot be read")
    known, effects = unreadable(known, "no")
    assert effects == (ReportUnreadable("no", lasts=True), give_back)
    assert known.figures is None
    known, effects = unreadable(known, "no")
    assert effects == (ReportUnreadable("no", lasts=True),), "it has been given back"
    _, effects = unreadable(changed_copy(known, written=frozenset({"g"})), "no")
    assert effects == (ReportUnreadable("no", lasts=True), give_back), "what could not be is tried again"


def test_a_figure_ends_the_count_of_failures_and_a_counter_that_goes_back_is_one() -> None:
    known, _ = unreadable(running(), "no")
    known, effects = measured(known, CPUSET, STATE, PODS, UsageReading(2 * S, -1, {}))
    assert effects == (ReportUnreadable("the counters went backwards", lasts=False),)
    assert known.failures == 2
    known, _ = measured(known, CPUSET, STATE, PODS, UsageReading(3 * S, 0, {}))
    assert known.failures == 0


def test_quotas_of_the_ledger_are_known_until_they_are_removed() -> None:
    known = BeSuppression.load(["b", "a", 3])
    assert (known.above, known.written) == ("a", {"a", "b"})
    assert BeSuppression.load("broken") == BeSuppression()
    known = removed(changed_copy(known, quota=5), "a")
    assert (known.written, known.quota) == ({"b"}, 5)
    assert removed(known, "b").quota is None


def test_words() -> None:
    assert quota_words(None) == quota_words(-1) == "no CFS quota"
    assert quota_words(240_000) == "a CFS quota of 2.40 CPUs"
    assert reason(BeSuppression(), CPUSET) == "usage is not known"
