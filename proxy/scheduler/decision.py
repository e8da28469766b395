"""Decide for one node whether it would admit a pod, and where it would place it.

Theory. The engine that runs on the nodes decides here too (``proxy.engine.pod_dry_run``). The object of the
node becomes a state of the engine, in which all CPUs that are not free are held. First the pending pods
arrive in their order: those that are assumed on the node and that the object does not show yet. Then the pod
itself arrives.

kubelet does not keep that order. It handles the pods of one watch event in the order of their creation, and
the pods of several events in the order of their binds; and binds that are under way at the same time end in
any order. With a strict topology policy the order can decide: a small pod that comes first takes the lowest
NUMA node, although the large pod fits only there, or a CPU that the scheduler has named for another pod. So
if pods are pending, the pod fits only if all of them are admitted in every order
(``_rejected_in_some_order``). Under ``single-numa-node`` a pod of one container without named CPUs needs no
trial if enough CPUs are free for it to find a NUMA node after all others, wherever these are: a pod of s CPUs
is rejected only if each of the n NUMA nodes has at most s - 1 CPUs left. If too many pods are pending for a
trial, the node takes no more pods until its object shows some of them.

Volcano's predicate (Volcano v1.12 pkg/scheduler/plugins/numaaware ``predicateFn``) comes first: a pod with
the annotation ``volcano.sh/numa-topology-policy`` needs a node with that policy and a static CPU manager.
Volcano's plugin then computes the CPUs with its own allocator; here the engine does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from math import prod

from msgspec import Struct, field
from msgspec.structs import replace

from proxy.allocation.cpu_request import CPU, MILLI
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.allocation.koordinator.resource_status import status_text
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import Provider
from proxy.engine.node import Node
from proxy.engine.owners import ReservationCpus
from proxy.engine.pod_dry_run import DryRunOutcome, dry_run
from proxy.engine.state import NodeState
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NodeBindPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.requests import MEMORY, ContainerKind
from proxy.model.workload import Pod
from proxy.pools.claims import STRICT
from proxy.scheduler.node_facts import SchedulableNode
from proxy.scheduler.pod_demand import PodDemand, with_cpus
from proxy.scheduler.resource_topology import MemoryRows

SHOWN = "shown"
"""The owner of the memory and devices that the object of the node shows as taken. It is also a part of the
names under which CPUs that the object shows are owned."""
NOT_STATIC = "CPUManagerNotStatic"
OTHER_POLICY = "TopologyPolicyDiffers"
REORDERED = "PendingPodsConflict"
MOST_SETS = 32
"""The most sets of pending pods that are tried: as many as five different pods have."""


class NodeVerdict(Struct, frozen=True):
    """The decision for a pod and a node.

    Attributes:
        fits: Whether the node would admit the pod.
        reason: A short CamelCase reason such as ``TopologyAffinityError``; empty if it fits.
        message: The reason as text.
        numa_nodes: NUMA nodes of the CPUs, memory and devices that it would get.
        cpus: The CPUs that its containers would own together.
        containers: The CPUs of each container that would own some, as Linux lists.
        used: The fractions of the CPUs and memory of these NUMA nodes that are owned afterwards, 0 to 1.
    """

    fits: bool
    reason: str = ""
    message: str = ""
    numa_nodes: Mask = field(default_factory=Mask)
    cpus: CpuSet = field(default_factory=CpuSet)
    containers: tuple[tuple[str, str], ...] = ()
    used: tuple[float, ...] = ()


FITS = NodeVerdict(fits=True)


class ExpectedNode(Struct, frozen=True):
    """A node with the pods that are assumed on it.

    Attributes:
        node: The node as its objects show it.
        shown: The state of the engine that they show.
        state: The state after the pending pods have arrived in the order of their binds.
        pending: The pods.
        rejected: The pending pods that the node would reject.
        ended: CPUs of pods that have ended and that the objects still show, in the order of their ends.
    """

    node: SchedulableNode
    shown: NodeState
    state: NodeState
    pending: tuple[PodDemand, ...] = ()
    rejected: tuple[PodDemand, ...] = ()
    ended: tuple[CpuSet, ...] = ()

    def with_more(self, pods: Sequence[PodDemand]) -> ExpectedNode:
        """Return the node with more pods that are assumed on it."""
        if not pods:
            return self
        state, rejected = _arrive(self.node, self.state, pods)
        return replace(
            self, state=state, pending=(*self.pending, *pods), rejected=(*self.rejected, *rejected)
        )


def expected_node(
    node: SchedulableNode, pending: Sequence[PodDemand] = (), ended: tuple[CpuSet, ...] = ()
) -> ExpectedNode:
    """Return a node with the pods that are assumed on it.

    Args:
        node: The node as its objects show it.
        pending: Pods that are assumed on it and that it does not show, in the order of their binds.
        ended: CPUs that it shows for pods that have ended, in the order of their ends.
    """
    shown = shown_state(node)
    return ExpectedNode(node, shown, shown, ended=ended).with_more(pending)


def evaluate(demand: PodDemand, expected: ExpectedNode) -> NodeVerdict:
    """Decide for a pod and a node."""
    node = expected.node
    if rejected := _volcano_mismatch(node.rules, demand):
        return rejected
    outcome = _run(node, expected.state, demand)
    if not outcome.verdict.admitted:
        reason = outcome.verdict.reason or "Rejected"
        return NodeVerdict(fits=False, reason=reason, message=outcome.verdict.operator_message)
    verdict = _fitting_verdict(node.rules, outcome)
    if demand.pod.qos in STRICT and verdict.cpus:
        demand = with_cpus(demand, resource_status(node, verdict))  # it arrives with the CPUs of this order
    pods = (*expected.pending, demand)
    by_namespace = node.rules.admission.distinguish_namespaces
    kinds = Counter(pod.signature_for(by_namespace=by_namespace) for pod in pods)
    if not expected.pending or (len(kinds) == 1 and not expected.ended):
        return verdict
    possibly_rejected = _possibly_rejected(node, pods)
    if (
        possibly_rejected
        and (len(expected.ended) + 1) * prod(count + 1 for count in kinds.values()) > MOST_SETS
    ):
        message = f"{len(expected.pending)} pods are assumed on the node that its object does not show yet"
        return NodeVerdict(fits=False, reason=REORDERED, message=message)
    if loser := _rejected_in_some_order(expected, demand, possibly_rejected):
        message = f"{loser.ref} would be rejected if the pods came to the node in another order"
        return NodeVerdict(fits=False, reason=REORDERED, message=message)
    return verdict


def resource_status(node: SchedulableNode, verdict: NodeVerdict) -> str:
    """Return the annotation that names the CPUs which a pod would get."""
    shares = {
        numa.id: {CPU: MILLI * len(numa.cpus & verdict.cpus)}
        for numa in node.rules.machine.nodes
        if not numa.cpus.isdisjoint(verdict.cpus)
    }
    return status_text(verdict.cpus, shares)


def shown_state(node: SchedulableNode) -> NodeState:
    """Return the state of the engine that a node's objects show."""
    rules = node.rules
    owned = rules.machine.online - node.free
    pod_cpus = owned - node.reserved
    if node.reserved or owned:
        # Without a floor the engine keeps a free CPU for the shared pool. kubelet does not: its reserved CPUs
        # are never owned. If the objects do not tell them apart, one of the owned CPUs stands for them.
        hidden = not node.reserved and not node.names_owners and not rules.floors
        reserve = _one_of(rules, pod_cpus) if hidden else node.reserved
        rules = _variant(rules, reserve.bits, partial(rules.with_reserved_cpus, reserve))
        pod_cpus -= reserve
    if node.names_owners:
        pod_cpus |= owned & CpuSet.union_of(node.shown.values())  # some may have been reserved since
    pods = [Pod(f"{uid}/{SHOWN}", uid, namespace, uid) for uid, namespace in node.namespaces.items()]
    state = NodeState.of(rules, pods, (), reservation_cpus=_reservations(node, pod_cpus))
    if node.memory:
        state = replace(
            state, providers=tuple(_with_memory(provider, node.memory) for provider in state.providers)
        )
    return replace(state, devices=_devices(node)) if node.devices else state


def _reservations(node: SchedulableNode, pod_cpus: CpuSet) -> dict[str, ReservationCpus]:
    """Return the CPUs that the object shows as taken, by pod; under no pod if it names none."""
    reservations: dict[str, ReservationCpus] = {}
    for uid, cpus in (*node.shown.items(), ("", pod_cpus)):
        if taken := cpus & pod_cpus:
            owner = f"{uid}/{SHOWN}"
            reservations[owner] = ReservationCpus(owner, taken)
            pod_cpus -= taken
    return reservations


def _one_of(rules: Node, pod_cpus: CpuSet) -> CpuSet:
    """Return one of the CPUs of pods, if possible of a core that they own as a whole.

    Under ``full-pcpus-only`` the sibling of a reserved CPU may have an owner, but the sibling of an owned CPU
    may not.
    """
    whole = (core for core in rules.machine.cores.values() if core <= pod_cpus)
    return CpuSet([next(whole, pod_cpus).first()])


def _with_memory(provider: Provider, rows: MemoryRows) -> Provider:
    """Return a provider; the memory provider with the memory that the objects show as held."""
    if type(provider) is not MemoryProvider:
        return provider
    state, blocks = provider.state, []
    for numa, resource, most, free in rows:
        if free < most and numa in state.nodes:
            block = Block(Mask([numa]), resource, most - free)
            state = state.charged(block, block.size)
            blocks.append(block)
    state = state.with_blocks(SHOWN, SHOWN, tuple(blocks))
    return dataclasses.replace(provider, state=state)  # noqa: TID251  a dataclass


def _variant(rules: Node, key: Hashable, make: Callable[[], Node]) -> Node:
    """Return the rules of a node with a change; equal ones are made once.

    Args:
        rules: The rules.
        key: The change.
        make: Makes the changed rules.
    """
    cached = _VARIANTS.get((id(rules), key))
    if cached is not None and cached[0] is rules:
        return cached[1]
    if len(_VARIANTS) >= _MOST_VARIANTS:
        _VARIANTS.clear()
    node = make()
    _VARIANTS[id(rules), key] = rules, node
    return node


_VARIANTS: dict[tuple[int, Hashable], tuple[Node, Node]] = {}
_MOST_VARIANTS = 1024


def _devices(node: SchedulableNode) -> DeviceState:
    registered: dict[str, dict[str, RegisteredDevice]] = {}
    held_ids: dict[str, frozenset[str]] = {}
    for resource, zones in node.devices.items():
        names = {numa: [f"{numa}/{number}" for number in range(total)] for numa, (total, _) in zones.items()}
        registered[resource] = {
            name: RegisteredDevice(name, Mask([numa])) for numa, each in names.items() for name in each
        }
        held_ids[resource] = frozenset(
            name for numa, each in names.items() for name in each[zones[numa][1] :]
        )
    return DeviceState(registered, {SHOWN: {SHOWN: held_ids}})


def _volcano_mismatch(rules: Node, demand: PodDemand) -> NodeVerdict | None:
    policy = demand.volcano_policy
    if policy is None:
        return None
    if not rules.static:
        message = f"the pod demands topology policy {policy}, and the node's CPU manager is not static"
        return NodeVerdict(fits=False, reason=NOT_STATIC, message=message)
    if rules.policy is not policy:
        message = f"the pod demands topology policy {policy}, and the node has {rules.policy}"
        return NodeVerdict(fits=False, reason=OTHER_POLICY, message=message)
    return None


def _run(node: SchedulableNode, state: NodeState, demand: PodDemand) -> DryRunOutcome:
    """Run a pod on a node; if koordlet gives the pod its CPUs, run it as under a static CPU manager."""
    rules = state.node
    if node.is_static_for(demand) is rules.static:
        return dry_run(state, demand.arrival())
    static = _variant(rules, "static", partial(rules.with_static, static=True))
    outcome = dry_run(replace(state, node=static), demand.arrival())
    return replace(outcome, state=replace(outcome.state, node=rules))


def _arrive(
    node: SchedulableNode, state: NodeState, pods: Iterable[PodDemand]
) -> tuple[NodeState, list[PodDemand]]:
    """Let pods arrive one after the other; return the state, and the pods that were rejected."""
    rejected = []
    for demand in pods:
        outcome = _run(node, state, demand)
        state = outcome.state
        if not outcome.verdict.admitted:
            rejected.append(demand)
    return state, rejected


def _possibly_rejected(node: SchedulableNode, pods: Sequence[PodDemand]) -> int:
    """Return the pods that may find no NUMA node after all others, wherever these are (bits of positions)."""
    rules = node.rules
    plain = (
        rules.policy is TopologyPolicy.SINGLE_NUMA_NODE
        and rules.bind is NodeBindPolicy.NONE
        and not rules.options.full_pcpus_only
        and not node.memory
    )
    remaining = len(node.free) - sum(floor.least for floor in rules.floors.floors)
    remaining -= sum(pod.exclusive_cpus for pod in pods)
    most = len(rules.machine.nodes)
    possibly_rejected = 0
    for at, pod in enumerate(pods):
        single_container = (
            pod.largest_container_cpus == pod.exclusive_cpus and not pod.devices and not pod.pod.cpuset
        )
        any_cpus = plain and not pod.pod.bind_required
        if (
            not any_cpus
            or not single_container
            or remaining + pod.exclusive_cpus <= most * (pod.exclusive_cpus - 1)
        ):
            possibly_rejected |= 1 << at
    return possibly_rejected


def _rejected_in_some_order(
    expected: ExpectedNode, demand: PodDemand, possibly_rejected: int
) -> PodDemand | None:
    """Return a pod that would be rejected if the pods came to the node in some order; None if there is none.

    Many orders begin alike, and most beginnings with the same pods leave the same CPUs. So the states that a
    set of pods may leave follow from those of the sets with one pod less, and equal states are kept once.
    Pods with equal demands need only one order among them, and so do the ends of pods that the objects still
    show. If all pods that are left are sure to be admitted, nothing more is tried. A pending pod that is
    rejected in the order of the binds does not count: it has no place to lose.

    Args:
        expected: The node with its pending pods.
        demand: The pod to decide on.
        possibly_rejected: Of the pending pods and this one, those that may be rejected
            (``_possibly_rejected``).
    """
    pods = (*expected.pending, demand)
    by_namespace = expected.node.rules.admission.distinguish_namespaces
    signatures = [pod.signature_for(by_namespace=by_namespace) for pod in pods]
    turns: tuple[PodDemand | CpuSet, ...] = (*pods, *expected.ended)
    equal = [
        sum(1 << at for at, other in enumerate(signatures) if other == signature) for signature in signatures
    ]
    equal += [(1 << len(turns)) - (1 << len(pods))] * len(expected.ended)
    states_of = {0: [expected.shown]}
    for _ in turns:
        further: dict[int, list[NodeState]] = {}
        for came, states in states_of.items():
            for at, turn in enumerate(turns if possibly_rejected & ~came else ()):
                if equal[at] & (2 << at) - 1 & ~came != 1 << at:
                    continue  # it has arrived, or an equal one arrives first
                after = further.setdefault(came | 1 << at, [])
                for before in states:
                    state, rejected = _state_after(expected.node, before, turn)
                    if rejected is not None and rejected not in expected.rejected:
                        return rejected
                    if not any(_is_equivalent(state, other_pod) for other_pod in after):
                        after.append(state)
        states_of = further
    return None


def _state_after(
    node: SchedulableNode, state: NodeState, turn: PodDemand | CpuSet
) -> tuple[NodeState, PodDemand | None]:
    """Return the state after a pod arrived, and the pod if it is rejected; or after CPUs became free."""
    if isinstance(turn, PodDemand):
        after, rejected = _arrive(node, state, (turn,))
        return after, rejected[0] if rejected else None
    for key, reserved in state.reservation_cpus.items():
        if not reserved.cpus.isdisjoint(turn):
            state = state.with_reservation(key, replace(reserved, cpus=reserved.cpus - turn))
    return state, None


def _is_equivalent(state: NodeState, other: NodeState) -> bool:
    """Return whether two states after the same pods, in different orders, are equal for the next pod."""
    return (
        state.pools == other.pools
        and state.devices == other.devices
        and state.providers == other.providers
        and len(state.pods) == len(other.pods)
    )


def _fitting_verdict(rules: Node, outcome: DryRunOutcome) -> NodeVerdict:
    containers = [each for each in outcome.containers if each.placement.exclusive]
    pod = outcome.containers[0].pod if outcome.containers else None
    kinds = (
        {container.name: container.kind for container in pod.requests.containers}
        if pod and pod.requests
        else {}
    )
    staying = [each for each in containers if kinds.get(each.name) is not ContainerKind.INIT] or containers
    cpus = CpuSet.union_of(each.placement.exclusive for each in staying)
    nodes = rules.machine.nodes_of(cpus)
    for each in outcome.containers:
        for block in each.placement.blocks:
            nodes |= block.affinity
        for _, ids in each.placement.devices:
            nodes |= Mask(int(device.partition("/")[0]) for device in ids)
    named = tuple((each.name, str(each.placement.exclusive)) for each in containers)
    used = tuple(_used_fractions(outcome.state, nodes)) if nodes else ()
    return NodeVerdict(fits=True, numa_nodes=nodes, cpus=cpus, containers=named, used=used)


def _used_fractions(state: NodeState, nodes: Mask) -> Iterator[float]:
    """Yield the fractions of the CPUs and of the counted memory of NUMA nodes that are owned."""
    machine, reserved = state.node.machine, state.node.reserved
    usable = CpuSet.union_of(numa.cpus for numa in machine.nodes if numa.id in nodes) - reserved
    if usable:
        yield 1 - len(usable & state.pools.shared) / len(usable)
    if state.memory is not None:
        tables = [memory.table(MEMORY) for numa, memory in state.memory.nodes.items() if numa in nodes]
        if total := sum(table.allocatable for table in tables):
            yield sum(table.reserved for table in tables) / total
