"""Devices that topoproxy assigns, as playbooks of the engine."""

from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_events import DevicesChanged, NodeRulesChanged
from proxy.engine.state import NodeState
from proxy.model.idset import Mask
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy
from tests.testkit.playbook import Playbook

MACHINE = described(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
NIC = "example.com/nic"
NICS = {f"nic{i}": RegisteredDevice(f"nic{i}", Mask((i // 2,))) for i in range(4)}


def test_the_newest_list_of_a_resource_counts() -> None:
    play = Playbook(NodeState.empty(NODE), handle)
    assert play >> DevicesChanged(NIC, NICS)
    assert play.state.devices.available(NIC) == NICS.keys()
    ill = RegisteredDevice("nic0", Mask((0,)), healthy=False)
    assert play >> DevicesChanged(NIC, {"nic0": ill, "nic1": NICS["nic1"]})
    assert play.state.devices.available(NIC) == {"nic1"}
    other, _ = handle(play.state, NodeRulesChanged(changed_copy(NODE, static=False), "rules"))
    assert other.devices.available(NIC) == {"nic1"}, "other rules leave the devices"
    assert play >> DevicesChanged(NIC, None)
    assert play.state.devices.registered == {}
    assert play >> DevicesChanged(NIC, None), "withdrawn twice"
