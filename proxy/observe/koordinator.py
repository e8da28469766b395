"""Builds the node's NodeResourceTopology object for schedulers, as Koordinator's agent keeps it.

Theory (Koordinator v1.8.0 pkg/koordlet/statesinformer/impl/states_noderesourcetopology.go). The object is
named like the node, and has annotations for facts for which the type has no fields: the location of each CPU,
the shared pools, the CPUs that kubelet assigned, the reserved CPUs. Koordinator's scheduler reads these keys
and this JSON. This module makes the object as data; the publisher compares it key by key and writes the
changes.

A scheduler counts the CPUs of annotations that it wrote itself and, of ``pod-cpu-allocs``, only CPUs that are
marked as kubelet's. CPUs that were chosen on the node are in no annotation of a pod. So they are listed in
``pod-cpu-allocs`` too, under the same mark; otherwise a scheduler would assign them a second time.

A zone (calTopologyZoneList of the same file) is a NUMA node, called by its kernel id: ids may have gaps, and
a node may have no CPU or no memory. All of a zone is allocatable, unless the node is labelled for NUMA
reservation: then kubelet's reserve (capacity - allocatable of the node) is spread evenly over the nodes that
have the resource, rounded up, so that together the zones never offer what kubelet reserves. Amounts are in
thousandths: milli-CPUs, and thousandths of a byte, because Koordinator's shares are exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from msgspec import Struct, field, structs
from msgspec.structs import replace

from proxy.engine.node_policy import node_reservation
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine, NumaNode
from proxy.model.quantity import show_quantity
from proxy.model.workload import QosClass
from proxy.observe.koordinator_kubelet import (
    Alloc,
    KubeletFacts,
    PodRow,
    kubelet_allocs,
    manager_policy,
    topology_of,
    topology_policy,
)
from proxy.pools.cpu_location import CpuLocation, groups_of, locations_of
from proxy.pools.node_keys import (
    NUMA_RESERVATION,
    RESERVATION,
    SYSTEM_QOS,
    amplification_ratios,
    system_qos,
    with_ratios,
)
from proxy.pools.published_pools import AnnotatedCpus, Withheld, node_pools
from proxy.pools.topology_keys import (
    BE_POOLS,
    MANAGER_POLICY,
    SHARED_POOLS,
    STATIC,
    ManagerPolicy,
    write_pools,
)

API_VERSION = "topology.node.k8s.io/v1alpha1"
KIND = "NodeResourceTopology"
BASIC_INFO = "node.koordinator.sh/cpu-basic-info"
CPU_TOPOLOGY = "node.koordinator.sh/cpu-topology"
POD_ALLOCS = "node.koordinator.sh/pod-cpu-allocs"
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "Koordinator"

CPU, MEMORY, HUGE_PAGES = "cpu", "memory", "hugepages-"
_ALWAYS_KB = (2048, 1_048_576)
"""Sizes of huge pages that every zone has."""

Amounts = Mapping[str, int]


class Zone(Struct, frozen=True):
    """One NUMA node."""

    node: int
    capacity: Amounts
    allocatable: Amounts

    def data(self) -> dict[str, object]:
        """Return the zone in the form of the object."""
        return {
            "name": f"node-{self.node}",
            "type": "Node",
            "resources": [
                {"name": name, "capacity": _shown(name, self.capacity[name])}
                | dict.fromkeys(("allocatable", "available"), _shown(name, self.allocatable[name]))
                for name in sorted(self.capacity)
            ],
        }


def _shown(name: str, milli: int) -> str:
    # Bytes are whole numbers: fractions are dropped.
    return show_quantity(milli, milli=True) if name == CPU else show_quantity(milli // 1000)


def zones_of(machine: Machine, locations: Iterable[CpuLocation]) -> tuple[Zone, ...]:
    """Return the zones of a machine, ascending by id, without any reserve."""
    cpus: dict[int, int] = {}
    for location in locations:
        cpus[location.node] = cpus.get(location.node, 0) + 1
    all_zones = []
    for node in machine.nodes:
        capacity = {CPU: 1000 * cpus.get(node.id, 0), **_memory(node)}
        all_zones.append(Zone(node.id, capacity, capacity))
    return tuple(all_zones)


def _memory(node: NumaNode) -> dict[str, int]:
    """Return the memory of a node; huge pages are not memory."""
    pages = {size: pages.nr * size << 10 for size, pages in (node.hugepages or {}).items()}
    sizes = {size: pages.get(size, 0) for size in {*_ALWAYS_KB, *(size for size in pages if pages[size])}}
    huge = {f"{HUGE_PAGES}{show_quantity(size << 10)}": 1000 * sizes[size] for size in sizes}
    return {MEMORY: 1000 * max(0, (node.mem_bytes or 0) - sum(pages.values())), **huge}


def kubelet_reserve(capacity: Amounts, allocatable: Amounts) -> dict[str, int]:
    """Return the CPU and memory that kubelet reserves, in the unit of the arguments, without zeros."""
    reserve = {
        name: capacity[name] - allocatable[name]
        for name in (CPU, MEMORY)
        if name in capacity and name in allocatable
    }
    return {name: amount for name, amount in reserve.items() if amount > 0}


def equal_share(milli: int, count: int) -> int:
    """Return one of ``count`` equal shares, rounded up to a thousandth; 0 if there is no zone."""
    return -(-milli // count) if count > 0 else 0


def subtract_share(zones: Iterable[Zone], share: Amounts) -> tuple[Zone, ...]:
    """Subtract a share from the allocatable amounts of each zone, down to zero."""
    return tuple(
        replace(
            zone,
            allocatable={
                name: max(0, amount - share[name]) if share.get(name, 0) > 0 else amount
                for name, amount in zone.allocatable.items()
            },
        )
        for zone in zones
    )


def with_reserve(zones: Iterable[Zone], reserve: Amounts) -> tuple[Zone, ...]:
    """Spread kubelet's reserve over the zones that have the resource.

    Args:
        zones: All zones of the node.
        reserve: Amounts that kubelet reserves on the node, in thousandths.
    """
    existing = tuple(zones)
    for name, milli in reserve.items():
        having = sum(1 for zone in existing if zone.capacity.get(name, 0) > 0)
        existing = tuple(
            subtract_share((zone,), {name: equal_share(milli, having)})[0]
            if zone.capacity.get(name, 0) > 0
            else zone
            for zone in existing
        )
    return existing


class NodeFacts(Struct, frozen=True):
    """The facts about a node from which its object is made.

    Attributes:
        name, uid: Of the Node object; the uid is empty if it is not known.
        labels, annotations: Of the Node object.
        capacity, allocatable: Of the Node object, in thousandths; empty if the object is not known.
        kubelet: Its settings and checkpoint.
        pods: Live pods.
        chosen: CPUs that were chosen on the node itself, without a scheduler.
        unavailable: CPUs that no new pod may own: reserved CPUs, and those that stay in the shared pool. A
            scheduler sees them as kubelet's reserve.
        basic: Facts about the processor, by the keys of ``cpu-basic-info``.
    """

    name: str = ""
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Amounts = field(default_factory=dict)
    allocatable: Amounts = field(default_factory=dict)
    kubelet: KubeletFacts = field(default_factory=KubeletFacts)
    pods: tuple[PodRow, ...] = ()
    chosen: tuple[Alloc, ...] = ()
    unavailable: CpuSet = field(default_factory=CpuSet)
    basic: Mapping[str, object] = field(default_factory=dict)


def topology_annotations(locations: Iterable[CpuLocation], facts: NodeFacts) -> dict[str, str]:
    """Return the annotations of a node, as JSON by key; malformed ones of the Node object count as not set.

    Args:
        locations: Its online CPUs.
        facts: The other facts about the node.
    """
    ordered = tuple(sorted(locations))
    topology = topology_of(ordered)
    policy = manager_policy(facts.kubelet, topology)
    reserved, _ = node_reservation(facts.annotations, topology)
    system, _ = system_qos(facts.annotations)
    kubelets = kubelet_allocs(facts.kubelet.checkpoint, facts.pods) if policy.policy == STATIC else ()
    withheld = Withheld(_union(alloc.cpus for alloc in kubelets), reserved.cpus, system.exclusive_cpus)
    pod_cpus = [AnnotatedCpus(pod.qos, pod.status.cpus) for pod in facts.pods if pod.status.cpus]
    pod_cpus += [
        AnnotatedCpus(QosClass.LSE if each.excludes_be else QosClass.LSR, each.cpus) for each in facts.chosen
    ]
    pools = node_pools(groups_of(ordered), pod_cpus, withheld)
    allocs = sorted((*kubelets, *facts.chosen), key=lambda alloc: alloc.uid)
    annotations = {
        BASIC_INFO: _json({"hyperThreadEnabled": _has_siblings(ordered), **facts.basic}),
        CPU_TOPOLOGY: _json({"detail": [_location(location) for location in ordered]}),
        SHARED_POOLS: write_pools(pools.shared),
        BE_POOLS: write_pools(pools.be),
        MANAGER_POLICY: _json(_reserving(policy, facts.unavailable).data()),
        POD_ALLOCS: _json([alloc.data() for alloc in allocs] or None),
        RESERVATION: _json(reserved.data()),
        SYSTEM_QOS: _json(system.data()),
    }
    ratios, _ = amplification_ratios(facts.annotations)
    if ratios:
        # Zones stay without amplification: the scheduler multiplies them.
        return with_ratios(annotations, ratios)
    return annotations


def node_zones(machine: Machine, facts: NodeFacts) -> tuple[Zone, ...]:
    """Return the zones of a node."""
    whole = zones_of(machine, locations_of(machine))
    if facts.labels.get(NUMA_RESERVATION) != "true":
        return whole
    return with_reserve(whole, kubelet_reserve(facts.capacity, facts.allocatable))


def node_resource_topology(machine: Machine, facts: NodeFacts) -> dict[str, object]:
    """Return the whole object of a node, ready for JSON."""
    metadata: dict[str, object] = {
        "name": facts.name,
        "labels": {MANAGED_BY: MANAGER, **_copied(facts.labels)},
        "annotations": topology_annotations(locations_of(machine), facts),
    }
    if facts.uid:
        owner: dict[str, object] = {"apiVersion": "v1", "kind": "Node", "name": facts.name, "uid": facts.uid}
        metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "topologyPolicies": [topology_policy(facts.kubelet.topology_policy, facts.kubelet.topology_scope)],
        "zones": [zone.data() for zone in node_zones(machine, facts)],
    }


def _reserving(policy: ManagerPolicy, reserved: CpuSet) -> ManagerPolicy:
    """Return the policy with more reserved CPUs."""
    return (
        structs.replace(policy, reserved=str(CpuSet.parse(policy.reserved) | reserved))
        if reserved
        else policy
    )


def _copied(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: labels[key] for key in (NUMA_RESERVATION,) if labels.get(key)}


def _location(location: CpuLocation) -> dict[str, int]:
    return {"id": location.cpu, "core": location.core, "socket": location.socket, "node": location.node}


def _has_siblings(locations: Iterable[CpuLocation]) -> bool:
    places = [(location.socket, location.core) for location in locations]
    return len(set(places)) < len(places)


def _union(sets: Iterable[CpuSet]) -> CpuSet:
    cpus = CpuSet()
    for each in sets:
        cpus |= each
    return cpus


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
