"""What is counted of the memory of containers that were placed under other settings, or by an older version.

A record of the ledger tells the memory that was promised then. Where memory was not counted, a container that
is bound to NUMA nodes uses their memory all the same, as one that is taken in from the runtime does. And what
runs is never refused, so after a change of ``reservedMemory`` more may be promised than there is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from proxy.model.workload import Container, Phase
from proxy.plan.adopt import memory_of
from proxy.plan.state import NodeState


def recounted(state: NodeState) -> NodeState:
    """Count the memory of bound containers that were promised none; the same state where there are none."""
    if state.memory is None:
        return state
    late = tuple(after for c in state.containers.values() if (after := _counted(state, c)) is not c)
    return state.changed(put=late) if late else state


def _counted(state: NodeState, container: Container) -> Container:
    aside, placement = container.pod.aside, container.placement
    promised = aside is not None and (aside.blocks or any(part.blocks for part in aside.parts))
    if placement.blocks or promised or container.phase is Phase.EXITED:
        return container
    blocks = memory_of(state, container.pod, container.request, placement.mems)
    return (
        dataclasses.replace(container, placement=dataclasses.replace(placement, blocks=blocks))
        if blocks
        else container
    )


def beyond(state: NodeState) -> dict[str, tuple[int, int]]:
    """Give the resources of which more is promised than the nodes have: bytes promised, and bytes there.

    Only what could not be charged to any node is noticed, so the two are of the whole machine.
    """
    if state.memory is None:
        return {}
    promised: Counter[str] = Counter()
    for pod in state.memory.assignments.values():
        for blocks in pod.values():
            for block in blocks:
                promised[block.resource] += block.size
    charged: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for node in state.memory.nodes.values():
        for resource, table in node.tables.items():
            charged[resource] += table.reserved
            there[resource] += table.allocatable
    return {name: (size, there[name]) for name, size in sorted(promised.items()) if size > charged[name]}
