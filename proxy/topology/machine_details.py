"""Facts about a machine that placement does not use: kinds of CPUs, kinds of files, SMT, versions.

Everything here is JSON-ready and shaped as ``topoproxy topology --json`` shows it.

``cache/indexK`` describes one cache of a CPU: its level, its type, and the CPUs that share it. The last level
is the highest one that holds data (type Data or Unified). It is found for each CPU separately, because CPUs
of one machine can end at different levels, such as efficiency cores without a share of the L3. An empty
sharing map means that the cache belongs to the CPU's core. A map without the CPU itself must be wrong, so the
cache is skipped.

The ``id`` file is only reported, not used: many kernels have none, and ids are unique only within a level.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.model.idset import CpuSet
from proxy.model.machine import Cache
from proxy.topology.cpus import CPU_DIR, group_cpus, ids_in, lowest
from proxy.topology.files import SysfsTree
from proxy.topology.nodes import NODE_DIR

_NODE_MASKS = (
    "online",
    "possible",
    "has_cpu",
    "has_memory",
    "has_normal_memory",
    "has_high_memory",
    "has_generic_initiator",
)
_CPU_FILES = {
    "topology_lists": ("topology/core_cpus_list", "topology/thread_siblings_list"),
    "core_cpus": ("topology/core_cpus", "topology/core_cpus_list"),
    "die": ("topology/die_id",),
    "cluster": ("topology/cluster_id",),
    "book": ("topology/book_siblings",),
    "cache": ("cache",),
    "cache_id": ("cache/index0/id",),
}
_HYBRID_DEVICES = ("cpu_core", "cpu_atom", "cpu_lowpower")
_PER_CORE = (
    ("midr", "regs/identification/midr_el1"),
    ("cpu_capacity", "cpu_capacity"),
    ("max_freq_khz", "cpufreq/cpuinfo_max_freq"),
)


class _LastLevelCache(Struct, frozen=True):
    """The last-level cache that one CPU sees: sharing CPUs as bits, level, and its directory."""

    bits: int
    level: int
    path: str


def _last_level(tree: SysfsTree, cpu: int, core: int) -> _LastLevelCache | None:
    base = f"{CPU_DIR}/cpu{cpu}/cache"
    levels: list[tuple[int, str]] = []
    for index in tree.numbered(base, "index"):
        path = f"{base}/index{index}"
        level = tree.number(f"{path}/level")
        if level is not None:
            levels.append((level, path))
    levels.sort(key=lambda pair: -pair[0])
    for level, path in levels:
        if tree.text(f"{path}/type") == "Instruction":
            continue
        bits = _sharing(tree, path)
        if bits == 0:
            return _LastLevelCache(core, level, path)
        if bits is not None and bits >> cpu & 1:
            return _LastLevelCache(bits, level, path)
    return None


def _sharing(tree: SysfsTree, path: str) -> int | None:
    """Read which CPUs share a cache.

    The list file is not named after the mask file, so ``SysfsTree.id_set`` cannot read it.
    """
    bits = tree.mask(f"{path}/shared_cpu_map")
    return tree.id_list(f"{path}/shared_cpu_list") if bits is None else bits


def read_caches(
    tree: SysfsTree, online: int, cores: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, Cache]]:
    """Find the last-level cache groups.

    Args:
        tree: The sysfs.
        online: The online CPUs as bits.
        cores: CPU to its core, as bits.

    Returns:
        CPU to its group (bits; CPUs without caches are left out), and the caches by group name.
    """
    last_levels: dict[int, _LastLevelCache] = {}
    for cpu in ids_in(online):
        cache = _last_level(tree, cpu, cores[cpu])
        if cache is not None:
            last_levels[cpu] = cache
    groups = group_cpus({cpu: cache.bits & online for cpu, cache in last_levels.items()})
    caches: dict[int, Cache] = {}
    for bits in sorted(set(groups.values()), key=lowest):
        first = last_levels[lowest(bits)]
        number = tree.number(f"{first.path}/id")
        size = tree.text(f"{first.path}/size")
        caches[lowest(bits)] = Cache(CpuSet.from_bits(bits), first.level, number, size or None)
    return groups, caches


def read_kinds(tree: SysfsTree, cores: Mapping[int, int]) -> dict[str, dict[str, str]] | None:
    """Find the kinds of CPUs of a hybrid machine.

    Args:
        tree: The sysfs.
        cores: CPU to its core, as bits. All CPUs of a core are of one kind, so one read per core is enough.

    Returns:
        Criterion to value to CPUs, for each criterion in which CPUs differ; None if there is none.
    """
    kinds: dict[str, dict[str, str]] = {}
    devices = {name: tree.id_list(f"devices/{name}/cpus") for name in _HYBRID_DEVICES}
    listed = {name: str(CpuSet.from_bits(bits)) for name, bits in devices.items() if bits}
    if len(listed) > 1:
        kinds["device"] = listed
    distinct = sorted(set(cores.values()), key=lowest)
    for criterion, path in _PER_CORE:
        values: dict[str, int] = {}
        for core in distinct:
            text = tree.text(f"{CPU_DIR}/cpu{lowest(core)}/{path}")
            if text is None and core == distinct[0]:
                break
            if text:
                values[text] = values.get(text, 0) | core
        if len(values) > 1:
            kinds[criterion] = {value: str(CpuSet.from_bits(bits)) for value, bits in values.items()}
    return kinds or None


def read_files(tree: SysfsTree, online: int) -> dict[str, bool]:
    """Return which kinds of files the tree has, judging by the first online CPU and the first node."""
    cpu = f"{CPU_DIR}/cpu{lowest(online)}"
    node = f"{NODE_DIR}/node{next(iter(tree.numbered(NODE_DIR, 'node')), 0)}"
    kinds = {f"cpu_{name}": tree.exists(f"{CPU_DIR}/{name}") for name in ("online", "present", "isolated")}
    for kind, paths in _CPU_FILES.items():
        kinds[kind] = any(tree.exists(f"{cpu}/{path}") for path in paths)
    for kind, name in (("node", ""), ("node_cpulist", "cpulist"), ("node_distance", "distance")):
        kinds[kind] = tree.exists(f"{node}/{name}")
    kinds["node_hugepages"] = tree.exists(f"{node}/hugepages")
    kinds["node_cpu_links"] = any(tree.exists(f"{node}/cpu{cpu_id}") for cpu_id in ids_in(online))
    kinds["pci"] = bool(tree.names("bus/pci/devices"))
    return kinds


def read_smt(tree: SysfsTree) -> dict[str, object]:
    """Read the kernel's SMT (simultaneous multithreading) state of the whole machine."""
    return {
        "control": tree.text(f"{CPU_DIR}/smt/control"),
        "active": tree.number(f"{CPU_DIR}/smt/active"),
    }


def read_node_masks(tree: SysfsTree) -> dict[str, object]:
    """Read the node sets that the kernel lists, as text; sets without a file are left out."""
    texts = {name: tree.text(f"{NODE_DIR}/{name}") for name in _NODE_MASKS}
    return {name: text for name, text in texts.items() if text is not None}


def read_versions(proc: SysfsTree | None) -> dict[str, str | None]:
    """Read the architecture and the kernel release from proc; None for each that it does not have.

    Kernels before 6.1 have no file for the architecture. ARM, which does not support every bind policy, is
    recognized by ``cpuinfo``: only on ARM does a CPU have an implementer. Only the beginning of the file is
    read, because one CPU is enough.
    """
    if proc is None:
        return {"arch": None, "kernel": None}
    fields = (proc.text("version") or "").split()
    release = proc.text("sys/kernel/osrelease") or (fields[2] if len(fields) > 2 else None)
    arch = proc.text("sys/kernel/arch") or None
    if arch is None and "CPU implementer" in (proc.text("cpuinfo", 4096) or ""):
        arch = "aarch64"
    return {"arch": arch, "kernel": release}
