"""The static CPU policy and its state, as values.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``NewStaticPolicy``.
The CPUs of a machine are in the *default* set, which all containers without exclusive CPUs share, or they
belong to a container. *Reserved* CPUs are never given away; they stay in the default set unless
``strict-cpu-reservation`` takes them out. Containers of one pod may have CPUs in common.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.distributed import take_distributed
from proxy.allocation.packed import take_packed
from proxy.allocation.rejection import AllocationRejectedError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions

Assignments = Mapping[str, Mapping[str, CpuSet]]
"""Pod uid to container name to CPUs."""


class CpuStateError(ValueError):
    """The reserved CPUs do not fit the machine; the text is kubelet's."""


class CpuRejectedError(AllocationRejectedError):
    """A container cannot have its CPUs; the text is kubelet's message."""


class SmtAlignmentError(CpuRejectedError):
    """A request is not a number of whole cores, or there are too few of them."""

    reason = "SMTAlignmentError"


class CpuPolicy(Struct, frozen=True):
    """The settings of the static CPU policy, which do not change while the node runs.

    Attributes:
        topo: The machine.
        options: How CPUs are chosen.
        reserved: CPUs that no container owns.
        reserved_cores: All threads of the cores that have reserved CPUs.
    """

    topo: CpuTopology
    options: CpuOptions
    reserved: CpuSet
    reserved_cores: CpuSet

    @classmethod
    def of(
        cls,
        topo: CpuTopology,
        options: CpuOptions | None = None,
        reserved: CpuSet | None = None,
        amount: int | None = None,
    ) -> CpuPolicy:
        """Choose the reserved CPUs.

        Args:
            topo: The machine.
            options: How CPUs are chosen.
            reserved: The CPUs to reserve. If None or empty, ``amount`` CPUs are chosen as an allocation would
                choose them.
            amount: How many CPUs to reserve (``kubeReserved`` and ``systemReserved``, rounded up); None for
                exactly the CPUs in ``reserved``.

        Raises:
            CpuStateError: The CPUs cannot be reserved.
        """
        options = options or CpuOptions()
        chosen = reserved or CpuSet()
        if not chosen and amount and amount <= len(topo.cpus):
            chosen = take(topo, options, topo.cpus, amount)
        if amount is not None and len(chosen) != amount:
            raise CpuStateError(
                "[cpumanager] unable to reserve the required amount of CPUs "
                f"(size of {chosen} did not equal {amount})"
            )
        if unknown := chosen - topo.cpus:
            raise CpuStateError(
                "[cpumanager] unable to build the reserved physical CPUs from the reserved set: "
                f"unknown CPU ID: {unknown.first()}"
            )
        cores = sum(bits for bits in topo.cores.values() if bits & chosen.bits)
        return cls(topo, options, chosen, CpuSet.from_bits(cores))

    @property
    def threads_per_core(self) -> int:
        """Threads of a core, at least 1."""
        return max(self.topo.cpus_per_core, 1)


class CpuState(Struct, frozen=True):
    """The CPUs that containers own, and the default set.

    Attributes:
        default: The CPUs that all other containers share.
        assigned: The CPUs that containers own.
        pod_level_cpus: Pod uid to the CPUs that a pod owns as a whole; its containers' CPUs are inside.
        reusing: The pod that was served last; ``reusable`` are the CPUs of its init containers.
    """

    default: CpuSet = field(default_factory=CpuSet)
    assigned: Assignments = field(default_factory=dict)
    pod_level_cpus: Mapping[str, CpuSet] = field(default_factory=dict)
    reusing: str = ""
    reusable: CpuSet = field(default_factory=CpuSet)

    def owned_by(self, uid: str, name: str) -> CpuSet | None:
        """Return the CPUs of a container, or None if it owns none."""
        return self.assigned.get(uid, {}).get(name)

    def reusable_by(self, uid: str) -> CpuSet:
        """Return the CPUs that the next container of a pod may use again."""
        return self.reusable if uid == self.reusing else CpuSet()


def take(
    topo: CpuTopology, options: CpuOptions, cpus: CpuSet, count: int, steps: list[str] | None = None
) -> CpuSet:
    """Choose CPUs as the options say; sentences about what was done are added to ``steps``.

    Raises:
        NotEnoughCpus: Too few are available.
    """
    if count == 0:
        return CpuSet()
    if options.distribute_cpus_across_numa:
        group = max(topo.cpus_per_core, 1) if options.full_pcpus_only else 1
        return take_distributed(topo, cpus, count, group=group, steps=steps)
    return take_packed(
        topo,
        cpus,
        count,
        prefer_uncore=options.prefer_align_cpus_by_uncorecache,
        spread=options.distribute_cpus_across_cores,
        steps=steps,
    )


def pick_unpoliced(
    machine: Machine,
    topology: CpuTopology,
    available: CpuSet,
    count: int,
    options: CpuOptions | None = None,
    near: Mask | None = None,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose CPUs when no topology policy is set.

    The packed allocator (``proxy.allocation.packed``) keeps sockets, nodes and cores whole, but may split a
    request over two nodes although one of them could hold it, because it first fills the core with the fewest
    free CPUs. So this function calls it for one node at a time. The nodes that can hold the request alone are
    ordered by: enough wholly free cores (a thread next to one of another container is slow), near to the
    container's devices, has memory, fewest free CPUs (best fit), lowest id. If no node can hold the request,
    all free CPUs are offered together. Inside a node the CPU manager's options apply.

    Args:
        machine: The machine.
        topology: The same machine as the allocator reads it.
        available: CPUs to choose from.
        count: How many are wanted, at least 1.
        options: How CPUs are chosen inside a node.
        near: NUMA nodes to prefer; None for no preference.
        steps: Sentences about what was done are added here; None for no record.

    Raises:
        NotEnoughCpus: ``available`` holds fewer.
    """
    threads = max(len(core) for core in machine.cores.values())
    fitting: list[tuple[int, bool, bool, int, int, CpuSet]] = []
    for node in machine.nodes:
        free = node.cpus & available
        if len(free) >= count:
            whole = sum(len(core) for core in machine.cores.values() if core <= free)
            missing_whole = max(0, count - count % threads - whole)
            far = near is not None and node.id not in near
            fitting.append((missing_whole, far, node.mem_bytes == 0, len(free), node.id, free))
    best = min(fitting)[-1] if fitting else available
    return take(topology, options or CpuOptions(), best, count, steps)
