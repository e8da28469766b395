"""Which owners can be moved to which CPUs."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.owner_moves import containers_of, why_not_movable
from proxy.engine.owners import ReservationCpus
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NodeBindPolicy
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, TopologyPolicy
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request, SetAside
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 1)  # CPUs 0-3 and 4-7
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
POD = Pod("s", "u", "ns", "p", cgroup_parent="/kubepods/podu")
OTHER = Pod("t", "v", "ns", "q", cgroup_parent="/kubepods/podv")
MINE, FREE = CpuSet.parse("0-1"), CpuSet.parse("2-3")


def without(gone: CpuSet) -> Machine:
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in MACHINE.nodes)
    return changed_copy(MACHINE, cpus=tuple(c for c in MACHINE.cpus if c.id not in gone), nodes=nodes)


def owning(key: str, cpus: str, pod: Pod = POD, phase: Phase = Phase.RUNNING, **changes: Any) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask((0,)), excludes_be=True, **changes)
    return Container(key, key, pod, Request(), placement, phase, 0, f"{pod.key}/{key}")


def state(*containers: Container, node: Node = NODE, pods: tuple[Pod, ...] = (POD, OTHER)) -> NodeState:
    return NodeState.of(node, pods, containers)


def refusal_reason(there: NodeState, cpus: CpuSet = FREE) -> str:
    return why_not_movable(there, f"{POD.key}/a", cpus)


def test_an_owner_can_be_moved_to_free_cpus_of_its_numa_node() -> None:
    assert refusal_reason(state(owning("a", "0-1"))) == ""
    assert refusal_reason(state(owning("a", "0-1")), CpuSet.parse("1-2")) == ""


def test_only_existing_containers_can_be_moved() -> None:
    there = state(owning("a", "0-1", phase=Phase.EXITED))
    assert containers_of(there, f"{POD.key}/a") == ()
    assert refusal_reason(there) == "it owns no CPUs"


@pytest.mark.parametrize("phase", [Phase.CREATING, Phase.CREATED, Phase.STARTING])
def test_an_owner_that_does_not_run_stays(phase: Phase) -> None:
    assert refusal_reason(state(owning("a", "0-1", phase=phase))) == "ns/p/a is not running"


def test_an_owner_whose_cpus_are_being_changed_stays() -> None:
    there = state(owning("a", "0-1"))
    hold = ReservationCpus(f"{POD.key}/a", CpuSet.parse("3"))
    assert refusal_reason(there.with_reservation("instead-1", hold)) == "its CPUs are being changed already"
    other = there.with_reservation("instead-1", ReservationCpus("another", CpuSet.parse("3")))
    assert refusal_reason(other) == "CPUs 3 are not free"


def test_an_owner_with_replaced_or_offline_cpus_stays() -> None:
    reason = "ns/p/a does not have the CPUs that it was given"
    assert refusal_reason(state(owning("a", "0-1", replacement=CpuSet.parse("7")))) == reason
    away = NODE.with_machine(without(CpuSet.parse("1")))
    assert refusal_reason(state(owning("a", "0-1"), node=away)) == reason


def test_an_owner_that_hooks_have_narrowed_stays() -> None:
    assert (
        refusal_reason(state(owning("a", "0-1", hook_cpus=CpuSet.parse("0")))) == "a hook has narrowed ns/p/a"
    )


def test_cpus_named_by_another_component_are_not_moved() -> None:
    reason = "the CPUs of ns/p/a were named for it, or chosen for its pod"
    named = changed_copy(POD, cpuset=MINE, cpuset_chosen_locally=True)
    assert refusal_reason(state(owning("a", "0-1", named), pods=(named,))) == reason
    aside = changed_copy(POD, reserved_for_pod=SetAside(None, preferred=True, cpus=MINE))
    assert refusal_reason(state(owning("a", "0-1", aside), pods=(aside,))) == reason
    held = state(owning("a", "0-1")).with_kubelet_cpus({"u": {"a": MINE}})
    assert refusal_reason(held) == reason
    assert refusal_reason(state(owning("a", "0-1", named), pods=())) == reason, "its sandbox is not known"


def test_an_owner_moves_only_to_as_many_cpus_as_it_has() -> None:
    assert refusal_reason(state(owning("a", "0-1")), CpuSet.parse("2")) == "it has 2 CPUs, not 1"
    assert refusal_reason(state(owning("a", "0-1")), MINE) == "it is on CPUs 0-1 already"


def test_cpus_where_its_memory_may_not_be_are_refused() -> None:
    reason = "CPUs 4-5 are on NUMA node 1, and its memory may be on NUMA node 0 only"
    assert refusal_reason(state(owning("a", "0-1")), CpuSet.parse("4-5")) == reason


SMT = regular_machine(1, 1, 4, 2)  # the cores are 0,4 and 1,5 and so on
FULL, SPREAD = BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS


@pytest.mark.parametrize(
    ("rules", "requires", "cpus", "reason"),
    [
        ({}, BindPolicy.NONE, "2-3", ""),
        ({"options": CpuOptions(full_pcpus_only=True)}, BindPolicy.NONE, "2-3", "whole cores"),
        ({"options": CpuOptions(full_pcpus_only=True)}, BindPolicy.NONE, "2,6", ""),
        ({"bind": NodeBindPolicy.FULL_PCPUS_ONLY}, BindPolicy.NONE, "2-3", "whole cores"),
        ({"bind": NodeBindPolicy.FULL_PCPUS_ONLY}, BindPolicy.NONE, "2,6", ""),
        ({}, FULL, "2-3", "whole cores"),
        ({}, FULL, "2,6", ""),
        ({"bind": NodeBindPolicy.SPREAD_BY_PCPUS}, BindPolicy.NONE, "2,6", "one CPU of each core"),
        ({}, SPREAD, "2,6", "one CPU of each core"),
        ({}, SPREAD, "2-3", ""),
        ({"options": CpuOptions(full_pcpus_only=True)}, SPREAD, "2-3", ""),
    ],
)
def test_cpus_that_break_the_required_binding_are_refused(
    rules: dict[str, Any], requires: BindPolicy, cpus: str, reason: str
) -> None:
    node = Node(SMT, CpuTopology.of(SMT), static=True, **rules)
    pod = changed_copy(POD, bind_required=requires)
    there = state(owning("a", "0,4", pod), node=node, pods=(pod,))
    expected = f"CPUs {cpus} are not {reason}, which it requires" if reason else ""
    assert refusal_reason(there, CpuSet.parse(cpus)) == expected


@pytest.mark.parametrize("policy", list(TopologyPolicy))
def test_a_move_to_more_numa_nodes_is_refused_under_a_strict_policy(policy: TopologyPolicy) -> None:
    node = changed_copy(NODE, policy=policy)
    narrow, wide = (
        state(changed_copy(c, placement=changed_copy(c.placement, mems=Mask((0, 1)))), node=node)
        for c in (owning("a", "0-1"), owning("a", "0,7"))
    )
    reason = "CPUs 3-4 are on NUMA nodes 0-1, and it is on NUMA node 0 only"
    assert refusal_reason(narrow, CpuSet.parse("3-4")) == (reason if policy.is_strict else "")
    assert refusal_reason(narrow, CpuSet.parse("5-6")) == ""
    assert refusal_reason(wide, CpuSet.parse("3-4")) == ""


def test_cpus_that_are_taken_are_refused() -> None:
    assert refusal_reason(state(owning("a", "0-1"), owning("b", "3", OTHER))) == "CPUs 3 are not free"
    ended = owning("b", "3", OTHER, Phase.EXITED)
    assert refusal_reason(state(owning("a", "0-1"), ended)) == "CPUs 3 are not free"
    missing = NODE.with_machine(without(CpuSet.parse("3")))
    assert refusal_reason(state(owning("a", "0-1"), node=missing)) == "CPUs 3 are not free"


@pytest.mark.parametrize(
    "rules",
    [
        {"reserved": CpuSet((3,))},
        {"node_reservation": CpuSet((3,))},
        {"system": CpuSet((3,))},
        {"admission": AdmissionRules(floor=5)},
        {"admission": AdmissionRules(numa_floor=1)},
    ],
)
def test_cpus_that_no_container_may_own_are_refused(rules: dict[str, Any]) -> None:
    there = state(owning("a", "0-1"), node=changed_copy(NODE, **rules))
    assert refusal_reason(there, CpuSet.parse("1,3")) == "CPUs 3 are not free"


def test_cpus_reserved_for_other_containers_are_refused() -> None:
    aside = changed_copy(OTHER, reserved_for_pod=SetAside(None, preferred=True, cpus=CpuSet.parse("3")))
    assert refusal_reason(state(owning("a", "0-1"), pods=(POD, aside))) == "CPUs 3 are not free"
    named = changed_copy(OTHER, cpuset=CpuSet.parse("2"))
    assert refusal_reason(state(owning("a", "0-1"), pods=(POD, named))) == "CPUs 2 are not free"


def test_all_containers_of_an_owner_are_checked() -> None:
    first = owning("a", "0-1")
    for other, reason in (
        (owning("b", "0-1", phase=Phase.CREATED), "ns/p/b is not running"),
        (owning("b", "0-1", hook_extra_cpus=CpuSet.parse("3")), "a hook has narrowed ns/p/b"),
    ):
        assert refusal_reason(state(first, changed_copy(other, owner=first.owner))) == reason
    fewer = changed_copy(owning("b", "0"), owner=first.owner)
    assert refusal_reason(state(first, fewer)).endswith("does not have the CPUs that it was given")


def test_the_shared_pool_keeps_a_cpu_while_both_sets_are_held() -> None:
    there = state(owning("a", "0-1"), owning("b", "4-7", OTHER))
    assert refusal_reason(there) == "the shared pool would be left empty"
    assert refusal_reason(there, CpuSet.parse("1-2")) == ""
