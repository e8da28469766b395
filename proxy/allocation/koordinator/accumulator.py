"""The accumulator: choose n CPUs by bind policy, exclusive policy and strategy.

Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource/cpu_accumulator.go ``takeCPUs``. A request
goes where it fits as a whole: into one NUMA node if any can hold it, otherwise into one socket, and otherwise
across sockets. ``MostAllocated`` and ``LeastAllocated`` decide which of those that fit is first.

- ``FullPCPUs``, and any policy if cores have one thread: whole cores of one node, or of one socket. If
  neither has enough, then all whole cores of each socket that fits into the request, the largest first; what
  is still missing is taken core by core from the sockets with the fewest. The rest, less than a core or more
  than there are whole cores, is left to step 3.
- ``SpreadByPCPUs``: one thread of each core of one node; if these are too few, any threads of one node, those
  of different cores first; then the same for sockets.
- Step 3, for both: single CPUs, near to the CPUs already taken, one of each core in turn.

CPUs in use by pods with the *same* exclusive policy are avoided in a first attempt and allowed in a second.

Differences from Koordinator:

- When Koordinator takes core by core and less than a core is missing, it continues with the next socket and
  takes too much (3 sockets of 8 CPUs, 11 wanted: 12 taken). Here the rest is left to step 3.
- Koordinator's design says that if no node is free of ``NUMANodeLevel`` pods, cores free of them are taken,
  and that ``PCPULevel`` applies to whole cores too. Its code does neither. Here ``degrade`` does both.
- In Koordinator, the CPUs chosen so far for a request count as exclusive for its further CPUs; here they do
  not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.koordinator.bind_request import Allocated, BindRequest
from proxy.allocation.koordinator.groups import CpuGroup, Groups
from proxy.allocation.packed import NotEnoughCpus
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NumaStrategy
from proxy.model.phrases import counted, cpus


def accumulate(
    topo: CpuTopology,
    free: CpuSet,
    n: int,
    request: BindRequest,
    allocated: Allocated,
    *,
    degrade: bool = True,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose n of the free CPUs.

    ``request.required`` and ``request.preferred`` are ignored here, and ``DistributeEvenly`` is
    ``LeastAllocated``, as in Koordinator; see ``proxy.allocation.koordinator.bind`` for both.

    Args:
        topo: The machine.
        free: CPUs to choose from; those that the machine does not have are ignored.
        n: How many CPUs; below 1, none are chosen.
        request: How they are bound.
        allocated: The CPUs that other pods have.
        degrade: Follow the design of exclusive policies rather than the code (see above).
        steps: A sentence about each step is added here; None for no record.

    Returns:
        Exactly n CPUs, a subset of ``free``; the same for the same arguments.

    Raises:
        NotEnoughCpus: Fewer than n are free.
    """
    work = _Work(topo, free.bits & topo.cpus.bits, n, request, allocated, degrade=degrade, steps=steps)
    if n < 1:
        return CpuSet()
    if n > work.free.bit_count():
        raise NotEnoughCpus(n, work.free.bit_count())
    for step in work.plan():
        step()
        if not work.needed:
            break
    return CpuSet.from_bits(work.taken)


def avoided_cpus(topo: CpuTopology, request: BindRequest, allocated: Allocated) -> tuple[int, int]:
    """Return the CPUs to avoid, as bits: others' cores, and under ``NUMANodeLevel`` also their nodes."""
    if request.exclusive not in (ExclusivePolicy.PCPU_LEVEL, ExclusivePolicy.NUMA_NODE_LEVEL):
        return 0, 0
    others_cpus = allocated.under(request.exclusive).bits
    nodes = (
        _widened(topo.nodes.values(), others_cpus)
        if request.exclusive is ExclusivePolicy.NUMA_NODE_LEVEL
        else 0
    )
    return _widened(topo.cores.values(), others_cpus), nodes


class _Work:
    """The choice for one request: free CPUs, chosen CPUs, how many are still needed."""

    def __init__(
        self,
        topo: CpuTopology,
        free: int,
        needed: int,
        request: BindRequest,
        allocated: Allocated,
        *,
        degrade: bool,
        steps: list[str] | None,
    ) -> None:
        refs = allocated.counts if request.max_ref_count > 1 else None
        self.groups = Groups(topo, request.strategy, refs)
        self.topo = topo
        self.request = request
        self.free = free
        self.needed = needed
        self.taken = 0
        self.steps = steps
        self.lowest = "fewest" if request.strategy is NumaStrategy.MOST_ALLOCATED else "most"
        cores, nodes = avoided_cpus(topo, request, allocated)
        node_level = request.exclusive is ExclusivePolicy.NUMA_NODE_LEVEL
        # The CPUs to avoid in each attempt: whole nodes, then (see ``degrade``) only cores.
        self.avoided = [nodes, cores] if node_level and degrade else [nodes or cores]
        self.avoided_whole = self.avoided if node_level or degrade else [0]
        self.avoided_in_sockets = 0 if node_level and not degrade else cores
        self.avoided_in_whole_sockets = cores if degrade else 0

    def plan(self) -> Iterator[Callable[[], None]]:
        full = self.request.policy is BindPolicy.FULL_PCPUS
        if full or self.topo.cpus_per_core == 1:
            yield self.cores_of_a_node
            yield self.cores_of_a_socket
            yield self.cores_of_sockets
        if not full:
            yield self.threads_of_a_node
            yield self.threads_of_a_socket
        yield self.threads_anywhere

    def cores_of_a_node(self) -> None:
        for avoided in (*self.avoided_whole, 0):
            if fit := self.fitting(self.groups.whole_by_node(self.free & ~avoided)):
                self.take_from(fit, "whole cores", f"NUMA node {fit.unit}")
                return

    def cores_of_a_socket(self) -> None:
        for avoided in (self.avoided_in_whole_sockets, 0):
            if fit := self.fitting(self.groups.whole_by_socket(self.free & ~avoided)):
                self.take_from(fit, "whole cores", f"socket {fit.unit}")
                return

    def cores_of_sockets(self) -> None:
        small: list[CpuGroup] = []
        for group in sorted(self.groups.whole_by_socket(self.free), key=lambda group: -len(group.cpus)):
            if len(group.cpus) <= self.needed:
                self.take(group.cpus, f"all whole cores of socket {group.unit}")
            else:
                small.append(group)
        for group in sorted(small, key=lambda group: len(group.cpus)):
            cores = self.whole_cores(group.cpus)
            if cores:
                self.take(cores, f"as many whole cores as fit, of socket {group.unit}")

    def whole_cores(self, listed: Sequence[int]) -> list[int]:
        """Return the CPUs of those cores of a list that fit into the number still needed, in their order."""
        chosen: list[int] = []
        for core in dict.fromkeys(self.groups.core_of[cpu] for cpu in listed):
            threads = list(CpuSet.from_bits(self.topo.cores[core]))
            if len(threads) <= self.needed - len(chosen):
                chosen += threads
        return chosen

    def threads_of_a_node(self) -> None:
        for avoided, one_each in (*((bits, True) for bits in self.avoided), (0, False)):
            groups = self.groups.single_by_node(self.free & ~avoided, one_each=one_each)
            if fit := self.fitting(groups):
                self.take_spread(fit, f"NUMA node {fit.unit}", one_each=one_each)
                return

    def threads_of_a_socket(self) -> None:
        for avoided, one_each in ((self.avoided_in_sockets, True), (0, False)):
            groups = self.groups.single_by_socket(self.free & ~avoided, one_each=one_each)
            if fit := self.fitting(groups):
                self.take_spread(fit, f"socket {fit.unit}", one_each=one_each)
                return

    def threads_anywhere(self) -> None:
        for avoided in (*self.avoided, 0):
            ordered = self.groups.spread(self.groups.by_core(self.free & ~avoided, self.taken))
            self.take(ordered[: self.needed], "single CPUs, one of each core in turn")
            if not self.needed:
                return

    def fitting(self, groups: Sequence[CpuGroup]) -> CpuGroup | None:
        return next((group for group in groups if len(group.cpus) >= self.needed), None)

    def take_from(self, group: CpuGroup, kind: str, where: str) -> None:
        chosen = group.cpus[: self.needed]
        self.take(chosen, f"{kind} of {where}, which has the {self.lowest} free ({len(group.cpus)})")

    def take_spread(self, group: CpuGroup, where: str, *, one_each: bool) -> None:
        kind = "one thread of each core" if one_each else "threads, of different cores first,"
        self.take_from(CpuGroup(group.unit, self.groups.spread(group.cpus)), kind, where)

    def take(self, chosen: Sequence[int], text: str) -> None:
        if not chosen:
            return
        bits = CpuSet(chosen)
        if self.steps is not None:
            self.steps.append(f"{counted(len(bits), 'CPU')}: {text}: {cpus(bits)}")
        self.taken |= bits.bits
        self.free &= ~bits.bits
        self.needed -= len(bits)


def _widened(units: Iterable[int], bits: int) -> int:
    """Return all CPUs of the units that have one of these."""
    widened = 0
    for unit in units:
        if unit & bits:
            widened |= unit
    return widened
