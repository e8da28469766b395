"""What kubelet's memory manager does when a pod has gone."""

from __future__ import annotations

from proxy.place.memory.allocate import release
from proxy.place.memory.state import MemoryState


def release_pod(state: MemoryState, uid: str) -> MemoryState:
    """Give back the memory of all containers of a pod."""
    for name in tuple(state.assignments.get(uid, {})):
        state = release(state, uid, name)
    return state
