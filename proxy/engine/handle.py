"""The engine: a state and an event in, the next state out."""

from __future__ import annotations

from proxy.engine.node_events import NodeEvent, SavedCpusLearned
from proxy.engine.state import NodeState


def handle(state: NodeState, event: NodeEvent) -> NodeState:
    """Return the state after an event."""
    return _saved_learned(state, event)


def _saved_learned(state: NodeState, event: SavedCpusLearned) -> NodeState:
    if event.container_id not in state.containers and event.cpus is not None:
        return state  # nothing would forget it any more
    return state.knowing(state.runtime.saving(event.container_id, event.cpus))
