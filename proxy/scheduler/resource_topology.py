"""Read a NodeResourceTopology of NFD (Node Feature Discovery), nri-plugins, Koordinator or topoproxy.

Versions v1alpha1 and v1alpha2 of topology.node.k8s.io differ in ``attributes`` only. A zone of type ``Node``
is a NUMA node, called ``node-N``; other zones are left out.

Memory is counted by NUMA node if kubelet's memory manager is Static. topoproxy says so by an attribute. NFD's
topology-updater says so by showing memory at all: it writes the memory that kubelet's GetAllocatableResources
returns, and this is none without a static memory manager (node-feature-discovery v0.17
pkg/resourcemonitor/noderesourcesaggregator.go, makeNodeAllocatable; kubernetes v1.36
pkg/kubelet/cm/memorymanager/policy_none.go). Koordinator and nri-plugins write the memory of all machines.

If there is no attribute ``topologyManagerPolicy``, the deprecated ``topologyPolicies`` counts: one word for
policy and scope, such as ``SingleNUMANodePodLevel``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from proxy.model.devices import is_extended_resource
from proxy.model.idset import CpuSet, union
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.quantity import parse_quantity
from proxy.model.requests import in_bytes
from proxy.pools.go_json import Fields, load
from proxy.pools.pod_fingerprint import ATTRIBUTE, ATTRIBUTE_METHOD, METHOD_ALL
from proxy.pools.topology_keys import (
    CPU_MANAGER,
    FIGURES,
    MANAGER_POLICY,
    MEMORY_MANAGER,
    NAMESPACE_LIMIT,
    STATIC_MEMORY,
    TOPOLOGY_POLICY,
    TOPOLOGY_SCOPE,
)
from proxy.scheduler.agent_policies import read_annotation

CpuRows = tuple[tuple[int, int, int, int], ...]
"""CPUs: id, core, socket, NUMA node."""
MemoryRows = tuple[tuple[int, str, int, int], ...]
"""Memory: NUMA node, resource, bytes that pods may have, bytes that are free."""
CPU_TOPOLOGY = "node.koordinator.sh/cpu-topology"
POD_ALLOCS = "node.koordinator.sh/pod-cpu-allocs"
MOST_CPUS = 8192
"""The most CPUs of a Numatopology, or of a zone of a NodeResourceTopology."""
MOST_DEVICES = 65536
"""The most devices of one resource in a zone: each is one value in the decision."""
_ZONE = re.compile(r"node-([0-9]{1,4})")
_POLICIES = {
    "BestEffort": TopologyPolicy.BEST_EFFORT,
    "Restricted": TopologyPolicy.RESTRICTED,
    "SingleNUMANode": TopologyPolicy.SINGLE_NUMA_NODE,
    "None": TopologyPolicy.NONE,
}
_SCOPES = {"PodLevel": Scope.POD, "ContainerLevel": Scope.CONTAINER, "": Scope.CONTAINER}


class ZoneAmounts(Struct, frozen=True):
    """A resource of a NUMA node: the capacity, the part that pods may have, and the free part."""

    capacity: int
    allocatable: int
    available: int


class ResourceTopologyFacts(Struct, frozen=True):
    """The facts of a NodeResourceTopology.

    Attributes:
        zones: NUMA node to resource to amounts; CPUs in thousandths.
        distances: NUMA node and its distances, in ascending order of nodes; empty if unknown.
        policy, scope: Of the topology manager; empty if the object has none.
        cpu_policy: Of the CPU manager that decides on the node.
        options, reserved: Of kubelet's CPU manager, by Koordinator's annotation; if topoproxy says which
            policy is in effect, kubelet's options are ignored.
        rows: CPUs by Koordinator's annotation.
        shown: CPUs of the pods that Koordinator's annotation lists, by uid.
        namespaces: The namespaces of these pods, by uid, if one of ``policies`` needs them.
        counts_memory: Whether memory is counted by NUMA node.
        policies: The rules of the node that topoproxy's agent publishes, by name.
        fingerprint: Of all pods that the object counts; empty if it has none.
        by_koordlet: Whether Koordinator's agent describes the node. Its LSE and LSR pods (latency-sensitive
            exclusive and reserved) then get the CPUs that a scheduler names, whichever policy kubelet's CPU
            manager has.
    """

    zones: Mapping[int, Mapping[str, ZoneAmounts]]
    distances: tuple[tuple[int, tuple[int, ...]], ...] = ()
    policy: str = ""
    scope: str = ""
    cpu_policy: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    reserved: CpuSet = field(default_factory=CpuSet)
    rows: CpuRows = ()
    shown: Mapping[str, CpuSet] = field(default_factory=dict)
    namespaces: Mapping[str, str] = field(default_factory=dict)
    counts_memory: bool = False
    policies: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    by_koordlet: bool = False

    @property
    def memory(self) -> MemoryRows:
        """Memory and huge pages, if they are counted."""
        if not self.counts_memory:
            return ()
        return tuple(
            (numa, resource, amounts.allocatable, min(amounts.available, amounts.allocatable))
            for numa, resources in sorted(self.zones.items())
            for resource, amounts in sorted(resources.items())
            if in_bytes(resource)
        )

    @property
    def devices(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Devices by resource and NUMA node: the number of all devices and of the free ones."""
        devices: dict[str, dict[int, tuple[int, int]]] = {}
        for numa, resources in self.zones.items():
            for name, amounts in resources.items():
                if is_extended_resource(name):
                    devices.setdefault(name, {})[numa] = (amounts.allocatable, amounts.available)
        return devices

    def cpu_rows(self) -> CpuRows:
        """Return the CPUs that are named; if none are, as many as each NUMA node has, numbered from 0."""
        if self.rows:
            return self.rows
        rows: list[tuple[int, int, int, int]] = []
        for numa in sorted(self.zones):
            cpu = self.zones[numa].get("cpu")
            for _ in range(cpu.capacity // 1000 if cpu else 0):
                rows.append((len(rows), len(rows), numa, numa))
        return tuple(rows)

    def free(self, everything: CpuSet) -> CpuSet:
        """Return the free CPUs: those that no pod holds, or by amount the last ones of each NUMA node."""
        if self.rows:
            pod_cpus = union(cpus.bits for cpus in self.shown.values())
            return everything - CpuSet.from_bits(pod_cpus) - self.reserved
        by_node: dict[int, list[int]] = {}
        for cpu, _, _, numa in self.cpu_rows():
            by_node.setdefault(numa, []).append(cpu)
        return CpuSet(
            cpu
            for numa, cpus in by_node.items()
            for cpu in cpus[len(cpus) - min(len(cpus), self.zones[numa]["cpu"].available // 1000) :]
        )


def read_resource_topology(raw: Mapping[str, Any]) -> ResourceTopologyFacts:
    """Read the object.

    Raises:
        ValueError: A field has a wrong value; the text names it.
    """
    fields = Fields(raw)
    metadata = Fields(fields.get("metadata"), "metadata")
    texts = metadata.get("annotations")
    annotations: Mapping[str, Any] = texts if isinstance(texts, dict) else {}
    attributes = read_annotation(annotations) | {
        attribute.text("name"): attribute.text("value") for attribute in fields.objects("attributes")
    }
    policy, scope = _policy(fields, attributes)
    manager = Fields.parse(str(annotations.get(MANAGER_POLICY) or "{}"))
    options = {} if CPU_MANAGER in attributes else manager.get("options")
    zones, costs = _zones(fields)
    allocs = _pod_allocs(annotations)
    return ResourceTopologyFacts(
        zones,
        _distances(zones, costs),
        policy,
        scope,
        attributes.get(CPU_MANAGER) or manager.text("policy"),
        {str(k): str(v) for k, v in options.items()} if isinstance(options, dict) else {},
        CpuSet.parse(manager.text("reservedCPUs")),
        _rows(annotations),
        _cpus_by_pod(allocs),
        namespaces_of(allocs) if NAMESPACE_LIMIT in attributes else {},
        _counts_memory(attributes, annotations),
        attributes,
        attributes.get(ATTRIBUTE, "") if attributes.get(ATTRIBUTE_METHOD, METHOD_ALL) == METHOD_ALL else "",
        CPU_TOPOLOGY in annotations and FIGURES not in annotations,
    )


def namespaces_of(pods: Iterable[Fields]) -> dict[str, str]:
    """Return the namespaces of pods, by uid."""
    return {pod.text("uid"): pod.text("namespace") for pod in pods}


def _counts_memory(attributes: Mapping[str, str], annotations: Mapping[str, Any]) -> bool:
    """Return whether the memory manager is static."""
    if MEMORY_MANAGER in attributes:
        return attributes[MEMORY_MANAGER] == STATIC_MEMORY
    by_others = FIGURES in annotations or CPU_TOPOLOGY in annotations
    return TOPOLOGY_POLICY in attributes and not by_others


def _policy(fields: Fields, attributes: Mapping[str, str]) -> tuple[str, str]:
    if TOPOLOGY_POLICY in attributes:
        return attributes[TOPOLOGY_POLICY], attributes.get(TOPOLOGY_SCOPE, "")
    listed = fields.get("topologyPolicies")
    text = str(listed[0]) if isinstance(listed, list) and listed else ""
    for name, policy in _POLICIES.items():
        if text.startswith(name) and text[len(name) :] in _SCOPES:
            return policy.value, _SCOPES[text[len(name) :]].value
    return "", ""


def _zones(fields: Fields) -> tuple[dict[int, dict[str, ZoneAmounts]], dict[int, dict[int, int]]]:
    zones: dict[int, dict[str, ZoneAmounts]] = {}
    costs: dict[int, dict[int, int]] = {}
    for zone in fields.objects("zones"):
        match = _ZONE.fullmatch(zone.text("name"))
        if zone.text("type") != "Node" or match is None:
            continue
        numa = int(match[1])
        zones[numa] = {entry.text("name"): _amounts(entry) for entry in zone.objects("resources")}
        named = {
            _ZONE.fullmatch(entry.text("name")): entry.number("value") for entry in zone.objects("costs")
        }
        costs[numa] = {int(name[1]): value for name, value in named.items() if name}
    return zones, costs


def _amounts(resource: Fields) -> ZoneAmounts:
    resource_name = resource.text("name")
    milli = resource_name == "cpu"
    most = MOST_CPUS * 1000 if milli else MOST_DEVICES if is_extended_resource(resource_name) else None

    def read(name: str) -> int:
        value = resource.get(name)
        amount = 0 if value is None else parse_quantity(value, milli=milli)
        if amount < 0:
            raise ValueError(f"{name} of {resource_name!r:.80} is negative")
        if most is not None and amount > most:
            limit = most // 1000 if milli else most
            raise ValueError(f"{name} of {resource_name!r:.80} is more than {limit} on one NUMA node")
        return amount

    return ZoneAmounts(read("capacity"), read("allocatable"), read("available"))


def _distances(
    zones: Mapping[int, object], costs: Mapping[int, Mapping[int, int]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the distance table; empty if it is not complete."""
    nodes = sorted(zones)
    if any(other not in costs.get(numa, {}) for numa in nodes for other in nodes):
        return ()
    return tuple((numa, tuple(costs[numa][other] for other in nodes)) for numa in nodes)


def _rows(annotations: Mapping[str, Any]) -> CpuRows:
    text = annotations.get(CPU_TOPOLOGY)
    if not text:
        return ()
    # Read without the limit on entries, which is meant for annotations of pods: machines have more CPUs.
    detail = Fields.parse(str(text)).get("detail")
    if not isinstance(detail, list):
        raise ValueError(f"annotation {CPU_TOPOLOGY}: detail is not a list")  # noqa: TRY004  one error kind
    fields = (Fields(each, CPU_TOPOLOGY) for each in detail)
    rows = sorted(
        (row.number("id"), row.number("core"), row.number("socket"), row.number("node")) for row in fields
    )
    for cpu in (rows[0][0], rows[-1][0]) if rows else ():
        if not 0 <= cpu < CpuSet.LIMIT:  # a set of CPUs is a number with a bit for each id
            raise ValueError(f"annotation {CPU_TOPOLOGY}: {cpu} is not the id of a CPU")
    return tuple(rows)


def _pod_allocs(annotations: Mapping[str, Any]) -> list[Fields]:
    text = annotations.get(POD_ALLOCS)
    return list(Fields({"allocs": load(str(text))}).objects("allocs")) if text else []


def _cpus_by_pod(allocs: Iterable[Fields]) -> dict[str, CpuSet]:
    cpus_of: dict[str, CpuSet] = {}
    for alloc in allocs:
        uid = alloc.text("uid")
        cpus_of[uid] = cpus_of.get(uid, CpuSet()) | CpuSet.parse(alloc.text("cpuset"))
    return cpus_of
