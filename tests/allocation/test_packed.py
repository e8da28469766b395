"""The packed allocator on machines small enough to work out by hand."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import Counts, CpuRow, CpuTopology
from proxy.allocation.packed import NotEnoughCpus, _Accumulator, take_packed
from proxy.model.idset import CpuSet
from proxy.model.machine import Cache, Cpu, Machine, NumaNode
from tests.oracles.packed_orders import free_cores, free_cpus, free_nodes, free_sockets


def grid(
    sockets: int, nodes: int, cores: int, threads: int = 2, *, caches: int = 1, declared: Counts | None = None
) -> CpuTopology:
    """Build sockets of ``nodes`` nodes of ``caches`` caches of ``cores`` cores; siblings lie far apart."""
    total = sockets * nodes * caches * cores
    rows = [
        CpuRow(
            cpu=thread * total + core,
            core=core,
            socket=core // (nodes * caches * cores),
            numa=core // (caches * cores),
            uncore=core // cores,
        )
        for thread in range(threads)
        for core in range(total)
    ]
    return CpuTopology.of_rows(rows, declared)


ONE_SOCKET = grid(1, 1, 4)  # CPUs 0-3 and siblings 4-7
TWO_SOCKETS = grid(2, 1, 4)  # 0-3 + 8-11, 4-7 + 12-15
SUBNUMA = grid(2, 2, 2)  # nodes 0-1+8-9, 2-3+10-11 (socket 0), 4-5+12-13, 6-7+14-15 (socket 1)
CACHED = grid(1, 1, 2, caches=3)  # caches 0-1+6-7, 2-3+8-9, 4-5+10-11


def take(topo: CpuTopology, available: str, n: int, **options: bool) -> str:
    return str(take_packed(topo, CpuSet.parse(available), n, **options))


@pytest.mark.parametrize(
    ("topo", "available", "n", "expected", "why"),
    [
        (ONE_SOCKET, "0-7", 0, "", "nothing is wanted"),
        (ONE_SOCKET, "0-7", 2, "0,4", "a whole core"),
        (ONE_SOCKET, "0-7", 3, "0-1,4", "a core and one thread of the next"),
        (ONE_SOCKET, "0-2,4,6", 1, "1", "the core that is already broken"),
        (ONE_SOCKET, "0-2,4,6", 3, "0-1,4", "a whole core first, then the broken one"),
        (ONE_SOCKET, "1-3,5-7,40", 6, "1-3,5-7", "CPUs that the machine does not have are ignored"),
        (TWO_SOCKETS, "0-15", 8, "0-3,8-11", "a whole socket"),
        (TWO_SOCKETS, "0-15", 10, "0-4,8-12", "a socket and a core of the other"),
        (TWO_SOCKETS, "1-15", 2, "1,9", "the socket with fewer free CPUs"),
        (TWO_SOCKETS, "1-15", 8, "4-7,12-15", "a whole socket before a part of a fuller one"),
        (SUBNUMA, "0-15", 4, "0-1,8-9", "a whole node"),
        (SUBNUMA, "0-15", 12, "0-5,8-13", "a socket and a node"),
        (SUBNUMA, "1-15", 8, "4-7,12-15", "the whole socket"),
        (SUBNUMA, "1-15", 4, "2-3,10-11", "a whole node inside the socket that is already in use"),
        (SUBNUMA, "0-3,5-11,13-15", 2, "5,13", "the most used node of the most used socket"),
    ],
)
def test_takes_the_largest_units_that_fit(
    topo: CpuTopology, available: str, n: int, expected: str, why: str
) -> None:
    assert take(topo, available, n) == expected, why


def test_missing_cpus_are_reported_as_by_kubelet() -> None:
    with pytest.raises(NotEnoughCpus) as caught:
        take(ONE_SOCKET, "0,2", 3)
    assert str(caught.value) == "not enough cpus available to satisfy request: requested=3, available=2"
    with pytest.raises(NotEnoughCpus, match="requested=2, available=1"):
        take(ONE_SOCKET, "0,90-95", 2)
    with pytest.raises(ValueError, match="negative"):
        take(ONE_SOCKET, "0-7", -1)


def test_spread_takes_one_thread_of_every_core_first() -> None:
    assert take(TWO_SOCKETS, "0-15", 4, spread=True) == "0-3"
    assert take(TWO_SOCKETS, "0-15", 6, spread=True) == "0-3,8-9"
    assert take(TWO_SOCKETS, "0-15", 8, spread=True) == "0-3,8-11", "whole sockets still come first"
    assert take(TWO_SOCKETS, "1-15", 4, spread=True) == "1-3,8"


@pytest.mark.parametrize(
    ("available", "n", "expected", "why"),
    [
        ("0-11", 4, "0-1,6-7", "a whole cache"),
        ("0-11", 6, "0-2,6-8", "a whole cache, and a core of another one"),
        ("1-11", 4, "2-3,8-9", "a whole cache, although another one has fewer free CPUs"),
        ("1-11", 3, "1,6-7", "a part that one cache can give exactly"),
        ("1-11", 2, "2,8", "two cores of the first cache have three free CPUs, one core has one: next cache"),
        ("0-11", 3, "0-1,6", "an odd number leaves the highest thread"),
        ("0,2-6,8-11", 3, "2-3,8", "one cache that has all three, although another one has a free core"),
        ("1-11", 8, "2-5,8-11", "two whole caches"),
        ("0,2,4", 2, "0,2", "no cache has two: single CPUs"),
    ],
)
def test_as_few_uncore_caches_as_possible_are_used(available: str, n: int, expected: str, why: str) -> None:
    assert take(CACHED, available, n, prefer_uncore=True) == expected, why


def test_uncore_alignment_with_four_threads_splits_no_even_core() -> None:
    topo = grid(1, 1, 2, 4, caches=2)  # core 0: 0,4,8,12; core 2: 2,6,10,14
    assert take(topo, "0,4,8,2,6,3,7", 2, prefer_uncore=True) == "2,6"


def test_uncore_alignment_takes_whole_caches_from_the_average_size_on() -> None:
    topo = CpuTopology.of_rows(CpuRow(cpu, cpu, 0, 0, int(cpu > 1)) for cpu in range(8))  # caches of 2 and 6
    assert take(topo, "0-7", 3, prefer_uncore=True) == "2-4"
    assert take(topo, "0-7", 4, prefer_uncore=True) == "0-3"


def test_without_uncore_alignment_caches_do_not_matter() -> None:
    assert take(CACHED, "1-11", 4) == "1-2,7-8"


def test_units_beside_used_ones_come_first() -> None:
    busy = CpuSet.parse("1-15")
    assert free_sockets(TWO_SOCKETS, busy) == [1]
    assert free_nodes(SUBNUMA, busy) == [1, 2, 3]
    assert free_nodes(SUBNUMA, CpuSet.parse("0-3,5-11,13-15")) == [3, 0, 1], "the used socket's nodes first"
    assert free_cores(TWO_SOCKETS, CpuSet.parse("0-3,5-11,13-15")) == [5, 6, 7, 0, 1, 2, 3]
    assert free_cpus(TWO_SOCKETS, busy) == [8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert free_cpus(TWO_SOCKETS, busy, spread=True) == [1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]


def test_a_socket_that_straddles_nodes_is_listed_once() -> None:
    rows = [CpuRow(cpu, cpu, 0, cpu // 2, 0) for cpu in range(4)]
    topo = CpuTopology.of_rows(rows, Counts(cpus=4, cores=4, sockets=1))  # NUMA nodes are not stated
    assert free_sockets(topo, topo.cpus) == [0]
    assert free_cpus(topo, topo.cpus) == [0, 1, 2, 3]


def test_nodes_above_sockets_when_a_node_holds_several() -> None:
    rows = [CpuRow(cpu, cpu, cpu // 2, cpu // 4, 0) for cpu in range(8)]
    topo = CpuTopology.of_rows(rows)
    assert topo.nodes_first
    assert take(topo, "0,2-7", 2) == "2-3", "the whole socket inside the node that is in use"
    assert take(topo, "0,2-7", 4) == "4-7"
    assert not SUBNUMA.nodes_first


def test_single_cpus_come_socket_by_socket_also_below_a_node() -> None:
    topo = CpuTopology.of_rows(CpuRow(cpu, cpu // 2, cpu // 4, 0, 0) for cpu in range(8))
    assert free_cpus(topo, CpuSet.parse("0-4,6-7")) == [4, 6, 7, 0, 1, 2, 3], "the used socket to its end"


def test_declared_counts_give_averages_but_never_foreign_cpus() -> None:
    # Core 0 has two threads and core 2 to 4 have one: the average is one.
    rows = [CpuRow(0, 0, 0, 0, 0), CpuRow(1, 0, 0, 0, 0), *(CpuRow(i, i, 0, 0, 0) for i in (2, 3, 4))]
    averaged = CpuTopology.of_rows(rows, Counts(cpus=5, cores=4, sockets=1, numa_nodes=1))
    assert free_cores(averaged, CpuSet.parse("0,2-4")) == [0, 2, 3, 4]
    assert take(averaged, "0,2-4", 2) == "2-3", "core 0 is half free, whatever the average says"
    assert take(averaged, "0-4", 2) == "2-3"
    assert take(averaged, "0-4", 1, prefer_uncore=True) == "2", "a cache gives no part of core 0"
    exact = CpuTopology.of_rows(rows)
    assert exact.cpus_per_core == 2, "the largest core's"
    assert free_cores(exact, CpuSet.parse("0,2-4")) == [2, 3, 4]
    assert free_cores(exact, CpuSet.parse("0-4")) == [2, 3, 4, 0]


def test_counts_that_are_not_stated_make_no_unit_whole() -> None:
    assert Counts() == Counts(0, 0, 0, 0, 0)
    topo = grid(2, 1, 2, declared=Counts())
    assert topo.cpus_per_core == topo.cpus_per_uncore == 0
    assert free_sockets(topo, topo.cpus) == free_cores(topo, topo.cpus) == []
    assert take(topo, "0-7", 3, prefer_uncore=True) == "0-1,4", "single CPUs, core by core"


def machine(cpus: list[Cpu], nodes: dict[int, str], caches: dict[int, Cache]) -> Machine:
    online = CpuSet(c.id for c in cpus)
    numa = tuple(NumaNode(i, CpuSet.parse(text)) for i, text in nodes.items())
    return Machine(tuple(cpus), numa, online, online, caches=caches)


def test_a_machine_is_read() -> None:
    cpus = [Cpu(i, core=i % 4, package=i % 4 // 2 * 2, numa=i % 4 // 2, llc=i % 4 // 2 * 2) for i in range(8)]
    caches = {0: Cache(CpuSet.parse("0-1,4-5"), 3), 2: Cache(CpuSet.parse("2-3,6-7"), 3)}
    topo = CpuTopology.of(machine(cpus, {0: "0-1,4-5", 1: "2-3,6-7"}, caches))
    assert topo.counts == Counts(8, 4, 2, 2, 2)
    assert (topo.cpus_per_core, topo.cpus_per_uncore, topo.nodes_first) == (2, 4, True)
    assert take(topo, "0-7", 4) == "0-1,4-5"


def test_an_offline_thread_does_not_spoil_its_core_or_socket() -> None:
    cpus = [Cpu(i, core=i % 4, package=i % 4 // 2 * 2, numa=i % 4 // 2) for i in range(7)]
    topo = CpuTopology.of(machine(cpus, {0: "0-1,4-5", 1: "2-3,6"}, {}))
    assert free_cores(topo, topo.cpus) == [3, 2, 0, 1]
    assert free_sockets(topo, topo.cpus) == [2, 0]
    assert take(topo, "0-6", 3) == "2-3,6", "the whole of the smaller socket"


def test_gaps_in_the_kernels_data_are_filled() -> None:
    cpus = [
        Cpu(0, core=0, package=0, numa=3, llc=0),
        Cpu(1, core=1, package=0, llc=1),
        Cpu(2, core=2, package=0, llc=9),
        Cpu(3, core=3, package=3),
        Cpu(4, core=4, package=0, numa=4),
    ]
    caches = {0: Cache(CpuSet([0]), 3), 1: Cache(CpuSet([1]), 2)}
    topo = CpuTopology.of(machine(cpus, {2: "", 3: "0", 4: "4"}, caches))
    assert topo.nodes == {2: 0b01000, 3: 0b00111, 4: 0b10000}, "the package's lowest node, else the lowest"
    assert topo.uncores == {0: 0b00001, 1: 0b10110, 3: 0b01000}, "level 2 is no uncore cache"


def test_without_numa_nodes_there_is_one() -> None:
    topo = CpuTopology.of(machine([Cpu(0, core=0, package=0), Cpu(1, core=1, package=1)], {}, {}))
    assert topo.nodes == {0: 0b11}
    nothing = CpuTopology.of_rows([])
    assert (nothing.cpus_per_core, free_cpus(nothing, CpuSet())) == (0, [])


TOPOLOGIES = [ONE_SOCKET, TWO_SOCKETS, SUBNUMA, CACHED, grid(4, 1, 3, 1), grid(1, 4, 2, 4)]


@given(st.sampled_from(TOPOLOGIES), st.integers(0), st.integers(0, 64), st.booleans(), st.booleans())
def test_allocations_have_the_requested_size_and_use_available_cpus(
    topo: CpuTopology, pick: int, n: int, uncore: bool, spread: bool
) -> None:
    available = CpuSet.from_bits(pick & topo.cpus.bits)
    if n > len(available):
        with pytest.raises(NotEnoughCpus):
            take_packed(topo, available, n, prefer_uncore=uncore, spread=spread)
        return
    taken = take_packed(topo, available, n, prefer_uncore=uncore, spread=spread)
    assert len(taken) == n
    assert taken <= available


@given(st.sampled_from(TOPOLOGIES), st.integers(0), st.integers(0, 64))
def test_breaks_at_most_one_whole_core(topo: CpuTopology, pick: int, n: int) -> None:
    available = CpuSet.from_bits(pick & topo.cpus.bits)
    if n > len(available):
        return
    left = available - take_packed(topo, available, n)
    whole = [bits for bits in topo.cores.values() if bits & ~available.bits == 0]
    broken = [bits for bits in whole if 0 < (bits & left.bits).bit_count() < bits.bit_count()]
    assert len(broken) <= 1


def test_no_unit_is_looked_at_once_all_cpus_are_taken() -> None:
    work = _Accumulator(TWO_SOCKETS, TWO_SOCKETS.cpus.bits, 2)
    order = iter([0, 1, 2])
    work.take_whole("core", TWO_SOCKETS.cores, order)
    assert (work.needed, next(order)) == (0, 1)
    with mock.patch.object(_Accumulator, "take_singles", side_effect=AssertionError):
        assert take(TWO_SOCKETS, "0-15", 8) == "0-3,8-11"
