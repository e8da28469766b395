"""The providers of devices: those that kubelet has assigned, and those that topoproxy assigns itself."""

from __future__ import annotations

import pytest

from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.allocation.providers.devices import (
    AssignedDevices,
    DeviceProvider,
    assigned_hints,
    nodes_of_devices,
)
from proxy.allocation.providers.provider import ProviderRequest, Serves
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import LocatedDevice, Pod, Request
from tests.testkit.changed_copy import changed_copy

GPU0, GPU1 = (LocatedDevice(f"/dev/gpu{i}", "vendor/gpu", Mask([i]), "sysfs") for i in (0, 1))
NIC1 = LocatedDevice("mlx5_1", "vendor/nic", Mask([1]), "sysfs")
NOWHERE = LocatedDevice("/dev/fuse")
NODES = Mask([0, 1])
GPUS = {"gpu": {i: RegisteredDevice(i, Mask([n])) for i, n in (("a", 0), ("b", 1), ("c", 1))}}


def request(
    *near: LocatedDevice, gpus: int = 0, scope: Scope = Scope.CONTAINER, name: str = "c"
) -> ProviderRequest:
    pod_requests = PodRequests(
        "u",
        (
            ContainerResources("c", limits={"gpu": gpus} if gpus else {}),
            ContainerResources("d", limits={"gpu": 1}),
        ),
    )
    pod = Pod("s", "u", "ns", "p", requests=pod_requests)
    return ProviderRequest(pod, pod_requests, name, Request(devices=near), scope)


NEAR2 = changed_copy(GPU0, fewest_numa_nodes=1), changed_copy(GPU1, fewest_numa_nodes=1)


@pytest.mark.parametrize(
    ("near", "hints"),
    [
        ((), {}),
        ((NOWHERE,), {}),
        ((GPU0, NOWHERE), {"vendor/gpu": (Mask([0]), True)}),
        ((GPU0, GPU1), {"vendor/gpu": (Mask([0, 1]), True)}),
        (NEAR2, {"vendor/gpu": (Mask([0, 1]), False)}),
        ((NEAR2[0],), {"vendor/gpu": (Mask([0]), True)}),
        ((GPU0, NIC1), {"vendor/gpu": (Mask([0]), True), "vendor/nic": (Mask([1]), True)}),
        (
            (LocatedDevice("/dev/a", nodes=Mask([1])), LocatedDevice("/dev/b", nodes=Mask([0]))),
            {"devices": (Mask([0, 1]), True)},
        ),
        ((LocatedDevice("/dev/a", nodes=Mask([1, 7])),), {"devices": (Mask([1]), True)}),
        ((LocatedDevice("/dev/a", nodes=Mask([7])),), {}),
    ],
)
def test_devices_assigned_by_kubelet_determine_their_nodes(
    near: tuple[LocatedDevice, ...], hints: dict[str, tuple[Mask, bool]]
) -> None:
    assert assigned_hints(near, Mask([0, 1])) == {r: (TopologyHint(*h),) for r, h in hints.items()}


def test_nodes_of_devices() -> None:
    assert nodes_of_devices([NOWHERE]) is None
    assert nodes_of_devices([GPU0, NOWHERE, NIC1]) == Mask([0, 1])


def test_assigned_devices_are_hints_only_and_limit_the_nodes() -> None:
    provider = AssignedDevices(NODES)
    assert (provider.name, provider.serves, provider.accounts) == ("devices", Serves.NONE, False)
    assert not provider.wants(request(NOWHERE))
    assert provider.wants(request(GPU0))
    assert provider.hints(request()) is None
    had = Grants(CpuSet([1]))
    assert provider.allocate(request(GPU0), TopologyHint(None, False), had).grants is had
    found = [provider.explain_shortfall(request(GPU1), node) for node in (0, 1)]
    assert found == [None, ()], "only NUMA node 1 is near to the device"
    assert provider.explain_shortfall(request(GPU0, NIC1), 0) is None


def test_registered_devices_are_granted_and_missing_ones_are_explained() -> None:
    provider = DeviceProvider(NODES, DeviceState(GPUS))
    assert not provider.wants(request())
    wanted = request(gpus=2)
    assert list(provider.hints(wanted) or ()) == ["gpu"]
    done = provider.allocate(wanted, TopologyHint(Mask([1]), True), Grants(CpuSet([1])))
    assert done.grants == Grants(CpuSet([1]), devices=(("gpu", ("b", "c")),))
    assert done.steps == ("gpu: b, c: near NUMA node 1",)
    after = done.provider
    assert isinstance(after, DeviceProvider)
    assert after.state.available("gpu") == {"a"}
    assert after.explain_shortfall(request(gpus=1, name="d"), 1) == (Shortfall("gpu", Mask([1]), 1, 0),)
    assert after.explain_shortfall(request(gpus=1, name="d"), 0) == ()
    assert after.explain_shortfall(wanted, 0) is None, "it could never have two"
    assert after.explain_shortfall(request(name=""), 1) == (), "pods as a whole are explained without devices"


def test_registered_devices_are_named_like_assigned_ones() -> None:
    provider = DeviceProvider(NODES, DeviceState(GPUS))
    assert (provider.name, provider.serves, provider.accounts) == ("devices", Serves.NONE, False)


def test_the_hints_for_a_pod_count_the_devices_of_all_containers() -> None:
    provider = DeviceProvider(NODES, DeviceState(GPUS))

    def masks(wanted: ProviderRequest) -> list[str]:
        return [str(hint.affinity) for hint in (provider.hints(wanted) or {})["gpu"] or ()]

    assert masks(request(gpus=2)) == ["1", "0-1"]
    assert masks(request(gpus=2, scope=Scope.POD)) == ["0-1"], "c and d need three"


def test_devices_without_topology_are_never_short_of_a_node() -> None:
    anywhere = {"gpu": {i: RegisteredDevice(i) for i in "ab"}}
    assert DeviceProvider(NODES, DeviceState(anywhere)).explain_shortfall(request(gpus=3), 0) == ()
    wanted = changed_copy(
        request(),
        requests=PodRequests("u", (ContainerResources("c", limits={"any": 1, "gpu": 1}),)),
    )
    state = DeviceState({"any": anywhere["gpu"], **GPUS}).give("q", "c", "gpu", frozenset("a"))
    assert DeviceProvider(NODES, state).explain_shortfall(wanted, 0) == (Shortfall("gpu", Mask([0]), 1, 0),)


def test_only_devices_near_to_a_node_count_for_it() -> None:
    mixed = {"gpu": {**GPUS["gpu"], "y": RegisteredDevice("y"), "z": RegisteredDevice("z", Mask())}}
    provider = DeviceProvider(NODES, DeviceState(mixed))
    found = [provider.explain_shortfall(request(gpus=gpus), node) for gpus in (1, 2) for node in (0, 1)]
    assert found == [(), (), None, ()]
