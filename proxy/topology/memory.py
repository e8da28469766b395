"""Memory sizes and huge pages, of a node and of the whole machine.

``MemTotal`` of a node's meminfo is what the kernel manages there, in kB of 1024 bytes. Huge pages come as
one directory per page size, ``hugepages-2048kB``, below a node and below ``kernel/mm``; kernels before those
directories report one size in ``/proc/meminfo``.
"""

from __future__ import annotations

import re

from proxy.model.machine import HugePages
from proxy.topology.files import SysfsTree

_KB = 1024
_FIELD = re.compile(r"^(?:Node \d+ )?(\w+):\s+(\d+)(?: kB)?\s*$", re.MULTILINE)
_SIZE = re.compile(r"hugepages-(\d{1,12})kB")


def meminfo(tree: SysfsTree, path: str) -> dict[str, int]:
    """Read a meminfo file, of ``/proc`` or of a node: field to number (kB where the field has a unit)."""
    text = tree.text(path)
    return {} if text is None else {name: int(value) for name, value in _FIELD.findall(text)}


def mem_total(fields: dict[str, int]) -> int | None:
    """Return the total memory in bytes, None where meminfo does not have it."""
    total = fields.get("MemTotal")
    return None if total is None else total * _KB


def hugepages(tree: SysfsTree, directory: str) -> dict[int, HugePages] | None:
    """Read a directory of huge page sizes: page size in kB to counts; None where there is no directory."""
    if not tree.exists(directory):
        return None
    found: dict[int, HugePages] = {}
    for name in tree.names(directory):
        match = _SIZE.fullmatch(name)
        number = tree.number(f"{directory}/{name}/nr_hugepages") if match else None
        if match and number is not None:
            free = tree.number(f"{directory}/{name}/free_hugepages")
            surplus = tree.number(f"{directory}/{name}/surplus_hugepages")
            found[int(match[1])] = HugePages(number, free, surplus)
    return found


def machine_hugepages(
    tree: SysfsTree, fields: dict[str, int]
) -> tuple[dict[int, HugePages] | None, str | None]:
    """Return the machine's huge pages (without surplus) and where they were found.

    Args:
        tree: The sysfs.
        fields: ``/proc/meminfo``, for kernels that have no directory.
    """
    found = hugepages(tree, "kernel/mm/hugepages")
    if found is not None:
        return {size: HugePages(pages.nr, pages.free) for size, pages in found.items()}, "sysfs"
    if "HugePages_Total" in fields and "Hugepagesize" in fields:
        pages = HugePages(fields["HugePages_Total"], fields.get("HugePages_Free"))
        return {fields["Hugepagesize"]: pages}, "proc/meminfo"
    return None, None
