"""CPUs and memory that containers lack on a machine with hotplug, and the reports of these losses."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.handle import handle
from proxy.engine.hotplug import (
    changed_losses,
    containers_with_other_mems,
    differences,
    losses,
    replacements_in_use,
    with_replacement,
)
from proxy.engine.node import Node
from proxy.engine.node_effects import LossesChanged
from proxy.engine.node_events import LossesDue
from proxy.engine.replacement_cpus import owners_missing_cpus
from proxy.engine.state import NodeState
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy
from tests.testkit.playbook import Playbook

WHOLE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
POD = Pod("s", "p", "ns", "p")
BLOCK = Block(Mask((1,)), "memory", 1)


def without(text: str, memory: str = "") -> Machine:
    gone, empty = CpuSet.parse(text), Mask.parse(memory)
    nodes = tuple(
        changed_copy(n, cpus=n.cpus - gone, mem_bytes=0 if n.id in empty else n.mem_bytes)
        for n in WHOLE.nodes
    )
    return changed_copy(WHOLE, cpus=tuple(c for c in WHOLE.cpus if c.id not in gone), nodes=nodes)


def owner(cpus: str, key: str = "x", mems: str = "0", **more: object) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask.parse(mems), **more)
    return Container(key, key, POD, Request(), placement, Phase.RUNNING, owner=key)


def node(*containers: Container) -> NodeState:
    return NodeState.of(Node(WHOLE, CpuTopology.of(WHOLE)), (POD,), containers)


def test_differences_between_machines_are_described() -> None:
    assert differences(WHOLE, WHOLE) == []
    ((what, before, now),) = differences(WHOLE, without("3"))
    assert (what, str(before), str(now)) == ("CPUs", "0-15", "0-2,4-15")


@pytest.mark.parametrize(
    ("container", "gone", "message"),
    [
        pytest.param(owner("2-3"), "7", "", id="none of its own"),
        pytest.param(
            owner("2-3"), "3", "its CPU 3 is offline: it runs on 2, 1 fewer than it was promised", id="one"
        ),
        pytest.param(
            owner("2-3", replacement=CpuSet([9])),
            "3",
            "its CPU 3 is offline: it runs on 2,9, with CPU 9 in its place",
            id="replaced",
        ),
    ],
)
def test_missing_resources_of_a_container_are_described(
    container: Container, gone: str, message: str
) -> None:
    state = node(container).with_machine(without(gone))
    assert [loss.text() for loss in losses(state).values()] == ([message] if message else [])


def test_a_loss_is_reported_when_it_begins_changes_and_ends() -> None:
    whole = node(owner("2-3"))
    container, nothing = whole.containers["x"], LossesChanged(())
    one = "its CPU 3 is offline: it runs on 2, 1 fewer than it was promised"
    scenario = Playbook(whole, handle)
    assert scenario >> LossesDue() << nothing
    scenario.state = scenario.state.with_machine(without("3"))
    assert scenario >> LossesDue() << LossesChanged(((container, one),))
    assert scenario >> LossesDue() << nothing
    scenario.state = scenario.state.with_machine(without("2-3"))
    (changed,) = handle(scenario.state, LossesDue())[1]
    assert isinstance(changed, LossesChanged)
    assert "CPUs 2-3 are offline" in changed.changes[0][1]
    scenario.state = scenario.state.with_machine(WHOLE)
    assert scenario >> LossesDue() << LossesChanged(((container, ""),))
    assert scenario >> LossesDue() << nothing


def bound(pool: Pool, **more: object) -> Container:
    placement = Placement(pool, CpuSet(), Mask((1,)), **more)
    return Container("x", "x", POD, Request(), placement, Phase.RUNNING)


@pytest.mark.parametrize(
    ("container", "follow", "is_lacked"),
    [
        pytest.param(owner("2-3", mems="1"), True, True, id="an owner's, near its CPUs"),
        pytest.param(owner("2-3", mems="1"), False, False, id="an owner's that may be anywhere"),
        pytest.param(owner("2-3", mems="1", blocks=(BLOCK,)), False, True, id="counted"),
        pytest.param(bound(Pool.SHARED), True, False, id="of a whole pool"),
        pytest.param(bound(Pool.SHARED, pool_numa_limit=Mask((1,))), False, True, id="of a part of a pool"),
    ],
)
def test_lost_memory_is_missing_for_containers_that_are_bound_to_it(
    container: Container, follow: bool, is_lacked: bool
) -> None:
    rules = Node(WHOLE, CpuTopology.of(WHOLE), follow_mems=follow)
    state = NodeState.of(rules, (POD,), (container,)).with_machine(without("", "1"))
    message = "its memory of NUMA node 1 is gone: it has that of NUMA node 0"
    assert {key: loss.text() for key, loss in losses(state).items()} == ({"x": message} if is_lacked else {})


def test_the_memory_of_a_container_that_lacks_cpus_counts_only_if_it_is_bound_to_it() -> None:
    rules = Node(WHOLE, CpuTopology.of(WHOLE), follow_mems=False)
    state = NodeState.of(rules, (POD,), (owner("2-3", mems="0-1"),)).with_machine(without("3", "1"))
    assert losses(state)["x"].nodes == Mask()
    follows = NodeState.of(node().node, (POD,), (owner("2-3", mems="0-1"),)).with_machine(without("3", "1"))
    assert losses(follows)["x"].nodes == Mask((1,))


def test_the_end_of_a_loss_is_not_reported_of_a_container_that_is_observed() -> None:
    state = node(owner("2-3"))
    assert [text for _, text in changed_losses({"x": "CPU 3"}, state)[1]] == [""]
    observed = structs.replace(state, mode=NodeMode.OBSERVE)
    assert changed_losses({"x": "CPU 3"}, observed) == ({}, [])


def test_the_loss_of_a_removed_container_ends_without_a_report() -> None:
    lost, _ = handle(node(owner("2-3")).with_machine(without("3")), LossesDue())
    gone = structs.replace(node(), facts=lost.facts)
    after, effects = handle(gone, LossesDue())
    assert (after.facts.losses, effects) == ({}, (LossesChanged(()),))


def test_replacements_are_needed_as_long_as_cpus_are_away() -> None:
    state = node(owner("2-3", replacement=CpuSet.parse("8-9")))
    for machine, used in ((without("2-3"), "8-9"), (without("3"), "8"), (WHOLE, "")):
        now = state.with_machine(machine)
        (short,) = owners_missing_cpus(now)
        assert str(replacements_in_use(now, short)) == used
        (changed,) = with_replacement(short.containers, CpuSet.parse(used))
        assert str(changed.placement.replacement) == used


def test_containers_with_other_memory_nodes() -> None:
    state = node(owner("2-3"), owner("4-5", "y", "1"))
    assert containers_with_other_mems(state, state) == []
    after = state.with_machine(without("", memory="1"))
    assert containers_with_other_mems(state, after) == ["y"]
    (loss,) = losses(after).values()
    assert (str(loss.nodes), str(loss.mems)) == ("1", "0")
    assert loss.text() == "its memory of NUMA node 1 is gone: it has that of NUMA node 0"
