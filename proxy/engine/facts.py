"""What is known about a node besides its pods, its containers and the runtime: one value for each matter."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.engine.cpuset_mems import MemoryBindings
from proxy.engine.quotas import RemovedQuotas
from proxy.engine.write_conflicts import WriteConflicts
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager, NodeMeta

if TYPE_CHECKING:
    from proxy.engine.node_policy import NodePolicy
    from proxy.engine.partition import PartitionFacts
    from proxy.engine.suppression import BeSuppression


# Which order a runtime sends is its own matter (``RuntimeQuirks.mask_as_sent``). Nothing but a unit's own
# property shows it, after a call that carried a cpuset which does not read the same both ways.


class MaskOrder(StrEnum):
    """What is known of the runtime."""

    UNKNOWN = "not known"
    RIGHT = "right"
    REVERSED = "wrong"


def learned(known: MaskOrder, has: CpuSet, meant: CpuSet, reverse: CpuSet, *, sent: bool) -> MaskOrder:
    """Return what is known after a look at a unit.

    Args:
        known: What was known.
        has: What the unit is to have, as systemd reports it.
        meant: What it should be.
        reverse: What systemd reads where the bytes of that cpuset's mask come in reverse order.
        sent: Whether the runtime, and no other program, has sent it just now; else it may have been ours.
    """
    if reverse == meant:
        return known
    if has == reverse:
        return MaskOrder.REVERSED
    return MaskOrder.RIGHT if has == meant and sent else known


_NO_CPUS = CpuSet()


class MatterFacts(Struct, frozen=True):
    """What is known, by matter.

    Attributes:
        drift: Writes of other programs to cpusets.
        quotas: CFS quotas that were removed.
        mems: Memory nodes in effect.
        losses: What containers lack of what they were promised, as it was reported.
        cpu_groups: Whether the node has the cpu controller's tree, where CFS quotas are written.
        masks: In which order the runtime sends masks to systemd.
        cpu_manager: What kubelet's CPU manager does, as it was read last.
        policy: The policy of the node that is in effect; None before it was read.
        node_meta: The newest Node object read; None where there is none, or it could never be read.
        kubelet_reserved: CPUs that a takeover keeps back in addition, because kubelet did.
        partitions: Partitions of owners; None where the node has none.
        suppression: BE suppression; None where BE is not suppressed.
    """

    drift: WriteConflicts = WriteConflicts()
    quotas: RemovedQuotas = RemovedQuotas()
    mems: MemoryBindings = MemoryBindings()
    losses: Mapping[str, str] = {}
    cpu_groups: bool = False
    masks: MaskOrder = MaskOrder.UNKNOWN
    cpu_manager: CpuManager = CpuManager()
    policy: NodePolicy | None = None
    node_meta: NodeMeta | None = None
    kubelet_reserved: CpuSet = _NO_CPUS
    partitions: PartitionFacts | None = None
    suppression: BeSuppression | None = None

    def kept(self) -> tuple[object, ...]:
        """Return the facts that the ledger keeps."""
        return self.quotas, self.partitions, self.suppression

    def records(self) -> dict[str, dict[str, object]]:
        """Return the ledger's records of them."""
        records = self.quotas.dump()
        if self.partitions is not None:
            records |= self.partitions.dump()
        if self.suppression is not None:
            records |= self.suppression.dump()
        return records
