"""Annotations and attributes of a NodeResourceTopology.

Koordinator's annotations hold the node's pools and the policy of kubelet's CPU manager. Its reporter writes
them, and its hooks read them from there (Koordinator v1.8.0 pkg/koordlet/runtimehooks/hooks/cpuset/rule.go,
parseRule). ``proxy.observe.koordinator`` writes the same annotations.

The attributes are added by topoproxy, and named as in kubelet's configuration or in topoproxy's own. Objects
that have no attributes, Volcano's Numatopology and Koordinator's form, have them as an annotation
(``POLICIES``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from msgspec import Struct

from proxy.pools.published_pools import NodePool

SHARED_POOLS = "node.koordinator.sh/cpu-shared-pools"
BE_POOLS = "node.koordinator.sh/be-cpu-shared-pools"
MANAGER_POLICY = "kubelet.koordinator.sh/cpu-manager-policy"
STATIC = "static"

FIGURES = "topoproxy/figures"
"""The annotation with figures for operators; an object that has it was written by topoproxy."""

CPU_MANAGER = "cpuManagerPolicy"
CPU_OPTIONS = "cpuManagerPolicyOptions"
MEMORY_MANAGER = "memoryManagerPolicy"
STATIC_MEMORY = "Static"
"""Names of attributes, and a value of the last one."""
TOPOLOGY_POLICY = "topologyManagerPolicy"
TOPOLOGY_SCOPE = "topologyManagerScope"
TOPOLOGY_OPTIONS = "topologyManagerPolicyOptions"
BIND = "cpuBindPolicy"
STRATEGY = "numaAllocateStrategy"
POD_LIMIT = "maxCPUsPerPod"
NAMESPACE_LIMIT = "maxCPUsPerNamespace"
NODE_LIMIT = "maxCPUsPerNode"
OWNER_NAMESPACES = "ownerNamespaces"
FLOOR = "sharedFloor"
NUMA_FLOOR = "sharedFloorPerNUMANode"
AUTO = "auto"
"""Names of further attributes, and the value of a floor that follows from the machine."""

POLICIES = "topoproxy/policies"
"""The annotation with the attributes as a JSON object."""
FLOOR_CPUS = "floorCPUs"
WITHHELD_CPUS = "withheldCPUs"
"""Members of the annotation only: they are true of the object that has it."""


class ManagerPolicy(Struct, frozen=True):
    """Policy and options of kubelet's CPU manager.

    Attributes:
        policy: ``none``, ``static``, or empty if unknown.
        options: Options of the policy.
        reserved: CPUs that the CPU manager reserves.
    """

    policy: str = ""
    options: tuple[tuple[str, str], ...] = ()
    reserved: str = ""

    def data(self) -> dict[str, object]:
        """Return the value as Koordinator writes it, without empty parts."""
        reported = {"policy": self.policy, "options": dict(self.options), "reservedCPUs": self.reserved}
        return {name: value for name, value in reported.items() if value}


def write_pools(pools: Iterable[NodePool]) -> str:
    """Write pools as the annotation has them; a part without CPUs has no list."""
    rows = []
    for pool in pools:
        row: dict[str, object] = {"socket": pool.socket, "node": pool.node}
        rows.append({**row, "cpuset": str(pool.cpus)} if pool.cpus else row)
    return json.dumps(rows or None, separators=(",", ":"))
