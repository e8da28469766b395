"""Edge cases of CPU sets: uneven caches and cores, all CPUs reserved, no CPUs, sockets of other sizes."""

from __future__ import annotations

from unittest import mock

import pytest

from proxy.allocation import cpu_hints as hints_room
from proxy.allocation import sockets as sockets_room
from proxy.allocation.cpu_hints import cpu_hints
from proxy.allocation.cpu_policy import CpuPolicy, CpuState, CpuStateError, pick_unpoliced, take
from proxy.allocation.cpu_topology import Counts, CpuRow, CpuTopology
from proxy.allocation.demand import Demand
from proxy.allocation.distributed import take_distributed
from proxy.allocation.packed import NotEnoughCpus, take_packed
from proxy.allocation.sockets import SocketFamily, Sockets
from proxy.engine.placement import memory_nodes_for
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import CpuOptions
from proxy.topology.regular_machine import regular_machine
from tests.oracles.cpu_manager_state import start

NOTHING = CpuTopology.of_rows(())
SMT4 = CpuTopology.of_rows(CpuRow(c, c // 4, 0, 0, c // 16) for c in range(32))  # two caches of four cores


def uneven(*caches: int) -> CpuTopology:
    """Single-threaded cores in caches of these sizes."""
    homes = [i for i, size in enumerate(caches) for _ in range(size)]
    return CpuTopology.of_rows(CpuRow(c, c, 0, 0, home) for c, home in enumerate(homes))


def steps(topo: CpuTopology, free: str, n: int) -> list[str]:
    reported: list[str] = []
    take_packed(topo, CpuSet.parse(free), n, prefer_uncore=True, steps=reported)
    return reported


def test_a_cache_below_the_average_is_not_taken_whole_for_less() -> None:
    assert steps(uneven(2, 6), "0-7", 3) == ["all that was still wanted from uncore cache 1: CPUs 2-4"]
    assert steps(uneven(2, 6), "0-7", 4)[0] == "uncore cache 0 whole: CPUs 0-1"
    assert steps(uneven(4, 4), "1-7", 2) == ["all that was still wanted from uncore cache 0: CPUs 1-2"]
    assert steps(uneven(4, 4), "0-7", 6) == [
        "uncore cache 0 whole: CPUs 0-3",
        "all that was still wanted from uncore cache 1: CPUs 4-5",
    ]


def test_a_remainder_from_one_cache_wastes_at_most_one_cpu() -> None:
    step = "all that was still wanted from uncore cache 0: CPUs"
    assert steps(SMT4, "0-31", 3) == [f"{step} 0-2"]
    assert steps(SMT4, "0-31", 8) == [f"{step} 0-7"]
    assert steps(SMT4, "0-31", 5) == [
        "1 whole core of NUMA node 0: CPUs 0-3",
        "1 single CPU of core 1: CPU 4",
    ]
    assert steps(SMT4, "0-6,16-31", 7)[0] == f"{step} 0-6"
    assert not steps(SMT4, "0-6,16-31", 6)[0].startswith(step), (
        "the cache has seven CPUs of two cores, and six are requested"
    )
    declared = CpuTopology.of_rows(
        [CpuRow(c, c // 2, 0, 0, 0) for c in range(4)],
        Counts(cpus=4, cores=4, sockets=1, numa_nodes=1, uncore_caches=1),
    )
    assert steps(declared, "0-3", 1)[0].startswith("1 single CPU"), (
        "by the declared counts a core has one thread"
    )


def test_no_cpus_from_an_empty_set() -> None:
    assert take_distributed(NOTHING, CpuSet([1]), 0) == CpuSet()
    assert NOTHING.cpus_per_core == NOTHING.cpus_per_uncore == 0
    assert CpuPolicy.of(NOTHING).threads_per_core == 1
    assert "node_cores" not in repr(SMT4)
    assert "uncore_cores" not in repr(SMT4)
    for field in ("socket_nodes", "socket_cores", "node_sockets", "node_uncores"):
        assert field not in repr(SMT4)
    with pytest.raises(NotEnoughCpus, match="requested=1, available=0"):
        take_distributed(NOTHING, CpuSet([1]), 1)
    with pytest.raises(ValueError, match="a group has at least one"):
        take_distributed(SMT4, SMT4.cpus, 4, group=0)


def test_unknown_thread_counts_default_to_one() -> None:
    rows = [CpuRow(c, c // 2, 0, c // 4, 0) for c in range(8)]
    untold = CpuTopology.of_rows(rows, Counts(cpus=8, sockets=1, numa_nodes=2))
    options = CpuOptions(distribute_cpus_across_numa=True, full_pcpus_only=True)
    assert str(take(untold, options, untold.cpus, 6)) == "0-2,4-6"
    assert CpuPolicy.of(untold, options).threads_per_core == 1
    assert CpuPolicy.of(SMT4).threads_per_core == 4


def test_all_free_cpus_can_be_taken() -> None:
    topo = CpuTopology.of_rows(CpuRow(c, c, 0, c // 4, 0) for c in range(8))
    reported: list[str] = []
    take_distributed(topo, topo.cpus, 8, steps=reported)
    assert reported == ["4 CPUs from each of NUMA nodes 0-1: CPUs 0-7"]


def test_all_cpus_may_be_reserved() -> None:
    every = CpuPolicy.of(SMT4, amount=32)
    assert (every.reserved, every.reserved_cores) == (SMT4.cpus, SMT4.cpus)
    assert CpuPolicy.of(SMT4, amount=0).reserved == CpuSet()
    assert CpuPolicy.of(SMT4, reserved=CpuSet([1, 9]), amount=2).reserved == CpuSet([1, 9]), "the named CPUs"
    with pytest.raises(CpuStateError, match=r"\(size of 1,9 did not equal 0\)"):
        CpuPolicy.of(SMT4, reserved=CpuSet([1, 9]), amount=0)
    few = CpuPolicy.of(SMT4, reserved=CpuSet([0, 1]))
    stored = CpuState(CpuSet([0, 1]), {"p": {"c": CpuSet(range(2, 32))}})
    assert start(few, stored) is stored, "only the reserved CPUs are left"


def test_sockets_of_other_sizes_are_all_touched() -> None:
    """Six nodes in one socket and two in the other: five full nodes are on two sockets of four."""
    topo = CpuTopology.of_rows(CpuRow(c, c, int(c >= 24), c // 4, 0) for c in range(32))
    free = CpuSet(c for c in range(32) if c % 4)
    listed = cpu_hints(topo, free, CpuSet(), 17, by_socket=True)
    best = min(
        (h for h in listed if h.preferred and h.affinity),
        key=lambda h: (len(h.affinity or ()), h.affinity.bits),  # type: ignore[union-attr]
    )
    assert best == TopologyHint(Mask([0, 1, 2, 3, 4, 6]), preferred=True)
    with mock.patch.object(hints_room, "MOST_LISTED_NODES", 0):
        family = cpu_hints(topo, free, CpuSet(), 17, by_socket=True)
    assert isinstance(family, SocketFamily)
    assert family.best() == best
    assert tuple(family) == listed
    assert family.best(Mask([7])) == TopologyHint(Mask([0, 1, 2, 3, 4, 7]), preferred=True)
    assert family.preferred_masks((0, 1, 6), family.demands, 1) == []
    assert family.preferred_masks((0, 1, 6), (), 2) == [1 << 0 | 1 << 6]
    assert family.preferred_masks((0, 1, 6), (), 3) == [0b11 | 1 << 6]
    assert family.preferred_masks((0, 1, 6), (), 4) == []
    rich = (Demand(4, ((1 << 0, 4), (1 << 1, 1), (1 << 2, 1), (1 << 3, 2))),)
    pairs = Sockets(((0, 0b1), (1, 0b10), (2, 0b100), (3, 0b1), (4, 0b10), (5, 0b100)), 2)
    masks = SocketFamily((), tuple(range(6)), 1, rich, 1, pairs).preferred_masks(range(6), rich, 1)
    assert masks == [0b11, 0b101], "two nodes; on the other two sockets there is not enough"
    close = SocketFamily(
        (), tuple(range(6)), 1, (Demand(3, ((1 << 0, 1), (1 << 3, 2), (1 << 1, 3))),), 1, pairs
    )
    assert close.preferred_masks(range(6), close.demands, 1) == [0b11, 0b110], (
        "not the sockets of three nodes"
    )


def test_choices_of_sockets() -> None:
    four = Sockets(((0, 0b1), (1, 0b10), (2, 0b100), (3, 0b1000)), 2)
    assert list(four.choices(())) == [0b11, 0b101, 0b1001, 0b110, 0b1010, 0b1100]
    assert [list(Sockets(four.of_node, count).choices(())) for count in (0, 4, 5)] == [[], [0b1111], []]
    demand = Demand(5, ((1 << 0, 1), (1 << 2, 3), (1 << 3, 2)))
    with mock.patch.object(sockets_room, "CHOICES", 5):
        assert list(four.choices((demand,))) == [0b1100]
        assert list(four.choices((Demand(7, demand.amounts),))) == []
    with mock.patch.object(sockets_room, "CHOICES", 6):
        assert len(list(four.choices((demand,)))) == 6
    assert (
        Sockets.of(
            CpuTopology.of_rows(CpuRow(c, c, c // 4, c // 2, 0) for c in range(16)), 3
        ).aligned_socket_count
        == 2
    )


def test_hints_are_listed_up_to_twelve_nodes() -> None:
    def hints(nodes: int) -> object:
        return cpu_hints(
            CpuTopology.of_rows(CpuRow(c, c, 0, c, 0) for c in range(nodes)),
            CpuSet(range(nodes)),
            CpuSet(),
            2,
        )

    assert isinstance(hints(12), tuple)
    assert not isinstance(hints(13), tuple)


def test_memory_of_promises_at_the_byte() -> None:
    gib = 1 << 30
    machine = regular_machine(2, 2, 2, 1, mem_bytes_per_node=10 * gib)
    cpus = machine.nodes[1].cpus
    over = [(Mask([1]), 99 * gib)]
    assert str(memory_nodes_for(machine, cpus, 10 * gib, over)) == "0-1"
    assert str(memory_nodes_for(machine, cpus, 10 * gib + 1, over)) == "0-2", (
        "the free memory of a node is never negative"
    )
    assert str(memory_nodes_for(machine, cpus, 6 * gib, [(Mask([1, 9]), 4 * gib)])) == "1", (
        "node 9 does not exist"
    )
    assert str(memory_nodes_for(machine, cpus, 6 * gib, [(Mask([1, 9]), 5 * gib)])) == "0-1"
    assert str(memory_nodes_for(machine, cpus, 0, over)) == "1"
    assert str(memory_nodes_for(machine, cpus, 1, over)) == "0-1"


@pytest.mark.parametrize(
    ("available", "near", "cpus"),
    [
        ("0-1,4,12", None, "4,12"),  # the only whole core, with no other CPU on its node
        ("0-15", [1], "4,12"),
        ("0-15", [0, 1], "0,8"),
        ("0-1,4-7,12-15", [0], "4,12"),  # a whole core is preferred to near CPUs
        ("0-3,8-11,4,12", [0], "0,8"),  # near CPUs are preferred to the best fit
        ("0-3,8-11,4,12", None, "4,12"),
    ],
)
def test_two_cpus_are_a_whole_core_if_possible(available: str, near: list[int] | None, cpus: str) -> None:
    machine = regular_machine(2, 1, 4, 2)
    preference = None if near is None else Mask(near)
    assert (
        str(pick_unpoliced(machine, CpuTopology.of(machine), CpuSet.parse(available), 2, near=preference))
        == cpus
    )
    options = CpuOptions(distribute_cpus_across_cores=True)
    assert str(pick_unpoliced(machine, CpuTopology.of(machine), machine.online, 2, options)) == "0-1"
