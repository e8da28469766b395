"""Finds the location of a device in sysfs.

A device file has two numbers, and ``/sys/dev/char/MAJ:MIN`` (or ``block``) is a link to the device's
directory below ``/sys/devices``. This directory lies in the directory of its parent device, and so on up to
the PCI function, which has a file ``numa_node``. So the nearest ancestor directory with that file gives the
node. A value of -1 means that the firmware did not report a node. A node that the machine does not have is a
firmware error. In both cases the device counts as near no NUMA node.

A few devices are not found that way:

- A disk made of other disks (device mapper, md, multipath NVMe) is a virtual device. Its location is that of
  its parts, which it lists as ``slaves/`` or, for NVMe, as controllers of its subsystem.
- A VFIO group is a virtual device; its members are in ``/sys/kernel/iommu_groups/N/devices``.
- NVIDIA's driver makes no directory in sysfs; it lists its cards by PCI address in
  ``/proc/driver/nvidia/gpus``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from proxy.model.idset import Mask, union
from proxy.topology.files import SysfsTree

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_MINOR = re.compile(r"^Device Minor:\s*(\d{1,6})\s*$", re.MULTILINE)
_CONTROLLER = re.compile(r"nvme\d+")
_VIRTUAL = "devices/virtual/"
_GPUS = "driver/nvidia/gpus"
_PARTS_LIMIT = 64
_DEPTH_LIMIT = 6
_SHOWN_SOURCES = 4


class DeviceLocation(Struct, frozen=True):
    """The NUMA nodes of a device.

    Attributes:
        nodes: NUMA nodes; None if the device is near no NUMA node, or its nodes are unknown.
        source: The source of ``nodes``, or the reason why there are none, as text.
        functions: Addresses of the device's PCI functions; empty if it has none.
    """

    nodes: Mask | None
    source: str
    functions: tuple[str, ...] = ()


def combined_location(locations: Iterable[DeviceLocation]) -> DeviceLocation | None:
    """Return the location of a device with several parts, from parts with known nodes; None if no parts."""
    all_locations = list(locations)
    located = [location for location in all_locations if location.nodes is not None] or all_locations
    if not located:
        return None
    bits = union(location.nodes.bits for location in located if location.nodes is not None)
    sources = list(dict.fromkeys(location.source for location in located))
    more = f" and {len(sources) - _SHOWN_SOURCES} more" if len(sources) > _SHOWN_SOURCES else ""
    functions = dict.fromkeys(function for location in all_locations for function in location.functions)
    nodes = Mask.from_bits(bits) if bits else None
    return DeviceLocation(nodes, ", ".join(sources[:_SHOWN_SOURCES]) + more, tuple(functions))


class SysfsDeviceLookup:
    """Looks for devices in sysfs.

    Args:
        sysfs_root: Used in place of ``/sys``.
        procfs_root: Used in place of ``/proc``.
    """

    def __init__(self, sysfs_root: Path, procfs_root: Path) -> None:
        self._sys = SysfsTree(Path(os.path.realpath(sysfs_root)))
        self._proc = SysfsTree(procfs_root)
        self._cards: tuple[tuple[str, ...], dict[int, str]] = ((), {})

    def locate_numbers(self, kind: str, major: int, minor: int) -> DeviceLocation | None:
        """Find a device by its numbers.

        Args:
            kind: ``char`` or ``block``.
            major: Its major number.
            minor: Its minor number.

        Returns:
            None if sysfs does not list the device.
        """
        return self.locate_path(f"dev/{kind}/{major}:{minor}")

    def locate_iommu_group(self, group: int) -> DeviceLocation | None:
        """Find the members of an IOMMU group; None if there is no such group, or it is empty."""
        directory = f"kernel/iommu_groups/{group}/devices"
        return combined_location(
            self._locate_all(f"{directory}/{name}" for name in self._sys.names(directory)[:_PARTS_LIMIT])
        )

    def locate_nvidia_card(self, minor: int) -> DeviceLocation | None:
        """Find an NVIDIA card by the minor number of its device file; None if the driver does not list it."""
        names = tuple(self._proc.names(_GPUS))
        if names != self._cards[0]:
            # Reading the file takes the driver's lock, so it is read once per card and not once per
            # container.
            texts = {name: self._proc.text(f"{_GPUS}/{name}/information") or "" for name in names}
            minors = {int(m[1]): name for name, text in texts.items() if (m := _MINOR.search(text))}
            self._cards = (names, minors)
        address = self._cards[1].get(minor)
        return None if address is None else self.locate_path(f"bus/pci/devices/{address.lower()}")

    def locate_path(self, path: str) -> DeviceLocation | None:
        """Find the device that a path below ``/sys`` leads to; None if there is none."""
        return combined_location(self._locate_all((path,)))

    def _locate_all(self, paths: Iterable[str], depth: int = 0) -> list[DeviceLocation]:
        locations: list[DeviceLocation] = []
        for path in paths:
            real = self._real(path)
            if real is None:
                continue
            parts = self._parts(real) if depth < _DEPTH_LIMIT else []
            locations += (self._locate_all(parts, depth + 1) if parts else []) or [self._above(real)]
            if len(locations) >= _PARTS_LIMIT:
                break
        return locations

    def _real(self, path: str) -> str | None:
        """Follow links; None if they lead to no device or out of the tree."""
        root = str(self._sys.root)
        real = os.path.realpath(f"{root}/{path}")
        inner = real.removeprefix(f"{root}/")
        return inner if inner != real and inner.startswith("devices/") and self._sys.exists(inner) else None

    def _parts(self, real: str) -> list[str]:
        """List the parts of a virtual disk, or of the disk that a partition is on."""
        if not real.startswith(_VIRTUAL):
            return []
        disk = real
        while disk.count("/") > _VIRTUAL.count("/"):
            slaves = self._sys.names(f"{disk}/slaves")
            if slaves:
                return [f"{disk}/slaves/{name}" for name in slaves]
            disk = os.path.dirname(disk)  # noqa: PTH120 - a name, not a file
            if disk.rpartition("/")[2].startswith("nvme-subsys"):
                return [f"{disk}/{name}" for name in self._sys.names(disk) if _CONTROLLER.fullmatch(name)]
        return []

    def _above(self, real: str) -> DeviceLocation:
        """Read the nearest ``numa_node`` at or above a directory."""
        directory = real
        function = tuple(part for part in real.split("/") if _PCI.fullmatch(part))[-1:]
        while "/" in directory:
            text = self._sys.text(f"{directory}/numa_node")
            if text is not None:
                return self._reported(directory.rpartition("/")[2], text, function)
            directory = directory.rpartition("/")[0]
        if real.startswith(_VIRTUAL):
            return DeviceLocation(None, "a device without hardware of its own")
        return DeviceLocation(None, f"sysfs has no NUMA node for {real}", function)

    def _reported(self, name: str, text: str, function: tuple[str, ...]) -> DeviceLocation:
        device = f"PCI device {name}" if _PCI.fullmatch(name) else f"device {name}"
        if text == "-1":
            return DeviceLocation(None, f"{device} has no NUMA node", function)
        node = int(text) if text.isascii() and text.isdigit() and len(text) < 7 else -1
        # A kernel without NUMA has no node directories: its only node is node 0.
        if node in (self._sys.numbered("devices/system/node", "node") or [0]):
            return DeviceLocation(Mask((node,)), f"numa_node of {device}", function)
        message = f"{device} has NUMA node {text[:20]!r}, which this machine does not have"
        return DeviceLocation(None, message, function)
