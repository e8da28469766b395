"""BE suppression as playbooks, on 16 CPUs with a usage that the test sets."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.be_usage import UsageQuery, UsageReading
from proxy.engine.enforcement_state import Enforcement
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_effects import Change, NodeEffects, PutRecord
from proxy.engine.state import NodeState
from proxy.engine.suppression import (
    MISSED_ROUNDS,
    SUPPRESSION_RECORD,
    BeQuotaRead,
    BeQuotaRemoved,
    BeQuotasRead,
    BeQuotaWritten,
    BeSuppression,
    BeUsageRead,
    BeUsageUnreadable,
    LimitQuota,
    RemoveBeQuotas,
    ReportBeChange,
    ReportNoBeGroup,
    ReportUnreadable,
    SuppressionChange,
    SuppressionEnded,
    SuppressionSettings,
    WriteBeQuota,
    budget_reason,
    quota_text,
    suppression_note,
    suppression_obstacle,
)
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import SuppressMode
from proxy.model.mode import NodeMode
from proxy.model.pod_selection import PodSelection
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.pools.be_suppression import Usage
from proxy.pools.claims import UNLIMITED
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy
from tests.testkit.playbook import Playbook

S = 1_000_000_000
CPUSET, QUOTA = SuppressionSettings(SuppressMode.CPUSET), SuppressionSettings(SuppressMode.QUOTA)
MACHINE = regular_machine(1, 2, 4, 2)
STATE = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))
PODS = UsageQuery({}, frozenset(), frozenset({"be"}), ())
GROUP = "kubepods/besteffort"
ROW = {"quota": [GROUP]}


def read(
    state: NodeState, used: float, settings: SuppressionSettings = CPUSET, above: str = ""
) -> tuple[NodeState, NodeEffects]:
    """Read the usage a second later, with ``used`` CPUs in use by pods that are not BE."""
    last = state.facts.suppression.reading or UsageReading(0, 0, {"ls": {"x": 0}})
    counter = last.groups["ls"]["x"] + int(used * S)
    reading = UsageReading(last.at + S, counter, {"ls": {"x": counter}})
    return handle(state, BeUsageRead(7.0, settings, PODS, reading, above))


def running(settings: SuppressionSettings = CPUSET, above: str = "") -> NodeState:
    state, effects = read(STATE, 0, settings, above)
    assert effects == (), "a single reading yields no usage"
    return state


def be_cpus(state: NodeState) -> int:
    return len(state.pools.cpus_of(Pool.BE))


@pytest.mark.parametrize(
    ("used", "cpus"), [pytest.param(0, 11, id="idle"), (6, 5), (9, 2), pytest.param(15, 2, id="never less")]
)
def test_be_gets_the_unused_cpus_up_to_the_threshold(used: float, cpus: int) -> None:
    state, (change, report) = read(running(), used)
    known, why = state.facts.suppression, budget_reason(state.facts.suppression, CPUSET)
    assert be_cpus(state) == cpus
    assert isinstance(change, Change)
    reported = SuppressionChange(7.0, "CPUs 0-15", f"CPUs {state.pools.cpus_of(Pool.BE)}", why)
    assert (report, known.change) == (ReportBeChange(reported), reported)
    assert known.figures is not None
    assert known.figures[0] == 10400 - 1000 * used


def test_a_pool_that_is_small_enough_is_not_narrowed() -> None:
    state, effects = read(running(), 0, changed_copy(CPUSET, threshold=100))
    assert (effects, state.pools.be_now) == ((), None)


def test_a_budget_a_little_above_whole_cpus_adds_none() -> None:
    state, _ = read(running(), 4.45)
    assert be_cpus(state) == 6
    state, effects = read(state, 4.35)
    assert (effects, be_cpus(state)) == ((), 6), "6.05 CPUs"
    assert be_cpus(read(state, 4.1)[0]) == 7


def test_cpus_of_lsr_pods_are_taken_in_proportion_as_soon_as_there_are_some() -> None:
    pod = Pod("s", "u", "ns", "lsr", qos=QosClass.LSR)
    cpus = CpuSet.parse("0-1,8-9")  # a quarter of the machine
    placement = Placement(Pool.OWN, cpus, Mask((0,)), excludes_be=False)
    lsr = Container("c", "c", pod, Request(), placement, Phase.RUNNING, 0, "u")
    state, _ = read(running(), 6.4)
    assert len(state.pools.cpus_of(Pool.BE)) == 4
    assert len(state.pools.cpus_of(Pool.BE) & cpus) == 2
    state, (_, report) = read(state.with_pod(pod).changed(put=(lsr,)), 6.4)
    assert isinstance(report, ReportBeChange)
    assert len(state.pools.cpus_of(Pool.BE)) == 4
    assert len(state.pools.cpus_of(Pool.BE) & cpus) == 1


def test_a_quota_from_the_budget_to_its_end() -> None:
    scenario = Playbook(running(QUOTA, GROUP), handle)
    last = scenario.state.facts.suppression.reading
    assert last is not None
    later = UsageReading(last.at + S, 4 * S, {"ls": {"x": 4 * S}})
    scenario >> BeUsageRead(8.0, QUOTA, PODS, later)
    limit = LimitQuota(
        GROUP, 6400, None, budget_reason(scenario.state.facts.suppression, QUOTA), matters=True
    )
    assert scenario << limit
    write = WriteBeQuota(limit, 640_000)
    assert scenario >> BeQuotaRead(limit, -1) << PutRecord(SUPPRESSION_RECORD, ROW) << write, (
        "the ledger has it first"
    )
    assert scenario.state.facts.suppression.quota == -1
    change = SuppressionChange(9.0, "no CFS quota", "a CFS quota of 6.40 CPUs", limit.reason)
    assert scenario >> BeQuotaWritten(9.0, write) << ReportBeChange(change)
    assert scenario >> BeQuotaRead(limit, 640_000), "the quota is in effect already"
    assert scenario >> SuppressionEnded(10.0, "it stops") << RemoveBeQuotas((GROUP,), "it stops")
    over = SuppressionChange(11.0, "a CFS quota of 6.40 CPUs", "no CFS quota", "it stops")
    scenario >> BeQuotaRemoved(11.0, GROUP, "it stops") << PutRecord(SUPPRESSION_RECORD, None)
    assert scenario << ReportBeChange(over)
    assert (scenario.state.facts.suppression.quota, scenario.state.facts.suppression.change) == (None, over)


@pytest.mark.parametrize("inside", [frozenset({"be"}), frozenset()])
def test_no_quota_is_set_without_a_cgroup_above_the_be_pods(inside: frozenset[str]) -> None:
    query, reading = changed_copy(PODS, inside=inside), UsageReading(2 * S, 4 * S, {})
    _, effects = handle(running(QUOTA), BeUsageRead(8.0, QUOTA, query, reading))
    assert effects == ((ReportNoBeGroup(),) if inside else ())


def test_suppression_is_undone_after_a_while_without_readings() -> None:
    state, _ = read(running(), 6)
    for _ in range(MISSED_ROUNDS - 1):
        state, effects = handle(state, BeUsageUnreadable(8.0, "no"))
        assert effects == (ReportUnreadable("no", lasts=False),)
        assert state.facts.suppression.figures is not None
    assert be_cpus(state) == 5
    state, (_, *effects) = handle(state, BeUsageUnreadable(8.0, "no"))
    change = state.facts.suppression.change
    assert change is not None
    assert effects == [ReportUnreadable("no", lasts=True), ReportBeChange(change)]
    assert (change.after, change.reason) == ("CPUs 0-15", "their usage cannot be read")
    assert (be_cpus(state), state.facts.suppression.figures) == (16, None)
    state, effects = handle(state, BeUsageUnreadable(8.0, "no"))
    assert effects == (ReportUnreadable("no", lasts=True),), "the CPUs were released already"
    failures = state.facts.suppression.failures
    state, _ = handle(state, BeQuotasRead(frozenset({"g"})))
    known = changed_copy(state.facts.suppression, failures=failures)
    state = changed_copy(state, facts=changed_copy(state.facts, suppression=known))
    _, effects = handle(state, BeUsageUnreadable(8.0, "no"))
    remove = RemoveBeQuotas(("g",), "their usage cannot be read")
    assert effects == (ReportUnreadable("no", lasts=True), remove), (
        "a quota that could not be removed is retried"
    )


def test_usage_after_an_outage_is_not_averaged_over_the_outage() -> None:
    state, _ = read(running(), 6)
    for _ in range(MISSED_ROUNDS):
        state, _ = handle(state, BeUsageUnreadable(8.0, "no"))
    assert be_cpus(state) == 16
    counter = 6 * S + 600 * 9 * S  # 9 CPUs in use during ten minutes without readings
    reading = UsageReading(602 * S, counter, {"ls": {"x": counter}})
    state, effects = handle(state, BeUsageRead(609.0, CPUSET, PODS, reading))
    assert (effects, be_cpus(state)) == ((), 16), "there is no usage before the second reading"
    state, _ = read(state, 1)
    assert (be_cpus(state), state.facts.suppression.failures) == (10, 0)


def test_figures_end_with_the_suppression() -> None:
    """The next reading is the first one again: rates over a long pause would be those of the past."""
    state, _ = read(running(), 6)
    state, _ = handle(state, SuppressionEnded(9.0, "it is off"))
    known = state.facts.suppression
    assert (known.reading, known.figures, known.failures, be_cpus(state)) == (None, None, 0, 16)


def test_a_reading_resets_the_failure_count_and_a_decreasing_counter_is_a_failure() -> None:
    state, _ = handle(running(), BeUsageUnreadable(8.0, "no"))
    state, effects = handle(state, BeUsageRead(8.0, CPUSET, PODS, UsageReading(2 * S, -1, {})))
    assert effects == (ReportUnreadable("the counters went backwards", lasts=False),)
    assert state.facts.suppression.failures == 2
    state, _ = handle(state, BeUsageRead(8.0, CPUSET, PODS, UsageReading(3 * S, 0, {})))
    assert state.facts.suppression.failures == 0


def test_quotas_of_the_ledger_are_known_until_they_are_removed() -> None:
    assert BeSuppression.load(["b", "a", 3]) == {"a", "b"}
    assert BeSuppression.load("broken") == frozenset()
    scenario = Playbook(STATE, handle)
    assert scenario >> BeQuotasRead(frozenset({"b", "a"})), "the ledger has them already"
    assert scenario.state.facts.suppression == BeSuppression(above="a", written=frozenset({"a", "b"}))
    assert scenario >> BeQuotaRemoved(1.0, "a") << PutRecord(SUPPRESSION_RECORD, {"quota": ["b"]})
    assert scenario >> BeQuotaRemoved(1.0, "b") << PutRecord(SUPPRESSION_RECORD, None), (
        "nothing is reported of an earlier run"
    )
    assert scenario.state.facts.suppression.change is None


def test_quotas_of_other_groups_are_removed_before_the_next_is_written() -> None:
    state, _ = handle(running(QUOTA), BeQuotasRead(frozenset({"old"})))
    state, _ = read(state, 0, QUOTA, GROUP)
    _, effects = read(state, 0, QUOTA, GROUP)
    assert effects[0] == RemoveBeQuotas(("old",))
    assert isinstance(effects[1], LimitQuota)


def test_when_be_must_not_be_suppressed() -> None:
    assert suppression_obstacle(STATE, CPUSET) == ""
    assert (
        suppression_obstacle(changed_copy(STATE, mode=NodeMode.RELEASING), CPUSET) == "the node is released"
    )
    assert suppression_obstacle(changed_copy(STATE, mode=NodeMode.OBSERVE), CPUSET) == "the node is observed"


def test_a_quota_is_not_set_above_be_pods_that_are_observed() -> None:
    pod = Pod("s", "u", "ns", "be", kube_qos=KubeQos.BEST_EFFORT)
    other = Pod("t", "v", "ns", "ls", kube_qos=KubeQos.BURSTABLE)
    some = changed_copy(STATE, enforcement=Enforcement(PodSelection(percent=0)))
    observed = "the quota would limit BE pods that are observed"
    assert suppression_obstacle(some.with_pod(pod), QUOTA) == observed
    assert suppression_obstacle(some.with_pod(pod), CPUSET) == ""
    assert suppression_obstacle(some.with_pod(other), QUOTA) == "", "it is in another group"
    assert suppression_obstacle(STATE.with_pod(pod), QUOTA) == ""


def test_a_container_on_a_narrowed_pool_is_reported_with_its_cpus() -> None:
    pod = Pod("s", "u", "ns", "be", qos=QosClass.BE)
    container = Container("c1", "c", pod, Request(), Placement(Pool.BE, CpuSet(), Mask()), Phase.RUNNING)
    state = NodeState.of(STATE.node, (pod,), (container,), be_limit=CpuSet.parse("0-3"))
    note = suppression_note(BeSuppression(), CPUSET, state, container)
    assert note == "BE is suppressed: it runs on 0-3 now, of 0-15; usage is not known."
    assert (
        suppression_note(BeSuppression(), CPUSET, changed_copy(state, mode=NodeMode.OBSERVE), container) == ""
    )


def test_the_reason_of_a_suppression_is_described() -> None:
    assert quota_text(None) == quota_text(-1) == "no CFS quota"
    assert quota_text(240_000) == "a CFS quota of 2.40 CPUs"
    assert budget_reason(BeSuppression(), CPUSET) == "usage is not known"


@pytest.mark.parametrize(
    ("used", "kept", "system"),
    [
        (3.5, 0, "the system uses 1.5"),
        (3.5, 1000, "the system uses 1.5"),
        (3.5, 2500, "2.5 are kept back"),
        (2.0, 500, "0.5 are kept back"),
        (2.0, 0, "the system uses 0.0"),
    ],
)
def test_the_budget_is_explained_by_its_components(used: float, kept: int, system: str) -> None:
    usage = Usage(16_000, 16_000 - kept, used, pods={"ls": 2.0})
    text = budget_reason(BeSuppression(figures=(6900, usage)), CPUSET)
    budget = "the budget is 6.9 CPUs: 65 % of 16 are 10.4, other pods use 2.0"
    assert text == f"{budget}, {system}"


@pytest.mark.parametrize(("least", "milli"), [(None, 3400), (20, 3400), (25, 4000)])
def test_the_lower_bound_of_the_budget_is_named_if_it_decided(least: int | None, milli: int) -> None:
    usage = Usage(16_000, 16_000, 7.0, pods={"ls": 6.0})
    settings = changed_copy(CPUSET, least=least)
    text = budget_reason(BeSuppression(figures=(milli, usage)), settings)
    bound = "at least 25 % of 16, because " if least == 25 else ""
    budget = f"the budget is {milli / 1000:.1f} CPUs: {bound}65 % of 16 are 10.4, other pods use 6.0"
    assert text == f"{budget}, the system uses 1.0"


def test_a_group_without_a_limit_is_not_reported_as_suppressed() -> None:
    pod = Pod("s", "u", "ns", "be", qos=QosClass.BE)
    placement = Placement(Pool.BE, CpuSet(), Mask())
    container = Container("c1", "c", pod, Request(), placement, Phase.RUNNING)
    state = STATE.with_pod(pod).changed(put=(container,))
    for quota, is_limited in ((None, False), (UNLIMITED, False), (150_000, True)):
        note = suppression_note(BeSuppression(quota=quota), QUOTA, state, container)
        assert note.startswith("BE is suppressed: all BE pods together have") == is_limited, quota
        assert bool(note) == is_limited
