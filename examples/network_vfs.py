#!/usr/bin/env python3
"""A device plugin for virtual functions (SR-IOV) of network cards; a template for plugins of your own.

A virtual function is a PCI function with a link ``physfn`` to its card. A pod requests one virtual function
with

    resources: {limits: {example.com/vf: 1}}

and its container gets the PCI addresses in ``PCIDEVICE_EXAMPLE_COM_VF``, and VFIO's device files for the
functions that have the driver vfio-pci. A function is healthy while it has a driver and the link of its card
is up.

    python3 network_vfs.py --interface eth1            # with topoproxy
    python3 network_vfs.py --directory /var/lib/kubelet/device-plugins   # with kubelet's device manager
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxy.device_kit.api import AllocateAnswer, DeviceNode, DevicePlugin, PluginDevice, serve

VFIO = "vfio-pci"
DOWN = frozenset(("down", "lowerlayerdown", "notpresent"))
"""States of a link that passes no traffic (Documentation/networking/operstates.rst of Linux)."""


class NetworkVfs(DevicePlugin):
    """The virtual functions of network cards."""

    def __init__(
        self, sysfs: Path = Path("/sys"), resource: str = "example.com/vf", interface: str = ""
    ) -> None:
        """Read nothing yet.

        Args:
            sysfs: The directory to read instead of ``/sys``.
            resource: The resource.
            interface: Only virtual functions of the card with this interface; empty: all cards.
        """
        self.resource = resource
        self._pci = sysfs / "bus/pci/devices"
        self._interface = interface

    def devices(self) -> Iterator[PluginDevice]:
        """Return the virtual functions."""
        for function in sorted(self._pci.iterdir()):
            card = function / "physfn"
            if card.is_symlink() and self._is_chosen(card):
                node = int(_text(function / "numa_node") or -1)
                healthy = bool(_target(function / "driver")) and _is_up(card)
                yield PluginDevice(function.name, healthy, (node,) if node >= 0 else ())

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """Prefer functions of few cards: those of the card that has the most."""
        cards = {name: _target(self._pci / name / "physfn") for name in (*available, *must_include)}
        included, free = Counter(cards[name] for name in must_include), Counter(cards.values())
        rest = sorted(
            set(available) - set(must_include),
            key=lambda name: (-included[cards[name]], -free[cards[name]], cards[name], name),
        )
        return [*must_include, *rest][:size]

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        """Return the addresses and device files of functions."""
        groups = [
            _target(self._pci / name / "iommu_group")
            for name in ids
            if _target(self._pci / name / "driver") == VFIO
        ]
        files = [f"/dev/vfio/{name}" for name in (*dict.fromkeys(groups), *(["vfio"] if groups else []))]
        variable = "PCIDEVICE_" + "".join(c if c.isalnum() else "_" for c in self.resource).upper()
        return AllocateAnswer(
            envs={variable: ",".join(ids)}, devices=tuple(DeviceNode(file, file, "rw") for file in files)
        )

    def _is_chosen(self, card: Path) -> bool:
        is_network = _text(card / "class").startswith("0x02")
        return is_network and (not self._interface or (card / "net" / self._interface).exists())


def _is_up(card: Path) -> bool:
    """Return whether no interface of a card reports that its link is down."""
    return not any(_text(state) in DOWN for state in card.glob("net/*/operstate"))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _target(link: Path) -> str:
    """Return the name of the target of a link; empty if there is no link."""
    try:
        return link.readlink().name
    except OSError:
        return ""


def main() -> None:
    """Read the command line and serve."""
    options = argparse.ArgumentParser(description="Device plugin for virtual functions of network cards.")
    options.add_argument("--resource", default="example.com/vf")
    options.add_argument("--interface", default="", help="of the card; all cards if it is not given")
    options.add_argument("--sysfs-root", type=Path, default=Path("/sys"))
    options.add_argument("--directory", type=Path, default=Path("/var/lib/topoproxy/device-plugins"))
    arguments = options.parse_args()
    serve(
        NetworkVfs(arguments.sysfs_root, arguments.resource, arguments.interface),
        directory=arguments.directory,
    )


if __name__ == "__main__":
    main()
