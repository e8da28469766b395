"""Which owners get a partition, the life cycle of partitions as playbooks, and their records."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.handle import handle
from proxy.engine.inflight import InflightCall, InflightCalls
from proxy.engine.node import Node
from proxy.engine.node_effects import PutRecord
from proxy.engine.partition import (
    MakePartitions,
    PartitionFacts,
    PartitionMade,
    PartitionPlanned,
    PartitionRecord,
    PartitionRefused,
    PartitionsCompared,
    PartitionsDue,
    PartitionsEnded,
    PartitionsRead,
    PartitionState,
    ReportLostPartitions,
    makeable_cpus,
    partition_cpus,
    shared_with,
)
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy
from tests.testkit.playbook import Playbook

MACHINE = regular_machine(1, 1, 4, 2)
NODE = Node(MACHINE, CpuTopology.of(MACHINE))
POD = Pod("s-a", "a", "ns", "a")
RECORD = PartitionRecord(
    "kubepods/poda/x", CpuSet.parse("0-1"), "isolated", {"kubepods": CpuSet.parse("0-1")}
)


def owner(key: str = "x", cpus: str = "0-1", *, hard: bool = True, **more: object) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask(), excludes_be=hard)
    fields = {"placement": placement, "phase": Phase.RUNNING, "owner": f"a/{key}"} | more
    return Container(key, key, POD, Request(), **fields)


def node(*containers: Container) -> NodeState:
    return NodeState.of(NODE, (POD,), containers)


def with_hook(container: Container, extra: str) -> Container:
    placement = changed_copy(container.placement, hook_extra_cpus=CpuSet.parse(extra))
    return changed_copy(container, placement=placement)


def sharing(extra: str = "") -> Container:
    return with_hook(changed_copy(owner("ls"), placement=Placement(Pool.SHARED, CpuSet(), Mask())), extra)


@pytest.mark.parametrize(
    ("containers", "why"),
    [
        pytest.param([owner(), sharing()], "", id="alone"),
        pytest.param([owner(), sharing(extra="1")], "a hook lets ns/a/ls run on its CPUs", id="hook"),
        pytest.param([with_hook(owner(), "1")], "a hook has given it CPUs that are not its own", id="extra"),
        pytest.param([owner(hard=False)], "BE containers may run on its CPUs", id="LSR"),
        pytest.param([owner(), owner("y", "1-2", owner="a/x")], "ns/a/y has these CPUs too", id="pod"),
        pytest.param([owner(), owner("y", "1-2", phase=Phase.EXITED)], "", id="exited"),
        pytest.param([owner(cpus="8-9")], "it has none of its own CPUs now", id="offline"),
    ],
)
def test_an_owner_whose_cpus_no_other_container_uses_is_a_partition(
    containers: list[Container], why: str
) -> None:
    state = node(*containers)
    assert shared_with(state, containers[0]) == why
    assert partition_cpus(state, "x") == (None if why else CpuSet.parse("0-1"))


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.RUNNING])
def test_a_container_that_does_not_run_gets_no_partition(phase: Phase) -> None:
    assert partition_cpus(node(owner(phase=phase)), "x") is None


def test_a_container_without_exclusive_cpus_gets_no_partition() -> None:
    assert partition_cpus(node(sharing()), "ls") is None
    assert partition_cpus(node(), "x") is None
    others = node(sharing()).with_facts(partitions=PartitionFacts({"x": RECORD}))
    assert makeable_cpus(others, "ls") is None


def test_a_container_on_the_cpus_of_class_system_gets_no_partition() -> None:
    container = changed_copy(owner("sys"), placement=Placement(Pool.SYSTEM, CpuSet(), Mask()))
    state = NodeState.of(changed_copy(NODE, system=CpuSet.parse("0-1")), (POD,), (container,))
    assert state.desired_cpus(container) == CpuSet.parse("0-1")
    assert shared_with(state, container) == ""
    assert partition_cpus(state, "sys") is None


def test_outdated_partitions_are_found() -> None:
    known = PartitionFacts({"x": RECORD})
    assert known.outdated(node(owner()), "isolated") == []
    ended = [("x", RECORD)]
    assert known.outdated(node(owner()), "root") == ended, "another kind is configured"
    assert known.outdated(node(owner()), "") == ended, "no partitions are configured"
    assert known.outdated(node(owner(cpus="2-3")), "isolated") == ended, "it has other CPUs"
    assert known.outdated(node(), "isolated") == ended, "the container is gone"


def test_a_partition_is_planned_made_and_removed() -> None:
    scenario = Playbook(node(owner()), handle)
    assert scenario >> PartitionsDue() << MakePartitions(("x",))
    assert scenario >> PartitionPlanned("x", RECORD) << PutRecord("x/x", RECORD.dump())
    assert scenario >> PartitionsDue() << MakePartitions(()), "it is being made"
    assert scenario >> PartitionMade("x")
    assert scenario.state.facts.partitions == PartitionFacts({"x": RECORD})
    assert scenario >> PartitionsCompared({}) << ReportLostPartitions(())
    assert scenario >> PartitionsEnded(("x", "gone")) << PutRecord("x/x", None)
    assert scenario.state.facts.partitions == PartitionFacts()


def test_a_partition_that_the_kernel_refuses_has_its_reason_until_it_is_made() -> None:
    scenario = Playbook(node(owner()), handle)
    assert scenario >> PartitionPlanned("x", RECORD) << PutRecord("x/x", RECORD.dump())
    assert scenario >> PartitionsEnded(("x",)) << PutRecord("x/x", None)
    assert scenario >> PartitionRefused("x", "no")
    assert scenario.state.facts.partitions == PartitionFacts(obstacles={"x": "no"})
    assert scenario >> PartitionsDue(frozenset(("x",))) << MakePartitions(()), "not yet"
    assert scenario.state.facts.partitions.obstacles == {"x": "no"}
    assert scenario >> PartitionsDue() << MakePartitions(("x",))
    assert scenario >> PartitionPlanned("x", RECORD) << PutRecord("x/x", RECORD.dump()) >> PartitionMade("x")
    assert scenario.state.facts.partitions == PartitionFacts({"x": RECORD})


@pytest.mark.parametrize(
    ("containers", "why"),
    [
        pytest.param([owner(hard=False)], {"x": "BE containers may run on its CPUs"}, id="LSR"),
        pytest.param([owner(phase=Phase.CREATED)], {}, id="not started"),
        pytest.param([owner(phase=Phase.EXITED)], {}, id="exited"),
        pytest.param([sharing()], {}, id="it owns nothing"),
    ],
)
def test_containers_that_get_no_partition_have_a_reason(
    containers: list[Container], why: dict[str, str]
) -> None:
    scenario = Playbook(node(*containers), handle)
    assert scenario >> PartitionsDue() << MakePartitions(())
    assert scenario.state.facts.partitions.obstacles == why


@pytest.mark.parametrize(
    ("found", "state_text"),
    [
        (PartitionState("isolated", valid=False, reason="No cpu"), "isolated invalid (No cpu)"),
        (PartitionState("root", valid=True), "root"),
        (PartitionState("member", valid=False), "member"),
    ],
)
def test_a_partition_that_the_kernel_ended_is_reported_for_an_existing_container(
    found: PartitionState, state_text: str
) -> None:
    scenario = Playbook(node(owner()), handle)
    assert scenario >> PartitionsRead({"x": RECORD, "gone": RECORD}), "the ledger has the records already"
    assert scenario >> PartitionRefused("gone", "no")
    reported = f"the kernel turned it into {state_text}"
    assert (
        scenario
        >> PartitionsCompared({"x": found, "gone": found})
        << ReportLostPartitions(((scenario.state.containers["x"], reported),))
    )
    assert scenario.state.facts.partitions.obstacles == {"x": reported}, (
        "nothing is kept of a removed container"
    )


def test_when_a_partition_can_be_made() -> None:
    state = node(owner())
    assert makeable_cpus(state, "x") == CpuSet.parse("0-1")
    assert makeable_cpus(node(owner(hard=False)), "x") is None
    flying = changed_copy(state, inflight=InflightCalls().added(InflightCall(1, "x", CpuSet())))
    assert makeable_cpus(flying, "x") is None, "a call in flight may change its cpuset"
    other, _ = handle(state, PartitionsRead({"y": changed_copy(RECORD, cpus=CpuSet.parse("1-2"))}))
    assert makeable_cpus(other, "x") is None, "another partition still has some of them"
    other, _ = handle(state, PartitionsRead({"y": changed_copy(RECORD, cpus=CpuSet.parse("2-3"))}))
    assert makeable_cpus(other, "x") == CpuSet.parse("0-1")


def test_a_partition_record_survives_a_round_trip() -> None:
    assert PartitionRecord.load(RECORD.dump()) == RECORD
    for broken in (
        {},
        {**RECORD.dump(), "path": ""},
        {**RECORD.dump(), "kind": 1},
        {**RECORD.dump(), "lent": "x"},
    ):
        with pytest.raises(ValueError, match="it is not a partition"):
            PartitionRecord.load(broken)


def test_records_are_read_from_the_ledger() -> None:
    entries = {"x/a": RECORD.dump(), "x/b": {"path": 7}, "q/c": {}}
    assert PartitionFacts.load(entries) == ({"a": RECORD}, {"x/b": "it is not a partition"})
    assert PartitionFacts({"a": RECORD}).dump() == {"x/a": RECORD.dump()}
