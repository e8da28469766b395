"""Fences around pods: how long a fence lasts, and which pods can have one."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.pod_fence import (
    ActiveFence,
    ActiveFences,
    fence_around,
    fence_cpus,
    has_group,
    has_slice,
    lowered,
    raised,
)
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine

WIDE, NARROW, NARROWER = CpuSet.parse("0-7"), CpuSet.parse("0-1"), CpuSet.parse("1")


def test_a_fence_stays_until_the_last_call_has_completed() -> None:
    fences: ActiveFences = raised({}, "pod", ActiveFence("p", NARROW, WIDE))
    fences = raised(fences, "pod", ActiveFence("p", NARROWER, NARROW))
    assert fences == {"pod": ActiveFence("p", NARROWER, WIDE, 2)}, "the cpuset before the first call counts"
    other = ActiveFence("o", NARROW, NARROW)
    fences = lowered(raised(fences, "other", other), "pod")
    assert fences == {"pod": ActiveFence("p", NARROWER, WIDE), "other": other}
    assert lowered(fences, "pod") == {"other": other}
    assert lowered(fences, "absent") == fences


def test_the_cpuset_of_a_fence_is_checked_for_each_container_in_its_cgroup() -> None:
    fences = {"pod": ActiveFence("/kubepods/poda", NARROW, WIDE)}
    placement = Placement(Pool.SHARED, CpuSet(), Mask())
    pods = (Pod("s", uid, "ns", uid, cgroup_parent=f"/kubepods/pod{uid}") for uid in "ab")
    inside, outside = (Container("c", "c", pod, Request(), placement, Phase.RUNNING) for pod in pods)
    assert fence_around(fences, inside) == NARROW
    assert not fence_around(fences, outside)


@pytest.mark.parametrize(
    ("parent", "slice_of_its_own", "group_of_its_own"),
    [
        ("kubepods-pod1_2.slice", True, True),
        ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/", True, True),
        ("/kubepods/burstable/pod1", False, True),
        ("/kubepods/burstable", False, False),
        ("system.slice", False, False),
        ("", False, False),
    ],
)
def test_which_pods_have_a_group_of_their_own(
    parent: str, slice_of_its_own: bool, group_of_its_own: bool
) -> None:
    pod = Pod("s", "1", "ns", "p", cgroup_parent=parent)
    assert (has_slice(pod), has_group(pod)) == (slice_of_its_own, group_of_its_own)


def test_a_fence_contains_the_cpus_of_all_containers_of_the_pod() -> None:
    machine = regular_machine(1, 1, 4, 2)
    pod, again = (Pod(f"s{n}", "a", "ns", "a", attempt=n, cgroup_parent="/kubepods/poda") for n in (0, 1))
    other = Pod("s-b", "b", "ns", "b", cgroup_parent="/kubepods/podb")

    def owner(key: str, cpus: str, where: Pod, phase: Phase = Phase.RUNNING) -> Container:
        placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask())
        return Container(key, key, where, Request(), placement, phase, owner=key)

    there = [
        owner("x", "0", pod),
        owner("y", "1", again),
        owner("gone", "2", pod, Phase.EXITED),
        owner("z", "3", other),
    ]
    state = NodeState.of(Node(machine, CpuTopology.of(machine)), (pod, again, other), there)
    assert str(fence_cpus(state, there[0])) == "0-1"
