"""The changes that enforcement would make, from a state and the cpusets in the kernel."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.inflight import InflightCall
from proxy.engine.node import Node
from proxy.engine.plan_differences import (
    PlanChange,
    enforcement_change_note,
    live_containers,
    plan_differences,
    removable_quotas,
)
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import KeepQuota
from proxy.model.mode import NodeMode
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)
ALL, BOTH = MACHINE.online, MACHINE.memory_nodes
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
OWNED = CpuSet.parse("2-3")
SHARED = ALL - OWNED
OWNER = Pod("s-1", "u1", "ns", "owner", qos=QosClass.LSE, cpuset=OWNED, cgroup_parent="/kubepods/podu1")
SHARER = Pod("s-2", "u2", "ns", "web", qos=QosClass.LS)


def container(key: str, pod: Pod, placement: Placement, phase: Phase = Phase.RUNNING) -> Container:
    owner = pod.key if placement.pool is Pool.OWN else ""
    return Container(key, "c", pod, Request(), placement, phase, owner=owner)


OWN = container("own", OWNER, Placement(Pool.OWN, OWNED, Mask((0,))))
WEB = container("web", SHARER, Placement(Pool.SHARED, CpuSet(), BOTH))


def state(*containers: Container, mode: NodeMode = NodeMode.OBSERVE) -> NodeState:
    return structs.replace(NodeState.of(NODE, [OWNER, SHARER], containers), mode=mode)


def test_cpus_that_observed_containers_would_get_are_reported() -> None:
    there = state(OWN, WEB)
    cpusets = {"own": (ALL, BOTH), "web": (ALL, BOTH)}
    own, web = plan_differences(there, live_containers(there), cpusets, {"q/u1": 200_000, "qc/own": -1})
    assert (own.change, own.cpus, own.desired_cpus) == (PlanChange.PIN, ALL, OWNED)
    assert (own.mems, own.desired_mems, own.rebinds_memory) == (BOTH, Mask((0,)), True)
    assert (own.quota, own.pod_quota) == (None, 200_000)
    assert (web.change, web.desired_cpus, web.rebinds_memory) == (PlanChange.JOIN_POOL, SHARED, False)
    assert not own.applied
    assert not web.applied


@pytest.mark.parametrize("mode", [NodeMode.OBSERVE, NodeMode.ENFORCE])
def test_a_container_on_its_planned_cpus_would_not_change(mode: NodeMode) -> None:
    there = state(OWN, WEB, mode=mode)
    cpusets = {"own": (OWNED, Mask((0,))), "web": (SHARED, BOTH)}
    rows = plan_differences(there, live_containers(there), cpusets, {})
    assert [(row.change, row.is_changed, row.rebinds_memory) for row in rows] == [
        (PlanChange.NONE, False, False)
    ] * 2


def test_a_difference_on_an_enforced_container_is_drift() -> None:
    there = state(OWN, WEB, mode=NodeMode.ENFORCE)
    own, web = plan_differences(
        there, live_containers(there), {"own": (ALL, BOTH), "web": (SHARED, BOTH)}, {}
    )
    assert (own.change, own.applied, own.rebinds_memory) == (PlanChange.DRIFT, True, False)
    assert web.change is PlanChange.NONE


def test_an_unreadable_container_is_not_reported() -> None:
    there = state(OWN)
    (own,) = plan_differences(there, live_containers(there), {}, {})
    assert (own.change, own.cpus, own.mems, own.is_changed) == (PlanChange.NONE, None, None, False)


@pytest.mark.parametrize("mode", [NodeMode.OBSERVE, NodeMode.ENFORCE])
@pytest.mark.parametrize(("container_id", "differs"), [("own", False), ("web", True), ("gone", True)])
def test_a_container_with_a_call_in_flight_may_get_other_cpus_by_it(
    mode: NodeMode, container_id: str, *, differs: bool
) -> None:
    there = state(OWN, WEB, mode=mode)
    there = structs.replace(there, inflight=there.inflight.added(InflightCall(1, container_id, ALL)))
    own, web = plan_differences(there, [OWN, WEB], {"own": (ALL, BOTH), "web": (SHARED, BOTH)}, {})
    change = PlanChange.DRIFT if mode is NodeMode.ENFORCE else PlanChange.PIN
    assert (own.cpus, own.change) == (ALL, change if differs else PlanChange.NONE)
    assert web.change is PlanChange.NONE


@pytest.mark.parametrize("mode", [NodeMode.OBSERVE, NodeMode.ENFORCE])
def test_a_call_that_got_no_answer_hides_no_difference(mode: NodeMode) -> None:
    there = state(OWN, mode=mode)
    orphan = InflightCall(1, "own", ALL, orphaned_since=1.0)
    there = structs.replace(there, inflight=there.inflight.added(orphan))
    (own,) = plan_differences(there, [OWN], {"own": (ALL, BOTH)}, {})
    assert own.change is (PlanChange.DRIFT if mode is NodeMode.ENFORCE else PlanChange.PIN)
    awaited = structs.replace(there, inflight=there.inflight.added(InflightCall(2, "own", OWNED)))
    (own,) = plan_differences(awaited, [OWN], {"own": (ALL, BOTH)}, {})
    assert own.change is PlanChange.NONE


@pytest.mark.parametrize(
    ("quotas", "own", "web"),
    [
        ({}, (None, None), (None, None)),
        ({"qc/own": 1}, (1, None), (None, None)),
        ({"q/u1": 2}, (None, 2), (None, None)),
        ({"qc/own": -1, "q/u1": -1}, (None, None), (None, None)),
        ({"qc/web": 3, "q/u1": 2}, (None, 2), (3, None)),
    ],
)
def test_a_quota_of_a_pod_is_removed_from_its_owners(
    quotas: dict[str, int], own: tuple[int | None, int | None], web: tuple[int | None, int | None]
) -> None:
    beside = structs.replace(WEB, pod=OWNER)
    there = state(OWN, beside, mode=NodeMode.ENFORCE)
    rows = plan_differences(there, [OWN, beside], {"own": (OWNED, Mask((0,))), "web": (SHARED, BOTH)}, quotas)
    assert [(row.quota, row.pod_quota) for row in rows] == [own, web]
    assert [row.is_changed for row in rows] == [own != (None, None), web != (None, None)]


def test_containers_are_in_the_order_of_their_names() -> None:
    names = {"z": "a", "x": "b", "y": "b"}
    there = state(*(structs.replace(WEB, id=key, name=name) for key, name in names.items()))
    assert [(c.name, c.id) for c in live_containers(there)] == [("a", "z"), ("b", "x"), ("b", "y")]


def test_only_containers_that_may_run_are_compared() -> None:
    phases = (Phase.CREATING, Phase.CREATED, Phase.STARTING, Phase.RUNNING, Phase.EXITED)
    there = state(*(structs.replace(WEB, id=phase.value, phase=phase) for phase in phases))
    assert [c.phase for c in live_containers(there)] == [Phase.RUNNING, Phase.STARTING]


def test_quotas_of_owners_and_their_pods_would_be_removed() -> None:
    there = state(OWN, WEB)
    assert removable_quotas(there, live_containers(there)) == {
        "q/u1": ("/kubepods/podu1", ""),
        "qc/own": ("/kubepods/podu1", "own"),
    }
    assert removable_quotas(there, [WEB]) == {}


@pytest.mark.parametrize("keep", KeepQuota)
@pytest.mark.parametrize("containers", [1, 2])
def test_quotas_that_a_setting_keeps_would_not_be_removed(keep: KeepQuota, containers: int) -> None:
    """The number of containers of a pod is read from the newest facts about the pod."""
    requests = PodRequests("u1", tuple(ContainerResources(str(n)) for n in range(containers)))
    known = structs.replace(OWNER, requests=requests)
    there = structs.replace(
        NodeState.of(changed_copy(NODE, keep_quota=keep), [known, SHARER], [OWN]), mode=NodeMode.OBSERVE
    )
    stays = keep is KeepQuota.ALWAYS or (keep is KeepQuota.SEVERAL_CONTAINERS and containers > 1)
    assert bool(removable_quotas(there, [OWN])) is not stays


@pytest.mark.parametrize(
    ("mode", "applied", "reported"),
    [
        (NodeMode.ENFORCE, True, ""),
        (NodeMode.ENFORCE, False, "the plan is applied to this pod since then"),
        (NodeMode.OBSERVE, False, ""),
        (NodeMode.RELEASED, True, "the plan is no longer applied to this pod"),
    ],
)
@pytest.mark.parametrize("key", ["own", "s-1"])
def test_whether_a_decision_is_applied_may_change(
    mode: NodeMode, key: str, reported: str, *, applied: bool
) -> None:
    words = enforcement_change_note(state(OWN, mode=mode), key, applied=applied)
    assert words.partition(":")[0] == reported
    assert enforcement_change_note(state(OWN, mode=mode), "gone", applied=applied) == ""
