"""Deciding for one node: would it admit the pod, and where would it put it.

Theory. The engine that runs on the nodes decides here too (``proxy.engine.pod_dry_run``): the node as its
object shows it becomes a state of the engine, in which everything that is not free is held; the pods that
were promised to the node and that the object does not show yet arrive in their order; then the pod arrives.

kubelet does not keep that order. It handles pods of one watch event by their creation, and pods of several
events as they were bound. With a strict topology policy the order can decide: a small pod that comes first
takes the lowest NUMA node, where the large one fitted. So where pods are pending, the other orders that are
likely are tried too, and the pod fits only if all pods are admitted in each: as bound, as created, with the
new pod first, and by size. Pods with equal demands need no such trial, and neither do pods of one container
under ``single-numa-node`` where this many CPUs are free that each finds a NUMA node after all others,
wherever these are: a pod of s CPUs is refused only if all n NUMA nodes have at most s - 1 left. Where too
many pods are pending for a trial, the node takes no more until it shows some.

Volcano's predicate (Volcano v1.12 pkg/scheduler/plugins/numaaware ``predicateFn``) comes first: a pod with
the annotation ``volcano.sh/numa-topology-policy`` needs a node with that policy and a static CPU manager.
What Volcano's plugin then computes with its own allocator is computed here by the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from proxy.allocation.cpu_request import CPU, MILLI
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.allocation.koordinator.resource_status import status_text
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import Provider
from proxy.engine.node import Node
from proxy.engine.owners import CpuHold
from proxy.engine.pod_dry_run import DryRunOutcome, dry_run
from proxy.engine.state import NodeState
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.koordinator import NodeBindPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.requests import MEMORY, ContainerKind
from proxy.scheduler.node_facts import SchedulableNode
from proxy.scheduler.pod_demand import PodDemand
from proxy.scheduler.resource_topology import MemoryRows

SHOWN = "shown"
"""The owner of what the object of the node shows as taken."""
NOT_STATIC = "CPUManagerNotStatic"
OTHER_POLICY = "TopologyPolicyDiffers"
REORDERED = "PendingPodsConflict"
MOST_PENDING = 4
"""Pending pods whose orders are tried."""


class NodeVerdict(Struct, frozen=True):
    """The decision for a pod and a node.

    Attributes:
        fits: Whether the node would admit the pod.
        reason: A short CamelCase reason such as ``TopologyAffinityError``; empty where it fits.
        message: The reason in words.
        numa_nodes: NUMA nodes of the CPUs, memory and devices that it would get.
        cpus: The CPUs that its containers would own together.
        containers: The CPUs of each container that would own some, as Linux lists.
        used: Parts of the CPUs and of the memory of these NUMA nodes that have owners then, 0 to 1.
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
    """A node with the pods that are promised to it.

    Attributes:
        node: The node as its objects show it.
        shown: The state of the engine that they show.
        state: The same after the pending pods have come in the order of their promises.
        pending: The pods.
        lost: Those of them that the node would refuse.
    """

    node: SchedulableNode
    shown: NodeState
    state: NodeState
    pending: tuple[PodDemand, ...] = ()
    lost: tuple[PodDemand, ...] = ()

    def with_more(self, pods: Sequence[PodDemand]) -> ExpectedNode:
        """Return the node with more pods that are promised to it."""
        if not pods:
            return self
        state, lost = _arrive(self.state, pods)
        return replace(self, state=state, pending=(*self.pending, *pods), lost=(*self.lost, *lost))


def expect(node: SchedulableNode, pending: Sequence[PodDemand] = ()) -> ExpectedNode:
    """Return a node with the pods that are promised to it.

    Args:
        node: The node as its objects show it.
        pending: Pods that are promised to it and that it does not show, in the order of the promises.
    """
    shown = shown_state(node)
    return ExpectedNode(node, shown, shown).with_more(pending)


def judge(demand: PodDemand, expected: ExpectedNode) -> NodeVerdict:
    """Decide for a pod and a node."""
    node = expected.node
    if refused := _volcano_mismatch(node.rules, demand):
        return refused
    outcome = dry_run(expected.state, demand.arrival())
    if not outcome.verdict.admitted:
        reason = outcome.verdict.reason or "Rejected"
        return NodeVerdict(fits=False, reason=reason, message=outcome.verdict.operator_message)
    verdict = _placed(node.rules, outcome)
    orders = _orders(expected.pending, demand)
    if not orders or _spacious(node, (*expected.pending, demand)):
        return verdict
    if len(expected.pending) > MOST_PENDING:
        words = f"{len(expected.pending)} pods are promised to the node that it does not show yet"
        return NodeVerdict(fits=False, reason=REORDERED, message=words)
    for order in orders:
        # A pending pod that is refused in any case has no place to lose.
        refusals = [each for each in _arrive(expected.shown, order)[1] if each not in expected.lost]
        if refusals:
            words = f"{refusals[0].ref} would be refused if the pods came to the node in another order"
            return NodeVerdict(fits=False, reason=REORDERED, message=words)
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
    taken = rules.machine.online - node.free
    held = taken - node.reserved
    if node.reserved or taken:
        # Something has to be left for the shared pool, as there is on the node itself.
        kept = node.reserved or CpuSet([held.first()])
        rules = _reserving(rules, kept)
        held -= kept
    state = NodeState.empty(rules)
    if held:
        state = state.holding(SHOWN, CpuHold(SHOWN, held))
    if node.memory:
        state = replace(state, providers=tuple(_with_memory(each, node.memory) for each in state.providers))
    return replace(state, devices=_devices(node)) if node.devices else state


def _with_memory(provider: Provider, rows: MemoryRows) -> Provider:
    """Return a provider; that of memory with what the objects show as held."""
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


def _reserving(rules: Node, reserved: CpuSet) -> Node:
    """Return a node with other CPUs in reserve; the same ones are made once."""
    known = _RESERVING.get((id(rules), reserved.bits))
    if known is not None and known[0] is rules:
        return known[1]
    if len(_RESERVING) >= _MOST_RESERVING:
        _RESERVING.clear()
    made = rules.reserving(reserved)
    _RESERVING[id(rules), reserved.bits] = rules, made
    return made


_RESERVING: dict[tuple[int, int], tuple[Node, Node]] = {}
_MOST_RESERVING = 1024


def _devices(node: SchedulableNode) -> DeviceState:
    registered: dict[str, dict[str, RegisteredDevice]] = {}
    held: dict[str, frozenset[str]] = {}
    for resource, zones in node.devices.items():
        names = {numa: [f"{numa}/{number}" for number in range(total)] for numa, (total, _) in zones.items()}
        registered[resource] = {
            name: RegisteredDevice(name, Mask([numa])) for numa, each in names.items() for name in each
        }
        held[resource] = frozenset(name for numa, each in names.items() for name in each[zones[numa][1] :])
    return DeviceState(registered, {SHOWN: {SHOWN: held}})


def _volcano_mismatch(rules: Node, demand: PodDemand) -> NodeVerdict | None:
    policy = demand.volcano_policy
    if policy is None:
        return None
    if not rules.static:
        words = f"the pod demands topology policy {policy}, and the node's CPU manager is not static"
        return NodeVerdict(fits=False, reason=NOT_STATIC, message=words)
    if rules.policy is not policy:
        words = f"the pod demands topology policy {policy}, and the node has {rules.policy}"
        return NodeVerdict(fits=False, reason=OTHER_POLICY, message=words)
    return None


def _arrive(state: NodeState, pods: Iterable[PodDemand]) -> tuple[NodeState, list[PodDemand]]:
    """Let pods arrive one after the other; returns the state, and the pods that were refused."""
    refused = []
    for demand in pods:
        outcome = dry_run(state, demand.arrival())
        state = outcome.state
        if not outcome.verdict.admitted:
            refused.append(demand)
    return state, refused


def _spacious(node: SchedulableNode, pods: Sequence[PodDemand]) -> bool:
    """Return whether each pod finds a NUMA node after all others, wherever these are."""
    rules = node.rules
    plain = (
        rules.policy is TopologyPolicy.SINGLE_NUMA_NODE
        and rules.bind is NodeBindPolicy.NONE
        and not rules.options.full_pcpus_only
    )
    if not plain or any(pod.largest != pod.exclusive or pod.devices or pod.pod.cpuset for pod in pods):
        return False
    left = len(node.free) - sum(pod.exclusive for pod in pods)
    most = len(rules.machine.nodes)
    return all(left + pod.exclusive > most * (pod.exclusive - 1) for pod in pods)


def _orders(pending: Sequence[PodDemand], demand: PodDemand) -> list[tuple[PodDemand, ...]]:
    """Return the orders in which the pods may arrive besides that of the promises, each demand order once."""
    bound = (*pending, demand)
    known = {tuple(each.signature for each in bound)}
    found = []
    by_size = sorted(bound, key=lambda each: each.exclusive)
    for order in ((demand, *pending), tuple(by_size), tuple(reversed(by_size))):
        signatures = tuple(each.signature for each in order)
        if signatures not in known:
            known.add(signatures)
            found.append(order)
    return found


def _placed(rules: Node, outcome: DryRunOutcome) -> NodeVerdict:
    containers = [each for each in outcome.containers if each.placement.exclusive]
    pod = outcome.containers[0].pod if outcome.containers else None
    kinds = {ask.name: ask.kind for ask in pod.asks.containers} if pod and pod.asks else {}
    staying = [each for each in containers if kinds.get(each.name) is not ContainerKind.INIT] or containers
    cpus = CpuSet.from_bits(union(each.placement.exclusive.bits for each in staying))
    nodes = rules.machine.nodes_of(cpus)
    for each in outcome.containers:
        for block in each.placement.blocks:
            nodes |= block.affinity
        for _, ids in each.placement.devices:
            nodes |= Mask(int(device.partition("/")[0]) for device in ids)
    named = tuple((each.name, str(each.placement.exclusive)) for each in containers)
    used = tuple(_used(outcome.state, nodes)) if nodes else ()
    return NodeVerdict(fits=True, numa_nodes=nodes, cpus=cpus, containers=named, used=used)


def _used(state: NodeState, nodes: Mask) -> Iterator[float]:
    """Return which parts of the CPUs and of the counted memory of NUMA nodes have owners."""
    machine, reserved = state.node.machine, state.node.reserved
    there = CpuSet.from_bits(union(numa.cpus.bits for numa in machine.nodes if numa.id in nodes)) - reserved
    if there:
        yield 1 - len(there & state.pools.shared) / len(there)
    if state.memory is not None:
        tables = [each.table(MEMORY) for numa, each in state.memory.nodes.items() if numa in nodes]
        if total := sum(table.allocatable for table in tables):
            yield sum(table.reserved for table in tables) / total
