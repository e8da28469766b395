"""PCI functions in a directory used as ``/sys``, as the kernel lists them."""

from __future__ import annotations

import os
from pathlib import Path


class PciTree:
    """Writes PCI functions below a sysfs root."""

    def __init__(self, sysfs: Path) -> None:
        self.sysfs = sysfs

    def add(
        self,
        address: str,
        code: str,
        node: str = "-1",
        *,
        ids: str = "0x15b3:0x1017",
        driver: str = "",
        names: tuple[str, ...] = (),
        physical: str = "",
    ) -> None:
        """Add a function.

        Args:
            address: Its address, such as ``0000:3b:00.0``.
            code: The content of ``class``.
            node: The content of ``numa_node``; empty for no such file.
            ids: Vendor and product.
            driver: Its driver; empty for none.
            names: Directories inside it, such as ``net/eth1``.
            physical: Address of its physical function, if it is a virtual one.
        """
        directory = self.sysfs / f"devices/pci0000:00/{address}"
        directory.mkdir(parents=True)
        vendor, _, product = ids.partition(":")
        for name, text in (("class", code), ("vendor", vendor), ("device", product), ("numa_node", node)):
            if text:
                (directory / name).write_text(f"{text}\n")
        for name in names:
            (directory / name).mkdir(parents=True)
        self._link(f"bus/pci/devices/{address}", directory)
        if driver:
            where = self.sysfs / f"bus/pci/drivers/{driver}"
            where.mkdir(parents=True, exist_ok=True)
            (directory / "driver").symlink_to(os.path.relpath(where, directory))
        if physical:
            (directory / "physfn").symlink_to(f"../{physical}")

    def _link(self, path: str, target: Path) -> None:
        link = self.sysfs / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))
