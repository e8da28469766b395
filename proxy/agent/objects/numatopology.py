"""Volcano's Numatopology (nodeinfo.volcano.sh/v1alpha1): the CPUs of a node, and which are free.

See Volcano v1.12 pkg/scheduler/plugins/numaaware and volcano-sh/resource-exporter pkg/numatopo.

Volcano's plugin counts the CPUs of ``numares.cpu.allocatable`` as free, and subtracts ``resReserved.cpu``
CPUs that it chooses itself. The CPUs that topoproxy reserves are known by id and are not among the free ones,
so they would be subtracted twice: ``resReserved.cpu`` is 0.

The plugin continues to deduct a pod that it has bound until ``podAllocations`` shows it (Volcano after
1.15). A CRD without that field refuses it; then the field is left out.
"""

from __future__ import annotations

from typing import Any

from proxy.agent.objects.node_page import NodePage, PublishedPod
from proxy.agent.objects.node_resource_topology import policies_annotation
from proxy.model.idset import CpuSet

API_VERSION = "nodeinfo.volcano.sh/v1alpha1"
KIND = "Numatopology"
PLURAL = "numatopologies"
PATH = f"/apis/{API_VERSION}/{PLURAL}"
POD_ALLOCATIONS = "podAllocations"


def numatopology(page: NodePage, *, allocations: bool = True) -> dict[str, Any]:
    """Return the object of a node.

    Args:
        page: The node.
        allocations: Whether the CRD has ``podAllocations``.
    """
    spec: dict[str, Any] = {
        "policies": {
            "CPUManagerPolicy": page.policies.cpu_manager_policy,
            "TopologyManagerPolicy": page.policies.topology_manager_policy,
        },
        "resReserved": {"cpu": "0"},
        "numares": {
            "cpu": {
                "allocatable": str(CpuSet.parse(page.free)) if page.free else "",
                "capacity": len(page.cpus),
            }
        },
        "cpuDetail": {
            str(cpu): {"numa": numa, "socket": socket, "core": core} for cpu, core, socket, numa in page.cpus
        },
    }
    if allocations:
        spec[POD_ALLOCATIONS] = [allocation for pod in page.pods if (allocation := _allocation(pod))]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": page.name, "annotations": policies_annotation(page)},
        "spec": spec,
    }


def _allocation(pod: PublishedPod) -> dict[str, Any]:
    """Return the CPUs of a pod; empty if it owns none. CPUs that are set aside for the pod have no name."""
    cpus_by_name = [(container.name, container.cpus) for container in pod.containers] + [("", pod.set_aside)]
    containers = [{"name": name, "allocations": {"cpu": cpus}} for name, cpus in cpus_by_name if cpus]
    if not containers:
        return {}
    return {
        "uid": pod.uid,
        "name": pod.name,
        "namespace": pod.namespace,
        "containerAllocations": containers,
    }
