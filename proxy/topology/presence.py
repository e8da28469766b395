"""Whether a machine is still what it was: quick enough to be asked every now and then.

What comes and goes while a machine runs: CPUs (offline, or a thread of each core where SMT is switched off),
whole NUMA nodes, and the memory of a node, block by block. ``meminfo`` of the nodes tells the last two: a
node whose memory is offline stays, with ``MemTotal`` 0, and is gone only when its memory is taken out.

A size changes a little all the time where a balloon takes memory away, so only a change by half of the
smallest block that a kernel takes offline at once (128 MiB) counts, or one from or to nothing.
"""

from __future__ import annotations

from pathlib import Path

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.topology.cpus import read_cpu_lists
from proxy.topology.files import Tree
from proxy.topology.memory import mem_total, meminfo
from proxy.topology.nodes import NODE_DIR
from proxy.topology.reader import sysfs_of

GRAIN = 64 << 20
"""Bytes by which the memory of a node may differ from what is known."""


def is_same(known: Machine, sysfs_root: Path) -> bool:
    """Return whether CPUs and memory are there as they are known to be.

    Args:
        known: The machine as it was read.
        sysfs_root: What stands for ``/sys``, as for ``read_machine``.
    """
    tree = Tree(sysfs_of(sysfs_root))
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
