"""Objects of a cluster, as the API server returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.model.idset import CpuSet
from proxy.scheduler.node_facts import SchedulableNode, join_facts
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.pod_demand import PodDemand, read_demand
from proxy.scheduler.resource_topology import read_resource_topology

Json = dict[str, Any]


def numatopology(
    name: str,
    *,
    numa_nodes: int = 2,
    cores: int = 4,
    threads: int = 2,
    free: str | None = None,
    policy: str = "single-numa-node",
    static: bool = True,
    reserved: int = 0,
    pods: Mapping[str, str] | None = None,
) -> Json:
    """Return a Numatopology: each NUMA node is a socket, threads of a core are numbered side by side."""
    per = cores * threads
    count = numa_nodes * per
    detail = {
        str(cpu): {"numa": cpu // per, "socket": cpu // per, "core": cpu % per // threads}
        for cpu in range(count)
    }
    spec: Json = {
        "policies": {
            "CPUManagerPolicy": "static" if static else "none",
            "TopologyManagerPolicy": policy,
        },
        "resReserved": {"cpu": str(reserved)},
        "numares": {"cpu": {"allocatable": f"0-{count - 1}" if free is None else free, "capacity": count}},
        "cpuDetail": detail,
    }
    if pods is not None:
        spec["podAllocations"] = [
            {
                "uid": uid,
                "name": uid,
                "namespace": "default",
                "containerAllocations": [{"name": "main", "allocations": {"cpu": cpus}}],
            }
            for uid, cpus in pods.items()
        ]
    return {"apiVersion": "nodeinfo.volcano.sh/v1alpha1", "metadata": {"name": name}, "spec": spec}


def resource_topology(
    name: str,
    zones: Mapping[int, Mapping[str, tuple[int, int]]],
    policy: str = "single-numa-node",
    scope: str = "pod",
) -> Json:
    """Return a NodeResourceTopology; amounts are the capacity of a zone and its free part."""
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "metadata": {"name": name},
        "attributes": [
            {"name": "topologyManagerPolicy", "value": policy},
            {"name": "topologyManagerScope", "value": scope},
        ],
        "zones": [
            {
                "name": f"node-{numa}",
                "type": "Node",
                "resources": [
                    {
                        "name": resource,
                        "capacity": str(total),
                        "allocatable": str(total),
                        "available": str(free),
                    }
                    for resource, (total, free) in resources.items()
                ],
            }
            for numa, resources in zones.items()
        ],
    }


def pod(name: str, *cpus: object, uid: str = "", node: str = "", **more: Any) -> Json:
    """Return a Guaranteed pod with a container for each number of CPUs."""
    devices = more.pop("devices", {})
    annotations, labels = more.pop("annotations", {}), more.pop("labels", {})
    containers = []
    for number, count in enumerate(cpus):
        amounts = {"cpu": str(count), "memory": "200M", **devices}
        resources = {"requests": amounts, "limits": amounts}
        containers.append({"name": f"c{number}", "image": "x", "resources": resources})
    metadata: Json = {"name": name, "namespace": "default", "uid": uid or name}
    metadata |= {"annotations": annotations, "labels": labels}
    spec = {"containers": containers, **({"nodeName": node} if node else {}), **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def demand(name: str, *cpus: object, **more: Any) -> PodDemand:
    return read_demand(pod(name, *cpus, **more))


def node(name: str = "n1", zones: Json | None = None, **more: Any) -> SchedulableNode:
    """Return a node of a Numatopology, and of a NodeResourceTopology if one is given."""
    numa = read_numatopology(numatopology(name, **more))
    return join_facts(name, None, numa, read_resource_topology(zones) if zones else None)


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)
