"""The machine and the rules of a node; no decision changes them.

When CPUs come or go, or the rules change, a new ``Node`` takes the place of the old one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from proxy.allocation.cpu_policy import CpuPolicy
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.allocation.distance import Distances
from proxy.allocation.koordinator.selection import NodeBinding
from proxy.allocation.memory.state import MemoryState, Reserved, initial, node_memory
from proxy.allocation.providers.cpu import CpuProvider
from proxy.allocation.providers.devices import AssignedDevices
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import Provider, Serves
from proxy.model.admission import AdmissionRules
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BeCpuset, KeepQuota, NodeBindPolicy, NumaStrategy
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.model.workload import KubeQos, Placement, Pod, Pool
from proxy.pools.claims import STRICT
from proxy.pools.pools import Floors, floors_of

ProviderFactory = Callable[["Node"], Provider | None]
"""Returns the provider of a node with nothing granted; None if the node does not use this provider."""


def _assigned_devices(node: Node) -> Provider:
    return AssignedDevices(node.nodes)


def _cpus(node: Node) -> Provider:
    binding = NodeBinding(node.bind, node.strategy, node.machine.architecture)
    return CpuProvider(node.machine, node.cpu, binding)


def _memory(node: Node) -> Provider | None:
    return None if node.memory is None else MemoryProvider(node.machine, node.memory, node.follow_mems)


PROVIDERS: tuple[ProviderFactory, ...] = (_assigned_devices, _cpus, _memory)
"""The providers of every node, in the order in which they are queried and allocate.

If topoproxy assigns devices itself, the provider of these devices comes first; its content is part of the
state (``proxy.engine.topology_manager.build_context``).

kubelet has the same order: device manager, CPU manager, memory manager (kubernetes v1.36,
pkg/kubelet/cm/container_manager_linux.go ``NewContainerManager``).
"""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Node:
    """The machine and the rules.

    Attributes:
        machine: The hardware.
        topology: The hardware in the form that the allocator reads.
        static: Whether whole-CPU Guaranteed containers get exclusive CPUs (``cpuManagerPolicy: static``).
        reserved: CPUs that no container may own (``reservedSystemCPUs``).
        follow_mems: Whether containers that own CPUs get the memory nodes of those CPUs.
        policy, scope: How hints are merged, and whether for containers or for pods.
        options: How CPUs are chosen.
        closest: kubelet's ``prefer-closest-numa-nodes``.
        reserved_memory: ``reservedMemory``, if memory is counted by NUMA node; None if it is not.
        devices: Devices of a simulation, by resource and id; the devices of plugins are in the state.
        node_reservation: CPUs that neither pools nor owners use (Koordinator's node reservation).
        system: CPUs for pods of class SYSTEM (Koordinator's system-qos-resource).
        system_cpus_exclusive: Whether no other container uses them.
        bind: How CPUs of owners are bound on this node (Koordinator's cpu-bind-policy).
        strategy: Which NUMA nodes are filled first (Koordinator's numa-allocate-strategy).
        keep_quota: Which owners keep their CFS quota.
        be_cpuset: Whether requests of BE (best effort) containers name the BE pool, or the cgroups above them
            are narrowed to it.
        admission: Which pods may own CPUs.
        factories: The functions that make the providers of the topology manager.
        providers: The providers with nothing granted, in the order in which they are queried.
        serves_all: Whether at least one provider has to be queried for every container.
        serves_guaranteed: Whether some provider has to be queried for every container of a Guaranteed pod.
        accounts: Whether some provider records the resources of running containers.
        shareable: CPUs that pools may use.
        cpu: The machine, the options and the reserved CPUs, in the form that the CPU manager reads.
        memory: The memory of the NUMA nodes with nothing granted; None if it is not counted.
        distances: The distance table, if ``closest`` is on and the machine reports one.
        nodes: All NUMA nodes.
        floors: CPUs of the shared pool that no owner may take.
        most_ownable: How many CPUs can have owners at the same time; the floors stay in the shared pool.
    """

    machine: Machine
    topology: CpuTopology
    static: bool = False
    reserved: CpuSet = field(default_factory=CpuSet)
    follow_mems: bool = True
    policy: TopologyPolicy = TopologyPolicy.NONE
    scope: Scope = Scope.CONTAINER
    options: CpuOptions = field(default_factory=CpuOptions)
    closest: bool = False
    reserved_memory: Reserved | None = None
    devices: Mapping[str, Mapping[str, RegisteredDevice]] = field(default_factory=dict)
    node_reservation: CpuSet = field(default_factory=CpuSet)
    system: CpuSet = field(default_factory=CpuSet)
    system_cpus_exclusive: bool = True
    bind: NodeBindPolicy = NodeBindPolicy.NONE
    strategy: NumaStrategy = NumaStrategy.NONE
    keep_quota: KeepQuota = KeepQuota.NEVER
    be_cpuset: BeCpuset = BeCpuset.NARROW
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    factories: tuple[ProviderFactory, ...] = field(default=PROVIDERS, repr=False)
    pool_placements: dict[object, Placement] = field(default_factory=dict, compare=False, repr=False)
    """Placements of containers that own nothing, made once for each class (``engine.container_create``)."""
    shareable: CpuSet = field(init=False, compare=False, repr=False)
    cpu: CpuPolicy = field(init=False, compare=False, repr=False)
    memory: MemoryState | None = field(init=False, compare=False, repr=False)
    distances: Distances | None = field(init=False, compare=False, repr=False)
    nodes: Mask = field(init=False, compare=False, repr=False)
    floors: Floors = field(init=False, compare=False, repr=False)
    most_ownable: int = field(init=False, compare=False, repr=False)
    providers: tuple[Provider, ...] = field(init=False, compare=False, repr=False)
    serves_all: bool = field(init=False, compare=False, repr=False)
    serves_guaranteed: bool = field(init=False, compare=False, repr=False)
    accounts: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        def set_field(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        machine = self.machine
        withheld = self.withheld
        reserved = (self.reserved | withheld) & self.topology.cpus
        cpu = CpuPolicy.of(self.topology, self.options, reserved)
        shareable = machine.online - (reserved if self.options.strict_cpu_reservation else withheld)
        set_field("cpu", cpu)
        set_field("shareable", shareable or machine.online)
        set_field("nodes", Mask(node.id for node in machine.nodes))
        set_field("distances", Distances.of(machine) if self.closest else None)
        floors = floors_of(self.admission, machine, self.shareable)
        set_field("floors", floors)
        ownable = machine.online - reserved
        floor_cpus = floors.choose(self.shareable, machine, reserved) if floors else CpuSet()
        # Even without a floor the shared pool must not be empty.
        set_field("most_ownable", len(ownable - floor_cpus) - (not floors and self.shareable <= ownable))
        counts_memory = self.reserved_memory is not None
        set_field(
            "memory", initial(node_memory(machine), self.reserved_memory or {}) if counts_memory else None
        )
        providers = tuple(provider for make in self.factories if (provider := make(self)) is not None)
        served = {provider.serves for provider in providers}
        set_field("providers", providers)
        set_field("serves_all", Serves.ALL in served)
        set_field("serves_guaranteed", not served.isdisjoint((Serves.GUARANTEED, Serves.ALL)))
        set_field("accounts", any(provider.accounts for provider in providers))

    def with_machine(self, machine: Machine) -> Node:
        """Return the node with another machine: CPUs came or went."""
        topology = CpuTopology.of(machine)
        return dataclasses.replace(
            self, machine=machine, topology=topology, pool_placements=dict[object, Placement]()
        )

    def with_static(self, *, static: bool) -> Node:
        """Return the node on which whole-CPU Guaranteed containers get exclusive CPUs, or do not."""
        return dataclasses.replace(self, static=static, pool_placements=dict[object, Placement]())

    def with_reserved_cpus(self, reserved: CpuSet) -> Node:
        """Return the node with other reserved CPUs."""
        return dataclasses.replace(self, reserved=reserved, pool_placements=dict[object, Placement]())

    def for_running(self, running: Node) -> Node:
        """Return these rules with a running node's machine, and its ``static``, which a takeover may set."""
        return dataclasses.replace(
            self,
            machine=running.machine,
            topology=running.topology,
            static=running.static,
            pool_placements=dict[object, Placement](),
        )

    def with_namespace_labels(self, labels: Mapping[str, Mapping[str, str]] | None) -> Node:
        """Return these rules with the labels of namespaces; ``labels`` is None if none are known."""
        owners = self.admission.owners
        if (known := owners.knowing(labels)) is owners:
            return self
        return dataclasses.replace(self, admission=structs.replace(self.admission, owners=known))

    @property
    def withheld(self) -> CpuSet:
        """CPUs that neither the shared pool nor new owners use."""
        return self.node_reservation | self.system if self.system_cpus_exclusive else self.node_reservation

    def erases(self, placement: Placement) -> bool:
        """Return whether a container's request names no CPUs: then it has those of the cgroups above it."""
        return self.be_cpuset is BeCpuset.ERASE and placement.pool is Pool.BE and not placement.is_narrowed

    def serves(self, pod: Pod) -> bool:
        """Return whether some provider has to be queried for every container of a pod."""
        return self.serves_all or (self.serves_guaranteed and pod.kube_qos is KubeQos.GUARANTEED)

    def refuses_unplaced(self, pod: Pod) -> bool:
        """Return whether a pod must not run unplaced, because its class or the topology policy is strict."""
        return pod.qos in STRICT or (self.policy.is_strict and pod.kube_qos is KubeQos.GUARANTEED)

    @property
    def decides_pods(self) -> bool:
        """Whether pods are decided as a whole, before their containers are created."""
        return self.scope is Scope.POD and self.policy is not TopologyPolicy.NONE
