"""What kubelet's memory manager does when a container starts, and when a container or a pod has gone."""

from __future__ import annotations

from proxy.allocation.memory.allocate import MemoryGrant
from proxy.allocation.memory.state import MemoryState
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, PodRequests


def nodes_of(granted: MemoryGrant) -> Mask:
    """Return the NUMA nodes that a container's memory is on."""
    return Mask(node for block in granted.blocks for node in block.affinity)


def release_pod(state: MemoryState, uid: str) -> MemoryState:
    """Release the memory of all containers of a pod."""
    for name in tuple(state.assignments.get(uid, {})):
        state = release(state, uid, name)
    return state


def start(state: MemoryState, pod: PodRequests, name: str) -> MemoryState:
    """Release what earlier ordinary init containers still hold once a container starts."""
    for ask in pod.containers:
        if ask.name == name:
            break
        if ask.kind is ContainerKind.INIT:
            state = release(state, pod.uid, ask.name)
    return state


def release(state: MemoryState, uid: str, name: str) -> MemoryState:
    """Release the memory of a container; one that holds none changes nothing."""
    blocks = state.blocks(uid, name)
    if blocks is None:
        return state
    for block in blocks:
        state = state.uncharged(block)
    return state.with_blocks(uid, name, None)
