"""Which owners get a partition, which partitions are outdated, and records as plain data."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.partition import PartitionFacts, PartitionRecord, partition_cpus, shared_with
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy

MACHINE = described(1, 1, 4, 2)
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
def test_a_container_that_does_not_run_is_none(phase: Phase) -> None:
    assert partition_cpus(node(owner(phase=phase)), "x") is None


def test_a_container_that_owns_nothing_is_none() -> None:
    assert partition_cpus(node(sharing()), "ls") is None
    assert partition_cpus(node(), "x") is None


def test_what_is_outdated() -> None:
    known = PartitionFacts().making("x", RECORD)
    assert known.outdated(node(owner()), "isolated") == []
    ended = [("x", RECORD)]
    assert known.outdated(node(owner()), "root") == ended, "another kind is configured"
    assert known.outdated(node(owner()), "") == ended, "there are to be none"
    assert known.outdated(node(owner(cpus="2-3")), "isolated") == ended, "it has other CPUs"
    assert known.outdated(node(), "isolated") == ended, "it is gone"


def test_what_is_known() -> None:
    known = PartitionFacts().making("x", RECORD).explained("y", "no")
    assert known.without(("x", "z")) == PartitionFacts(why={"y": "no"})
    assert known.records == {"x": RECORD}


def test_a_record_as_plain_data() -> None:
    assert PartitionRecord.load(RECORD.dump()) == RECORD
    for broken in (
        {},
        {**RECORD.dump(), "path": ""},
        {**RECORD.dump(), "kind": 1},
        {**RECORD.dump(), "lent": "x"},
    ):
        with pytest.raises(ValueError, match="it is not a partition"):
            PartitionRecord.load(broken)
