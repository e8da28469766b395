"""The NodeResourceTopology of a node, in the two forms that schedulers read.

There is one object for a node, and its two readers disagree about ``allocatable``. NFD's topology-updater
(node-feature-discovery v0.17 pkg/nfd-topology-updater, read by scheduler-plugins' NodeResourceTopologyMatch)
leaves reserved CPUs out of it, and shows in ``available`` what pods have not taken. Koordinator's agent
writes all CPUs of the zone in all three amounts, and its scheduler subtracts reserved and owned CPUs that it
reads from annotations. So the form is a setting; the default is the form of the scheduler whose API the
cluster has.

NFD's attributes are the policy and the scope of the topology manager, and the fingerprint of the pods.
Attributes for the CPU manager and the memory manager are our own, named as in kubelet's configuration;
readers skip attributes that they do not know (scheduler-plugins v0.34.7 pkg/noderesourcetopology/nodeconfig).

Resources are CPUs, memory, huge pages, and the devices that topoproxy assigns itself. Memory that no pod is
promised (``memoryManagerPolicy`` None) is available as a whole: NodeResourceTopologyMatch rejects Guaranteed
pods if no zone has memory (scheduler-plugins v0.34.7 pkg/noderesourcetopology/filter.go,
resourcesAvailableInAnyNUMANodes).

The fingerprint names the pods whose CPUs ``available`` leaves out: when the fingerprint is that of the
running pods, NodeResourceTopologyMatch drops the amounts that it has reserved for its pods
(cache/overreserve.go, Resync). So a pod is added to the fingerprint only when one of its containers was
placed or CPUs were set aside for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proxy.agent.objects.node_page import NodePage, PublishedNumaNode, PublishedZone, all_cpus
from proxy.model.idset import CpuSet
from proxy.pools.pod_fingerprint import ANNOTATION, ATTRIBUTE, ATTRIBUTE_METHOD, METHOD_ALL, fingerprint
from proxy.pools.topology_keys import FIGURES, FLOOR_CPUS, MEMORY_MANAGER, POLICIES, WITHHELD_CPUS

GROUP = "topology.node.k8s.io"
KIND = "NodeResourceTopology"
PLURAL = "noderesourcetopologies"
NFD_VERSION = "v1alpha2"
"""The version of the API that has the fields of NFD's form."""


def collection_path(version: str) -> str:
    """Return the path of the collection in a version of the API."""
    return f"/apis/{GROUP}/{version}/{PLURAL}"


def nfd_topology(page: NodePage) -> dict[str, Any]:
    """Return the object as NFD's topology-updater writes it, in ``NFD_VERSION``."""
    attributes = page.policies.by_name()
    annotations = {FIGURES: figures(page)}
    if page.pods:
        attributes[ATTRIBUTE] = fingerprint((pod.namespace, pod.name) for pod in page.pods if pod.counted)
        attributes[ATTRIBUTE_METHOD] = METHOD_ALL
        annotations[ANNOTATION] = attributes[ATTRIBUTE]
    devices = {zone.name: zone for zone in page.devices}
    return {
        "apiVersion": f"{GROUP}/{NFD_VERSION}",
        "kind": KIND,
        "metadata": {"name": page.name, "annotations": annotations},
        "topologyPolicies": list(page.koordinator.topology_policies),
        "attributes": [{"name": name, "value": value} for name, value in attributes.items()],
        "zones": [_zone(page, numa, devices.get(f"node-{numa.id}")) for numa in page.numa_nodes],
    }


def koordinator_topology(page: NodePage, version: str = "v1alpha1") -> dict[str, Any]:
    """Return the object as Koordinator's agent writes it."""
    part = page.koordinator
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": KIND,
        "metadata": {
            "name": page.name,
            "labels": dict(part.labels),
            "annotations": {**part.annotations, **policies_annotation(page), FIGURES: figures(page)},
        },
        "topologyPolicies": list(part.topology_policies),
        "zones": [
            {"name": zone.name, "type": zone.type, "resources": list(zone.resources)} for zone in part.zones
        ],
    }


def policies_annotation(page: NodePage) -> dict[str, str]:
    """Return the annotation of objects that have no attributes; none if topoproxy's policies do not apply.

    Memory is left out: these objects do not show how much of it is free.
    """
    if not page.applied:
        return {}
    policies = page.policies.by_name()
    policies.pop(MEMORY_MANAGER, None)
    if page.floor is not None:
        policies |= {FLOOR_CPUS: page.floor, WITHHELD_CPUS: page.withheld}
    return {POLICIES: json.dumps(policies, separators=(",", ":"))}


def with_owner(value: Mapping[str, Any], node: str, uid: str) -> dict[str, Any]:
    """Return an object that is deleted with the Node object."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
    return {**value, "metadata": {**value["metadata"], "ownerReferences": [owner]}}


def scheduler_content(value: Mapping[str, Any]) -> tuple[object, object]:
    """Return what schedulers read (not the figures), first without the fingerprint, then with it."""
    notes = {name: text for name, text in value["metadata"]["annotations"].items() if name != FIGURES}
    fingerprint = notes.pop(ANNOTATION, "")
    attributes = [
        attribute
        for attribute in value.get("attributes", ())
        if attribute["name"] not in (ATTRIBUTE, ATTRIBUTE_METHOD)
    ]
    labels = value["metadata"].get("labels")
    basis = value["zones"], value["topologyPolicies"], attributes, notes, labels
    return basis, (basis, fingerprint)


def figures(page: NodePage) -> str:
    """Return figures for people, which schedulers do not read, in a few words."""
    owners = [container.cpus for pod in page.pods for container in pod.containers if container.cpus]
    return (
        f"mode={page.mode} owners={len(owners)} exclusive={all_cpus(owners)} free={page.free} "
        f"reserved={page.reserved}"
    )


def _zone(page: NodePage, numa: PublishedNumaNode, devices: PublishedZone | None) -> dict[str, Any]:
    cpus = CpuSet(cpu for cpu, _, _, where in page.cpus if where == numa.id)
    reserved, free = all_cpus([page.reserved]), all_cpus([page.free])
    resources = [_amounts("cpu", len(cpus), len(cpus - reserved), len(cpus & free))]
    total = {"memory": numa.memory, **numa.hugepages}
    whole = {name: {"allocatable": amount, "free": amount} for name, amount in total.items() if amount}
    promised = page.memory.get(str(numa.id), {}) if page.memory else whole
    for name, table in sorted(promised.items()):
        resources.append(
            _amounts(name, max(total.get(name, 0), table["allocatable"]), table["allocatable"], table["free"])
        )
    zone: dict[str, Any] = {
        "name": f"node-{numa.id}",
        "type": "Node",
        "resources": [*resources, *(devices.resources if devices else ())],
    }
    if numa.distances:
        zone["costs"] = [
            {"name": f"node-{other}", "value": distance} for other, distance in numa.distances.items()
        ]
    return zone


def _amounts(name: str, capacity: int, allocatable: int, available: int) -> dict[str, str]:
    return {
        "name": name,
        "capacity": str(capacity),
        "allocatable": str(allocatable),
        "available": str(available),
    }
