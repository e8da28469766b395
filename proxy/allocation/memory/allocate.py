"""Allocate memory of NUMA nodes to containers.

Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/policy_static.go ``Allocate``. The mask comes from the
merge of all hints. If the mask is open, the best hint of the memory manager itself is taken. If its nodes
have too little free memory, the mask is extended to the best hint that contains it. In both cases a preferred
decision must stay preferred. Finally the mask must not put single and group allocations on one node. The best
hint is a preferred one, then one with fewer nodes, then one with lower nodes.

An allocation takes over what ordinary init containers of the pod hold on the same mask: only the rest is
charged, and their blocks shrink by what was taken over. The sum of all blocks is always what is charged.

Two differences are intentional. A single node of a group in use is treated as a mask with too little memory,
and extended to the group; kubelet gives the node to both, and afterwards its accounts no longer balance. And
kubelet's allocation fails for a container that requests nothing; ours gives it nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from proxy.allocation.hint_family import Family
from proxy.allocation.memory.hints import family, reusable_memory, violates_groups
from proxy.allocation.memory.request import container_amounts, gets_memory
from proxy.allocation.memory.state import MemoryRejectedError, MemoryState
from proxy.model.grants import Block, Blocks
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.phrases import numa_nodes_text
from proxy.model.quantity import show_quantity
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests


class MemoryGrant(Struct, frozen=True):
    """The result of an allocation.

    Attributes:
        state: The new state.
        blocks: The blocks that the container holds; empty if it gets no memory of its own.
        reasons: Sentences that explain the choice.
    """

    state: MemoryState
    blocks: Blocks
    reasons: tuple[str, ...]


def allocate(state: MemoryState, pod: PodRequests, name: str, merged: TopologyHint) -> MemoryGrant:
    """Allocate memory to a container.

    Args:
        state: The state before; it is not changed.
        pod: The pod, with all its containers in order.
        name: The container.
        merged: The merged hint; ``TopologyHint(None, False)`` without a topology policy.

    Raises:
        MemoryRejectedError: The request does not fit; the text is kubelet's.
        KeyError: The pod has no container of that name.
    """
    container = pod.named(name)
    if not gets_memory(pod):
        return MemoryGrant(state, (), ("only Guaranteed pods are given memory of their own",))
    if (held := state.blocks(pod.uid, name)) is not None:
        return MemoryGrant(state, held, ("it holds its memory already",))
    amounts = container_amounts(pod, container)
    if not amounts:
        return MemoryGrant(state, (), ("it requests no memory of its own",))
    mask, reasons = _choose(state, family(state, pod, amounts, name), amounts, merged)
    blocks = tuple(Block(mask, resource, size) for resource, size in amounts.items())
    for block in blocks:
        reused = min(reusable_memory(state, pod, name, mask, block.resource), block.size)
        if reused:
            reasons.append(f"{show_quantity(reused)} of {block.resource} taken over from init containers")
        state = _shrink(state.charged(block, block.size - reused), pod, container, block)
    return MemoryGrant(state.with_blocks(pod.uid, name, blocks), blocks, tuple(reasons))


def _choose(
    state: MemoryState, suitable: Family, amounts: Mapping[str, int], merged: TopologyHint
) -> tuple[Mask, list[str]]:
    mask = merged.affinity
    if mask is None:
        best = suitable.best_bits()
        if not best:
            raise MemoryRejectedError(
                "failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
            )
        if merged.preferred and not suitable.prefers(best):
            raise MemoryRejectedError("failed to find the default preferred hint")
        mask = Mask.from_bits(best)
        return mask, [f"no nodes were decided on; the best for its memory: {numa_nodes_text(mask)}"]
    reasons = [f"decided on: {numa_nodes_text(mask)}"]
    in_group = len(mask) == 1 and len(state.nodes[mask.first()].cells) > 1
    if in_group or not _has_free(state, mask, amounts):
        wider = suitable.best_bits(mask.bits)
        if not wider:
            raise MemoryRejectedError("failed to find NUMA nodes to extend the current topology hint")
        if merged.preferred and not suitable.prefers(wider):
            raise MemoryRejectedError("failed to find the extended preferred hint")
        if wider != mask.bits:
            mask = Mask.from_bits(wider)
            reason = "serves a group" if in_group else "too little free memory there"
            reasons.append(f"{reason}; enough on {numa_nodes_text(mask)}")
    if violates_groups(state, mask):
        raise MemoryRejectedError("preferred hint violates NUMA node allocation")
    return mask, reasons


def _has_free(state: MemoryState, mask: Mask, amounts: Mapping[str, int]) -> bool:
    nodes = [state.nodes[i] for i in mask]
    return all(sum(node.table(name).free for node in nodes) >= size for name, size in amounts.items())


def _shrink(state: MemoryState, pod: PodRequests, container: ContainerResources, block: Block) -> MemoryState:
    """Shrink the blocks of earlier ordinary init containers by the memory that a new block takes over."""
    remaining = block.size
    for earlier in pod.containers:
        if earlier.name == container.name:
            break
        held = state.blocks(pod.uid, earlier.name)
        if earlier.kind is not ContainerKind.INIT or not held:
            continue
        reduced = []
        for own in held:
            same_place = own.resource == block.resource and own.affinity == block.affinity
            part = min(own.size, remaining) if same_place else 0
            remaining -= part
            reduced.append(replace(own, size=own.size - part))
        state = state.with_blocks(pod.uid, earlier.name, tuple(reduced))
    return state
