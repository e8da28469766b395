"""The example of a device plugin, on a recorded PCI bus, as a class and as a program."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.device_kit.api import DeviceNode, PluginDevice
from proxy.device_kit.testing import DeviceManager, running
from tests.testkit.pci_tree import PciTree

FILE = Path(__file__).parents[2] / "examples/network_vfs.py"
VF = "example.com/vf"
NETWORK = "0x020000"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("network_vfs", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Bus:
    """Two network cards with virtual functions, on NUMA nodes 0 and 1, and a disk that has some, too."""

    def __init__(self, directory: Path) -> None:
        self.sysfs = directory / "sys"
        tree = PciTree(self.sysfs)
        for card, node, name in (("0000:5e:00.0", "0", "eth1"), ("0000:af:00.0", "1", "eth2")):
            tree.add(card, NETWORK, node, driver="mlx5_core", names=(f"net/{name}",))
            for number in (2, 3, 4):
                function = f"{card[:-1]}{number}"
                driver = "vfio-pci" if number < 4 else "mlx5_core"
                tree.add(function, NETWORK, node, driver=driver, physical=card)
                group = self.sysfs / f"kernel/iommu_groups/{number + 10 * int(node)}"
                group.mkdir(parents=True, exist_ok=True)
                (self.function(function) / "iommu_group").symlink_to(group)
            self.link(card, name, "up")
        tree.add("0000:81:00.0", "0x010802", "1", driver="nvme")
        tree.add("0000:81:00.1", "0x010802", "1", driver="nvme", physical="0000:81:00.0")

    def function(self, address: str) -> Path:
        return self.sysfs / "bus/pci/devices" / address

    def link(self, card: str, name: str, state: str) -> None:
        (self.function(card) / f"net/{name}/operstate").write_text(f"{state}\n")


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    return Bus(tmp_path)


def listed(plugin: Any) -> dict[str, PluginDevice]:
    return {device.id: device for device in plugin.devices()}


def test_virtual_functions_of_network_cards_are_listed_with_their_nodes(bus: Bus) -> None:
    found = listed(example().NetworkVfs(bus.sysfs))
    assert set(found) == {f"0000:{card}:00.{n}" for card in ("5e", "af") for n in (2, 3, 4)}
    assert all(device.healthy for device in found.values())
    assert found["0000:5e:00.2"].numa == (0,)
    assert found["0000:af:00.2"].numa == (1,)


def test_one_card_can_be_chosen_by_its_interface(bus: Bus) -> None:
    assert {name[5:7] for name in listed(example().NetworkVfs(bus.sysfs, interface="eth2"))} == {"af"}
    assert listed(example().NetworkVfs(bus.sysfs, interface="eth9")) == {}


def test_without_a_driver_or_a_link_a_function_is_unhealthy(bus: Bus) -> None:
    (bus.function("0000:5e:00.3") / "driver").unlink()
    bus.link("0000:af:00.0", "eth2", "down")
    found = listed(example().NetworkVfs(bus.sysfs))
    assert {name for name, device in found.items() if device.healthy} == {"0000:5e:00.2", "0000:5e:00.4"}


def test_a_node_that_the_firmware_does_not_name_is_left_out(bus: Bus) -> None:
    (bus.function("0000:5e:00.2") / "numa_node").write_text("-1\n")
    assert listed(example().NetworkVfs(bus.sysfs))["0000:5e:00.2"].numa == ()


def test_a_container_gets_addresses_and_the_files_of_vfio(bus: Bus) -> None:
    plugin = example().NetworkVfs(bus.sysfs, "example.com/fast-vf")
    answer = plugin.allocate(("0000:5e:00.2", "0000:5e:00.4", "0000:af:00.3"))
    assert answer.envs == {"PCIDEVICE_EXAMPLE_COM_FAST_VF": "0000:5e:00.2,0000:5e:00.4,0000:af:00.3"}
    assert answer.devices == tuple(
        DeviceNode(file, file, "rw") for file in ("/dev/vfio/2", "/dev/vfio/13", "/dev/vfio/vfio")
    )
    assert plugin.allocate(("0000:5e:00.4",)).devices == ()


def test_functions_of_one_card_are_preferred(bus: Bus) -> None:
    plugin = example().NetworkVfs(bus.sysfs)
    free = ["0000:5e:00.3", "0000:af:00.2", "0000:af:00.3", "0000:5e:00.2", "0000:af:00.4"]
    assert plugin.preferred(free, (), 2) == ["0000:af:00.2", "0000:af:00.3"]
    assert plugin.preferred(free, ("0000:5e:00.2",), 2) == ["0000:5e:00.2", "0000:5e:00.3"]
    assert len(plugin.preferred(free, (), 5)) == 5


def test_a_link_that_goes_down_is_seen_by_the_manager(bus: Bus, tmp_path: Path) -> None:
    plugin = example().NetworkVfs(bus.sysfs)
    plugin.period_s = 0.05
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    with DeviceManager(sockets) as manager, running(plugin, sockets):
        manager.wait_for(VF, healthy=6)
        bus.link("0000:5e:00.0", "eth1", "down")
        manager.wait_for(VF, healthy=3)
        assert manager.preferred(VF, ["0000:af:00.2", "0000:5e:00.2"]) == ("0000:5e:00.2",)


def test_the_program_serves_until_it_gets_sigterm(bus: Bus, tmp_path: Path) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    line = [sys.executable, str(FILE), "--sysfs-root", str(bus.sysfs), "--directory", str(sockets)]
    environment = {**os.environ, "PYTHONPATH": str(FILE.parents[1])}
    with DeviceManager(sockets) as manager:
        program = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            manager.wait_for(VF, healthy=6, limit_s=60)
            answer = manager.allocate(VF, ["0000:5e:00.4"])
            assert answer.envs == {"PCIDEVICE_EXAMPLE_COM_VF": "0000:5e:00.4"}
        finally:
            program.send_signal(signal.SIGTERM)
            _, words = program.communicate(timeout=30)
    assert program.returncode == 0, words
    assert "registered the device plugin" in words
    assert sorted(path.name for path in sockets.iterdir()) == []
