"""The memory of the NUMA nodes, and the blocks of it that containers hold.

Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/state and policy_static.go. Each node keeps a table per
resource (``memory`` and each size of huge pages). A container holds blocks: one per resource, on a mask of
nodes. A node serves either blocks on itself alone or blocks on one group of nodes, never both: ``cells`` is
the group, and ``assignments`` counts the blocks on the node.

Blocks on a group are charged to its nodes in ascending order, as much as each has free, and released in the
same order, as much as each has reserved. So single nodes of a group may show other amounts after a release
than before, but their sum over the group is right; only that sum means anything.

kubelet keeps what an app container can take over from init containers in a table apart from the state. Here
it is read from the state: kubelet's table always equals what the ordinary init containers of the pod still
hold on the same mask, since an allocation shrinks their blocks by what it takes over. Unlike the table, the
state stays right when pods are allocated in turns, when an init container has been released, and after a
restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from proxy.allocation.rejection import AllocationRejectedError
from proxy.model.grants import Block, Blocks
from proxy.model.idset import Mask
from proxy.model.machine import Machine
from proxy.model.requests import HUGE_PAGES, MEMORY


class MemoryRejectedError(AllocationRejectedError):
    """The memory manager rejects the request; the message is kubelet's."""

    def __init__(self, message: str) -> None:
        super().__init__(f"[memorymanager] {message}")


class ResourceTable(Struct, frozen=True):
    """One resource of one node, in bytes; ``free`` and ``reserved`` add up to ``allocatable``."""

    total: int
    system_reserved: int
    allocatable: int
    reserved: int
    free: int

    def charge(self, size: int) -> ResourceTable:
        """Return the table after ``size`` bytes were taken, or given back if ``size`` is negative."""
        return replace(self, reserved=self.reserved + size, free=self.free - size)


NO_RESOURCE = ResourceTable(0, 0, 0, 0, 0)
"""The table of a resource that a node does not have."""


class NumaMemory(Struct, frozen=True):
    """One NUMA node.

    Attributes:
        tables: Resource to table.
        cells: The nodes with which it is allocated; itself alone while it is in no group.
        assignments: Number of blocks on it.
    """

    tables: Mapping[str, ResourceTable]
    cells: Mask
    assignments: int = 0

    def table(self, resource: str) -> ResourceTable:
        """Return the table of a resource; a table of zeros if the node does not have it."""
        return self.tables.get(resource, NO_RESOURCE)


Assignments = Mapping[str, Mapping[str, Blocks]]
"""Pod uid to container name to blocks."""


class MemoryState(Struct, frozen=True):
    """All nodes, ascending by id, and all assignments."""

    nodes: Mapping[int, NumaMemory] = field(default_factory=dict)
    assignments: Assignments = field(default_factory=dict)

    def blocks(self, uid: str, name: str) -> Blocks | None:
        """Return the blocks of a container; None if it has no entry."""
        return self.assignments.get(uid, {}).get(name)

    def with_blocks(self, uid: str, name: str, blocks: Blocks | None) -> MemoryState:
        """Return the state with other blocks for a container (None: no entry); nodes stay as they are."""
        pod = {k: v for k, v in self.assignments.get(uid, {}).items() if k != name}
        if blocks is not None:
            pod[name] = blocks
        others = {k: v for k, v in self.assignments.items() if k != uid}
        return replace(self, assignments={**others, uid: pod} if pod else others)

    def charged(self, block: Block, size: int) -> MemoryState:
        """Return the state with one more block on the nodes of its mask.

        Args:
            block: The block; all of its nodes exist.
            size: Bytes to charge: the block's, less what is taken over.
        """
        nodes, remaining = dict(self.nodes), size
        for i in block.affinity:
            table = nodes[i].table(block.resource)
            part = min(remaining, max(table.free, 0))
            remaining -= part
            nodes[i] = NumaMemory(
                {**nodes[i].tables, block.resource: table.charge(part)} if part else nodes[i].tables,
                block.affinity,
                nodes[i].assignments + 1,
            )
        return replace(self, nodes=nodes)

    def uncharged(self, block: Block) -> MemoryState:
        """Return the state with one block less; nodes that no longer exist are skipped."""
        nodes, remaining = dict(self.nodes), block.size
        for i in block.affinity:
            if (node := nodes.get(i)) is None:
                continue
            table = node.table(block.resource)
            part = min(remaining, table.reserved)
            remaining -= part
            count = max(node.assignments - 1, 0)
            nodes[i] = NumaMemory(
                {**node.tables, block.resource: table.charge(-part)} if part else node.tables,
                node.cells if count else Mask((i,)),
                count,
            )
        return replace(self, nodes=nodes)


class NodeMemory(Struct, frozen=True):
    """The memory of a node: bytes, and huge pages as page size in KiB to number of pages."""

    id: int
    total: int
    pages: Mapping[int, int] = field(default_factory=dict)


Reserved = Mapping[int, Mapping[str, int]]
"""``reservedMemory``: node to resource to bytes."""


def node_memory(machine: Machine) -> tuple[NodeMemory, ...]:
    """Read the memory of a machine's nodes; a node of unknown size has none."""
    return tuple(
        NodeMemory(n.id, n.mem_bytes or 0, {size: pages.nr for size, pages in (n.hugepages or {}).items()})
        for n in machine.nodes
    )


def initial(nodes: Iterable[NodeMemory], reserved: Reserved) -> MemoryState:
    """Return the state in which nothing is assigned.

    Huge pages are not ordinary memory: a node can give out what it has without them and without the reserve.

    If these two exceed the memory of the node, the node can give out 0 here (kubelet computes with a wrapped
    number); the configuration's checks report it (``memory_misfits``).

    Raises:
        MemoryRejectedError: No memory is reserved for the system.
    """
    if not any(amounts.get(MEMORY, 0) > 0 for amounts in reserved.values()):
        raise MemoryRejectedError("you should specify the system reserved memory")
    return MemoryState({n.id: _node(n, reserved.get(n.id, {})) for n in sorted(nodes, key=lambda n: n.id)})


def _sizes(node: NodeMemory) -> dict[str, int]:
    return {page_resource(kib): kib * 1024 * count for kib, count in node.pages.items()}


def _node(node: NodeMemory, reserved: Mapping[str, int]) -> NumaMemory:
    sizes = _sizes(node)
    tables = {name: _table(size, reserved.get(name, 0), size) for name, size in sizes.items()}
    tables[MEMORY] = _table(node.total, reserved.get(MEMORY, 0), node.total - sum(sizes.values()))
    return NumaMemory(tables, Mask((node.id,)))


def _table(total: int, reserved: int, usable: int) -> ResourceTable:
    free = max(usable - reserved, 0)
    return ResourceTable(total, reserved, free, 0, free)


def page_resource(kib: int) -> str:
    """Return the resource name of huge pages of a size in KiB, such as ``hugepages-1Gi``."""
    units = ("Ki", "Mi", "Gi", "Ti", "Pi")
    step = 0
    while kib and kib % 1024 == 0 and step < len(units) - 1:
        kib //= 1024
        step += 1
    return f"{HUGE_PAGES}{kib}{units[step]}"
