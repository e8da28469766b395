"""Whether a machine is still as it was read: quick enough for a periodic check.

What comes and goes while a machine runs: CPUs (offline, or a thread of each core when SMT is switched off),
whole NUMA nodes, and the memory of a node, block by block. ``meminfo`` of the nodes shows the last two: a
node whose memory is offline stays, with ``MemTotal`` 0, and disappears only when its memory is removed.

A size changes a little all the time where a balloon driver takes memory away. So a change counts only from
half of the smallest block that a kernel takes offline at once (128 MiB), or from or to nothing.
"""

from __future__ import annotations

from pathlib import Path

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.topology.cpus import read_cpu_lists
from proxy.topology.files import SysfsTree
from proxy.topology.memory import mem_total, meminfo
from proxy.topology.nodes import NODE_DIR
from proxy.topology.reader import sysfs_of

GRAIN = 64 << 20
"""Bytes by which the memory of a node may differ from what is known."""


def is_same(known: Machine, sysfs_root: Path) -> bool:
    """Return whether CPUs and memory are there as they are known to be.

    Args:
        known: The machine as it was read.
        sysfs_root: Used in place of ``/sys``, as for ``read_machine``.
    """
    tree = SysfsTree(sysfs_of(sysfs_root))
    if CpuSet.from_bits(read_cpu_lists(tree).online) != known.online:
        return False
    ids = tree.numbered(NODE_DIR, "node")
    if not ids:
        return True  # all CPUs and all memory are node 0
    if ids != [node.id for node in known.nodes]:
        return False
    return all(
        _alike(node.mem_bytes, mem_total(meminfo(tree, f"{NODE_DIR}/node{node.id}/meminfo")))
        for node in known.nodes
    )


def _alike(known: int | None, now: int | None) -> bool:
    if known is None or now is None:
        return known is now
    return (known == 0) == (now == 0) and abs(known - now) < GRAIN
