"""The last-level cache of each CPU.

``cache/indexK`` describes one cache of a CPU: its level, its type, and the CPUs that share it. The last
level is the highest one that holds data (type Data or Unified), found for every CPU by itself: CPUs of one
machine can end at different levels, such as efficiency cores without a share of the L3. A sharing map that
is empty means that the cache belongs to the CPU's core; a map without the CPU itself cannot be true and
the cache is passed over (machine facts, rule 5).

The ``id`` file is only reported, not used: many kernels have none, and ids are unique per level only.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.model.idset import CpuSet
from proxy.model.machine import Cache
from proxy.topology.cpus import CPU_DIR
from proxy.topology.files import SysfsTree
from proxy.topology.groups import each, lowest, partition


class _Found(Struct, frozen=True):
    """The last-level cache that one CPU sees: sharing CPUs as bits, level, and its directory."""

    bits: int
    level: int
    path: str


def _last_level(tree: SysfsTree, cpu: int, core: int) -> _Found | None:
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
            return _Found(core, level, path)
        if bits is not None and bits >> cpu & 1:
            return _Found(bits, level, path)
    return None


def _sharing(tree: SysfsTree, path: str) -> int | None:
    """Read which CPUs share a cache.

    The mask's list has another name, so ``SysfsTree.id_set`` does not fit.
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
    found: dict[int, _Found] = {}
    for cpu in each(online):
        cache = _last_level(tree, cpu, cores[cpu])
        if cache is not None:
            found[cpu] = cache
    groups = partition({cpu: cache.bits & online for cpu, cache in found.items()})
    caches: dict[int, Cache] = {}
    for bits in sorted(set(groups.values()), key=lowest):
        first = found[lowest(bits)]
        number = tree.number(f"{first.path}/id")
        size = tree.text(f"{first.path}/size")
        caches[lowest(bits)] = Cache(CpuSet.from_bits(bits), first.level, number, size or None)
    return groups, caches
