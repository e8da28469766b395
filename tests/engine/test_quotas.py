"""CFS quotas: the values that calls carry and record, and the removal and restoration of quotas."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_events import ContainerCreated
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_effects import PutRecord
from proxy.engine.node_state_facts import NodeStateFacts
from proxy.engine.quotas import (
    CpuControllerChecked,
    QuotaCarried,
    QuotaRecord,
    QuotaRefused,
    QuotaRequested,
    QuotaSaved,
    QuotasRead,
    QuotasRestored,
    QuotasToRemove,
    QuotasToRestore,
    QuotasUnsent,
    RemovedQuotas,
    RestoreQuotas,
    containers_without_quota,
    quotas_after_create,
    removable,
    writes_quotas,
)
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy
from tests.testkit.playbook import Playbook

MACHINE = regular_machine(1, 1, 4, 2)
POD = Pod("s-a", "a", "ns", "a", cgroup_parent="/kubepods/poda")
OWNER = Container(
    "x", "c", POD, Request(), Placement(Pool.OWN, CpuSet.parse("0-1"), Mask()), Phase.RUNNING, owner="a/c"
)
STATE = NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), (POD,), (OWNER,))


def learned(state: NodeState, known: RemovedQuotas, *, has_cpu_controller: bool = True) -> NodeState:
    """Return a state with these facts about quotas."""
    return structs.replace(state, facts=NodeStateFacts(quotas=known, has_cpu_controller=has_cpu_controller))


KNOWN = RemovedQuotas({"q/a": QuotaRecord(2, "kubepods/poda"), "qc/x": QuotaRecord(1)}, frozenset({"x"}))


def test_records_are_read_from_the_ledger() -> None:
    entries = {
        "q/a": {"quota": 2, "group": "kubepods/poda"},
        "qc/x": {"quota": 1},
        "c/x": {"quota": 9},
        "q/zero": {"quota": 0},
        "q/text": {"quota": "x"},
        "qc/group": {"quota": 1, "group": 7},
    }
    records, invalid = RemovedQuotas.load(entries)
    known = RemovedQuotas(records)
    assert known == changed_copy(KNOWN, unsent=frozenset())
    assert invalid == ["q/zero", "q/text", "qc/group"]


def test_quotas_removed_by_an_earlier_run_are_restored_if_they_can_be_written() -> None:
    play = Playbook(STATE, handle)
    assert play >> QuotasRead(KNOWN.records), "the records are in the ledger already"
    assert play.state.facts.quotas == changed_copy(KNOWN, unsent=frozenset())
    assert not writes_quotas(play.state)
    assert play >> CpuControllerChecked(found=True)
    assert writes_quotas(play.state)
    assert play >> QuotasRestored(("qc/x",)) << PutRecord("qc/x", None)
    assert play >> CpuControllerChecked(found=False)
    assert not writes_quotas(play.state)


@pytest.mark.parametrize(
    ("known", "requested", "off", "carries", "keeps"),
    [
        pytest.param(RemovedQuotas(), 5, False, 0, None, id="no owner: as it came"),
        pytest.param(RemovedQuotas(), 0, False, 0, None, id="no owner, no quota"),
        pytest.param(RemovedQuotas(), 5, True, -1, 5, id="an owner"),
        pytest.param(RemovedQuotas(), 0, True, -1, None, id="an owner, no quota asked for"),
        pytest.param(KNOWN, 0, True, -1, 1, id="an owner with a record"),
        pytest.param(KNOWN, 0, False, 1, 1, id="to be restored: the update restores it"),
        pytest.param(KNOWN, 5, False, 0, 5, id="to be restored: the newest counts"),
        pytest.param(KNOWN, -1, True, -1, None, id="an owner that shall have none"),
        pytest.param(KNOWN, -1, False, 0, None, id="to be restored, and shall have none"),
    ],
)
def test_quotas_that_an_update_carries_and_records(
    known: RemovedQuotas, requested: int, off: bool, carries: int, keeps: int | None
) -> None:
    after, carried = known.requested("x", requested, off=off)
    assert carried == carries
    record = after.records.get("qc/x")
    assert (record and record.quota) == keeps
    assert after.records.get("q/a") == known.records.get("q/a"), "the record of its pod is not affected"


def test_a_saved_quota_is_restored_or_stays_off() -> None:
    assert KNOWN.saved("x", -1) == changed_copy(KNOWN, unsent=frozenset())
    assert KNOWN.saved("x", 1) == RemovedQuotas({"q/a": QuotaRecord(2, "kubepods/poda")})
    assert (KNOWN.carried("x", off=True), KNOWN.carried("x", off=False), KNOWN.carried("y", off=False)) == (
        -1,
        1,
        0,
    )


@pytest.mark.parametrize(
    ("phase", "send", "write"),
    [
        (Phase.CREATED, ["x"], ["q/a"]),
        (Phase.RUNNING, ["x"], ["q/a", "qc/x"]),
        (Phase.EXITED, [], ["q/a"]),
    ],
)
def test_removed_quotas_are_restored(phase: Phase, send: list[str], write: list[str]) -> None:
    state = learned(STATE, KNOWN, has_cpu_controller=False).changed(put=(changed_copy(OWNER, phase=phase),))
    after, effects = handle(state, QuotasToRestore())
    restore = effects[-1]
    assert isinstance(restore, RestoreQuotas)
    written = restore.write
    assert ([*restore.send], sorted(written)) == (send, write)
    assert ("qc/x" in after.facts.quotas.records) is (phase is not Phase.EXITED)
    assert effects[:-1] == ((PutRecord("qc/x", None),) if phase is Phase.EXITED else ())
    assert written["q/a"] == (QuotaRecord(2, "kubepods/poda"), ("", ""))
    assert written.get("qc/x", (QuotaRecord(1), ("/kubepods/poda", "x"))) == (
        QuotaRecord(1),
        ("/kubepods/poda", "x"),
    )


def test_quotas_that_are_off_or_not_due_are_not_restored() -> None:
    nothing = RestoreQuotas((), {})
    off = learned(STATE, KNOWN)
    assert Playbook(off, handle) >> QuotasToRestore() << nothing
    assert containers_without_quota(off) == [OWNER]
    back = learned(STATE, KNOWN, has_cpu_controller=False)
    assert Playbook(back, handle) >> QuotasToRestore(frozenset(KNOWN.records)) << nothing
    assert containers_without_quota(back) == []


def test_quota_records_before_and_after_a_call() -> None:
    scenario = Playbook(learned(STATE, RemovedQuotas()), handle)
    records, row = {"qc/x": QuotaRecord(7)}, PutRecord("qc/x", {"quota": 7, "group": ""})
    assert scenario >> QuotasToRemove(records) << row
    assert scenario >> QuotasToRemove(records)
    assert scenario >> QuotasUnsent(("x",))
    assert scenario.state.facts.quotas.unsent == {"x"}
    assert scenario >> QuotaSaved("x", 7)  # it is older than the quota of the current call
    assert scenario.state.facts.quotas.unsent == {"x"}
    assert scenario >> QuotaSaved("x", -1)
    assert scenario.state.facts.quotas == RemovedQuotas(records)
    assert scenario >> QuotasRestored(("qc/x", "qc/other")) << PutRecord("qc/x", None)
    assert scenario.state.facts.quotas == RemovedQuotas()


def test_a_refused_update_leaves_the_record_as_it_was() -> None:
    former = QuotaRecord(7)
    row = PutRecord("qc/x", {"quota": 7, "group": ""})
    changed = {"qc/x": QuotaRecord(9)}
    scenario = Playbook(learned(STATE, RemovedQuotas(changed)), handle)
    assert scenario >> QuotaRefused("x", 0, former), "no quota was requested"
    assert scenario >> QuotaRefused("x", 8, former), "another request came later"
    assert scenario >> QuotaRefused("x", 9, former) << row
    assert scenario.state.facts.quotas == RemovedQuotas({"qc/x": former})
    assert (
        Playbook(learned(STATE, RemovedQuotas(changed)), handle)
        >> QuotaRefused("x", 9, None)
        << PutRecord("qc/x", None)
    )
    assert Playbook(learned(STATE, RemovedQuotas()), handle) >> QuotaRefused("x", -1, former) << row


def test_a_quota_that_a_hook_requests() -> None:
    scenario = Playbook(learned(STATE, RemovedQuotas()), handle)
    row = PutRecord("qc/x", {"quota": 9, "group": ""})
    assert scenario >> QuotaRequested("x", 9) << row << QuotaCarried(-1)
    assert scenario >> QuotaRequested("gone", 9) << QuotaCarried(0)


@pytest.mark.parametrize(
    ("requested", "off", "pool", "has_cpu_controller", "recorded"),
    [
        pytest.param(5, True, Pool.OWN, True, True, id="left out"),
        pytest.param(0, True, Pool.OWN, True, False, id="none was asked for"),
        pytest.param(5, False, Pool.OWN, True, True, id="off by now"),
        pytest.param(5, True, Pool.OWN, False, False, id="quotas are not written"),
        pytest.param(5, False, Pool.SHARED, True, False, id="it shares CPUs"),
    ],
)
def test_the_quota_of_a_create_without_a_quota(
    requested: int, off: bool, pool: Pool, has_cpu_controller: bool, recorded: bool
) -> None:
    cpus = CpuSet.parse("0-1") if pool is Pool.OWN else CpuSet()
    placement = Placement(pool, cpus, Mask(), cfs_quota_off=off)
    made = changed_copy(
        OWNER, id="t", phase=Phase.CREATING, placement=placement, request=Request(cpu_quota=requested)
    )
    state = learned(
        NodeState.of(STATE.node, (POD,), (made,)), RemovedQuotas(), has_cpu_controller=has_cpu_controller
    )
    after, effects = handle(state, ContainerCreated("t", "x"))
    row = PutRecord("qc/x", {"quota": requested, "group": ""})
    assert (row in effects) is recorded
    assert after.facts.quotas.records == ({"qc/x": QuotaRecord(requested)} if recorded else {})


@pytest.mark.parametrize(
    ("requested", "by_hook", "recorded"), [(5, 7, 7), (0, 7, 7), (5, -1, None), (5, 0, 5)]
)
def test_the_quota_that_a_hook_set_at_the_create_is_the_one_that_is_restored(
    requested: int, by_hook: int, recorded: int | None
) -> None:
    placement = Placement(Pool.OWN, CpuSet.parse("0-1"), Mask(), cfs_quota_off=True, hook_quota=by_hook)
    request = Request(cpu_quota=requested)
    made = changed_copy(OWNER, id="t", phase=Phase.CREATING, placement=placement, request=request)
    state = learned(NodeState.of(STATE.node, (POD,), (made,)), RemovedQuotas())
    after, _ = handle(state, ContainerCreated("t", "x"))
    assert after.facts.quotas.records == ({} if recorded is None else {"qc/x": QuotaRecord(recorded)})


def test_the_quota_of_a_create_is_not_recorded_on_a_node_that_only_observes() -> None:
    """The request was forwarded unchanged, with its quota."""
    placement = Placement(Pool.OWN, CpuSet.parse("0-1"), Mask(), cfs_quota_off=True)
    request = Request(cpu_quota=5)
    made = changed_copy(OWNER, id="t", phase=Phase.CREATING, placement=placement, request=request)
    before = {"qc/other": QuotaRecord(3)}
    state = learned(NodeState.of(STATE.node, (POD,), (made,)), RemovedQuotas(before))
    assert quotas_after_create(state, made).records == {**before, "qc/t": QuotaRecord(5)}
    observed = changed_copy(state, mode=NodeMode.OBSERVE)
    assert quotas_after_create(observed, made).records == before
    leaving = changed_copy(state, mode=NodeMode.RELEASING)
    assert "qc/t" in quotas_after_create(leaving, made).records, "a release that has begun restores it"


@pytest.mark.parametrize(
    ("mode", "records", "written"),
    [
        (NodeMode.ENFORCE, {}, True),
        (NodeMode.OBSERVE, {}, False),
        (NodeMode.OBSERVE, {"qc/x": QuotaRecord(3)}, True),
        (NodeMode.RELEASING, {}, True),
    ],
)
def test_quotas_are_written_if_some_are_to_be_off_or_may_be(
    mode: NodeMode, records: dict[str, QuotaRecord], written: bool
) -> None:
    state = changed_copy(learned(STATE, RemovedQuotas(records)), mode=mode)
    assert writes_quotas(state) is written
    assert not writes_quotas(state.with_facts(has_cpu_controller=False))


def test_only_owners_that_exist_and_are_not_observed_have_no_quota() -> None:
    sharing = changed_copy(OWNER, id="y", placement=Placement(Pool.SHARED, CpuSet(), Mask()), owner="")
    ended = changed_copy(OWNER, id="z", phase=Phase.EXITED)
    there = learned(NodeState.of(STATE.node, (POD,), (OWNER, sharing, ended)), RemovedQuotas())
    assert [container.id for container in containers_without_quota(there)] == ["x"]
    unknown = learned(NodeState.of(STATE.node, (), (OWNER,)), RemovedQuotas())
    assert [container.id for container in containers_without_quota(unknown)] == ["x"], (
        "its sandbox is not known"
    )
    assert containers_without_quota(changed_copy(there, mode=NodeMode.OBSERVE)) == []


def test_the_quota_of_a_container_that_owns_no_cpus_is_sent_with_its_request_and_not_recorded() -> None:
    placement, request = Placement(Pool.SHARED, CpuSet(), Mask()), Request(cpu_quota=5)
    made = changed_copy(OWNER, id="t", phase=Phase.CREATING, placement=placement, request=request, owner="")
    before = {"qc/other": QuotaRecord(3)}
    state = learned(NodeState.of(STATE.node, (POD,), (made,)), RemovedQuotas(before))
    assert quotas_after_create(state, made).records == before


def test_quotas_of_owners_are_removed() -> None:
    both = {"q/a": ("/kubepods/poda", ""), "qc/x": ("/kubepods/poda", "x")}
    assert removable(STATE, [OWNER]) == both
    assert removable(STATE, [changed_copy(OWNER, phase=Phase.CREATED)]) == {"q/a": both["q/a"]}
    again = changed_copy(POD, sandbox_id="s-a2", attempt=1)
    assert removable(STATE.with_pod(again), [OWNER]) == both, "another sandbox of the same pod"
    other = changed_copy(POD, sandbox_id="s-b", uid="b")
    assert removable(STATE.with_pod(other), [OWNER]) == {"qc/x": both["qc/x"]}, (
        "the cgroup is shared by several pods"
    )
