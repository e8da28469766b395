"""Memory nodes of running containers: which are repaired, and which calls to the runtime name.

Theory of operation. The memory nodes of a container are decided when it is created and do not change, because
its memory is there. So every difference in the kernel is drift: another program has written them. The effect
of that write on the pages has already happened (``backends.cgroup.memory``):

* Missing nodes are always given back. Adding nodes moves no page and takes milliseconds.
* Surplus nodes are taken away only if the container has no memory on them. On cgroup v2 the kernel would
  migrate that memory within the write, which takes seconds and may leave pages behind (cgroup-v2.rst); and if
  the remaining nodes have too little free memory, later allocations may end in the OOM killer. If the
  container has memory on them, that is reported, with the amount, and compared again at each reconcile. Until
  then topoproxy does not narrow the container in any other way: updates that pass through, and topoproxy's
  own, name the nodes that it has (``carried``).

Memory nodes may disappear (``hotplug``). A container that was bound to such a node has its remaining nodes,
or all existing nodes if none of its own remains. No call names a node that is gone, because the kernel would
refuse it. On cgroup v1 the kernel removes such a node from all groups and does not put it back, so the groups
above a container are widened when the node has returned. If the parent of a group has fewer nodes than were
decided for the group, the group gets those of the parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field, structs

from proxy.model.idset import Mask
from proxy.model.workload import Container

if TYPE_CHECKING:
    from proxy.engine.state import NodeState


class MemoryBindings(Struct, frozen=True):
    """The known memory nodes in effect.

    Attributes:
        as_planned: Ids of containers that had the planned nodes when these were last compared with the
            kernel.
        wider_than_planned: All nodes of containers that have more than were decided, because their memory is
            there.
        returned: Nodes that were gone and came back.
        is_changed: Whether nodes have ever come or gone.
    """

    as_planned: frozenset[str] = frozenset()
    wider_than_planned: Mapping[str, Mask] = field(default_factory=dict)
    returned: Mask = field(default_factory=Mask)
    is_changed: bool = False

    def changed(self, returned: Mask) -> MemoryBindings:
        """Return the bindings after nodes came or went: other programs did not write these differences."""
        return structs.replace(
            self, as_planned=frozenset(), returned=self.returned | returned, is_changed=True
        )

    def forgotten(self) -> MemoryBindings:
        """Return the bindings without the nodes of containers, which other programs may change now."""
        return structs.replace(self, as_planned=frozenset(), wider_than_planned={})

    def carried(self, state: NodeState, container: Container) -> Mask:
        """Return the memory nodes that a call to the runtime names, so that the container loses none."""
        wide = self.wider_than_planned.get(container.id, Mask()) & state.node.machine.memory_nodes
        return wide or state.desired_mems(container)

    def renewed(self, state: NodeState, container: Container) -> Mask | None:
        """Return the nodes that topoproxy's update names; None if the runtime has saved the right ones."""
        is_gone = not container.placement.mems <= state.node.machine.memory_nodes
        differs = self.is_changed or is_gone or container.id in self.wider_than_planned
        return self.carried(state, container) if differs else None


class MemsRepair(Struct, frozen=True):
    """The writes that repair the nodes of one container.

    Attributes:
        write: The nodes to write at once; None for no write.
        narrow: The nodes to write if the container's memory allows it; None if it has no surplus nodes.
        is_drift: Whether nodes were missing.
        is_as_planned: Whether the container has the planned nodes after the write.
    """

    write: Mask | None = None
    narrow: Mask | None = None
    is_drift: bool = False
    is_as_planned: bool = False


def repair(current: Mask, planned: Mask, above: Mask, existing: Mask, returned: Mask) -> MemsRepair:
    """Return the repair of a container's nodes.

    Args:
        current: The nodes that its cgroup has.
        planned: The nodes that were decided.
        above: The nodes that the cgroup above it has.
        existing: The nodes that exist.
        returned: Nodes that came back; for these the cgroups above are widened.
    """
    if current != planned and not planned - above <= returned:
        planned = planned & above or current
    target = (
        current if current <= existing else current & existing | planned
    )  # no memory is left on nodes that are gone
    if planned - target:
        return MemsRepair(target | planned, is_drift=True, is_as_planned=target <= planned)
    write = None if target == current else target
    return MemsRepair(write, is_as_planned=True) if target == planned else MemsRepair(write, narrow=planned)
