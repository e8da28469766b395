"""Describes the CPUs that kubelet manages, as Koordinator's node object reports them.

See Koordinator v1.8.0 pkg/koordlet/statesinformer/impl/states_noderesourcetopology.go, calGuaranteedCpu.

There are three parts:

- the CPUs that kubelet's static policy assigned to pods that no other program manages: those of its
  checkpoint, without pods of class LS (latency-sensitive) or BE (best effort) and pods to which a scheduler
  assigned CPUs;
- the CPUs that kubelet reserves: those that are configured, or otherwise as many as its reserves need, chosen
  as kubelet chooses them;
- the name that the object has for the policy and scope of kubelet's topology manager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.packed import NotEnoughCpus, take_packed
from proxy.backends.kubelet.checkpoints import Checkpoint
from proxy.model.idset import CpuSet
from proxy.model.workload import QosClass
from proxy.pools.annotations import ResourceStatus
from proxy.pools.cpu_location import CpuLocation
from proxy.pools.topology_keys import STATIC, ManagerPolicy

_POLICIES = {"single-numa-node": "SingleNUMANode", "restricted": "Restricted", "best-effort": "BestEffort"}
_SCOPES = {"container": "ContainerLevel", "pod": "PodLevel"}


class KubeletFacts(Struct, frozen=True):
    """Kubelet's settings.

    Attributes:
        policy: Of its CPU manager; None if kubelet was not queried.
        options: Of its CPU manager.
        reserved_cpus: ``reservedSystemCPUs``.
        reserved_milli: Milli-CPUs of ``kubeReserved`` and ``systemReserved`` together.
        topology_policy, topology_scope: Of its topology manager.
        checkpoint: ``cpu_manager_state``; None if there is none.
    """

    policy: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    reserved_cpus: CpuSet = field(default_factory=CpuSet)
    reserved_milli: int = 0
    topology_policy: str = ""
    topology_scope: str = ""
    checkpoint: Checkpoint | None = None


class PodRow(Struct, frozen=True):
    """The facts about a live pod that the object shows."""

    namespace: str
    name: str
    uid: str
    qos: QosClass = QosClass.NONE
    status: ResourceStatus = field(default_factory=ResourceStatus)


class Alloc(Struct, frozen=True):
    """CPUs that a pod has although no scheduler assigned them.

    Attributes:
        namespace, name: Empty if only the uid is known.
        excludes_be: Whether BE pods must not run on these CPUs either; true for kubelet's choices.
    """

    uid: str
    cpus: CpuSet
    namespace: str = ""
    name: str = ""
    excludes_be: bool = True

    def data(self) -> dict[str, object]:
        """Return the entry as Koordinator writes it, without empty members."""
        fields = {"namespace": self.namespace, "name": self.name, "uid": self.uid, "cpuset": str(self.cpus)}
        return {**{name: value for name, value in fields.items() if value}, "managedByKubelet": True}


def kubelet_allocs(checkpoint: Checkpoint | None, pods: Iterable[PodRow]) -> tuple[Alloc, ...]:
    """Return the CPUs that kubelet assigned to pods of its own, by uid, from its checkpoint.

    An invalid set is skipped: an error in a file of kubelet must not hide the rest of the file.
    """
    pod_of = {pod.uid: pod for pod in pods}
    entries = checkpoint.fields.get("entries") if checkpoint else None
    allocs = []
    for uid, containers in sorted(entries.items() if isinstance(entries, dict) else ()):
        pod = pod_of.get(uid)
        if pod is not None and (pod.qos in (QosClass.LS, QosClass.BE) or pod.status.cpus):
            continue
        cpus = _union_of_texts(containers)
        if cpus and pod is not None:
            allocs.append(Alloc(uid, cpus, pod.namespace, pod.name))
        elif cpus:
            allocs.append(Alloc(uid, cpus))
    return tuple(allocs)


def _union_of_texts(containers: object) -> CpuSet:
    cpus = CpuSet()
    for text in containers.values() if isinstance(containers, dict) else ():
        try:
            cpus |= CpuSet.parse(text) if isinstance(text, str) else CpuSet()
        except ValueError:
            continue
    return cpus


def manager_policy(facts: KubeletFacts, topology: CpuTopology) -> ManagerPolicy:
    """Return the policy and options of the CPU manager, and the CPUs that it reserves."""
    if facts.policy is None:
        return ManagerPolicy()
    options = tuple(sorted(facts.options.items()))
    if facts.policy != STATIC:
        return ManagerPolicy(facts.policy, options)
    reserved = facts.reserved_cpus or _packed(topology, -(-facts.reserved_milli // 1000))
    return ManagerPolicy(facts.policy, options, str(reserved))


def _packed(topology: CpuTopology, count: int) -> CpuSet:
    try:
        return take_packed(topology, topology.cpus, count)
    except NotEnoughCpus:
        return CpuSet()


def topology_of(locations: Iterable[CpuLocation]) -> CpuTopology:
    """Return the topology of CPUs for the allocator; the caches are unknown and do not matter here."""
    return CpuTopology.of_rows(
        CpuRow(location.cpu, location.core, location.socket, location.node, location.socket)
        for location in locations
    )


def topology_policy(policy: str, scope: str) -> str:
    """Return the object's name for a topology manager's policy and scope; ``None`` without an equivalent."""
    if policy not in _POLICIES or scope not in _SCOPES:
        return "None"
    return _POLICIES[policy] + _SCOPES[scope]
