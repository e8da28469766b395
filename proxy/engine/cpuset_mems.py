"""Memory nodes of running containers: what is repaired, and what calls to the runtime name.

Theory of operation. The nodes of a container are decided with its create and stay: its memory is there. So
all that can differ is drift, a write of another program. What that write did to the pages is done already
(``backends.cgroup.memory``):

* nodes that are missing are given back, always. Wider nodes move no page and take milliseconds.
* nodes that are too many are taken away only where the container has no memory on them. On v2 the kernel
  would migrate it within the write, which takes seconds and may leave pages behind (cgroup-v2.rst); and where
  the remaining nodes have too little free memory, later allocations may end in the OOM killer. Otherwise it
  is reported, with how much is there, and compared at each reconcile. Until then nothing of ours narrows it
  either: updates that pass, and our own, name the nodes that it has (``carried``).

Nodes may go, memory by memory (``hotplug``). A container that was bound to one has what is left of its nodes,
or any where nothing is left; no call names a node that is gone, which the kernel refuses. On v1 the kernel
takes a node that goes out of all groups and does not put it back, so the groups above a container are widened
when it has returned. A group whose parent has fewer nodes than was decided has those of the parent.
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
    """The memory nodes in effect, as far as they are known.

    Attributes:
        held: Ids of containers that had the planned nodes at the last comparison.
        wide: Containers with more nodes than decided, as their memory is there: all that they have.
        returned: Nodes that came back.
        is_changed: Whether nodes came or went at all.
    """

    held: frozenset[str] = frozenset()
    wide: Mapping[str, Mask] = field(default_factory=dict)
    returned: Mask = field(default_factory=Mask)
    is_changed: bool = False

    def changed(self, returned: Mask) -> MemoryBindings:
        """Return the bindings after nodes came or went: differences from now on are no writes of others."""
        return structs.replace(self, held=frozenset(), returned=self.returned | returned, is_changed=True)

    def forgotten(self) -> MemoryBindings:
        """Return the bindings without the nodes of containers, which other programs may change now."""
        return structs.replace(self, held=frozenset(), wide={})

    def carried(self, state: NodeState, container: Container) -> Mask:
        """Return the memory nodes that a call to the runtime names for a container, so that it loses none."""
        wide = self.wide.get(container.id, Mask()) & state.node.machine.memory_nodes
        return wide or state.desired_mems(container)

    def renewed(self, state: NodeState, container: Container) -> Mask | None:
        """Return the nodes that an update of ours names; None where the runtime has saved the right ones."""
        is_gone = not container.placement.mems <= state.node.machine.memory_nodes
        differs = self.is_changed or is_gone or container.id in self.wide
        return self.carried(state, container) if differs else None


class MemsRepair(Struct, frozen=True):
    """The writes that repair the nodes of one container.

    Attributes:
        write: What is written at once; None for nothing.
        narrow: What is written if its memory allows; None where it has no nodes too many.
        is_drift: Whether nodes were missing.
        is_right: Whether it has the planned nodes after the write.
    """

    write: Mask | None = None
    narrow: Mask | None = None
    is_drift: bool = False
    is_right: bool = False


def repair(current: Mask, planned: Mask, above: Mask, existing: Mask, returned: Mask) -> MemsRepair:
    """Return the repair of a container's nodes.

    Args:
        current: The nodes that its group has.
        planned: The nodes that were decided.
        above: The nodes that the group above has.
        existing: The nodes that exist.
        returned: Nodes that came back: groups above are widened for them.
    """
    if current != planned and not planned - above <= returned:
        planned = planned & above or current
    target = (
        current if current <= existing else current & existing | planned
    )  # no memory is left on nodes that are gone
    if planned - target:
        return MemsRepair(target | planned, is_drift=True, is_right=target <= planned)
    write = None if target == current else target
    return MemsRepair(write, is_right=True) if target == planned else MemsRepair(write, narrow=planned)
