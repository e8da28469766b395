"""The packed allocator: choose n CPUs so that they share as much as possible.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/cpu_assignment.go ``takeByTopologyNUMAPacked``. Take the
largest whole units that fit, then fill up with smaller ones. "Whole" means that every CPU of the unit is
available. Of every kind of unit, those with the fewest available CPUs come first (ties by id): this is
best-fit, the request leaves the fewest CPUs behind, and untouched sockets stay untouched for requests that
need them.

The hierarchy follows the machine. If there are at least as many sockets as NUMA nodes, nodes are above
sockets; otherwise (several nodes in a socket) sockets are above nodes. Cores are listed inside the second
level, so that a half-used node is finished before the next one is begun. The steps:

1. whole units of the first level;
2. whole units of the second level;
3. with ``prefer_uncore``: per uncore cache, all whole caches that fit, then the rest from this one cache if
   it can give exactly that;
4. unless ``spread``: whole cores;
5. single CPUs: core by core, or with ``spread`` ascending by id within each socket, which visits one thread
   of every core before any second thread (for the usual numbering of siblings).

Each order is computed when its step starts, and in step 3 again for each cache. A unit is taken only if all
its CPUs are available: with declared averages kubelet calls some uneven units whole that are not, and would
allocate CPUs that other containers own; here such a unit is left to the later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from proxy.allocation.allocation_order import Orders
from proxy.allocation.allocation_steps import CORE, NODE, PART, SINGLE, SOCKET, UNCORE, Note, step_texts
from proxy.allocation.cpu_topology import CpuTopology, Units
from proxy.allocation.rejection import AllocationRejectedError
from proxy.model.idset import CpuSet


class NotEnoughCpus(AllocationRejectedError):  # noqa: N818 - reads as what it is, in kubelet's words
    """More CPUs are requested than are available."""

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(
            f"not enough cpus available to satisfy request: requested={requested}, available={available}"
        )


def take_packed(
    topo: CpuTopology,
    available: CpuSet,
    n: int,
    *,
    prefer_uncore: bool = False,
    spread: bool = False,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose n of the available CPUs.

    Args:
        topo: The machine.
        available: CPUs to choose from; those that the machine does not have are ignored.
        n: How many.
        prefer_uncore: kubelet's ``prefer-align-cpus-by-uncorecache``.
        spread: kubelet's ``distribute-cpus-across-cores``.
        steps: Sentences about what was done are added here; None for no record.

    Returns:
        Exactly n CPUs, a subset of ``available``; the same for the same arguments.

    Raises:
        NotEnoughCpus: Fewer than n are available.
        ValueError: n is negative.
    """
    if n < 0:
        raise ValueError(f"cannot take {n} CPUs: the number is negative")
    notes: list[Note] | None = None if steps is None else []
    work = _Accumulator(topo, available.bits & topo.cpus.bits, n, notes)
    if n > work.free.bit_count():
        raise NotEnoughCpus(n, work.free.bit_count())
    for step in _steps(work, prefer_uncore=prefer_uncore, spread=spread):
        if work.needed == 0:
            break
        step()
    if steps is not None:
        steps += step_texts(topo, notes or ())
    return CpuSet.from_bits(work.taken)


def open_nodes(topo: CpuTopology, available: CpuSet) -> list[int]:
    """List the NUMA nodes that have available CPUs, in allocation order."""
    work = _start(topo, available)
    return list(work.node_order(work.free))


def _start(topo: CpuTopology, available: CpuSet) -> Orders:
    return Orders(topo, available.bits & topo.cpus.bits)


def _steps(work: _Accumulator, *, prefer_uncore: bool, spread: bool) -> Iterator[Callable[[], None]]:
    if work.topo.nodes_first:
        yield work.take_nodes
        yield work.take_sockets
    else:
        yield work.take_sockets
        yield work.take_nodes
    if prefer_uncore:
        yield work.take_uncores
    if not spread:
        yield work.take_cores
    yield lambda: work.take_singles(spread=spread)


class _Accumulator(Orders):
    """One request: free CPUs and taken CPUs as bit masks, and how many are still needed."""

    def __init__(self, topo: CpuTopology, free: int, needed: int, notes: list[Note] | None = None) -> None:
        super().__init__(topo, free)
        self.needed = needed
        self.taken = 0
        self.notes = notes

    def take(self, bits: int, kind: str, unit: int) -> None:
        if self.notes is not None:
            self.notes.append((kind, unit, bits))
        self.taken |= bits
        self.free &= ~bits
        self.needed -= bits.bit_count()

    def take_whole(self, kind: str, units: Units, order: Iterable[int]) -> None:
        for unit in order:
            bits = units[unit]
            if bits.bit_count() <= self.needed and not bits & ~self.free:
                self.take(bits, kind, unit)
                if not self.needed:
                    return

    def take_nodes(self) -> None:
        self.take_whole(NODE, self.topo.nodes, self.whole_nodes())

    def take_sockets(self) -> None:
        self.take_whole(SOCKET, self.topo.sockets, self.whole_sockets())

    def take_cores(self) -> None:
        self.take_whole(CORE, self.topo.cores, self.whole_cores())

    def take_uncores(self) -> None:
        for uncore in list(self.uncore_order(self.free)):
            if self.needed >= self.topo.cpus_per_uncore:
                self.take_whole(UNCORE, self.topo.uncores, self.uncore_order(self.free))
            if not self.needed:
                return
            self.take_rest_from(uncore)

    def take_rest_from(self, uncore: int) -> None:
        """Take all that is still needed from one uncore cache, core by core, or nothing."""
        threads = max(self.topo.cpus_per_core, 1)
        core_count = -(-self.needed // threads)
        free = self.topo.uncores[uncore] & self.free
        cores = [bits for _, bits in self.topo.uncore_cores[uncore] if bits & free][:core_count]
        chosen = 0
        for bits in cores:
            chosen |= bits & self.free
        if self.needed % 2 and threads > 1 and chosen.bit_count() > self.needed:
            chosen ^= 1 << (chosen.bit_length() - 1)
        if chosen.bit_count() == self.needed:
            self.take(chosen, PART, uncore)

    def take_singles(self, *, spread: bool) -> None:
        for cpu in self.cpus_by_socket() if spread else self.cpus_by_core():
            if not self.needed:
                return
            self.take(1 << cpu, SINGLE, cpu)
