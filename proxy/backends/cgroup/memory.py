"""Read where a container's memory is: bytes by NUMA node, from the memory and hugetlb controllers.

(Linux cgroup-v1/memory.rst, cgroup-v2.rst, hugetlb.rst; the moves of memory were measured on kernel 6.1.)

* v2 reports ``anon`` and ``file`` in bytes by NUMA node. v1 reports pages by LRU list: ``total`` is the sum
  of ``file``, ``anon`` and the locked pages (``unevictable``), and the lines that begin with
  ``hierarchical_`` include the groups below, as v2 always does. Neither includes huge pages, which are in
  ``hugetlb.<size>.numa_stat``.
* The counters contain the pages that are charged to the group: if another container read a page of a file
  first, the page is charged to that container.
* On v2 a change of ``cpuset.mems`` moves mapped pages during the write: 120 MB took 4 s in a virtual machine,
  and 0.4 s the second time. v1 moves them only if ``cpuset.memory_migrate`` is 1, which no runtime sets;
  otherwise existing pages stay, and only new pages come from the new nodes. Page cache that is not mapped
  never moves. Adding nodes moves nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from proxy.backends.cgroup.files import OsCgroupFiles, read_kernel_file
from proxy.backends.cgroup.hierarchies import controller_mounts, has_controller, mounts_elsewhere, v1_mounts
from proxy.backends.cgroup.search import GroupFinder
from proxy.executor.kernel_ports import MemoryUse
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError

_NODE = re.compile(r"N([0-9]{1,5})=([0-9]{1,19})")
_STAT = "memory.numa_stat"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def bytes_by_node(line: str, unit: int = 1) -> dict[int, int]:
    """Parse ``N0=1 N1=2`` in a line; zeros are left out."""
    return {int(m[1]): int(m[2]) * unit for m in _NODE.finditer(line) if int(m[2])}


def parse_memory_use(text: str, version: int, huge: str = "") -> MemoryUse:
    """Parse ``memory.numa_stat``.

    Args:
        text: The text of the file.
        version: 1 or 2.
        huge: The texts of the ``hugetlb.<size>.numa_stat`` files, joined by newlines.

    Raises:
        CgroupError: The text is not that of ``memory.numa_stat``.
    """
    lines = {head: rest for line in text.splitlines() for head, _, rest in [_split_name(line)]}
    if version == 2:
        if not {"anon", "file"} <= lines.keys():
            raise CgroupError(f"cannot read {_STAT}: it has no lines for anon and file")
        anon, file = bytes_by_node(lines["anon"]), bytes_by_node(lines["file"])
    else:
        stem = "hierarchical_" if "hierarchical_total" in lines else ""
        if not {f"{stem}total", f"{stem}file"} <= lines.keys():
            raise CgroupError(f"cannot read {_STAT}: it has no lines for total and file")
        total, file = (
            bytes_by_node(lines[f"{stem}total"], _PAGE_BYTES),
            bytes_by_node(lines[f"{stem}file"], _PAGE_BYTES),
        )
        # The kernel reads the lists one after the other while pages come and go, so differences can be
        # negative.
        anon = {n: more for n, size in total.items() if (more := size - file.get(n, 0)) > 0}
    return MemoryUse(anon, file, _huge(huge))


def _split_name(line: str) -> tuple[str, str, str]:
    """Split a line's name from the rest: ``anon N0=1`` on v2, ``total=5 N0=5`` on v1."""
    head, blank, rest = line.partition(" ")
    return head.partition("=")[0], blank, rest


def _huge(text: str) -> dict[int, int]:
    sizes: dict[int, int] = {}
    lines = text.splitlines()
    below = any(line.startswith("hierarchical_total=") for line in lines)
    for line in lines:
        if line.startswith("hierarchical_total=" if below else "total="):
            for node, size in bytes_by_node(line).items():
                sizes[node] = sizes.get(node, 0) + size
    return sizes


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """The memory controller's tree; implements ``proxy.executor.kernel_ports.MemoryTree``.

    Attributes:
        root: Where it is mounted.
        version: 1 or 2.
        hugetlb_root: Where the hugetlb controller's tree is mounted; None if there is none.
        v1_cpuset_root: Where the cpuset controller's tree is mounted, if that is v1; otherwise None.
    """

    root: Path
    version: int
    hugetlb_root: Path | None = None
    v1_cpuset_root: Path | None = None
    _finder: GroupFinder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_finder", GroupFinder(OsCgroupFiles(self.root)))

    def memory_use(self, parent: str, container_id: str) -> MemoryUse | None:
        """Return where a container's memory is; see ``proxy.executor.kernel_ports.MemoryTree.memory_use``."""
        path = self._finder.find(parent, container_id)
        if path is None:
            return None
        try:
            text = read_kernel_file(self.root / path / _STAT)
        except OSError as error:
            if error.errno in GONE and not (self.root / path).is_dir():
                return None
            raise CgroupError(f"cannot read {_STAT} of cgroup /{path}: {error.strerror}") from None
        return parse_memory_use(text, self.version, self._huge_text(path))

    def _huge_text(self, path: str) -> str:
        lines = []
        if self.hugetlb_root is not None:
            for file in sorted((self.hugetlb_root / path).glob("hugetlb.*.numa_stat")):
                try:
                    lines.append(read_kernel_file(file))
                except OSError:
                    continue  # gone with its group
        return "\n".join(lines)

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Remember where a container's group is; see ``proxy.backends.cgroup.locator``."""
        self._finder.remember(container_id, path, parent)

    def migrates_pages(self, path: str) -> bool:
        """Return whether a change of memory nodes moves pages; see ``executor.kernel_ports.MemoryTree``."""
        if self.v1_cpuset_root is None:
            return self.version == 2
        try:
            return read_kernel_file(self.v1_cpuset_root / path / "cpuset.memory_migrate").strip() == "1"
        except OSError:
            return False


def open_memory(root: Path, procfs: Path = Path("/proc")) -> KernelMemory | None:
    """Find the memory controller's hierarchy; None if there is none.

    Args:
        root: The root that ``proxy.backends.cgroup.cpuset.open_cgroups`` takes. If the controller is at none
            of its usual places, the mount table is used.
        procfs: The /proc with this process's mount table.
    """
    parent = root.parent if (root / "cpuset.cpus").is_file() else root
    mounts = mounts_elsewhere(root, procfs)
    sets = parent / "cpuset"
    cpusets = sets if (sets / "cpuset.cpus").is_file() else next(v1_mounts(mounts, "cpuset"), None)
    # On v2 a group may be named "memory" too, but only groups of v2 have cgroup.controllers.
    if (parent / "memory" / _STAT).is_file() and not (parent / "memory" / "cgroup.controllers").exists():
        huge = parent / "hugetlb"
        return KernelMemory(parent / "memory", 1, huge if huge.is_dir() else None, cpusets)
    for mount in (root, root / "unified"):
        if has_controller(mount, "memory"):
            return KernelMemory(mount, 2, mount, cpusets)
    for mount, version in controller_mounts(mounts, "memory", _STAT):
        tree = mount if version == 2 else next(v1_mounts(mounts, "hugetlb"), None)
        return KernelMemory(mount, version, tree, cpusets)
    return None
