"""Koordinator's bind policies at work: which CPUs a container or a pod gets that owns some.

Where neither the pod nor the node says how CPUs are to be bound, the CPU manager's options decide (``desk``).
Where one of them does, Koordinator's accumulator chooses, with the policy that holds for the pod (reference
e.1): what the pod requires, else what the node prescribes, else what the pod prefers. NUMA nodes that the
topology policy has decided on come first, as far as they have enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from proxy.model.idset import CpuSet, Mask, union
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NodeBindPolicy, NumaStrategy
from proxy.model.wording import nodes as named
from proxy.model.workload import Container, Phase, Pod, Pool
from proxy.place.binding.bind import bind, bind_on_nodes, usable
from proxy.place.binding.shares import CPU, InsufficientError, cpu_unit, divide, whole_cpus
from proxy.place.binding.wish import Allocated, BindError, BindWish, effective, fitted
from proxy.place.cpu_request import MILLI
from proxy.place.cputopo import CpuTopology
from proxy.plan.node import Node


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """How CPUs are chosen for one pod.

    Attributes:
        wish: What holds for it.
        taken: What others have, as far as that matters for it.
        architecture: Of the machine: not every one offers every policy. Empty where nobody tells.
        even: Whether the CPUs are divided evenly over the NUMA nodes that were decided on.
    """

    wish: BindWish
    taken: Allocated
    architecture: str = ""
    even: bool = False


def binding_of(node: Node, pod: Pod, containers: Iterable[Container]) -> Binding | None:
    """Find out how the CPUs of a pod are to be bound; None where nobody says.

    Args:
        node: The node with what it prescribes.
        pod: The pod with what it asks for.
        containers: All that are there; whose CPUs were got exclusively matters only to such pods.

    Raises:
        PolicyConflictError: Pod and node require different policies.
    """
    said = pod.bind_required or pod.bind_preferred or pod.exclusive or pod.aligned
    prescribed = node.bind is not NodeBindPolicy.NONE or node.strategy is not NumaStrategy.NONE
    if not said and not prescribed:
        return None
    policy, required = effective(pod.bind_required, pod.bind_preferred, node.bind, BindPolicy.FULL_PCPUS)
    strategy = node.strategy or NumaStrategy.MOST_ALLOCATED
    wish = BindWish(policy, required, pod.exclusive, strategy)
    architecture = node.machine.architecture
    if pod.exclusive in (ExclusivePolicy.NONE, ExclusivePolicy.DEFAULT):
        wish = dataclasses.replace(wish, exclusive=ExclusivePolicy.NONE)
        return Binding(wish, Allocated(), architecture)
    taken = Allocated()
    for container in containers:
        placement = container.placement
        if (
            placement.pool is Pool.OWN
            and container.phase is not Phase.EXITED
            and container.pod.key != pod.key
        ):
            taken = taken.add(placement.own, container.pod.exclusive)
    return Binding(wish, taken, architecture)


def choose(
    topology: CpuTopology, free: CpuSet, count: int, binding: Binding, nodes: Mask | None, steps: list[str]
) -> CpuSet:
    """Choose CPUs.

    Args:
        topology: The machine.
        free: CPUs to choose from.
        count: How many.
        binding: How.
        nodes: NUMA nodes that were decided on; None for any.
        steps: What was done is added here in words.

    Raises:
        NotEnoughCpus, BindError: They cannot be had so, or the machine does not offer what is required.
    """
    wish, changed = fitted(binding.wish, binding.architecture, topology)
    steps += changed
    steps.append(f"bind policy {wish.policy}, {'required' if wish.required else 'preferred'}")
    if nodes is not None:
        inside = free & CpuSet.from_bits(union(topology.nodes.get(node, 0) for node in nodes))
        if len(inside) >= count:
            if not binding.even or len(nodes) < 2:
                return bind(topology, inside, count, wish, binding.taken, steps)
            return _evenly(topology, inside, count, wish, binding.taken, nodes, steps)
        steps.append(f"{named(nodes)} had only {len(inside)} free")
    return bind(topology, free, count, wish, binding.taken, steps)


def _evenly(
    topology: CpuTopology,
    free: CpuSet,
    count: int,
    wish: BindWish,
    taken: Allocated,
    nodes: Mask,
    steps: list[str],
) -> CpuSet:
    """Choose an even part of the CPUs on each node (reference e.4)."""
    candidates = usable(topology, free, wish, count)
    has = {node: {CPU: MILLI * (topology.nodes.get(node, 0) & candidates.bits).bit_count()} for node in nodes}
    whole = wish.required and wish.policy is BindPolicy.FULL_PCPUS
    unit = cpu_unit(topology.cpus_per_core, bound=True, required_full=whole)
    try:
        shares = whole_cpus(divide({CPU: MILLI * count}, has, nodes, unit))
    except InsufficientError as error:
        raise BindError(str(error)) from None
    return bind_on_nodes(topology, free, shares, wish, taken, steps)
