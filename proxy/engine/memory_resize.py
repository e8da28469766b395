"""The memory of a container after its memory limit was changed (kubelet's resize in place).

Memory is not moved. An owner gets more memory nodes if its new limit needs them, and never loses one. Nodes
that the request or a hook has named stay. Memory that is counted stays on its nodes, even if they have less
than the new limit, because the container runs already. kubelet's own memory manager refuses such a resize as
infeasible (kubernetes v1.36, feature gate InPlacePodVerticalScalingExclusiveMemory).

New CPU shares and quotas are not recorded here: an owner keeps its CPUs until it ends.
"""

from __future__ import annotations

from msgspec import structs

from proxy.engine.hook_narrowing import is_bound_by_hook
from proxy.engine.placement import counted_nodes, owner_memory_nodes
from proxy.engine.state import NodeState
from proxy.model.idset import Mask
from proxy.model.phrases import numa_nodes_text
from proxy.model.requests import MEMORY
from proxy.model.workload import Container


def with_memory_limit(state: NodeState, container: Container, limit: int) -> Container:
    """Return a container after a resize in place; the same value if its memory limit does not change.

    Args:
        state: The node as it is.
        container: The container before.
        limit: Bytes; negative for no limit, 0 to leave the limit.
    """
    limit = max(limit, 0) if limit else container.request.memory_limit
    if limit == container.request.memory_limit:
        return container
    request, placement = structs.replace(container.request, memory_limit=limit), container.placement
    blocks = tuple(
        structs.replace(block, size=limit) if limit and block.resource == MEMORY else block
        for block in placement.blocks
    )
    mems = placement.mems
    if container.owns_cpus and not request.cpuset_mems and not is_bound_by_hook(placement):
        bound = counted_nodes(container.pod, placement.blocks)
        claimant = f"{container.owner} {container.name}"
        mems |= owner_memory_nodes(state, request, placement.exclusive, claimant, bound)[0]
    reasons = placement.reasons
    if mems != placement.mems:
        reasons = (*reasons, f"memory of {numa_nodes_text(mems)} since its memory limit was raised")
    placement = structs.replace(placement, mems=mems, blocks=blocks, reasons=reasons)
    return structs.replace(container, request=request, placement=placement)


def added_nodes(state: NodeState, container: Container, limit: int) -> Mask:
    """Return all memory nodes of a container after a resize in place that adds some; none if it adds none.

    The arguments are as for ``with_memory_limit``.
    """
    resized = with_memory_limit(state, container, limit)
    return state.desired_mems(resized) if resized.placement.mems != container.placement.mems else Mask()
