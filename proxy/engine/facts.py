"""What is known about a node beside its pods, its containers and the runtime: one value for each matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.engine.cpuset_mems import MemoryBindings
from proxy.engine.quotas import RemovedQuotas
from proxy.engine.systemd_masks import MaskOrder
from proxy.engine.write_conflicts import WriteConflicts
from proxy.model.kubelet import CpuManager

if TYPE_CHECKING:
    from proxy.engine.node_policy import NodePolicy
    from proxy.engine.partition import PartitionFacts
    from proxy.engine.suppression import BeSuppression


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
