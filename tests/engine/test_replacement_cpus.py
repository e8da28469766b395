"""The replacement of CPUs that are offline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.owners import ReservationCpus
from proxy.engine.replacement_cpus import MissingCpus, choose_replacements, owners_missing_cpus
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NodeBindPolicy
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, TopologyPolicy
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

WHOLE = regular_machine(2, 1, 4, 2)


def without(gone: CpuSet) -> Machine:
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in WHOLE.nodes)
    return changed_copy(WHOLE, cpus=tuple(c for c in WHOLE.cpus if c.id not in gone), nodes=nodes)


def owner(name: str, own: CpuSet, **more: object) -> Container:
    pod = Pod(f"s-{name}", name, "ns", name, **more)  # type: ignore[arg-type]
    placement = Placement(Pool.OWN, own, Mask([0]), excludes_be=True)
    return Container(name, "c", pod, Request(), placement, Phase.RUNNING, owner=f"{name}/c")


def state_of(gone: CpuSet, *containers: Container, **rules: object) -> NodeState:
    machine = without(gone)
    node = Node(machine, CpuTopology.of(machine), True, **rules)  # type: ignore[arg-type]
    return NodeState.of(node, (), containers)


def only(state: NodeState) -> MissingCpus:
    (short,) = owners_missing_cpus(state)
    return short


@given(
    st.sets(st.integers(0, 15), max_size=10),
    st.lists(st.integers(0, 3), min_size=16, max_size=16),
    st.booleans(),
    st.sampled_from(TopologyPolicy),
)
def test_replacement_cpus_are_free(
    away: set[int], hands: list[int], full: bool, policy: TopologyPolicy
) -> None:
    """Owners have arbitrary CPUs, and arbitrary CPUs go offline."""
    sets = [CpuSet(cpu for cpu, hand in enumerate(hands) if hand == n) for n in range(1, 4)]
    holders = [owner(f"o{n}", cpus) for n, cpus in enumerate(sets) if cpus]
    state = state_of(CpuSet(away), *holders, options=CpuOptions(full_pcpus_only=full), policy=policy)
    if not state.node.machine.online or not state.pools.shared:
        return
    for short in owners_missing_cpus(state):
        cpus, own = choose_replacements(state, short), short.containers[0].placement.exclusive
        assert len(cpus) <= short.missing == len(own & CpuSet(away))
        assert cpus <= state.pools.shared
        assert cpus < state.pools.shared or not cpus, "other containers keep some shared CPUs"
        homes = state.node.machine.nodes_of(own) or Mask([0])
        if policy in (TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE):
            assert cpus <= state.node.machine.cpus_of(homes)
        if full:
            assert all(core <= cpus or core.isdisjoint(cpus) for core in state.node.machine.cores.values())
        (holder,) = short.containers
        given_ = changed_copy(holder, placement=changed_copy(holder.placement, replacement=cpus))
        after = state.changed(put=(given_,))
        assert violations(after) == []
        assert len(after.desired_cpus(given_)) == len(own) - short.missing + len(cpus) or not cpus
        back = after.with_machine(WHOLE)
        assert back.desired_cpus(given_) == own
        assert back.pools.shared.isdisjoint(cpus), (
            "not usable by other containers until the owner has left them"
        )


def test_nearby_replacement_cpus_come_first() -> None:
    near = WHOLE.node_by_id[0].cpus
    own = CpuSet(list(near)[:2])
    state = state_of(CpuSet([max(own)]), owner("a", own))
    assert choose_replacements(state, only(state)) < near
    others = owner("b", near - own)
    crowded = state_of(CpuSet([max(own)]), owner("a", own), others)
    assert choose_replacements(crowded, only(crowded)) < WHOLE.node_by_id[1].cpus
    strict = state_of(CpuSet([max(own)]), owner("a", own), others, policy=TopologyPolicy.RESTRICTED)
    assert not choose_replacements(strict, only(strict))


SINGLE, RESTRICTED = TopologyPolicy.SINGLE_NUMA_NODE, TopologyPolicy.RESTRICTED


@pytest.mark.parametrize(
    ("policy", "full", "own", "taken", "replacements"),
    [
        (SINGLE, False, "0-3,8", "7,12-15", "9-11"),  # three are free on each node
        (RESTRICTED, False, "0-3,8", "7,12-15", "4-5,9-11"),
        (TopologyPolicy.BEST_EFFORT, False, "0-3,8", "7,12-15", "4-5,9-11"),
        (SINGLE, False, "0,8", "1,4-7,9,12", "2,10"),  # most are free on node 0
        (SINGLE, False, "0,8", "1-3,9,12-14", "7,15"),
        (RESTRICTED, False, "0-1,8-9", "2,4,12", "5-6,13-14"),
        # Node 0 has the most free CPUs, and node 1 the most whole cores.
        (SINGLE, True, "0,8", "1-3,5-7,13-15", "4,12"),
        (RESTRICTED, True, "0-1,8-9", "2,4-6,12-14", "3,7,11,15"),
    ],
)
def test_under_a_strict_policy_replacements_are_on_few_numa_nodes_when_all_cpus_are_offline(
    policy: TopologyPolicy, full: bool, own: str, taken: str, replacements: str
) -> None:
    """The memory may be on both NUMA nodes: memory does not always follow the CPUs."""
    holder = owner("a", CpuSet.parse(own))
    holder = changed_copy(holder, placement=changed_copy(holder.placement, mems=Mask([0, 1])))
    others = owner("b", CpuSet.parse(taken))
    options = CpuOptions(full_pcpus_only=full)
    state = state_of(CpuSet.parse(own), holder, others, policy=policy, options=options)
    assert str(choose_replacements(state, only(state))) == replacements


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ({"cpuset": CpuSet([3, 11])}, 0),
        ({"cpuset": CpuSet([3, 11]), "cpuset_chosen_locally": True}, 1),
        ({"bind_required": BindPolicy.FULL_PCPUS}, 0),
        ({"bind_required": BindPolicy.SPREAD_BY_PCPUS}, 1),
    ],
)
def test_containers_whose_cpus_have_a_replacement(more: dict[str, object], count: int) -> None:
    state = state_of(CpuSet([3]), owner("a", CpuSet([3, 11]), **more))
    assert len(choose_replacements(state, only(state))) == count


@pytest.mark.parametrize(
    ("bind", "count"), [(NodeBindPolicy.FULL_PCPUS_ONLY, 0), (NodeBindPolicy.SPREAD_BY_PCPUS, 1)]
)
def test_only_whole_cores_are_replacements_if_the_node_requires_them(
    bind: NodeBindPolicy, count: int
) -> None:
    state = state_of(CpuSet([3]), owner("a", CpuSet([3, 11])), bind=bind)
    assert len(choose_replacements(state, only(state))) == count


def test_cpus_assigned_by_kubelet_have_no_replacement() -> None:
    state = state_of(CpuSet([3]), owner("a", CpuSet([3, 11])))
    held = state.with_kubelet_cpus({"a": {"c": CpuSet([3, 11])}})
    assert not choose_replacements(held, only(held))
    pinned = changed_copy(owner("a", CpuSet([3, 11])), request=Request(cpuset_cpus="3,11"))
    other = NodeState.of(changed_copy(state.node, static=False), (), [pinned])
    assert not choose_replacements(other, only(other))
    chosen = changed_copy(pinned, pod=changed_copy(pinned.pod, cpuset_chosen_locally=True))
    by_us = NodeState.of(other.node, (), [chosen])
    assert len(choose_replacements(by_us, only(by_us))) == 1, "the node itself chose the CPUs for the pod"
    ours = NodeState.of(state.node, (), [pinned])
    assert len(choose_replacements(ours, only(ours))) == 1


def test_an_owner_with_named_cpus_has_no_replacement() -> None:
    own = CpuSet([3, 11])
    named, free = owner("a", own, cpuset=own), owner("a", own)
    state = state_of(CpuSet([3]), named, changed_copy(free, id="b", name="d"))
    assert len(only(state).containers) == 2
    assert not choose_replacements(state, only(state))


@pytest.mark.parametrize(("changed", "count"), [("a/c", 0), ("b/c", 1)])
def test_an_owner_whose_cpus_are_being_changed_has_no_replacement_yet(changed: str, count: int) -> None:
    state = state_of(CpuSet([3]), owner("a", CpuSet([3, 11])))
    state = state.with_reservation("instead-1", ReservationCpus(changed, CpuSet([5])))
    assert len(choose_replacements(state, only(state))) == count


def test_reserved_and_owned_cpus_are_no_replacement() -> None:
    own = CpuSet([3, 11])
    free = WHOLE.online - own - CpuSet([5])
    state = state_of(CpuSet([3]), owner("a", own), reserved=free)
    assert choose_replacements(state, only(state)) == CpuSet([5])
    assert owners_missing_cpus(state_of(CpuSet(), owner("a", own))) == []


@pytest.mark.parametrize("phase", [Phase.EXITED, Phase.CREATING])
def test_ended_and_future_containers_get_no_replacement(phase: Phase) -> None:
    gone = changed_copy(owner("a", CpuSet([3, 11])), phase=phase)
    assert owners_missing_cpus(state_of(CpuSet([3]), gone, owner("b", CpuSet([4])))) == []


def test_a_request_that_names_foreign_cpus_has_named_none_of_its_own() -> None:
    other = changed_copy(owner("a", CpuSet([3, 11])), request=Request(cpuset_cpus="0-15"))
    machine = without(CpuSet([3]))
    state = NodeState.of(Node(machine, CpuTopology.of(machine), False), (), [other])
    assert len(choose_replacements(state, only(state))) == 1
