from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import Mask
from proxy.model.mode import NodeMode
from proxy.observe.device_capacity import (
    DeviceCount,
    capacity_page,
    device_counts,
    healthy_devices,
    node_status_patch,
    zone_resources,
)
from proxy.topology.regular_machine import regular_machine
from tests.testkit.answers import check_answer
from tests.testkit.changed_copy import changed_copy

VF, FPGA = "example.com/vf", "example.com/fpga"
DEVICES = (
    DeviceState()
    .register(
        VF,
        [
            RegisteredDevice("a", Mask([0])),
            RegisteredDevice("b", Mask([0]), healthy=False),
            RegisteredDevice("c", Mask([1])),
            RegisteredDevice("both", Mask([0, 1])),
            RegisteredDevice("nowhere"),
        ],
    )
    .register(FPGA, [])
    .give("uid", "main", VF, frozenset("a"))
)


def state(mode: NodeMode = NodeMode.ENFORCE) -> NodeState:
    machine = regular_machine(2, 1, 2, 1)
    empty = NodeState.empty(Node(machine, CpuTopology.of(machine)))
    return changed_copy(empty, devices=DEVICES, mode=mode)


def applied(status: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """Apply the operations as an API server does."""
    copy = {part: dict(values) for part, values in status.items()}
    for each in patch:
        assert each["op"] == "add"
        _, root, part, key = each["path"].split("/")
        assert root == "status"
        copy[part][key.replace("~1", "/").replace("~0", "~")] = each["value"]
    return copy


def test_devices_are_counted_by_health_and_by_holder() -> None:
    assert device_counts(DEVICES) == {FPGA: DeviceCount(0, 0, 0), VF: DeviceCount(5, 4, 3)}


def test_a_numa_node_counts_the_devices_that_are_near_to_it() -> None:
    assert device_counts(DEVICES, 0) == {VF: DeviceCount(3, 2, 1)}
    assert device_counts(DEVICES, 1) == {VF: DeviceCount(2, 2, 2)}
    assert device_counts(DEVICES, 2) == {}
    assert zone_resources(DEVICES, 1) == [{"name": VF, "capacity": "2", "allocatable": "2", "available": "2"}]


def test_the_page_has_the_node_and_its_zones() -> None:
    page: Any = capacity_page(state())
    check_answer(page)
    assert healthy_devices(page["resources"]) == {FPGA: 0, VF: 4}
    assert [zone["name"] for zone in page["zones"]] == ["node-0", "node-1"]


def test_nothing_is_advertised_while_the_plan_is_not_applied() -> None:
    page: Any = capacity_page(state(NodeMode.OBSERVE))
    check_answer(page)
    assert (page["resources"], page["zones"]) == ([], [])


def test_capacity_is_the_number_of_healthy_devices_as_kubelet_makes_allocatable_equal_to_it() -> None:
    patch = node_status_patch({VF: 4}, {"cpu": "8"}, {"cpu": "7"})
    assert patch == [
        {"op": "add", "path": "/status/capacity/example.com~1vf", "value": "4"},
        {"op": "add", "path": "/status/allocatable/example.com~1vf", "value": "4"},
    ]


def test_only_what_differs_is_written() -> None:
    assert node_status_patch({VF: 4}, {VF: "4"}, {VF: "4"}) == []
    assert [each["path"] for each in node_status_patch({VF: 4}, {VF: "4"}, {VF: "0"})] == [
        "/status/allocatable/example.com~1vf"
    ]


def test_amounts_are_compared_by_value() -> None:
    for text in ("4", "4000m", "4.0", "4e0"):
        assert node_status_patch({VF: 4}, {VF: text}, {VF: text}) == []
    for text in ("3500m", "4k", "4Ki", "x", ""):
        assert len(node_status_patch({VF: 4}, {VF: text}, {VF: text})) == 2


def test_a_resource_that_is_no_longer_served_becomes_zero_and_stays() -> None:
    status = {"capacity": {VF: "4", "cpu": "8"}, "allocatable": {VF: "4", "cpu": "8"}}
    after = applied(status, node_status_patch({}, **status, advertised=[VF]))
    assert after == {"capacity": {VF: "0", "cpu": "8"}, "allocatable": {VF: "0", "cpu": "8"}}
    assert node_status_patch({}, **after, advertised=[VF]) == []


names = st.sampled_from(["example.com/a", "example.com/b~c", "cpu", "memory", "d.e/f"])
amounts = st.dictionaries(names, st.integers(0, 9).map(str))


@given(st.dictionaries(names, st.integers(0, 9)), amounts, amounts, st.sets(names))
def test_after_the_patch_the_status_says_what_was_wanted_and_nothing_else_changed(
    healthy: dict[str, int], capacity: dict[str, str], allocatable: dict[str, str], advertised: set[str]
) -> None:
    before = {"capacity": capacity, "allocatable": allocatable}
    after = applied(before, node_status_patch(healthy, capacity, allocatable, advertised))
    ours = healthy.keys() | advertised
    for part, values in after.items():
        assert {name: values[name] for name in ours} == {name: str(healthy.get(name, 0)) for name in ours}
        assert {k: v for k, v in values.items() if k not in ours} == {
            k: v for k, v in before[part].items() if k not in ours
        }
