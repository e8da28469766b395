"""NUMA nodes: their CPUs, memory and huge pages.

Every online node has a directory ``nodeN``; ids can have holes. A node may have CPUs and no memory, memory
and no CPUs (CXL, HBM, a GPU's memory), or neither. A row of ``distance`` has one column per online node in
ascending order of id: it is never indexed by id.

A CPU is in the node whose map contains it. If maps overlap (broken firmware) and exactly one of these nodes
has a link ``nodeN/cpuM`` for the CPU, the CPU goes to that node; otherwise it goes to the node with the
fewest CPUs. ``NumaNode`` holds the CPUs that went to the node, so that nodes stay disjoint for placement;
``claimed`` holds the maps as they were read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from proxy.model.errors import TopologyError
from proxy.model.idset import CpuSet
from proxy.model.machine import HugePages, NumaNode
from proxy.topology.cpus import ids_in
from proxy.topology.files import SysfsTree

NODE_DIR = "devices/system/node"


class Nodes(Struct, frozen=True):
    """The nodes of a tree; empty if it has no node directories.

    Attributes:
        nodes: Ascending by id.
        of_cpu: CPU to node id; CPUs that are in no node are left out.
        claimed: Node id to the CPUs of its map; empty unless maps overlap.
    """

    nodes: tuple[NumaNode, ...]
    of_cpu: Mapping[int, int]
    claimed: Mapping[int, CpuSet]


def _claims(tree: SysfsTree, node: int) -> int:
    """Read the CPUs of a node's map as bits.

    Raises:
        TopologyError: The files exist but cannot be understood. Treating the node as a node without CPUs
            would bind containers to memory far from them.
    """
    directory = f"{NODE_DIR}/node{node}"
    bits = tree.mask(f"{directory}/cpumap")
    if bits is None:
        bits = tree.id_list(f"{directory}/cpulist")
    if bits is not None:
        return bits
    text = tree.text(f"{directory}/cpumap") or tree.text(f"{directory}/cpulist")
    if text:
        raise TopologyError(
            f"cannot read the CPUs of NUMA node {node}: {text[:40]!r} is not a CPU mask or list"
        )
    return sum(1 << cpu for cpu in tree.numbered(directory, "cpu"))


def _node_of_cpu(tree: SysfsTree, claims: Mapping[int, int], cpu: int) -> int | None:
    """Return the node of one CPU."""
    nodes = [node for node, bits in claims.items() if bits >> cpu & 1]
    if len(nodes) > 1:
        linked = [node for node in nodes if tree.exists(f"{NODE_DIR}/node{node}/cpu{cpu}")]
        if len(linked) == 1:
            return linked[0]
        return min(nodes, key=lambda node: (claims[node].bit_count(), node))
    return nodes[0] if nodes else None


def _distance(tree: SysfsTree, node: int, count: int) -> tuple[int, ...]:
    """Read a row of distances; empty if there is no row or it does not fit the nodes."""
    path = f"{NODE_DIR}/node{node}/distance"
    fields = (tree.text(path) or "").split()
    if not fields:
        return ()
    if len(fields) != count or not all(field.isascii() and field.isdigit() for field in fields):
        tree.problems.append(f"{path}: not a row of {count} distances; ignored")
        return ()
    return tuple(int(field) for field in fields)


def read_nodes(tree: SysfsTree, online: int) -> Nodes:
    """Read the NUMA nodes.

    Args:
        tree: The sysfs.
        online: The online CPUs as bits; nodes hold no others.

    Raises:
        TopologyError: The CPUs of a node cannot be understood.
    """
    ids = tree.numbered(NODE_DIR, "node")
    claims = {node: _claims(tree, node) & online for node in ids}
    node_of = {cpu: _node_of_cpu(tree, claims, cpu) for cpu in ids_in(online)}
    of_cpu = {cpu: node for cpu, node in node_of.items() if node is not None}
    overlap = sum(bits.bit_count() for bits in claims.values()) > len(of_cpu)
    nodes = tuple(
        NumaNode(
            node,
            CpuSet(cpu for cpu, owner in of_cpu.items() if owner == node),
            mem_total(meminfo(tree, f"{NODE_DIR}/node{node}/meminfo")),
            hugepages(tree, f"{NODE_DIR}/node{node}/hugepages"),
            _distance(tree, node, len(ids)),
        )
        for node in ids
    )
    if overlap:
        tree.problems.append("NUMA nodes overlap: CPUs are in more than one node; memory should not be bound")
    claimed = {node: CpuSet.from_bits(bits) for node, bits in claims.items()} if overlap else {}
    return Nodes(nodes, of_cpu, claimed)


_KB = 1024
_FIELD = re.compile(r"^(?:Node \d+ )?(\w+):\s+(\d+)(?: kB)?\s*$", re.MULTILINE)
_SIZE = re.compile(r"hugepages-(\d{1,12})kB")


def meminfo(tree: SysfsTree, path: str) -> dict[str, int]:
    """Read a meminfo file, of ``/proc`` or of a node: field to number (kB if the field has a unit)."""
    text = tree.text(path)
    return {} if text is None else {name: int(value) for name, value in _FIELD.findall(text)}


def mem_total(fields: dict[str, int]) -> int | None:
    """Return the total memory in bytes, None if meminfo does not have it."""
    total = fields.get("MemTotal")
    return None if total is None else total * _KB


def hugepages(tree: SysfsTree, directory: str) -> dict[int, HugePages] | None:
    """Read a directory of huge page sizes: page size in kB to counts; None if there is no directory.

    Each size has a directory, such as ``hugepages-2048kB``, below a node and below ``kernel/mm``. Kernels
    without these directories report one size in ``/proc/meminfo``.
    """
    if not tree.exists(directory):
        return None
    pages: dict[int, HugePages] = {}
    for name in tree.names(directory):
        match = _SIZE.fullmatch(name)
        number = tree.number(f"{directory}/{name}/nr_hugepages") if match else None
        if match and number is not None:
            free = tree.number(f"{directory}/{name}/free_hugepages")
            surplus = tree.number(f"{directory}/{name}/surplus_hugepages")
            pages[int(match[1])] = HugePages(number, free, surplus)
    return pages


def machine_hugepages(
    tree: SysfsTree, fields: dict[str, int]
) -> tuple[dict[int, HugePages] | None, str | None]:
    """Return the machine's huge pages (without surplus) and where they were found.

    Args:
        tree: The sysfs.
        fields: ``/proc/meminfo``, for kernels that have no directory.
    """
    sizes = hugepages(tree, "kernel/mm/hugepages")
    if sizes is not None:
        return {size: HugePages(pages.nr, pages.free) for size, pages in sizes.items()}, "sysfs"
    if "HugePages_Total" in fields and "Hugepagesize" in fields:
        pages = HugePages(fields["HugePages_Total"], fields.get("HugePages_Free"))
        return {fields["Hugepagesize"]: pages}, "proc/meminfo"
    return None, None
