"""The packed allocator: choose n CPUs so that they share as much as possible.

Theory (kubelet 1.36, reference C.4). Take the largest whole units that fit, then fill up with smaller ones.
"Whole" means that every CPU of the unit is available. Whichever kind of unit is looked at, those with the
fewest available CPUs come first (ties by id): a request goes where it leaves the least behind, which is
best-fit, and untouched sockets stay untouched for requests that need them.

The hierarchy follows the machine. With at least as many sockets as NUMA nodes, nodes stand above sockets;
else (several nodes in a socket) sockets stand above nodes. Cores are listed inside the second level, so that
a half-used node is finished before the next one is begun. The steps:

1. whole units of the first level;
2. whole units of the second level;
3. with ``prefer_uncore``: per uncore cache, all whole caches that fit, else the rest from this one cache if
   it can give exactly that;
4. unless ``spread``: whole cores;
5. single CPUs: core by core, or with ``spread`` ascending by id within each socket, which visits one thread
   of every core before any second thread (for the usual numbering of siblings).

Each order is computed when its step starts and not again within it. A unit is taken only if all its CPUs are
available: with declared averages kubelet calls some uneven units whole that are not, and would hand out CPUs
that others own; here such a unit is left to the later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from proxy.model.idset import CpuSet
from proxy.place.cputopo import CpuTopology, Units


class NotEnoughCpus(ValueError):  # noqa: N818 - reads as what it is, in kubelet's words
    """More CPUs are wanted than are available.

    Attributes:
        requested, available: CPU counts.
    """

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(
            f"not enough cpus available to satisfy request: requested={requested}, available={available}"
        )
        self.requested = requested
        self.available = available


def take_packed(
    topo: CpuTopology, available: CpuSet, n: int, *, prefer_uncore: bool = False, spread: bool = False
) -> CpuSet:
    """Choose n of the available CPUs.

    Args:
        topo: The machine.
        available: CPUs to choose from; those that the machine does not have are ignored.
        n: How many.
        prefer_uncore: kubelet's ``prefer-align-cpus-by-uncorecache``.
        spread: kubelet's ``distribute-cpus-across-cores``.

    Returns:
        Exactly n CPUs, a subset of ``available``; the same for the same arguments.

    Raises:
        NotEnoughCpus: Fewer than n are available.
        ValueError: n is negative.
    """
    if n < 0:
        raise ValueError(f"cannot take {n} CPUs: the number is negative")
    work = _Accumulator(topo, available.bits & topo.cpus.bits, n)
    if n > work.free.bit_count():
        raise NotEnoughCpus(n, work.free.bit_count())
    for step in _steps(work, prefer_uncore=prefer_uncore, spread=spread):
        if work.needed == 0:
            break
        step()
    return CpuSet.from_bits(work.taken)


def free_sockets(topo: CpuTopology, available: CpuSet) -> list[int]:
    """List the wholly available sockets in allocation order."""
    return list(_start(topo, available).whole_sockets())


def free_nodes(topo: CpuTopology, available: CpuSet) -> list[int]:
    """List the wholly available NUMA nodes in allocation order."""
    return list(_start(topo, available).whole_nodes())


def free_cores(topo: CpuTopology, available: CpuSet) -> list[int]:
    """List the wholly available cores in allocation order."""
    return list(_start(topo, available).whole_cores())


def free_cpus(topo: CpuTopology, available: CpuSet, *, spread: bool = False) -> list[int]:
    """List the available CPUs in the order in which single CPUs are taken."""
    work = _start(topo, available)
    return list(work.cpus_by_socket() if spread else work.cpus_by_core())


def _start(topo: CpuTopology, available: CpuSet) -> _Accumulator:
    return _Accumulator(topo, available.bits & topo.cpus.bits, 0)


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


class _Accumulator:
    """One request in the making: what is free, what is taken, how many are still needed (bit masks)."""

    def __init__(self, topo: CpuTopology, free: int, needed: int) -> None:
        self.topo = topo
        self.free = free
        self.needed = needed
        self.taken = 0

    # Orders. Each gives unit ids, those with the fewest free CPUs first, every unit once and only where
    # something is free.

    def sort(self, units: Units, within: int) -> list[int]:
        """Order the units that have free CPUs inside the mask ``within``."""
        found = [(self.count(bits), unit) for unit, bits in units.items() if bits & within & self.free]
        return [unit for _, unit in sorted(found)]

    def nested(self, units: Units, outer: Units, order: Iterable[int]) -> list[int]:
        """Order the units by the outer units that they are in, and inside each as ``sort`` does."""
        # A unit that straddles two outer ones belongs to the first: listed twice it would be counted twice.
        return list(dict.fromkeys(u for o in order for u in self.sort(units, outer[o])))

    def node_order(self) -> list[int]:
        if self.topo.nodes_first:
            return self.sort(self.topo.nodes, self.free)
        return self.nested(self.topo.nodes, self.topo.sockets, self.socket_order())

    def socket_order(self) -> list[int]:
        if self.topo.nodes_first:
            return self.nested(self.topo.sockets, self.topo.nodes, self.node_order())
        return self.sort(self.topo.sockets, self.free)

    def core_order(self) -> list[int]:
        if self.topo.nodes_first:
            return self.nested(self.topo.cores, self.topo.sockets, self.socket_order())
        return self.nested(self.topo.cores, self.topo.nodes, self.node_order())

    def uncore_order(self) -> list[int]:
        return self.nested(self.topo.uncores, self.topo.nodes, self.node_order())

    def cpus_by_core(self) -> list[int]:
        return [
            cpu for core in self.core_order() for cpu in CpuSet.from_bits(self.topo.cores[core] & self.free)
        ]

    def cpus_by_socket(self) -> list[int]:
        order = self.socket_order()
        return [cpu for s in order for cpu in CpuSet.from_bits(self.topo.sockets[s] & self.free)]

    # Whole units, in their orders.

    def count(self, bits: int) -> int:
        return (bits & self.free).bit_count()

    def whole_nodes(self) -> Iterator[int]:
        nodes = self.topo.nodes
        return (n for n in self.node_order() if self.is_free(nodes[n]))

    def whole_sockets(self) -> Iterator[int]:
        topo = self.topo
        return (s for s in self.socket_order() if self.count(topo.sockets[s]) == topo.socket_size(s))

    def whole_uncores(self) -> Iterator[int]:
        uncores = self.topo.uncores
        return (u for u in self.uncore_order() if self.is_free(uncores[u]))

    def whole_cores(self) -> Iterator[int]:
        topo = self.topo
        return (c for c in self.core_order() if self.count(topo.cores[c]) == topo.core_size(c))

    def is_free(self, bits: int) -> bool:
        return bits & ~self.free == 0

    # Steps.

    def take(self, bits: int) -> None:
        self.taken |= bits
        self.free &= ~bits
        self.needed -= bits.bit_count()

    def take_whole(self, units: Units, order: Iterable[int]) -> None:
        for unit in list(order):
            bits = units[unit]
            if bits.bit_count() <= self.needed and self.is_free(bits):
                self.take(bits)

    def take_nodes(self) -> None:
        self.take_whole(self.topo.nodes, self.whole_nodes())

    def take_sockets(self) -> None:
        self.take_whole(self.topo.sockets, self.whole_sockets())

    def take_cores(self) -> None:
        self.take_whole(self.topo.cores, self.whole_cores())

    def take_uncores(self) -> None:
        for uncore in self.uncore_order():
            if self.needed >= self.topo.cpus_per_uncore:
                self.take_whole(self.topo.uncores, self.whole_uncores())
            if self.needed:
                self.take_rest_from(self.topo.uncores[uncore])
            if not self.needed:
                return

    def take_rest_from(self, uncore: int) -> None:
        """Take all that is still needed from one uncore cache, core by core, or nothing."""
        threads = max(self.topo.cpus_per_core, 1)
        wanted = -(-self.needed // threads)
        cores = [bits for bits in self.topo.cores.values() if bits & uncore & self.free][:wanted]
        found = 0
        for bits in cores:
            found |= bits & self.free
        if self.needed % 2 and threads > 1 and found.bit_count() > self.needed:
            found ^= 1 << (found.bit_length() - 1)
        if found.bit_count() == self.needed:
            self.take(found)

    def take_singles(self, *, spread: bool) -> None:
        for cpu in (self.cpus_by_socket() if spread else self.cpus_by_core())[: self.needed]:
            self.take(1 << cpu)
