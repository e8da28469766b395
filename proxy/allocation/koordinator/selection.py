"""Choose the CPUs of an owner when Koordinator's bind policies apply.

If neither the pod nor the node says how CPUs are bound, the options of the CPU manager decide
(``proxy.allocation.cpu_static``). If one of them does, Koordinator's accumulator chooses, under the policy
that applies to the pod: what the pod requires, otherwise what the node prescribes, otherwise what the pod
prefers (koordinator v1.8, pkg/scheduler/plugins/nodenumaresource). NUMA nodes of the merged hint come first,
if they have enough CPUs that a required policy may take.

If a choice leaves later containers of the pod too few cores for a required ``SpreadByPCPUs``, CPUs of the
cores with the most free CPUs are chosen (``proxy.allocation.koordinator.later_containers``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from msgspec import structs

from proxy.allocation.cpu_request import MILLI
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.koordinator.bind import bind, bind_on_nodes, eligible, usable
from proxy.allocation.koordinator.bind_request import (
    Allocated,
    BindError,
    BindRequest,
    effective_policy,
    supported_request,
)
from proxy.allocation.koordinator.later_containers import (
    NO_LATER_CONTAINERS,
    LaterContainers,
    fit,
    fullest_cores,
)
from proxy.allocation.koordinator.node_shares import CPU, InsufficientError, cpu_unit, divide, whole_cpus
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NodeBindPolicy, NumaStrategy
from proxy.model.phrases import numa_nodes_text
from proxy.model.workload import Container, Phase, Pod, Pool


@dataclasses.dataclass(frozen=True, slots=True)
class NodeBinding:
    """The settings of a node for the binding of CPUs.

    Attributes:
        policy: Koordinator's cpu-bind-policy of the node.
        strategy: Its numa-allocate-strategy.
        architecture: Architecture of the machine; empty if unknown.
    """

    policy: NodeBindPolicy = NodeBindPolicy.NONE
    strategy: NumaStrategy = NumaStrategy.NONE
    architecture: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """How CPUs are chosen for one pod.

    Attributes:
        request: The bind policy, exclusive policy and strategy that apply.
        taken: The CPUs of other pods that matter for this pod.
        architecture: Architecture of the machine, because some do not offer every policy; empty if unknown.
    """

    request: BindRequest
    taken: Allocated
    architecture: str = ""


def binding_of(node: NodeBinding, pod: Pod, containers: Iterable[Container]) -> Binding | None:
    """Return how the CPUs of a pod are bound; None if neither the pod nor the node prescribes it.

    Args:
        node: The settings of the node.
        pod: The pod with its bind policies.
        containers: All containers of the node; read only for a pod with an exclusive policy.

    Raises:
        PolicyConflictError: Pod and node require different policies.
    """
    is_specified = pod.bind_required or pod.bind_preferred or pod.exclusive or pod.aligned
    prescribed = node.policy is not NodeBindPolicy.NONE or node.strategy is not NumaStrategy.NONE
    if not is_specified and not prescribed:
        return None
    policy, required = effective_policy(
        pod.bind_required, pod.bind_preferred, node.policy, BindPolicy.FULL_PCPUS
    )
    strategy = node.strategy or NumaStrategy.MOST_ALLOCATED
    request = BindRequest(policy, required, pod.exclusive, strategy)
    architecture = node.architecture
    if pod.exclusive in (ExclusivePolicy.NONE, ExclusivePolicy.DEFAULT):
        request = structs.replace(request, exclusive=ExclusivePolicy.NONE)
        return Binding(request, Allocated(), architecture)
    taken = Allocated()
    for container in containers:
        placement = container.placement
        if (
            placement.pool is Pool.OWN
            and container.phase is not Phase.EXITED
            and container.pod.key != pod.key
        ):
            taken = taken.add(placement.exclusive, container.pod.exclusive)
    return Binding(request, taken, architecture)


def choose(
    topology: CpuTopology,
    free: CpuSet,
    count: int,
    binding: Binding,
    nodes: Mask | None,
    steps: list[str],
    *,
    even: bool = False,
    later: LaterContainers = NO_LATER_CONTAINERS,
) -> CpuSet:
    """Choose CPUs.

    Args:
        topology: The machine.
        free: CPUs to choose from.
        count: How many.
        binding: How they are bound.
        nodes: NUMA nodes of the merged hint; None for any.
        steps: Sentences about what was done are added here.
        even: Whether the CPUs are divided evenly over those NUMA nodes.
        later: Containers of the pod that need some of the remaining CPUs.

    Raises:
        NotEnoughCpus, BindError: There are too few such CPUs, or the machine does not offer what is required.
    """
    request, changed = supported_request(binding.request, binding.architecture, topology)
    steps += changed
    steps.append(f"bind policy {request.policy}, {'required' if request.required else 'preferred'}")
    area = free
    if nodes is not None:
        inside = free & CpuSet.from_bits(union(topology.nodes.get(node, 0) for node in nodes))
        most = len(eligible(topology, inside, request))
        if most >= count:
            area = inside
        else:
            steps.append(f"{numa_nodes_text(nodes)} had only {most} free for it")
            nodes = None
    first_steps: list[str] = []
    if even and nodes is not None and len(nodes) > 1:
        chosen = _evenly(topology, area, count, request, binding.taken, nodes, first_steps)
    else:
        chosen = bind(topology, area, count, request, binding.taken, first_steps)
    if request.required and request.policy is BindPolicy.SPREAD_BY_PCPUS and later.stages:
        on_hint = None if nodes is None else area
        others = _from_fullest_cores(topology, free, on_hint, count, request, binding.taken, later)
        areas = (area, free) if later.under_hint else (free,)
        chosen, first_steps = _leaving_enough(topology, areas, (chosen, first_steps), others, later)
    steps += first_steps
    return chosen


def _evenly(
    topology: CpuTopology,
    free: CpuSet,
    count: int,
    request: BindRequest,
    taken: Allocated,
    nodes: Mask,
    steps: list[str],
) -> CpuSet:
    """Choose an even part of the CPUs on each NUMA node."""
    candidates = usable(topology, free, request, count)
    available = {
        node: {CPU: MILLI * (topology.nodes.get(node, 0) & candidates.bits).bit_count()} for node in nodes
    }
    whole = request.required and request.policy is BindPolicy.FULL_PCPUS
    unit = cpu_unit(topology.cpus_per_core, required_full=whole)
    try:
        shares = whole_cpus(divide({CPU: MILLI * count}, available, nodes, unit))
    except InsufficientError as error:
        raise BindError(str(error)) from None
    return bind_on_nodes(topology, free, shares, request, taken, steps)


_Choice = tuple[CpuSet, list[str]]
"""CPUs, and sentences about how they were chosen."""


def _from_fullest_cores(
    topology: CpuTopology,
    free: CpuSet,
    inside: CpuSet | None,
    count: int,
    request: BindRequest,
    taken: Allocated,
    later: LaterContainers,
) -> Iterator[_Choice]:
    """Choose from the cores with the most free CPUs: on the nodes of the hint, on one node, or anywhere."""
    if inside is None:
        areas = [*(free & CpuSet.from_bits(bits) for bits in topology.nodes.values()), free]
    else:
        areas = [inside, free] if later.may_leave_hint else [inside]
    for area in areas:
        must, may = fullest_cores(topology, area, count)
        cpus = topology.one_of_each_core(must | may)
        if len(cpus) >= count:
            steps = ["of the cores with the most free CPUs: later containers of the pod need enough cores"]
            first = structs.replace(request, preferred=cpus & must)
            yield bind(topology, cpus, count, first, taken, steps), steps


def _leaving_enough(
    topology: CpuTopology,
    areas: Iterable[CpuSet],
    first: _Choice,
    others: Iterable[_Choice],
    later: LaterContainers,
) -> _Choice:
    """Return the first choice that leaves the later containers enough cores; ``first`` if none does.

    Args:
        topology: The machine.
        areas: Sets of free CPUs; the first in which the containers fit is best.
        first: The choice if there are no later containers.
        others: Other choices.
        later: The later containers.
    """
    made: list[_Choice] | None = None
    for area in areas:
        if _leaves_enough(topology, area, first, later):
            return first
        made = list(others) if made is None else made
        for choice in made:
            if _leaves_enough(topology, area, choice, later):
                return choice
    return first


def _leaves_enough(topology: CpuTopology, area: CpuSet, choice: _Choice, later: LaterContainers) -> bool:
    chosen, _ = choice
    return chosen <= area and fit(topology, area - chosen, later.stages)
