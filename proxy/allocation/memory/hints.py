"""The hints of memory: the sets of NUMA nodes that could hold a request.

Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/policy_static.go ``calculateHints``. All resources of a
request share one list of masks. A mask is a hint if

- no node of it serves blocks that conflict with it: a single node must not be in a group, and a group
  must consist of nodes without blocks, or be exactly the group that its nodes with blocks are in;
- for every resource its nodes have enough allocatable and, with what the pod's init containers leave on
  exactly this mask, enough free.

A hint is preferred if no smaller mask could ever hold the request, by the allocatable amounts.

So the masks are known without trying all of them: single nodes, groups in use, and - the open part of a
``Family`` - masks over nodes without blocks. On these nodes init containers have left nothing, and more nodes
never have less. On machines with many nodes the family is passed on as it is, see
``proxy.allocation.hint_family``.

Memory that is already held is the hint; if it differs from the request, there is no preference at all (the
CPU manager says "impossible" in that case). If no mask fits, there is no preference either: the allocation
rejects the request.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.allocation.demand import Demand, covers, least_node_count
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.memory.request import container_amounts, gets_memory, pod_amounts, split_problem
from proxy.allocation.memory.state import MemoryState
from proxy.model.grants import Blocks
from proxy.model.hint import Hints
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, PodRequests


def container_memory_hints(state: MemoryState, pod: PodRequests, name: str) -> Hints:
    """Return the hints for a container.

    Raises:
        KeyError: The pod has no container of that name.
    """
    container = pod.named(name)
    if not gets_memory(pod):
        return None
    amounts = container_amounts(pod, container)
    blocks = state.blocks(pod.uid, name)
    if blocks is not None:
        return _held(blocks, amounts)
    return _answer(family(state, pod, amounts, name), amounts)


def pod_memory_hints(state: MemoryState, pod: PodRequests) -> Hints:
    """Return the hints for a pod."""
    if not gets_memory(pod):
        return None
    amounts = pod_amounts(pod)
    if pod.pod_level_requests is not None and split_problem(pod):
        return dict.fromkeys(amounts, ())
    for container in pod.containers:
        if amounts and (blocks := state.blocks(pod.uid, container.name)) is not None:
            return _held(blocks, amounts)
    return _answer(family(state, pod, amounts), amounts)


def family(state: MemoryState, pod: PodRequests, amounts: Mapping[str, int], name: str = "") -> Family:
    """Return the masks that can hold some amounts.

    Args:
        state: Nodes and assignments.
        pod: The pod.
        amounts: Resource to bytes.
        name: The container that the amounts are for; empty: the pod.
    """
    by_capacity = tuple(_demand(state, name, size, free=False) for name, size in amounts.items())
    by_free = tuple(_demand(state, name, size, free=True) for name, size in amounts.items())
    least = least_node_count(tuple(state.nodes), by_capacity) if amounts else None
    if least is None:
        return Family((), (), 1, (), 0)
    fixed = {node.cells.bits: node.cells for node in state.nodes.values()}
    explicit = tuple(
        mask.bits
        for mask in fixed.values()
        if not violates_groups(state, mask)
        and covers(by_capacity, mask.bits)
        and all(
            d.amount_on(mask.bits) + reusable_memory(state, pod, name, mask, n) >= d.required
            for n, d in zip(amounts, by_free, strict=True)
        )
    )
    unused = tuple(i for i, node in state.nodes.items() if not node.assignments)
    return Family(explicit, unused, 2, by_free, max(least, 1))


def violates_groups(state: MemoryState, mask: Mask) -> bool:
    """Return whether a mask has nodes that serve blocks on other masks."""
    nodes = (state.nodes[i] for i in mask)
    return any(node.assignments and node.cells != mask for node in nodes)


def reusable_memory(state: MemoryState, pod: PodRequests, name: str, mask: Mask, resource: str) -> int:
    """Return the bytes that ordinary init containers before a container hold on exactly this mask."""
    total = 0
    for container in pod.containers:
        if container.name == name:
            break
        if container.kind is ContainerKind.INIT:
            held = state.blocks(pod.uid, container.name) or ()
            total += sum(b.size for b in held if b.affinity == mask and b.resource == resource)
    return total


def _demand(state: MemoryState, name: str, size: int, *, free: bool) -> Demand:
    tables = ((i, node.table(name)) for i, node in state.nodes.items())
    return Demand(size, tuple((1 << i, table.free if free else table.allocatable) for i, table in tables))


def _held(blocks: Blocks, amounts: Mapping[str, int]) -> Hints:
    if {b.resource: b.size for b in blocks} != dict(amounts) or len(blocks) != len(amounts):
        return None
    return {b.resource: (hint(b.affinity.bits, preferred=True),) for b in blocks}


def _answer(answer: Family, amounts: Mapping[str, int]) -> Hints:
    hints = answer.listed()
    return dict.fromkeys(amounts, hints) if hints else {}
