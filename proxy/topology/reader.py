"""Reads a ``Machine`` from sysfs.

The order matters: first the online CPUs, because every other set is limited to them; then the levels, the
caches (which need the cores), and the nodes. CPUs can come and go during the read, and a CPU that disappears
during it looks like a CPU without a package. So the online CPUs are read again at the end, and if they
changed, everything is read again (three times at most).

A missing level is not an error: many levels are missing on old kernels, on mainframes and in containers.
Without node directories all CPUs and all memory are node 0, as the kernel itself treats such a machine. A
machine without an online CPU is an error.
"""

from __future__ import annotations

from pathlib import Path

from proxy.model.errors import TopologyError
from proxy.model.idset import CpuSet
from proxy.model.machine import Cpu, HugePages, Machine, NumaNode
from proxy.topology.cpus import CPU_DIR, CpuLists, Levels, lowest, read_cpu_lists, read_levels
from proxy.topology.files import SysfsTree, is_directory
from proxy.topology.machine_details import (
    read_caches,
    read_files,
    read_kinds,
    read_node_masks,
    read_smt,
    read_versions,
)
from proxy.topology.nodes import NODE_DIR, Nodes, machine_hugepages, mem_total, meminfo, read_nodes

_ATTEMPTS = 3
_LOCAL_DISTANCE = 10
_EXPECTED_MEMORY_SHARE = 0.9
_MIB = 1 << 20


def read_machine(sysfs_root: Path, procfs_root: Path | None = None) -> Machine:
    """Read a machine.

    Args:
        sysfs_root: Used in place of ``/sys``; can also be a directory that contains ``sys`` (and ``proc``).
        procfs_root: Used in place of ``/proc``; None: ``proc`` next to the sysfs directory, if it exists.

    Raises:
        TopologyError: There is no CPU directory, or it may not be read; no CPU is online; or a NUMA node's
            CPUs cannot be understood.
    """
    root = sysfs_of(sysfs_root)
    if not is_directory(root / CPU_DIR):
        raise TopologyError(
            f"cannot read the machine from {sysfs_root}: there is no directory {CPU_DIR} in it"
        )
    proc = root.absolute().parent / "proc" if procfs_root is None else procfs_root
    for attempt in range(_ATTEMPTS):
        tree = SysfsTree(root)
        lists = read_cpu_lists(tree)
        if not lists.online:
            raise TopologyError(f"cannot read the machine from {sysfs_root}: {_why_no_cpu_is_online(tree)}")
        machine = _read(tree, SysfsTree(proc), lists)
        if attempt + 1 == _ATTEMPTS or read_cpu_lists(tree).online == lists.online:
            break
    return machine


def sysfs_of(sysfs_root: Path) -> Path:
    """Return the directory to use as ``/sys``: ``sys`` inside the given one, or the given one itself."""
    inner = sysfs_root / "sys"
    return inner if not is_directory(sysfs_root / CPU_DIR) and is_directory(inner / CPU_DIR) else sysfs_root


def _why_no_cpu_is_online(tree: SysfsTree) -> str:
    text = tree.text(f"{CPU_DIR}/online")
    if tree.problems:
        return f"no CPU is known to be online ({tree.problems[0]})"
    if text is not None:
        return f"{CPU_DIR}/online names no CPU"
    return f"{CPU_DIR} has neither a file 'online' nor a directory cpuN with 'topology' in it"


def _read(tree: SysfsTree, proc: SysfsTree, lists: CpuLists) -> Machine:
    online = lists.online
    levels = read_levels(tree, online)
    llc, caches = read_caches(tree, online, levels.groups["core"])
    nodes = read_nodes(tree, online)
    fields = meminfo(proc, "meminfo")
    pages, pages_source = machine_hugepages(tree, fields)
    _compare_memory(tree, nodes, mem_total(fields))
    reported = {name: _cpu_list(tree, name) for name in ("present", "possible", "isolated", "nohz_full")}
    present = CpuSet.from_bits(online) | (reported["present"] or CpuSet.from_bits(lists.directories))
    extra: dict[str, object] = {
        **read_versions(proc),
        "files": read_files(tree, online),
        "cpus": {"online_from": lists.source, **_texts(reported)},
        "smt": read_smt(tree),
        "numa": {"source": "sysfs" if nodes.nodes else "none", **_numa_extra(tree, nodes)},
        "memory": {
            "total_bytes": mem_total(fields),
            "hugepages": pages_json(pages),
            "hugepages_source": pages_source,
        },
        "kinds": read_kinds(tree, levels.groups["core"]),
        **_mainframe_levels(levels),
        "missing": list(levels.missing),
        "problems": list(dict.fromkeys(tree.problems)),
    }
    return Machine(
        cpus=_cpus(online, levels, llc, nodes),
        nodes=nodes.nodes or _assumed_node(online, mem_total(fields), pages),
        present=present,
        possible=present | (reported["possible"] or present),
        isolated=present & (reported["isolated"] or CpuSet()),
        caches=caches,
        extra=extra,
    )


def _compare_memory(tree: SysfsTree, nodes: Nodes, total: int | None) -> None:
    """Report if the nodes have much less memory than the machine, as in VMs with memory hot-plugged later."""
    if not total or not nodes.nodes or any(node.mem_bytes is None for node in nodes.nodes):
        return
    node_bytes = sum(node.mem_bytes or 0 for node in nodes.nodes)
    if node_bytes < total * _EXPECTED_MEMORY_SHARE:
        tree.problems.append(
            f"the nodes hold {node_bytes // _MIB} MiB together, /proc/meminfo says {total // _MIB} MiB"
        )


def _cpu_list(tree: SysfsTree, name: str) -> CpuSet | None:
    path = f"{CPU_DIR}/{name}"
    # The kernel prints "(null)" for a CPU mask that was never set up.
    bits = 0 if tree.text(path) == "(null)" else tree.id_list(path)
    return None if bits is None else CpuSet.from_bits(bits)


def _texts(sets: dict[str, CpuSet | None]) -> dict[str, str | None]:
    return {name: None if cpus is None else str(cpus) for name, cpus in sets.items()}


def pages_json(pages: dict[int, HugePages] | None) -> dict[str, dict[str, int]] | None:
    """Write huge page counts as JSON; unknown counts are left out."""
    if pages is None:
        return None
    named = {size: {"nr": p.nr, "free": p.free, "surplus": p.surplus} for size, p in pages.items()}
    return {str(size): {k: v for k, v in counts.items() if v is not None} for size, counts in named.items()}


def _numa_extra(tree: SysfsTree, nodes: Nodes) -> dict[str, object]:
    claimed = {str(node): str(cpus) for node, cpus in nodes.claimed.items()}
    return {**read_node_masks(tree), **({"claimed": claimed} if claimed else {})}


def _mainframe_levels(levels: Levels) -> dict[str, object]:
    """Return the mainframe levels above the package, if there are any."""
    extra: dict[str, object] = {}
    for level in ("book", "drawer"):
        if level in levels.groups:
            sets = sorted(set(levels.groups[level].values()), key=lowest)
            extra[f"{level}s"] = {str(lowest(bits)): str(CpuSet.from_bits(bits)) for bits in sets}
    return extra


def _cpus(online: int, levels: Levels, llc: dict[int, int], nodes: Nodes) -> tuple[Cpu, ...]:
    names = {
        level: {cpu: lowest(bits) for cpu, bits in groups.items()} for level, groups in levels.groups.items()
    }
    # A machine that reports no packages counts as one package.
    packages = names["package"] or dict.fromkeys(CpuSet.from_bits(online), lowest(online))
    return tuple(
        Cpu(
            id=cpu,
            core=names["core"][cpu],
            package=packages.get(cpu, cpu),
            die=names["die"].get(cpu),
            cluster=names["cluster"].get(cpu),
            llc=lowest(llc[cpu]) if cpu in llc else None,
            numa=nodes.of_cpu.get(cpu) if nodes.nodes else 0,
            core_id=levels.core_id.get(cpu),
            package_id=levels.package_id.get(cpu),
        )
        for cpu in CpuSet.from_bits(online)
    )


def _assumed_node(
    online: int, mem_bytes: int | None, pages: dict[int, HugePages] | None
) -> tuple[NumaNode, ...]:
    """Make the node 0 of a machine without node directories."""
    return (NumaNode(0, CpuSet.from_bits(online), mem_bytes, pages, (_LOCAL_DISTANCE,)),)


MEMORY_TOLERANCE_BYTES = 64 << 20
"""A node's memory counts as unchanged if it differs from its last size by less than this number of bytes:
half of the smallest block that a kernel takes offline at once (128 MiB). A balloon driver changes the size a
little all the time."""


def is_machine_unchanged(machine: Machine, sysfs_root: Path) -> bool:
    """Return whether the CPUs and the memory of a machine are unchanged since it was read.

    While a machine runs, CPUs (or one thread of each core, when SMT is switched off), whole NUMA nodes, and
    blocks of a node's memory can go offline. ``meminfo`` shows the last two: a node whose memory is offline
    remains with ``MemTotal`` 0, and disappears only when its memory is removed.

    Args:
        machine: The machine as it was read.
        sysfs_root: Used in place of ``/sys``, as for ``read_machine``.
    """
    tree = SysfsTree(sysfs_of(sysfs_root))
    if CpuSet.from_bits(read_cpu_lists(tree).online) != machine.online:
        return False
    ids = tree.numbered(NODE_DIR, "node")
    if not ids:
        return True  # all CPUs and all memory are node 0
    if ids != [node.id for node in machine.nodes]:
        return False
    return all(
        _is_same_size(node.mem_bytes, mem_total(meminfo(tree, f"{NODE_DIR}/node{node.id}/meminfo")))
        for node in machine.nodes
    )


def _is_same_size(before: int | None, now: int | None) -> bool:
    if before is None or now is None:
        return before is now
    return (before == 0) == (now == 0) and abs(before - now) < MEMORY_TOLERANCE_BYTES
