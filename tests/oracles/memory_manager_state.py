"""Whether a stored state still fits this machine.

Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/policy_static.go ``validateState``. The state without
assignments is computed from the machine and the reserves, and all blocks are charged to it. The outcome has
to equal what was read: the same nodes and resources, amounts, groups and numbers of assignments. Free and
reserved amounts are compared as sums over the group of a node, because how they are spread inside it depends
on the order of past allocations.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.allocation.memory.state import (
    MemoryRejectedError,
    MemoryState,
    NodeMemory,
    NumaMemory,
    Reserved,
    initial,
)


def validated(read: MemoryState, nodes: Iterable[NodeMemory], reserved: Reserved) -> MemoryState:
    """Return the state to start with: the stored one, or the initial one if nothing was stored.

    Raises:
        MemoryRejectedError: What was read does not fit the machine; the text is kubelet's.
    """
    expected = initial(nodes, reserved)
    if not read.nodes:
        if read.assignments:
            raise MemoryRejectedError("machine state can not be empty when it has memory assignments")
        return expected
    for uid, pod in read.assignments.items():
        for name, blocks in pod.items():
            where = f"(pod: {uid}, container: {name}) the memory assignment uses"
            for block in blocks:
                if any(i not in expected.nodes for i in block.affinity):
                    raise MemoryRejectedError(f"{where} the NUMA that does not exist")
                if any(block.resource not in expected.nodes[i].tables for i in block.affinity):
                    raise MemoryRejectedError(f"{where} memory resource that does not exist")
                expected = expected.charged(block, block.size)
    if problem := difference(read, expected):
        refusal = MemoryRejectedError("the expected machine state is different from the real one")
        refusal.add_note(problem)
        raise refusal
    return read


def difference(one: MemoryState, other: MemoryState) -> str:
    """Return a sentence about how the nodes of two states differ; empty if they do not."""
    if one.nodes.keys() != other.nodes.keys():
        return f"nodes {sorted(one.nodes)} are not {sorted(other.nodes)}"
    for i, mine in one.nodes.items():
        theirs = other.nodes[i]
        if (mine.assignments, mine.cells) != (theirs.assignments, theirs.cells):
            return f"node {i} has other assignments or another group"
        if mine.tables.keys() != theirs.tables.keys():
            return f"node {i} has other resources"
        for name in mine.tables:
            if _fixed(mine, name) != _fixed(theirs, name) or _sums(one, mine, name) != _sums(
                other, mine, name
            ):
                return f"node {i} has other amounts of {name}"
    return ""


def _fixed(node: NumaMemory, name: str) -> tuple[int, int, int]:
    table = node.tables[name]
    return table.total, table.system_reserved, table.allocatable


def _sums(state: MemoryState, node: NumaMemory, name: str) -> tuple[int, int]:
    tables = [state.nodes[i].table(name) for i in node.cells]
    return sum(t.free for t in tables), sum(t.reserved for t in tables)
