"""How to bind the CPUs of a pod, and which CPUs other pods have.

The terms are those of Koordinator's annotations and labels (koordinator a7a1b76, apis/extension/resource.go).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.rejection import AllocationRejectedError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NodeBindPolicy, NumaStrategy

ARM = frozenset({"aarch64", "arm64", "arm"})
"""Names of architectures on which only ``FullPCPUs`` and ``NUMANodeLevel`` are offered."""


_BINDING = frozenset({BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS})
_OF_NODE = {
    NodeBindPolicy.FULL_PCPUS_ONLY: BindPolicy.FULL_PCPUS,
    NodeBindPolicy.SPREAD_BY_PCPUS: BindPolicy.SPREAD_BY_PCPUS,
}


class BindError(AllocationRejectedError):
    """CPUs cannot be bound as requested; ``str()`` begins with the reason in Koordinator's words."""

    reason = "CPUBindPolicyError"


class WholeCoresError(BindError):
    """Whole cores are required, and the number of CPUs is not a multiple of the threads of a core."""

    def __init__(self, requested: int, threads: int) -> None:
        super().__init__(
            "node(s) requested cpus not multiple cpus per core: "
            f"requested={requested}, cpus per core={threads}"
        )


class RequiredPolicyError(BindError):
    """The available CPUs do not satisfy the required bind policy."""

    def __init__(self, policy: BindPolicy) -> None:
        super().__init__(f"insufficient CPUs to satisfy required cpu bind policy {policy}")


class UnsupportedPolicyError(BindError):
    """A required policy is not offered on this architecture."""


class PolicyConflictError(BindError):
    """The pod requires one bind policy and the node another."""


class BindRequest(Struct, frozen=True):
    """How to choose CPUs.

    Attributes:
        policy: Whole cores (``FullPCPUs``), or one thread of each core.
        required: Whether the policy is required; if not, it is only preferred.
        exclusive: Always only preferred.
        strategy: The order of the NUMA nodes; none is ``LeastAllocated``.
        preferred: CPUs to take first if they are free.
        max_ref_count: How many pods may have the same CPU.
    """

    policy: BindPolicy = BindPolicy.FULL_PCPUS
    required: bool = False
    exclusive: ExclusivePolicy = ExclusivePolicy.NONE
    strategy: NumaStrategy = NumaStrategy.MOST_ALLOCATED
    preferred: CpuSet = field(default_factory=CpuSet)
    max_ref_count: int = 1


class Allocated(Struct, frozen=True):
    """The CPUs that bound pods have.

    Attributes:
        counts: CPU to the number of pods that have it; only CPUs that some pod has.
        policies: CPU to the exclusive policy of the pod that was given it last.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    policies: Mapping[int, ExclusivePolicy] = field(default_factory=dict)

    def add(self, cpus: CpuSet, exclusive: ExclusivePolicy = ExclusivePolicy.NONE) -> Allocated:
        """Return the value after a pod with this exclusive policy got CPUs."""
        counts = dict(self.counts)
        for cpu in cpus:
            counts[cpu] = counts.get(cpu, 0) + 1
        return Allocated(counts, {**self.policies, **dict.fromkeys(cpus, exclusive)})

    def under(self, policy: ExclusivePolicy) -> CpuSet:
        """Return the CPUs that pods with an exclusive policy have."""
        return CpuSet(cpu for cpu, own in self.policies.items() if own is policy)


def effective_policy(
    required: BindPolicy, preferred: BindPolicy, node: NodeBindPolicy, default: BindPolicy
) -> tuple[BindPolicy, bool]:
    """Return the bind policy of a pod that owns CPUs, and whether it is required.

    A policy that says nothing about cores (none, ``Default``, ``ConstrainedBurst``) defers to the next one.
    Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource/util.go ``getCPUBindPolicy``.

    Args:
        required: The policy that the pod requires.
        preferred: The policy that it prefers.
        node: The policy that the node's label, or kubelet's ``full-pcpus-only`` in its place, requires.
        default: The policy to prefer if none of these is set.

    Raises:
        PolicyConflictError: Pod and node require different policies.
    """
    of_pod = required if required in _BINDING else None
    of_node = _OF_NODE.get(node)
    if of_pod and of_node and of_pod is not of_node:
        raise PolicyConflictError(
            f"cannot bind CPUs: the pod requires {of_pod} and the node requires {of_node}"
        )
    required_policy = of_pod or of_node
    if required_policy:
        return required_policy, True
    return next(
        (policy for policy in (preferred, default) if policy in _BINDING), BindPolicy.FULL_PCPUS
    ), False


def supported_request(
    request: BindRequest, architecture: str, topology: CpuTopology
) -> tuple[BindRequest, tuple[str, ...]]:
    """Return a request with only those policies that an architecture offers.

    On ARM only ``FullPCPUs`` and ``NUMANodeLevel`` are offered. With one thread per core both bind policies
    choose alike, and a core is never shared, so nothing is lost there.

    Args:
        request: The request.
        architecture: As the kernel names it, such as ``x86_64`` or ``aarch64``.
        topology: The machine.

    Returns:
        The request, and sentences about what was changed.

    Raises:
        UnsupportedPolicyError: ``SpreadByPCPUs`` is required and cores have several threads.
    """
    notes: list[str] = []
    if architecture not in ARM:
        return request, ()
    if request.policy is BindPolicy.SPREAD_BY_PCPUS:
        if request.required and topology.cpus_per_core > 1:
            raise UnsupportedPolicyError(
                f"cannot bind CPUs: {request.policy} is required, which {architecture} does not offer"
            )
        notes.append(
            f"{BindPolicy.FULL_PCPUS} instead of {request.policy}: {architecture} offers nothing else"
        )
        request = replace(request, policy=BindPolicy.FULL_PCPUS)
    if request.exclusive is ExclusivePolicy.PCPU_LEVEL:
        only = ExclusivePolicy.NUMA_NODE_LEVEL
        notes.append(f"{ExclusivePolicy.PCPU_LEVEL} left out: {architecture} offers only {only}")
        request = replace(request, exclusive=ExclusivePolicy.NONE)
    return request, tuple(notes)
