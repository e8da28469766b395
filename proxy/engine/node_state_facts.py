"""The facts in a node's state besides pods, containers and the runtime: one value for each subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.engine.cpuset_mems import MemoryBindings
from proxy.engine.partition import PartitionFacts
from proxy.engine.quotas import RemovedQuotas
from proxy.engine.suppression import BeSuppression
from proxy.engine.systemd_masks import MaskOrder
from proxy.engine.write_conflicts import WriteConflicts
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager, NodeMeta

if TYPE_CHECKING:
    from proxy.engine.node_policy import NodePolicy


_NO_CPUS = CpuSet()
BE_GROUPS = "b/groups"
"""The ledger's key of the record that the cgroups of class BestEffort were narrowed."""


class NodeStateFacts(Struct, frozen=True):
    """The facts about a node, one field for each subject.

    Attributes:
        drift: Writes of other programs to cpusets.
        quotas: CFS quotas that were removed.
        mems: Memory nodes in effect.
        losses: The hardware losses of containers, as reported last.
        has_cpu_controller: Whether the node has the cpu controller's tree, where CFS quotas are written.
        masks: In which byte order the runtime sends CPU masks to systemd.
        cpu_manager: The settings and allocations of kubelet's CPU manager, as read last.
        policy: The policy of the node that is in effect; None before it was read.
        node_meta: The newest Node object that was read; None if there is none, or it could never be read.
        kubelet_reserved: CPUs that a takeover reserves in addition, because kubelet reserved them.
        partitions: Partitions of owners.
        suppression: BE suppression.
        be_groups: Whether the cgroups of class BestEffort were narrowed to the BE pool (``beCpuset: erase``),
            by this run or an earlier one, and have not been released since.
    """

    drift: WriteConflicts = WriteConflicts()
    quotas: RemovedQuotas = RemovedQuotas()
    mems: MemoryBindings = MemoryBindings()
    losses: Mapping[str, str] = {}
    has_cpu_controller: bool = False
    masks: MaskOrder = MaskOrder.UNKNOWN
    cpu_manager: CpuManager = CpuManager()
    policy: NodePolicy | None = None
    node_meta: NodeMeta | None = None
    kubelet_reserved: CpuSet = _NO_CPUS
    partitions: PartitionFacts = PartitionFacts()
    suppression: BeSuppression = BeSuppression()
    be_groups: bool = False

    def changed_records(self, before: NodeStateFacts) -> dict[str, dict[str, object] | None]:
        """Return the ledger's records that differ from those of earlier facts; None for a removed one."""
        old, new = dict[str, dict[str, object]](), dict[str, dict[str, object]]()
        for was, now in (
            (before.quotas, self.quotas),
            (before.partitions, self.partitions),
            (before.suppression, self.suppression),
        ):
            if now is not was and now != was:
                old |= was.dump()
                new |= now.dump()
        old |= {BE_GROUPS: {}} if before.be_groups else {}
        new |= {BE_GROUPS: {}} if self.be_groups else {}
        return {key: new.get(key) for key in {**old, **new} if old.get(key) != new.get(key)}
