from __future__ import annotations

import json
import os
import re
import stat as modes
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from proxy.executor.ports import DeviceFacts, DeviceLocator
from proxy.model.idset import Mask
from proxy.model.workload import LocatedDevice
from proxy.topology.devices import SysfsDevices

GPU = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
NIC = "devices/pci0000:5d/0000:5d:02.0/0000:5e:00.0"
NVME = "devices/pci0000:80/0000:80:01.0/0000:81:00.0"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "machines"


class Host:
    """A host in a directory. Device files are plain files there; ``stat`` reports their kinds and numbers."""

    def __init__(self, root: Path) -> None:
        self.sys, self.dev, self.proc, self.cdi = (root / name for name in ("sys", "dev", "proc", "cdi"))
        for directory in (self.sys, self.dev, self.proc, self.cdi):
            directory.mkdir()
        self.numbers: dict[str, tuple[int, int]] = {}
        self.queried: list[str] = []
        for node in (0, 1):
            self.write(f"devices/system/node/node{node}/distance", "10 20")

    def write(self, path: str, text: str, root: Path | None = None) -> None:
        file = (root or self.sys) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def function(self, path: str, node: str) -> None:
        """Write a PCI function with its link in bus/pci."""
        self.write(f"{path}/numa_node", node)
        self.link(f"bus/pci/devices/{path.rpartition('/')[2]}", path)

    def link(self, path: str, target: str) -> None:
        link = self.sys / path
        link.parent.mkdir(parents=True, exist_ok=True)
        (self.sys / target).mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.sys / target, link.parent))

    def device(self, name: str, number: int, directory: str = "", kind: int = modes.S_IFCHR) -> None:
        """Write a device file 200:number, and its directory in sysfs if it has one."""
        file = self.dev / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        self.numbers[os.path.realpath(file)] = (kind, os.makedev(200, number))
        if directory:
            self.link(f"dev/{'block' if kind == modes.S_IFBLK else 'char'}/200:{number}", directory)

    def stat(self, path: str) -> os.stat_result:
        self.queried.append(path)
        real = os.stat(path)
        if path not in self.numbers:
            return real
        mode, number = self.numbers[path]
        return os.stat_result((mode | 0o600, *real[1:10]), {"st_rdev": number})

    def devices(self) -> SysfsDevices:
        return SysfsDevices(self.sys, self.dev, (self.cdi,), self.proc, stat=self.stat)

    def location(self, *paths: str) -> dict[str, str | None]:
        return reported(self.devices().locate(DeviceFacts(paths=paths)))


def reported(location: tuple[LocatedDevice, ...]) -> dict[str, str | None]:
    return {entry.name: None if entry.nodes is None else str(entry.nodes) for entry in location}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_nearest_ancestor_that_names_a_node(host: Host) -> None:
    host.function(NIC, "1")
    host.device("infiniband/uverbs0", 0, f"{NIC}/infiniband_verbs/uverbs0")
    devices: DeviceLocator = host.devices()
    assert devices.locate(DeviceFacts(paths=("/dev/infiniband/uverbs0",))) == (
        LocatedDevice("/dev/infiniband/uverbs0", "", Mask((1,)), "numa_node of PCI device 0000:5e:00.0"),
    )


def test_a_device_on_no_pci_bus_has_its_own_message(host: Host) -> None:
    host.write("devices/platform/npu.0/numa_node", "0")
    host.device("npu0", 1, "devices/platform/npu.0/misc/npu0")
    (location,) = host.devices().locate(DeviceFacts(mounts=("/dev/npu0",)))
    assert (location.nodes, location.source) == (Mask((0,)), "numa_node of device npu.0")


def test_block_and_character_devices_of_one_number_differ(host: Host) -> None:
    host.function(NIC, "1")
    host.function(NVME, "0")
    host.device("sda", 7, f"{NVME}/block/sda", modes.S_IFBLK)
    host.device("infiniband/umad0", 7, f"{NIC}/infiniband_mad/umad0")
    assert host.location("/dev/sda", "/dev/infiniband/umad0") == {
        "/dev/sda": "0",
        "/dev/infiniband/umad0": "1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1", "PCI device 0000:3b:00.0 has no NUMA node"),
        ("7", "PCI device 0000:3b:00.0 has NUMA node '7', which this machine does not have"),
        ("x", "PCI device 0000:3b:00.0 has NUMA node 'x', which this machine does not have"),
        ("9" * 30, f"PCI device 0000:3b:00.0 has NUMA node '{'9' * 20}', which this machine does not have"),
    ],
)
def test_an_invalid_node(host: Host, text: str, message: str) -> None:
    host.function(GPU, text)
    host.device("dri/card1", 1, f"{GPU}/drm/card1")
    (location,) = host.devices().locate(DeviceFacts(paths=("/dev/dri/card1",)))
    assert (location.nodes, location.source) == (None, message)


def test_a_kernel_without_numa_has_node_0_alone(host: Host, tmp_path: Path) -> None:
    host.function(GPU, "0")
    host.function(NIC, "1")
    host.device("dri/card0", 1, f"{GPU}/drm/card0")
    host.device("dri/card1", 2, f"{NIC}/drm/card1")
    (host.sys / "devices/system/node").rename(tmp_path / "gone")
    assert host.location("/dev/dri/card0", "/dev/dri/card1") == {
        "/dev/dri/card0": "0",
        "/dev/dri/card1": None,
    }


def test_what_is_not_there(host: Host) -> None:
    host.device("dri/card0", 5)
    (host.dev / "plain").write_text("")
    location = host.devices().locate(
        DeviceFacts(paths=("/dev/dri/card0", "/dev/uio9", "/dev/plain", "/dev/a\0b"))
    )
    assert [(entry.nodes, entry.source) for entry in location] == [
        (None, "sysfs does not list it"),
        (None, "this host has no such device file"),
        (None, "sysfs does not list it"),
        (None, "this host has no such device file"),
    ]


def test_names_without_meaning_are_not_entries(host: Host) -> None:
    host.device("nvidiactl", 255)
    paths = ("/dev", "/dev/null", "/dev/nvidiactl", "/etc/passwd", "/sys/fs/cgroup", "")
    assert host.devices().locate(DeviceFacts(paths, (), paths)) == ()
    assert host.queried == []


def test_a_directory_represents_its_device_files(host: Host) -> None:
    host.function(NIC, "1")
    host.function(GPU, "0")
    host.device("infiniband/uverbs0", 0, f"{NIC}/infiniband_verbs/uverbs0")
    host.device("infiniband/uverbs1", 1, f"{GPU}/infiniband_verbs/uverbs1")
    host.device("infiniband/rdma_cm", 2, "devices/virtual/misc/rdma_cm")
    host.device("infiniband/odd", 3)
    host.device("infiniband/by-ibdev/uverbs2", 4, f"{NIC}/infiniband_verbs/uverbs2")
    host.device("infiniband/a/b/deep", 5, f"{NIC}/infiniband_verbs/deep")
    (host.dev / "infiniband/link").symlink_to("uverbs0")
    (host.dev / "infiniband/plain").write_text("")
    found = {
        "/dev/infiniband/uverbs0": "1",
        "/dev/infiniband/uverbs1": "0",
        "/dev/infiniband/by-ibdev/uverbs2": "1",
    }
    assert reported(host.devices().locate(DeviceFacts(mounts=("/dev/infiniband",)))) == found
    assert (
        reported(
            host.devices().locate(
                DeviceFacts(mounts=("/dev/infiniband/",), paths=("/dev/infiniband/uverbs0",))
            )
        )
        == found
    )


def test_a_directory_without_nodes_is_one_entry_or_none(host: Host) -> None:
    host.device("snd/pcm0", 1)
    host.device("snd/pcm1", 2)
    host.device("infiniband/rdma_cm", 3)
    (host.dev / "empty").mkdir()
    (location,) = host.devices().locate(DeviceFacts(mounts=("/dev/snd", "/dev/infiniband", "/dev/empty")))
    assert location == LocatedDevice("/dev/snd", "", None, "no device in it has a NUMA node")


def test_a_directory_of_thousands_is_truncated(host: Host) -> None:
    host.function(NIC, "1")
    for number in range(300):
        host.device(f"many/x{number:03}", number, f"{NIC}/x/x{number}")
    location = host.devices().locate(DeviceFacts(mounts=("/dev/many",)))
    assert [entry.name for entry in location] == [f"/dev/many/x{number:03}" for number in range(256)]


def test_a_link_is_followed_inside_dev_and_not_out_of_it(host: Host, tmp_path: Path) -> None:
    host.function(NVME, "1")
    host.device("nvme0n1", 1, f"{NVME}/nvme/nvme0/nvme0n1", modes.S_IFBLK)
    host.device("../outside", 1)
    (host.dev / "disk").mkdir()
    (host.dev / "disk/by-id").symlink_to("../nvme0n1")
    (host.dev / "away").symlink_to("../outside")
    assert host.location("/dev/disk/by-id", "/dev/away") == {"/dev/disk/by-id": "1", "/dev/away": None}
    assert str(tmp_path / "outside") not in host.queried


def test_a_link_that_leads_out_of_sysfs_is_ignored(host: Host, tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices/numa_node").write_text("1\n")
    (host.sys / "dev/char").mkdir(parents=True)
    (host.sys / "dev/char/200:1").symlink_to(tmp_path / "devices")
    (host.sys / "dev/char/200:2").symlink_to("../../devices/gone")
    host.device("uio0", 1)
    host.device("uio1", 2)
    assert [e.source for e in host.devices().locate(DeviceFacts(paths=("/dev/uio0", "/dev/uio1")))] == [
        "sysfs does not list it"
    ] * 2


def test_a_vfio_group_has_the_nodes_of_its_members(host: Host) -> None:
    host.function(GPU, "0")
    host.function(NIC, "1")
    host.function(NVME, "-1")
    for group, functions in {12: (GPU, NIC, NVME), 13: (NVME,)}.items():
        for path in functions:
            host.link(f"kernel/iommu_groups/{group}/devices/{path.rpartition('/')[2]}", path)
    host.device("vfio/12", 1, "devices/virtual/vfio/12")
    location = host.devices().locate(
        DeviceFacts(paths=("/dev/vfio/12", "/dev/vfio/noiommu-13", "/dev/vfio/14", "/dev/vfio/vfio"))
    )
    assert [(e.name, e.nodes, e.source) for e in location] == [
        (
            "/dev/vfio/12",
            Mask((0, 1)),
            "numa_node of PCI device 0000:3b:00.0, numa_node of PCI device 0000:5e:00.0",
        ),
        ("/dev/vfio/noiommu-13", None, "PCI device 0000:81:00.0 has no NUMA node"),
        ("/dev/vfio/14", None, "its IOMMU group has no members"),
    ]


def test_a_new_vfio_device_is_located_as_other_devices(host: Host) -> None:
    host.function(NIC, "1")
    host.device("vfio/devices/vfio0", 1, f"{NIC}/vfio-dev/vfio0")
    assert host.location("/dev/vfio/devices/vfio0") == {"/dev/vfio/devices/vfio0": "1"}


def card(host: Host, address: str, minor: int) -> Path:
    text = f"Model: \t\t Some GPU\nIRQ:   \t\t 38\nDevice Minor: \t {minor}\nGPU Excluded:\t No"
    host.write(f"driver/nvidia/gpus/{address}/information", text, host.proc)
    return host.proc / f"driver/nvidia/gpus/{address}/information"


def test_a_card_that_sysfs_does_not_know_is_found_by_its_driver(host: Host) -> None:
    host.function(GPU, "0")
    host.function(NIC, "1")
    file = card(host, "0000:5e:00.0", 0)
    card(host, "0000:3B:00.0", 1)
    host.device("nvidia0", 0)
    host.device("nvidia7", 1)  # the number counts, not the name
    devices = host.devices()
    paths = DeviceFacts(
        paths=("/dev/nvidia0", "/dev/nvidia7", "/run/nvidia/driver/dev/nvidia1", "/dev/nvidia5")
    )
    location = devices.locate(paths)
    assert reported(location) == {
        "/dev/nvidia0": "1",
        "/dev/nvidia7": "0",
        "/dev/nvidia1": "0",
        "/dev/nvidia5": None,
    }
    assert location[0].source == "numa_node of PCI device 0000:5e:00.0"
    file.write_text("")  # the file is not read again while the cards are unchanged
    assert devices.locate(paths) == location
    host.function(NVME, "0")
    card(host, "0000:5e:00.0", 0)
    card(host, "0000:81:00.0", 5)
    assert reported(devices.locate(paths))["/dev/nvidia5"] == "0"


def test_a_card_in_sysfs_is_located_as_other_devices(host: Host) -> None:
    host.function(GPU, "0")
    host.function(NIC, "1")
    card(host, "0000:5e:00.0", 0)
    host.device("nvidia0", 0, f"{GPU}/nvidia/nvidia0")
    host.device("nvidia1", 1, "devices/virtual/nvidia/nvidia1")
    location = host.devices().locate(DeviceFacts(paths=("/dev/nvidia0", "/dev/nvidia1")))
    assert reported(location) == {"/dev/nvidia0": "0", "/dev/nvidia1": None}
    assert location[1].source == "a device without hardware of its own"


def test_a_disk_made_of_disks_has_their_nodes(host: Host) -> None:
    host.function(NVME, "1")
    host.function(NIC, "0")
    host.device("nvme0n1", 1, f"{NVME}/nvme/nvme0/nvme0n1", modes.S_IFBLK)
    host.link("devices/virtual/block/md0/slaves/nvme0n1p1", f"{NVME}/nvme/nvme0/nvme0n1/nvme0n1p1")
    host.link("devices/virtual/block/dm-1/slaves/md0", "devices/virtual/block/md0")
    host.link("devices/virtual/block/dm-1/slaves/sdb", f"{NIC}/host0/block/sdb")
    host.device("dm-1", 3, "devices/virtual/block/dm-1", modes.S_IFBLK)
    host.device("md0p1", 4, "devices/virtual/block/md0/md0p1", modes.S_IFBLK)
    assert host.location("/dev/dm-1", "/dev/md0p1") == {"/dev/dm-1": "0-1", "/dev/md0p1": "1"}


def test_a_multipath_disk_has_the_nodes_of_its_controllers(host: Host) -> None:
    host.function(NVME, "1")
    system = "devices/virtual/nvme-subsystem/nvme-subsys3"
    host.link(f"{system}/nvme3", f"{NVME}/nvme/nvme3")
    host.device("nvme3n1", 1, f"{system}/nvme3n1", modes.S_IFBLK)
    host.device("nvme3n1p2", 2, f"{system}/nvme3n1/nvme3n1p2", modes.S_IFBLK)
    assert host.location("/dev/nvme3n1", "/dev/nvme3n1p2") == {"/dev/nvme3n1": "1", "/dev/nvme3n1p2": "1"}


def test_a_sysfs_directory_represents_its_device(host: Host) -> None:
    host.function(NIC, "1")
    host.link("class/net/eth0", f"{NIC}/net/eth0")
    host.link("class/net/lo", "devices/virtual/net/lo")
    mounts = (
        "/sys/bus/pci/devices/0000:5e:00.0",
        "/sys/class/net/eth0",
        "/sys/class/net/lo",
        "/sys/class/net/x",
    )
    location = host.devices().locate(DeviceFacts(mounts=mounts))
    assert reported(location) == dict(zip(mounts, ("1", "1", None), strict=False))


def test_a_cdi_name_has_the_nodes_of_its_device_files(host: Host) -> None:
    host.function(GPU, "0")
    host.function(NIC, "1")
    host.device("dri/card0", 0, f"{GPU}/drm/card0")
    host.device("dri/card1", 1, f"{NIC}/drm/card1")
    host.link("class/net/eth0", f"{NIC}/net/eth0")
    card0, card1, control = ({"path": f"/dev/{name}"} for name in ("dri/card0", "dri/card1", "kfd"))
    edits = {
        "0": {"deviceNodes": [control, card0]},
        "all": {"deviceNodes": [card0, card1]},
        "net": {"netDevices": [{"hostInterfaceName": "eth0", "name": "n0"}]},
        "none": {"deviceNodes": [control]},
    }
    described = {
        "kind": "a.com/gpu",
        "devices": [{"name": name, "containerEdits": edit} for name, edit in edits.items()],
        "containerEdits": {"deviceNodes": [card1]},
    }
    (host.cdi / "gpu.json").write_text(json.dumps(described))
    names = tuple(f"a.com/gpu={name}" for name in ("0", "all", "net", "none", "gone"))
    location = host.devices().locate(DeviceFacts(("/dev/dri/card1",), names))
    by = f"(by {host.cdi}/gpu.json)"
    card, nic = "numa_node of PCI device 0000:3b:00.0", "numa_node of PCI device 0000:5e:00.0"
    assert [(e.name, e.nodes, e.source) for e in location] == [
        ("/dev/dri/card1", Mask((1,)), nic),
        ("a.com/gpu=0", Mask((0,)), f"{card} {by}"),
        ("a.com/gpu=all", Mask((0, 1)), f"{card}, {nic} {by}"),
        ("a.com/gpu=net", Mask((1,)), f"{nic} {by}"),
        ("a.com/gpu=none", None, f"{host.cdi}/gpu.json names no device file with a known location for it"),
        ("a.com/gpu=gone", None, "no CDI spec names it"),
    ]


def test_long_lists_of_sources_are_truncated(host: Host) -> None:
    for number in range(6):
        path = f"devices/pci0000:00/0000:00:0{number}.0"
        host.function(path, "0")
        host.link(f"kernel/iommu_groups/1/devices/0000:00:0{number}.0", path)
    (location,) = host.devices().locate(DeviceFacts(paths=("/dev/vfio/1",)))
    assert location.source.count("PCI device") == 4
    assert location.source.endswith("0000:00:03.0 and 2 more")


@pytest.mark.skipif(os.geteuid() != 0, reason="device files can be made by root only")
def test_a_real_device_file(host: Host) -> None:
    host.function(NVME, "1")
    file = host.dev / "nvme0n1"
    try:
        os.mknod(file, 0o600 | modes.S_IFBLK, os.makedev(259, 4))
    except OSError as error:
        pytest.skip(f"no device file can be made here: {error}")
    host.link("dev/block/259:4", f"{NVME}/nvme/nvme0/nvme0n1")
    devices = SysfsDevices(host.sys, host.dev, (), host.proc)
    assert reported(devices.locate(DeviceFacts(paths=("/dev/nvme0n1",)))) == {"/dev/nvme0n1": "1"}


@pytest.fixture
def snapshot(tmp_path: Path) -> Callable[[str], Path]:
    def unpack(name: str) -> Path:
        file = SHARED / f"{name}.tar.bz2"
        if not file.exists():
            pytest.skip(f"there is no snapshot {name} beside the repository")
        wanted = re.compile(
            r"[^/]+/sys/(devices/pci.*/numa_node|bus/pci/devices/.*|devices/system/node/node\d+)"
        )
        with tarfile.open(file) as tar:
            members = [member for member in tar if wanted.fullmatch(member.name)]
            tar.extractall(tmp_path / "machine", members, filter="tar")
        return next((tmp_path / "machine").glob("*/sys"))

    return unpack


def numa_nodes_of_pci(sysfs: Path) -> Mapping[str, str]:
    """Return PCI functions with the content of ``numa_node``, without following links."""
    return {file.parent.name: file.read_text().strip() for file in sysfs.glob("devices/pci*/**/numa_node")}


@pytest.mark.parametrize("name", ["40intel64-2g2n4c+pcilocality", "32intel64-2p8co2t+8ve"])
def test_every_pci_function_of_a_real_machine(
    snapshot: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    sysfs = snapshot(name)
    devices = SysfsDevices(sysfs, tmp_path / "dev", (), tmp_path / "proc")
    expected = numa_nodes_of_pci(sysfs)
    assert expected
    for address, node in expected.items():
        if (sysfs / "bus/pci/devices" / address).exists():
            (location,) = devices.locate(DeviceFacts(mounts=(f"/sys/bus/pci/devices/{address}",)))
            assert str(location.nodes) == (node if node != "-1" else "None"), location


def test_a_device_leads_to_the_pci_functions_that_carry_it(host: Host) -> None:
    host.function(NIC, "1")
    host.function(NVME, "0")
    host.device("infiniband/uverbs0", 0, f"{NIC}/infiniband_verbs/uverbs0")
    host.device("sda", 1, f"{NVME}/block/sda", modes.S_IFBLK)
    edits = {"deviceNodes": [{"path": "/dev/infiniband/uverbs0"}, {"path": "/dev/sda"}]}
    spec = {"kind": "v.com/x", "devices": [{"name": "both", "containerEdits": edits}, {"name": "none"}]}
    host.write("x.json", json.dumps(spec), host.cdi)
    devices = host.devices()
    assert devices.cdi_names() == ["v.com/x=both", "v.com/x=none"]
    assert devices.locate_device("/dev/infiniband/uverbs0").functions == ("0000:5e:00.0",)
    assert devices.locate_device("v.com/x=both").functions == ("0000:5e:00.0", "0000:81:00.0")
    assert devices.locate_device("v.com/x=none").functions == ()
    assert devices.locate_device("/dev/null").functions == ()
