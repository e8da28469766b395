"""Read a node from its objects, as input for the engine that decides for it.

Three objects describe a node, and any may be missing: Volcano's Numatopology (CPUs by id, which are free,
which pods hold them), a NodeResourceTopology of NFD (Node Feature Discovery) or of Koordinator (amounts by
NUMA node, policy and scope, devices), and the Node object (labels and annotations of Koordinator). They are
read by ``numatopology`` and ``resource_topology`` and joined here.

CPUs. A Numatopology names them. Without one, Koordinator's annotations do. With amounts only, as NFD writes
them, each NUMA node gets as many CPUs as it has capacity, numbered from 0. Then the answer whether a pod fits
is right, but the CPU ids are not, and it is unknown which threads share a core.

Policies. The Node object and the other objects are combined by the same rules as on the node
(``proxy.engine.node_policy``). If only NFD describes the node, the CPU manager counts as static: NFD does not
report it, and a policy of the topology manager has little meaning without a static CPU manager.

Memory counts only if an object says that the memory manager is static: a node without a static memory manager
rejects no pod for lack of memory on a NUMA node. Held memory counts on each NUMA node by itself, because
objects do not show which containers hold memory of several nodes together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

from msgspec import Struct, field
from msgspec.structs import replace

from proxy.allocation.cpu_policy import CpuPolicy, CpuStateError
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.koordinator.scored_hints import node_status
from proxy.allocation.packed import NotEnoughCpus
from proxy.engine.node import Node
from proxy.engine.node_policy import read_node_policy
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.machine import Cpu, HugePages, Machine, NumaNode
from proxy.model.options import TopologyPolicy, check_cpu_options, parse_cpu_options
from proxy.model.quantity import parse_quantity
from proxy.model.requests import HUGE_PAGES, MEMORY
from proxy.pools.claims import STRICT
from proxy.pools.node_keys import PLACEMENT_KEYS
from proxy.scheduler.agent_policies import AgentPolicies, read_policies
from proxy.scheduler.numatopology import NumatopologyFacts
from proxy.scheduler.pod_demand import PodDemand
from proxy.scheduler.resource_topology import CpuRows, MemoryRows, ResourceTopologyFacts

DeviceCounts = Mapping[str, Mapping[int, tuple[int, int]]]
"""Resource to NUMA node to the number of all devices and of free ones."""
_NO_LABELS = NodeMeta()
_SYSTEM_RESERVE_BYTES = 1
"""Bytes reserved on each NUMA node: the amounts are without kubelet's reserve, but the engine needs one."""


def most_free_cpus(node: SchedulableNode) -> int:
    """Return an upper limit of the CPUs that one container may own: the most free CPUs of a NUMA node."""
    if not node.rules.static or node.rules.policy is not TopologyPolicy.SINGLE_NUMA_NODE:
        return len(node.rules.machine.online)
    return max((len(node.free & numa_node.cpus) for numa_node in node.rules.machine.nodes), default=0)


def verdict_counts(node: SchedulableNode) -> tuple[object, ...]:
    """Return the counts on which a verdict depends: free CPUs, cores, devices and tenants by NUMA node.

    Cores that are not wholly free, but of which only reserved CPUs are missing, are counted separately too.
    Owned CPUs are counted if a rule limits them.
    """
    free, machine, reserved = node.free.bits, node.rules.machine, node.reserved.bits
    cores: dict[int | None, tuple[int, int, int, int]] = {}
    for cpus in machine.cores.values():
        part = (cpus.bits & free).bit_count()
        if part:
            numa = machine.by_id[cpus.first()].numa
            whole = part == cpus.bits.bit_count()
            unowned = not whole and not cpus.bits & ~(free | reserved)
            old = cores.get(numa, (0, 0, 0, 0))
            cores[numa] = old[0] + part, old[1] + whole, old[2] + (not whole), old[3] + unowned
    devices = tuple(
        (resource, tuple(sorted(zones.items()))) for resource, zones in sorted(node.devices.items())
    )
    tenants = node_status(machine.nodes_of(cpus) for cpus in node.shown.values())
    return (
        tuple(sorted(cores.items())),
        bool(node.reserved),
        devices,
        node.memory,
        node.by_koordlet,
        tuple(sorted(tenants.items())),
        _owned_counts(node),
    )


def _owned_counts(node: SchedulableNode) -> tuple[object, ...]:
    """Return how many CPUs are owned, on the node and in each namespace, if a rule limits them."""
    rules = node.rules.admission
    if rules.node_limit is None and rules.namespace_limit is None:
        return ()
    owned: dict[str, CpuSet] = {}
    for uid, cpus in node.shown.items():
        namespace = node.namespaces.get(uid, "")
        owned[namespace] = owned.get(namespace, CpuSet()) | cpus
    return len(CpuSet.union_of(owned.values())), *sorted((name, len(cpus)) for name, cpus in owned.items())


class UnknownNodeError(ValueError):
    """The objects do not describe a node well enough for a decision; the text is the reason."""


class SchedulableNode(Struct, frozen=True):
    """A node on which pods can be scheduled.

    Attributes:
        name: Of the Node object.
        rules: The machine and its policies; the same object for nodes that are alike.
        reserved: CPUs that no owner gets, whichever pods end.
        free: CPUs that a new owner may get.
        devices: Devices by NUMA node.
        memory: Memory by NUMA node, if it is counted.
        shown: Uids of the pods that the object counts already, and the CPUs that it shows for them.
        namespaces: The namespaces of these pods, by uid, if a rule of the node needs them.
        counts_named: Whether the object counts CPUs that the annotation of a pod names.
        fingerprint: Of all pods that the NodeResourceTopology counts; empty if it has none.
        has_amounts: Whether free CPUs follow from amounts of the NodeResourceTopology, which names no pods.
        names_owners: Whether the object shows all owned CPUs apart from those that are never owned, as
            topoproxy's agent writes it. Otherwise reserved CPUs may look like owned ones.
        by_koordlet: Whether LSE and LSR pods (Koordinator's latency-sensitive exclusive and reserved) get the
            CPUs that a scheduler names although the CPU manager is not static (Koordinator v1.8
            pkg/scheduler/plugins/nodenumaresource/plugin.go, PreFilter).
    """

    name: str
    rules: Node
    reserved: CpuSet
    free: CpuSet
    devices: DeviceCounts = field(default_factory=dict)
    shown: Mapping[str, CpuSet] = field(default_factory=dict)
    namespaces: Mapping[str, str] = field(default_factory=dict)
    counts_named: bool = True
    memory: MemoryRows = ()
    fingerprint: str = ""
    has_amounts: bool = False
    names_owners: bool = False
    by_koordlet: bool = False

    def gives_cpus(self, pod: PodDemand) -> bool:
        """Return whether the node gives a pod the exclusive CPUs that it requests."""
        return pod.owns_cpus(static=self.is_static_for(pod))

    def is_static_for(self, pod: PodDemand) -> bool:
        """Return whether a pod is treated as under a static CPU manager."""
        return self.rules.static or (self.by_koordlet and pod.pod.qos in STRICT)


def join_facts(
    name: str,
    meta: NodeMeta | None,
    numa: NumatopologyFacts | None,
    zones: ResourceTopologyFacts | None,
) -> SchedulableNode:
    """Combine the objects of a node.

    Args:
        name: Of the node.
        meta: Its Node object; None if it is not known.
        numa: Its Numatopology.
        zones: Its NodeResourceTopology.

    Raises:
        UnknownNodeError: The objects are incomplete, or contradict each other.
    """
    if numa is None and zones is None:
        raise UnknownNodeError("it has neither a Numatopology nor a NodeResourceTopology")
    rows = numa.cpus if numa else zones.cpu_rows() if zones else ()
    if not rows:
        raise UnknownNodeError("its objects name no CPU")
    distances = zones.distances if zones else ()
    agent = _agent_policies(numa, zones)
    manager = _cpu_manager(numa, zones, agent)
    options = agent.options or tuple(sorted(manager.options.items()))
    policy_labels = _policy_labels(meta)
    memory = zones.memory if zones else ()
    pages = tuple((where, resource, most) for where, resource, most, _ in memory)
    zone_ids = tuple(sorted(zones.zones)) if zones else ()
    own = replace(agent, floor_cpus=CpuSet())
    inputs = _RuleInputs(rows, zone_ids, distances, pages, options, _hashable(manager), policy_labels, own)
    rules = _rules(inputs)
    everything = rules.machine.online
    free = numa.free if numa else zones.free(everything) if zones else CpuSet()
    free = (free | agent.floor_cpus) & everything - agent.withheld
    shown, namespaces = _shown_pods(numa, zones)
    reserved = rules.reserved | agent.withheld & everything | _reserved_cpus(rules, numa, free)
    return SchedulableNode(
        name,
        rules,
        reserved,
        free - reserved,
        zones.devices if zones else {},
        shown,
        namespaces,
        numa is not None or zones is None or not zones.rows,
        memory,
        zones.fingerprint if zones else "",
        numa is None and zones is not None and not zones.rows,
        agent.knows_floor,
        zones is not None and zones.by_koordlet,
    )


def _shown_pods(
    numa: NumatopologyFacts | None, zones: ResourceTopologyFacts | None
) -> tuple[Mapping[str, CpuSet], Mapping[str, str]]:
    """Return the CPUs of the pods that the objects list, and their namespaces, by uid."""
    if numa is not None and numa.shown is not None:
        return numa.shown, numa.namespaces
    return (zones.shown, zones.namespaces) if zones is not None else ({}, {})


def _agent_policies(numa: NumatopologyFacts | None, zones: ResourceTopologyFacts | None) -> AgentPolicies:
    """Return the rules of a node as topoproxy's agent publishes them.

    Raises:
        UnknownNodeError: A policy has a wrong value.
    """
    of_zones, of_numa = zones.policies if zones else {}, numa.policies if numa else {}
    names_pods = numa.shown is not None if numa else bool(zones and zones.rows)
    by_id = of_numa if numa else of_zones
    try:
        # Reserved and owned CPUs look alike in an object that names no pods.
        return read_policies({**of_zones, **of_numa}, by_id if names_pods else {})
    except ValueError as error:
        raise UnknownNodeError(str(error)) from None


def _cpu_manager(
    numa: NumatopologyFacts | None, zones: ResourceTopologyFacts | None, agent: AgentPolicies
) -> CpuManager:
    """Return the settings of kubelet's managers, or of topoproxy's managers if these replace them."""
    policy = (numa.cpu_policy if numa else "") or (zones.cpu_policy if zones else "") or "static"
    topology = (zones.policy if zones else "") or (numa.policy if numa else "")
    scope = (zones.scope if zones else "") or agent.scope
    options = zones.options if zones else {}
    reserved = zones.reserved - agent.floor_cpus if zones else CpuSet()
    return CpuManager(policy, options, reserved, topology, scope)


def _policy_labels(meta: NodeMeta | None) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the labels and annotations of the Node object that a policy is read from.

    Others, such as amounts before amplification, differ between nodes that are alike.
    """
    meta = meta or _NO_LABELS
    return (
        tuple(sorted((k, v) for k, v in meta.labels.items() if k in PLACEMENT_KEYS)),
        tuple(sorted((k, v) for k, v in meta.annotations.items() if k in PLACEMENT_KEYS)),
    )


def _hashable(manager: CpuManager) -> tuple[str, str, str, int, tuple[tuple[str, str], ...]]:
    options = tuple(sorted(manager.options.items()))
    return manager.policy, manager.topology_policy, manager.topology_scope, manager.reserved.bits, options


class _RuleInputs(NamedTuple):
    """The facts from which the rules of a node follow; equal for nodes that are alike."""

    rows: CpuRows
    zones: tuple[int, ...]
    distances: tuple[tuple[int, tuple[int, ...]], ...]
    memory: tuple[tuple[int, str, int], ...]
    options: tuple[tuple[str, str], ...]
    manager: tuple[str, str, str, int, tuple[tuple[str, str], ...]]
    labels: tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]
    agent: AgentPolicies


_RULES_IN_USE: WeakValueDictionary[_RuleInputs, Node] = WeakValueDictionary()
"""The rules that at least one node has."""


def _rules(inputs: _RuleInputs) -> Node:
    """Return the rules of a node; nodes that are alike share them."""
    found = _RULES_IN_USE.get(inputs)
    if found is None:
        found = _RULES_IN_USE[inputs] = _make_rules(inputs)
    return found


def _make_rules(inputs: _RuleInputs) -> Node:
    rows, zones, distances, memory, options, manager, labels, agent = inputs
    cpu_policy, policy, scope, reserved, kubelets = manager
    machine = machine_of(rows, dict(distances), memory, zones)
    static = cpu_policy == "static"
    try:
        parsed = parse_cpu_options(dict(options)) if static else parse_cpu_options({})
    except ConfigError as error:
        raise UnknownNodeError(str(error)) from None
    if not agent.knows_floor:
        # Reserved CPUs and those of the floor look alike in the objects, and only the latter always stay in
        # the pool. kubelet admits pods even if the pool is left empty.
        parsed = replace(parsed, strict_cpu_reservation=False)
    reserve = {numa.id: {MEMORY: _SYSTEM_RESERVE_BYTES} for numa in machine.nodes} if memory else None
    topology = CpuTopology.of(machine)
    base = Node(
        machine,
        topology,
        static=static,
        options=parsed,
        closest=agent.closest,
        reserved_memory=reserve,
        bind=agent.bind,
        strategy=agent.strategy,
        admission=agent.admission,
    )
    meta = NodeMeta(labels=dict(labels[0]), annotations=dict(labels[1]))
    known = CpuManager(cpu_policy, dict(kubelets), CpuSet.from_bits(reserved), policy, scope)
    node = read_node_policy(base, machine, meta, known).on(base)
    if agent.withheld:
        node = dataclasses.replace(  # noqa: TID251  a dataclass
            node, node_reservation=node.node_reservation | agent.withheld, pool_placements={}
        )
    if policy and policy not in tuple(TopologyPolicy):
        raise UnknownNodeError(f"its topology manager has the policy {policy!r:.60}, which is not known")
    try:
        check_cpu_options(parsed, node.policy, len(machine.packages), len(machine.nodes))
    except ConfigError as error:
        raise UnknownNodeError(str(error)) from None
    return node


def machine_of(
    rows: CpuRows,
    distances: Mapping[int, tuple[int, ...]],
    memory: tuple[tuple[int, str, int], ...] = (),
    zones: Iterable[int] = (),
) -> Machine:
    """Make a machine of CPUs: id, core, socket, NUMA node; cores are numbered within their socket or not.

    Args:
        rows: The CPUs.
        distances: Of each NUMA node to all of them.
        memory: NUMA node, resource and the bytes that pods may have of it; empty if memory is not counted.
        zones: NUMA nodes, including those that have memory or devices but no CPUs.
    """
    cores: dict[tuple[int, int, int], int] = {}
    sockets: dict[int, int] = {}
    nodes = dict.fromkeys(zones, 0)
    for cpu, core, socket, numa in rows:
        cores.setdefault((socket, numa, core), cpu)
        sockets.setdefault(socket, cpu)
        nodes[numa] = nodes.get(numa, 0) | 1 << cpu
    cpus = tuple(
        Cpu(cpu, cores[socket, numa, core], sockets[socket], numa=numa, core_id=core, package_id=socket)
        for cpu, core, socket, numa in rows
    )
    online = CpuSet(cpu for cpu, *_ in rows)
    count = len(nodes)
    return Machine(
        cpus,
        tuple(
            NumaNode(
                numa,
                CpuSet.from_bits(nodes[numa]),
                *_sizes(numa, memory),
                _complete_distances(distances.get(numa, ()), count),
            )
            for numa in sorted(nodes)
        ),
        online,
        online,
    )


def _sizes(
    numa: int, memory: tuple[tuple[int, str, int], ...]
) -> tuple[int | None, dict[int, HugePages] | None]:
    """Return the memory of a NUMA node with its huge pages and the reserve, and its huge pages by page size.

    Raises:
        UnknownNodeError: The name of a resource has no size of huge pages.
    """
    if not memory:
        return None, None
    sizes = {resource: most for where, resource, most in memory if where == numa}
    pages = {}
    for resource, most in sizes.items():
        if resource.startswith(HUGE_PAGES):
            size = parse_quantity(resource.removeprefix(HUGE_PAGES)) // 1024
            if size < 1:
                raise UnknownNodeError(f"{resource} is no size of huge pages")
            pages[size] = HugePages(most // (size * 1024))
    return sizes.get(MEMORY, 0) + sum(
        size * 1024 * page.nr for size, page in pages.items()
    ) + _SYSTEM_RESERVE_BYTES, pages


def _complete_distances(distance: tuple[int, ...], count: int) -> tuple[int, ...]:
    return distance if len(distance) == count else ()


def _reserved_cpus(rules: Node, numa: NumatopologyFacts | None, free: CpuSet) -> CpuSet:
    """Return the CPUs that stay without an owner.

    If the object names an amount, the CPUs are chosen as kubelet chooses them. If it lists its pods instead,
    they are the CPUs that are neither free nor held by a pod.

    Raises:
        UnknownNodeError: The amount cannot be reserved on this machine.
    """
    if numa is None:
        return CpuSet()
    if numa.reserve:
        try:
            return CpuPolicy.of(rules.topology, rules.options, amount=numa.reserve).reserved
        except (CpuStateError, NotEnoughCpus) as error:
            raise UnknownNodeError(f"its reserved CPUs cannot be chosen: {error}") from None
    if numa.shown is None:
        return CpuSet()
    pod_cpus = union(cpus.bits for cpus in numa.shown.values())
    return rules.machine.online - free - CpuSet.from_bits(pod_cpus)
