"""Memory nodes: repairs of cpusets, and the nodes that calls name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.cpuset_mems import MemoryBindings, MemsRepair, repair
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_events import HardwareChanged, MemoryNodesCompared, ModeChanged
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

NONE, ZERO, ONE, BOTH = (Mask.parse(text) for text in ("", "0", "1", "0-1"))
MACHINE = regular_machine(2, 1, 4, 2)
STATE = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))


def bound(mems: Mask) -> Container:
    return Container(
        "x", "c", Pod("s", "p", "ns", "p"), Request(), Placement(Pool.OWN, CpuSet([0]), mems), Phase.RUNNING
    )


@pytest.mark.parametrize(
    ("has", "want", "above", "there", "returned", "done"),
    [
        pytest.param(ZERO, ZERO, BOTH, BOTH, NONE, MemsRepair(is_as_planned=True), id="right"),
        pytest.param(ONE, ZERO, BOTH, BOTH, NONE, MemsRepair(BOTH, is_drift=True), id="another one"),
        pytest.param(
            ONE, BOTH, BOTH, BOTH, NONE, MemsRepair(BOTH, is_drift=True, is_as_planned=True), id="missing"
        ),
        pytest.param(BOTH, ZERO, BOTH, BOTH, NONE, MemsRepair(narrow=ZERO), id="too many"),
        pytest.param(ONE, BOTH, ONE, BOTH, NONE, MemsRepair(is_as_planned=True), id="the parent has no more"),
        pytest.param(
            ONE, ZERO, ONE, BOTH, NONE, MemsRepair(is_as_planned=True), id="the parent has none of them"
        ),
        pytest.param(
            ONE, BOTH, ONE, BOTH, ZERO, MemsRepair(BOTH, is_drift=True, is_as_planned=True), id="came back"
        ),
        pytest.param(BOTH, ONE, BOTH, ONE, NONE, MemsRepair(ONE, is_as_planned=True), id="one is gone"),
        pytest.param(
            ZERO, ONE, BOTH, ONE, NONE, MemsRepair(ONE, is_as_planned=True), id="all it had is gone"
        ),
    ],
)
def test_memory_nodes_are_repaired(
    has: Mask, want: Mask, above: Mask, there: Mask, returned: Mask, done: MemsRepair
) -> None:
    assert repair(has, want, above, there, returned) == done


MASKS = st.sets(st.integers(0, 2)).map(Mask)


@given(MASKS, MASKS.filter(bool), MASKS.filter(bool), MASKS.filter(bool), MASKS)
def test_a_repair_removes_no_memory_node_that_exists(
    has: Mask, want: Mask, above: Mask, there: Mask, returned: Mask
) -> None:
    done = repair(has, want & there or there, above & there or there, there, returned)
    if done.write is not None:
        assert has & there <= done.write
        assert done.write <= there
    assert not (done.is_as_planned and done.narrow is not None)


def test_memory_nodes_that_calls_name() -> None:
    known, one = MemoryBindings(), bound(ZERO)
    assert (known.carried(STATE, one), known.renewed(STATE, one)) == (ZERO, None)
    wide = changed_copy(known, wider_than_planned={"x": BOTH}, as_planned=frozenset({"x"}))
    assert (wide.carried(STATE, one), wide.renewed(STATE, one)) == (BOTH, BOTH)
    assert wide.forgotten() == known
    changed = wide.changed(ONE).changed(ZERO)
    assert changed == MemoryBindings(wider_than_planned={"x": BOTH}, returned=BOTH, is_changed=True)
    assert changed.renewed(STATE, one) == BOTH, "its memory is still there"
    assert MemoryBindings(is_changed=True).renewed(STATE, one) == ZERO, (
        "the cpuset that the runtime has saved may name a removed node"
    )
    gone = bound(Mask.parse("0,7"))
    assert known.renewed(STATE, gone) == ZERO


def test_known_memory_nodes_end_with_the_mode_and_surplus_ones_outlast_a_hot_plug() -> None:
    wide, right = {"x": BOTH}, frozenset({"y"})
    compared, _ = handle(STATE, MemoryNodesCompared(right, wide))
    assert compared.facts.mems == MemoryBindings(right, wide)
    for mode in (NodeMode.RELEASING, NodeMode.RELEASED):
        left, _ = handle(compared, ModeChanged(mode))
        assert left.facts.mems == MemoryBindings()
    again, _ = handle(handle(left, MemoryNodesCompared(right, wide))[0], ModeChanged(NodeMode.ENFORCE))
    assert again.facts.mems == MemoryBindings()
    assert handle(compared, ModeChanged(NodeMode.OBSERVE))[0].facts == compared.facts
    nodes = tuple(changed_copy(n, mem_bytes=0 if n.id == 1 else n.mem_bytes) for n in MACHINE.nodes)
    halved, _ = handle(compared, HardwareChanged(changed_copy(MACHINE, nodes=nodes)))
    assert halved.facts.mems == MemoryBindings(wider_than_planned=wide, is_changed=True)
    whole, _ = handle(halved, HardwareChanged(MACHINE))
    assert whole.facts.mems == MemoryBindings(wider_than_planned=wide, returned=ONE, is_changed=True)
    same, _ = handle(compared, HardwareChanged(changed_copy(MACHINE)))
    assert same.facts == compared.facts
