"""The PCI functions of a machine in sysfs, with their kind and NUMA nodes.

``/sys/bus/pci/devices`` lists all functions by address. Bridges and controllers of the board are functions
too, so only functions of some classes are given to containers (``PciFunction.is_assignable``). The class
codes are those of the PCI Code and ID Assignment Specification.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from msgspec import Struct

from proxy.model.idset import Mask
from proxy.topology.device_location import SysfsDeviceLookup
from proxy.topology.files import SysfsTree

_DIRECTORY: Final = "bus/pci/devices"
_KINDS: Final = {
    "01": "storage",
    "02": "network",
    "0207": "InfiniBand",
    "03": "display",
    "0302": "3D controller",
    "04": "multimedia",
    "05": "memory",
    "06": "bridge",
    "07": "communication",
    "08": "system",
    "0b": "processor",
    "0b40": "coprocessor",
    "0c": "serial bus",
    "0c06": "InfiniBand",
    "10": "encryption",
    "11": "signal processing",
    "12": "accelerator",
    "40": "coprocessor",
}
_ASSIGNABLE: Final = ("01", "02", "03", "0b40", "0c06", "10", "12", "40")
_INTERFACES: Final = ("net", "infiniband", "nvme", "drm", "block", "accel")
_CLASS = re.compile(r"0x([0-9a-f]{6})")
_VIRTIO = re.compile(r"virtio\d+")
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{36})\s*$", re.MULTILINE)
_GPUS: Final = "driver/nvidia/gpus"


class PciFunction(Struct, frozen=True):
    """One PCI function.

    Attributes:
        address: Domain, bus, device and function, such as ``0000:3b:00.0``.
        code: Its class code, six hexadecimal digits; empty if unknown.
        vendor, product: Ids, such as ``0x8086``; empty if unknown.
        driver: Name of the driver; empty if it has none.
        interfaces: Names under which the kernel shows it, such as ``eth1``, ``nvme0`` or ``renderD128``.
        physical: For a virtual function (SR-IOV), the address of its physical function; otherwise empty.
        nodes: NUMA nodes; None if sysfs does not report one.
        source: The source of ``nodes``, or the reason why there are none, as text.
    """

    address: str
    code: str
    vendor: str
    product: str
    driver: str
    interfaces: tuple[str, ...]
    physical: str
    nodes: Mask | None
    source: str

    @property
    def kind(self) -> str:
        """Its kind as text; empty if its class is not in the table."""
        return _KINDS.get(self.code[:4]) or _KINDS.get(self.code[:2], "")

    @property
    def is_assignable(self) -> bool:
        """Whether the function is of a class that is given to containers, or is a virtual function."""
        return self.code.startswith(_ASSIGNABLE) or bool(self.physical)


def pci_functions(sysfs_root: Path) -> tuple[PciFunction, ...]:
    """Read all PCI functions, by address.

    Args:
        sysfs_root: Used in place of ``/sys``.
    """
    tree, lookup = SysfsTree(sysfs_root), SysfsDeviceLookup(sysfs_root, Path("/proc"))
    return tuple(_function(tree, lookup, address) for address in sorted(tree.names(_DIRECTORY)))


def nvidia_addresses(procfs_root: Path) -> dict[str, str]:
    """Return the PCI addresses of NVIDIA's cards by UUID, the id that their device plugin uses.

    Args:
        procfs_root: Used in place of ``/proc``.
    """
    tree = SysfsTree(procfs_root)
    texts = {name: tree.text(f"{_GPUS}/{name}/information") or "" for name in tree.names(_GPUS)}
    return {match[1]: name.lower() for name, text in texts.items() if (match := _UUID.search(text))}


def _function(tree: SysfsTree, lookup: SysfsDeviceLookup, address: str) -> PciFunction:
    directory = f"{_DIRECTORY}/{address}"
    code = _CLASS.fullmatch(tree.text(f"{directory}/class") or "")
    location = lookup.locate_path(directory)
    return PciFunction(
        address,
        code[1] if code else "",
        tree.text(f"{directory}/vendor") or "",
        tree.text(f"{directory}/device") or "",
        _target(tree, f"{directory}/driver"),
        _interfaces(tree, directory),
        _target(tree, f"{directory}/physfn"),
        location.nodes if location else None,
        location.source if location else "sysfs has no NUMA node for it",
    )


def _target(tree: SysfsTree, link: str) -> str:
    """Return the last part of a link's target; empty if there is no link."""
    try:
        return Path(tree.root, link).readlink().name
    except OSError:
        return ""


def _interfaces(tree: SysfsTree, directory: str) -> tuple[str, ...]:
    inner = [f"{directory}/{name}" for name in tree.names(directory) if _VIRTIO.fullmatch(name)]
    directories = (f"{at}/{kind}" for at in (directory, *inner) for kind in _INTERFACES)
    return tuple(dict.fromkeys(name for path in directories for name in tree.names(path)))
