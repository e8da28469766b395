"""What the daemon answers about devices: kubelet's lists, requests of containers, and past decisions."""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.api.kubelet import podresources_pb2 as pb
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.executor.decision_history import DecisionHistory
from proxy.model.explanation import Explanation
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, LocatedDevice, Phase, Placement, Pod, Pool, Request, Verdict
from proxy.observe.device_assignments import KubeletDevices, assignments_page
from proxy.topology.regular_machine import regular_machine
from tests.testkit.answers import check_answer

MACHINE = regular_machine(2, 1, 4, 2)
POD = Pod("s", "u", "shop", "db")
NOT_ASKED = KubeletDevices(is_queried=False)


def group(resource: str, *ids: str, nodes: tuple[int, ...] | None = None) -> pb.ContainerDevices:
    made = pb.ContainerDevices(resource_name=resource, device_ids=ids)
    if nodes is not None:
        made.topology.nodes.extend(pb.NUMANode(ID=node) for node in nodes)
    return made


def test_a_device_in_several_groups_is_one_and_a_node_below_zero_is_none() -> None:
    listed = [
        group("x/a", "1", "2", nodes=(0,)),
        group("x/a", "1", nodes=(1,)),
        group("x/b", "1", nodes=(-1,)),
    ]
    allocatable = pb.AllocatableResourcesResponse(devices=listed)
    page = assignments_page(KubeletDevices(is_queried=True, allocatable=allocatable), None, ())
    check_answer(page)
    assert page["allocatable"] == [
        {"resource": "x/a", "id": "1", "numa": [0, 1]},
        {"resource": "x/a", "id": "2", "numa": [0]},
        {"resource": "x/b", "id": "1", "numa": None},
    ]


def test_requests_of_containers_that_have_not_ended() -> None:
    near = (LocatedDevice("/dev/nvidia0", "", Mask([1]), "sysfs"), LocatedDevice("GPU-1", "nvidia.com/gpu"))
    placement = Placement(Pool.SHARED, CpuSet(), Mask([0]))
    running = Container("1", "main", POD, Request(devices=near), placement, Phase.RUNNING)
    ended = structs.replace(running, id="2", name="init", phase=Phase.EXITED)
    state = NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), [POD], [running, ended])
    page = assignments_page(NOT_ASKED, state, ())
    check_answer(page)
    assert page["requested"] == [
        {
            "container": "shop/db/main",
            "resource": "",
            "device": "/dev/nvidia0",
            "numa": [1],
            "source": "sysfs",
        },
        {
            "container": "shop/db/main",
            "resource": "nvidia.com/gpu",
            "device": "GPU-1",
            "numa": None,
            "source": "",
        },
    ]


def test_the_history_has_containers_that_came_with_devices_and_none_that_were_refused() -> None:
    history, no = DecisionHistory(), Verdict(9, "TopologyAffinityError", "no")

    def decided(
        name: str, *devices: str, verdict: Verdict | None = None, applied: bool = True
    ) -> Explanation:
        given = verdict or Verdict()
        return Explanation("create", "shop/db", "u", name, devices=devices, verdict=given, applied=applied)

    history.note(1.0, decided("gone", "x/a=1"), "1")
    history.note(2.0, decided("refused", "x/a=1", verdict=no), "2")
    history.note(3.0, decided("observed", "x/a=1", "x/a=2", verdict=no, applied=False), "3")
    history.note(4.0, decided("plain"), "4")
    history.note(5.0, decided("", "x/a=1"), "5")
    history.removed("1")
    page = assignments_page(NOT_ASKED, None, history.with_devices())
    check_answer(page)
    assert page["history"] == [
        {"time": 1.0, "container": "shop/db/gone", "device": "x/a=1", "exists": False},
        {"time": 3.0, "container": "shop/db/observed", "device": "x/a=1", "exists": True},
        {"time": 3.0, "container": "shop/db/observed", "device": "x/a=2", "exists": True},
    ]


def test_devices_that_topoproxy_assigns_have_their_holders_also_without_a_plugin() -> None:
    devices = (
        DeviceState()
        .register("x/vf", [RegisteredDevice("a", Mask([1])), RegisteredDevice("b", healthy=False)])
        .give("u", "main", "x/vf", frozenset("a"))
        .give("u", "init", "x/vf", frozenset("a"))
        .give("other", "main", "x/gone", frozenset("z"))
    )
    state = structs.replace(NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), [POD], []), devices=devices)
    page = assignments_page(NOT_ASKED, state, ())
    check_answer(page)
    assert page["managed"] == [
        {"resource": "x/gone", "id": "z", "numa": None, "healthy": False, "containers": ["other/main"]},
        {
            "resource": "x/vf",
            "id": "a",
            "numa": [1],
            "healthy": True,
            "containers": ["shop/db/init", "shop/db/main"],
        },
        {"resource": "x/vf", "id": "b", "numa": None, "healthy": False, "containers": []},
    ]
