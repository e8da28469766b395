"""Devices merged from sysfs, CDI specs and the daemon: by their names, without guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.model.idset import Mask
from proxy.observe.device_list import DeviceList
from proxy.topology.device_location import DeviceLocation
from proxy.topology.pci import PciFunction
from proxy.topology.regular_machine import regular_machine
from tests.testkit.answers import check_answer

MACHINE = regular_machine(2, 1, 4, 2)
GPU, NIC, VF, BRIDGE = "0000:3b:00.0", "0000:5e:00.0", "0000:5e:02.0", "0000:00:00.0"
UUID = "GPU-11111111-2222-3333-4444-555555555555"


def function(address: str, code: str, node: int | None, physical: str = "") -> PciFunction:
    nodes = None if node is None else Mask([node])
    return PciFunction(address, code, "0x1", "0x2", "", (), physical, nodes, f"numa_node of {address}")


FUNCTIONS = (
    function(BRIDGE, "060000", None),
    function(GPU, "030200", 0),
    function(NIC, "020000", None),
    function(VF, "020000", 1, NIC),
)
LOCATIONS = {
    "nvidia.com/gpu=0": DeviceLocation(Mask([0]), "spec", (GPU,)),
    "nvidia.com/gpu=all": DeviceLocation(Mask([0, 1]), "spec", (GPU, VF)),
    "/dev/nvidia0": DeviceLocation(Mask([0]), "sysfs", (GPU,)),
    "/dev/npu0": DeviceLocation(Mask([1]), "sysfs"),
    "/dev/odd": DeviceLocation(None, "sysfs does not list it", ("0000:ff:00.0",)),
}


def locate(name: str) -> DeviceLocation:
    return LOCATIONS.get(name, DeviceLocation(None, "no CDI spec names it"))


def list_devices(
    page: Mapping[str, Any] | None = None, cdi: tuple[str, ...] = (), *, everything: bool = False
) -> dict[str, Any]:
    found = DeviceList(MACHINE, FUNCTIONS, locate, {UUID: GPU})
    found.add_cdi(cdi)
    found.add_daemon(page or {})
    answer = found.as_json(all_functions=everything, daemon="", kubelet={"asked": True})
    check_answer(answer)
    devices: Any = answer["devices"]
    assert len({d["name"] for d in devices}) == len(devices)
    return {d["name"]: d for d in devices}


def plugin_device(
    resource: str, name: str, numa: list[int] | None = None, container: str = ""
) -> dict[str, Any]:
    return {"resource": resource, "id": name, "numa": numa, **({"container": container} if container else {})}


def test_without_a_daemon_only_the_location_is_known() -> None:
    found = list_devices()
    assert list(found) == [GPU, NIC, VF]
    gpu, nic = found[GPU], found[NIC]
    assert (gpu["kind"], gpu["numa"], gpu["l3"]) == ("3D controller", [0], ["0-3,8-11"])
    assert (nic["numa"], nic["l3"]) == (None, None)
    for key, unknown in (("managers", []), ("containers", []), ("containersKnown", False), ("health", None)):
        assert gpu[key] == unknown
    assert found[VF]["pci"][0]["physicalFunction"] == NIC
    assert BRIDGE in list_devices(everything=True)


def test_ids_of_plugins_are_resolved_to_pci_functions() -> None:
    page = {
        "allocatable": [
            plugin_device("nvidia.com/gpu", UUID, [0]),
            plugin_device("x/vf", VF.upper(), [1]),
            plugin_device("x/fuse", "f"),
        ],
        "assigned": [plugin_device("nvidia.com/gpu", UUID, [0], "shop/db/main")],
    }
    found = list_devices(page)
    assert list(found) == [GPU, NIC, VF, "x/fuse=f"]
    gpu, vf, fuse = found[GPU], found[VF], found["x/fuse=f"]
    assert gpu["resources"] == [plugin_device("nvidia.com/gpu", UUID, [0])]
    assert (gpu["managers"], gpu["containers"], gpu["containersKnown"]) == (
        ["kubelet"],
        ["shop/db/main"],
        True,
    )
    assert gpu["health"] == "healthy"
    assert (vf["containers"], vf["containersKnown"], vf["health"]) == ([], True, "healthy")
    assert (fuse["kind"], fuse["numa"], fuse["l3"], fuse["pci"]) == (None, None, None, [])


@pytest.mark.parametrize(("numa", "expected"), [([Mask.LIMIT - 1], [Mask.LIMIT - 1]), ([Mask.LIMIT, 1], [1])])
def test_an_impossible_numa_node_is_omitted(numa: list[int], expected: list[int]) -> None:
    assert list_devices({"allocatable": [plugin_device("x/npu", "n", numa)]})["x/npu=n"]["numa"] == expected


def test_kubelets_numa_nodes_are_used_only_if_sysfs_has_none() -> None:
    page = {
        "allocatable": [
            plugin_device("x/vf", VF, [0]),
            plugin_device("x/nic", NIC, [1]),
            plugin_device("x/npu", "n", [1]),
        ]
    }
    found = list_devices(page)
    assert found[VF]["numa"] == [1]
    assert found[VF]["resources"][0]["numa"] == [0]
    assert (found[NIC]["numa"], found[NIC]["l3"]) == ([1], ["4-7,12-15"])
    assert found["x/npu=n"]["numaSource"] == "kubelet's pod-resources API"


def test_an_assigned_device_that_is_not_allocatable_is_not_listed_as_healthy() -> None:
    found = list_devices({"assigned": [plugin_device("x/vf", VF, [1], "shop/db/main")]})
    assert found[VF]["health"] == "not allocatable"
    assert found[VF]["containersKnown"]


def test_a_cdi_name_is_resolved_to_its_only_function() -> None:
    found = list_devices(cdi=("nvidia.com/gpu=0", "nvidia.com/gpu=all", "v.com/x=1"))
    assert found[GPU]["cdi"] == ["nvidia.com/gpu=0"]
    several, nowhere = found["nvidia.com/gpu=all"], found["v.com/x=1"]
    assert [f["address"] for f in several["pci"]] == [GPU, VF]
    assert several["numa"] == [0, 1]
    assert (nowhere["numa"], nowhere["numaSource"]) == (None, "no CDI spec names it")


def test_an_id_of_a_plugin_is_not_read_as_a_cdi_name() -> None:
    found = list_devices({"allocatable": [plugin_device("nvidia.com/gpu", "0")]}, ("nvidia.com/gpu=0",))
    assert found[GPU]["managers"] == []
    assert found["nvidia.com/gpu=0"]["managers"] == ["kubelet"]
    assert found["nvidia.com/gpu=0"]["cdi"] == []


def test_devices_of_claims_are_listed() -> None:
    claim = {
        "container": "shop/db/main",
        "claim": "shop/c",
        "driver": "gpu.x",
        "pool": "n1",
        "device": "gpu-0",
    }
    other = {**claim, "container": "shop/db/side"}
    without_cdi = {**claim, "device": "nic-0", "cdi": []}
    found = list_devices(
        {"claims": [{**c, "cdi": ["nvidia.com/gpu=0"]} for c in (claim, other)] + [without_cdi]}
    )
    gpu, nic = found[GPU], found["gpu.x/n1/nic-0"]
    assert gpu["managers"] == ["DRA"]
    assert gpu["containers"] == ["shop/db/main", "shop/db/side"]
    assert gpu["claims"] == [{"claim": "shop/c", "driver": "gpu.x", "pool": "n1", "device": "gpu-0"}]
    assert (gpu["containersKnown"], gpu["health"]) == (False, None)
    assert (nic["pci"], nic["numa"]) == ([], None)


def test_two_managers_of_one_device_are_both_listed() -> None:
    claim = {"container": "a/b/c", "claim": "a/c", "driver": "d", "pool": "p", "device": "x"}
    page = {
        "allocatable": [plugin_device("nvidia.com/gpu", UUID)],
        "claims": [{**claim, "cdi": ["nvidia.com/gpu=0"]}],
    }
    assert list_devices(page)[GPU]["managers"] == ["DRA", "kubelet"]


def test_requested_and_past_devices_are_listed() -> None:
    def requested_device(device: str, resource: str = "", numa: list[int] | None = None) -> dict[str, Any]:
        return {
            "container": "shop/db/main",
            "resource": resource,
            "device": device,
            "numa": numa,
            "source": "s",
        }

    def past_device(device: str, exists: bool = False) -> dict[str, Any]:
        return {"time": 7.5, "container": "shop/old/main", "device": device, "exists": exists}

    requested = [
        requested_device("/dev/nvidia0", numa=[0]),
        requested_device("/dev/npu0"),
        requested_device("/dev/odd"),
        requested_device(VF, "x/vf", [1]),
    ]
    history = [past_device("/dev/nvidia0"), past_device(f"x/vf={VF}", exists=True), past_device("x/away=1")]
    found = list_devices({"requested": requested, "history": history})
    assert found[GPU]["containers"] == ["shop/db/main"]
    assert not found[GPU]["containersKnown"], "other containers may have it, too"
    assert found[GPU]["history"] == [{"time": 7.5, "container": "shop/old/main", "exists": False}]
    assert found["/dev/npu0"]["numa"] == [1]
    assert found["/dev/odd"]["pci"] == []
    assert (found[VF]["managers"], found[VF]["containersKnown"]) == (["kubelet"], False)
    assert [h["exists"] for h in found[VF]["history"]] == [True]
    assert found["x/away=1"]["history"]


def test_invalid_parts_of_an_answer_are_ignored() -> None:
    page = {"allocatable": [{"resource": "x/a", "id": "1", "numa": "odd"}, 7], "claims": {}, "history": None}
    assert list_devices(page)["x/a=1"]["numa"] is None


def test_devices_of_topoproxy_have_its_health_and_containers() -> None:
    managed = [
        {**plugin_device("x/vf", VF, [1]), "healthy": True, "containers": ["shop/db/main"]},
        {**plugin_device("x/npu", "n", [0]), "healthy": False, "containers": []},
    ]
    found = list_devices({"managed": managed})
    vf, npu = found[VF], found["x/npu=n"]
    assert (vf["managers"], vf["containers"], vf["health"]) == (["topoproxy"], ["shop/db/main"], "healthy")
    assert (npu["containers"], npu["containersKnown"], npu["health"]) == ([], True, "unhealthy")
    assert npu["numaSource"] == "topoproxy's device plugins"


def test_a_device_of_kubelet_and_topoproxy_is_listed_with_both() -> None:
    claim = {"claim": "ml/c", "driver": "gpu.d", "pool": "p", "device": "d", "cdi": ["nvidia.com/gpu=0"]}
    page = {
        "managed": [{**plugin_device("x/gpu", GPU, [0]), "healthy": True, "containers": []}],
        "claims": [{**claim, "container": "ml/train/main"}],
    }
    assert list_devices(page)[GPU]["managers"] == ["DRA", "topoproxy"]
