"""CPU hints against plainly written rules, and hints that are too many to be listed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation import cpu_hints as room
from proxy.allocation.cpu_hints import container_request_hints, cpu_hints, pod_request_hints
from proxy.allocation.cpu_topology import Counts, CpuRow, CpuTopology
from proxy.allocation.hint_family import Family
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask


def machine(sizes: Sequence[int], nodes_per_socket: int = 1, first: int = 0) -> CpuTopology:
    """Build nodes of these sizes, CPUs in order; node ids start at ``first``."""
    owners = [node for node, size in enumerate(sizes) for _ in range(size)]
    return CpuTopology.of_rows(
        CpuRow(c, c, n // nodes_per_socket, n + first, 0) for c, n in enumerate(owners)
    )


def plain(
    topo: CpuTopology, available: CpuSet, reusable: CpuSet, request: int, by_socket: bool
) -> list[TopologyHint]:
    """Implement the rules without any shortcut."""
    nodes = sorted(topo.nodes)
    sets = [c for size in range(1, len(nodes) + 1) for c in combinations(nodes, size)]
    cpus = {c: CpuSet(i for n in c for i in CpuSet.from_bits(topo.nodes[n])) for c in sets}
    size = min((len(c) for c in sets if len(cpus[c]) >= request), default=len(nodes))
    per_socket = topo.counts.numa_nodes // topo.counts.sockets
    found = []
    for c in sets:
        if reusable <= cpus[c] and len(reusable) + len(cpus[c] & available) >= request:
            touched = sum(1 for bits in topo.sockets.values() if bits & cpus[c].bits)
            aligned = by_socket and per_socket > 0 and touched == -(-size // per_socket)
            found.append(TopologyHint(Mask(c), len(c) == size or aligned))
    return found


CASES = st.tuples(
    st.lists(st.integers(1, 4), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(0),
    st.integers(0),
    st.integers(1, 20),
    st.booleans(),
)


@given(CASES)
def test_hints_match_the_plain_rules(case: tuple[list[int], int, int, int, int, bool]) -> None:
    sizes, per_socket, free, reuse, request, by_socket = case
    topo = machine(sizes, per_socket, first=2)
    reusable = CpuSet.from_bits(reuse & topo.cpus.bits)
    available = CpuSet.from_bits(free & topo.cpus.bits) - reusable
    result = cpu_hints(topo, available, reusable, request, by_socket=by_socket)
    assert list(result) == plain(topo, available, reusable, request, by_socket)


@given(CASES)
def test_a_family_stands_for_the_same_hints(case: tuple[list[int], int, int, int, int, bool]) -> None:
    sizes, per_socket, free, reuse, request, by_socket = case
    topo = machine(sizes, per_socket, first=2)
    reusable = CpuSet.from_bits(reuse & topo.cpus.bits)
    available = CpuSet.from_bits(free & topo.cpus.bits) - reusable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "MOST_LISTED_NODES", 1)
        result = cpu_hints(topo, available, reusable, request, by_socket=by_socket)
    expected = plain(topo, available, reusable, request, by_socket)
    assert list(result) == expected
    if isinstance(result, Family):
        every = Mask(topo.nodes)
        assert set(result.for_window(every)) == set(expected), "a window of all nodes contains all hints"
        assert len(result[0].affinity or ()) == min(len(h.affinity or ()) for h in expected)


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=2, max_size=4),
    st.integers(0),
    st.integers(0),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_cores_count_if_cpus_must_be_on_different_ones(
    threads: list[list[int]], free: int, reuse: int, request: int, cores: int
) -> None:
    """Listed or as a family; ``threads`` are those of each core, by node."""
    cores_of = [(node, core, n) for node, sizes in enumerate(threads) for core, n in enumerate(sizes)]
    places = [(node, core) for node, core, n in cores_of for _ in range(n)]
    topo = CpuTopology.of_rows(
        CpuRow(cpu, 10 * node + core, node, node, node) for cpu, (node, core) in enumerate(places)
    )
    reusable = CpuSet.from_bits(reuse & topo.cpus.bits)
    available = CpuSet.from_bits(free & topo.cpus.bits) - reusable

    def holds(nodes: tuple[int, ...], cpus: CpuSet) -> bool:
        inside = [places[cpu] for cpu in cpus if places[cpu][0] in nodes]
        return len(inside) >= request and len(set(inside)) >= cores

    every = topo.nodes
    sets = [nodes for size in range(1, len(every) + 1) for nodes in combinations(every, size)]
    fewest = min((len(nodes) for nodes in sets if holds(nodes, topo.cpus)), default=len(every))
    expected = [
        TopologyHint(Mask(nodes), len(nodes) == fewest)
        for nodes in sets
        if holds(nodes, available | reusable) and all(places[cpu][0] in nodes for cpu in reusable)
    ]
    assert list(cpu_hints(topo, available, reusable, request, cores=cores)) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "MOST_LISTED_NODES", 1)
        assert list(cpu_hints(topo, available, reusable, request, cores=cores)) == expected


def test_owned_cpus_are_measured_by_the_cores_that_they_have() -> None:
    """A container that was placed before ``SpreadByPCPUs`` was required has both threads of two cores."""
    topo = CpuTopology.of_rows(CpuRow(c, c // 2, c // 8, c // 8, c // 8) for c in range(16))

    def first(cpus: str) -> TopologyHint:
        owned = CpuSet.parse(cpus)
        hints = container_request_hints(topo, 6, owned, CpuSet(), CpuSet(), cores=6)
        assert hints == pod_request_hints(topo, 6, [(6, owned)], CpuSet(), CpuSet(), cores=6)
        assert hints is not None
        found = hints["cpu"]
        assert found is not None
        return found[0]

    assert first("0,2,4,6,8,10") == TopologyHint(Mask([0, 1]), preferred=True)
    assert first("0-5") == TopologyHint(Mask([0]), preferred=True)


def test_preferred_is_measured_by_an_empty_machine() -> None:
    topo = machine([4, 4])
    result = cpu_hints(topo, CpuSet.parse("0-1,4-5"), CpuSet(), 4)
    assert result == (TopologyHint(Mask([0, 1]), preferred=False),), "it would fit on one node"
    assert cpu_hints(topo, topo.cpus, CpuSet(), 5) == (TopologyHint(Mask([0, 1]), preferred=True),)
    assert cpu_hints(topo, topo.cpus, CpuSet(), 9) == ()


def test_reusable_cpus_bind_to_their_nodes() -> None:
    topo = machine([4, 4])
    result = cpu_hints(topo, CpuSet.parse("4-7"), CpuSet.parse("0-1"), 2)
    assert [h.affinity for h in result] == [Mask([0]), Mask([0, 1])]
    assert cpu_hints(topo, topo.cpus, CpuSet([40]), 1) == (), "no node has the removed CPU"


def test_with_sockets_that_are_not_stated_none_is_aligned() -> None:
    rows = [CpuRow(c, c, 0, c // 2, 0) for c in range(4)]
    topo = CpuTopology.of_rows(rows, Counts(cpus=4, cores=4, sockets=0, numa_nodes=2))
    result = cpu_hints(topo, topo.cpus, CpuSet(), 2, by_socket=True)
    assert [h.preferred for h in result] == [True, True, False]


def test_the_three_kinds_of_empty_hints() -> None:
    topo = machine([4, 4])
    none = CpuSet()
    assert container_request_hints(topo, 0, None, topo.cpus, none) is None
    assert container_request_hints(topo, 9, None, topo.cpus, none) == {"cpu": ()}
    assert container_request_hints(topo, 2, CpuSet.parse("0-2"), topo.cpus, none) == {"cpu": ()}
    assert pod_request_hints(topo, 0, [], topo.cpus, none) is None
    assert pod_request_hints(topo, 4, [(2, CpuSet.parse("0-2"))], topo.cpus, none) == {"cpu": ()}


def test_hints_cover_cpus_that_are_owned_already() -> None:
    topo = machine([4, 4])
    owned, free = CpuSet.parse("4-5"), CpuSet.parse("0-3")
    only_there = (TopologyHint(Mask([1]), preferred=True), TopologyHint(Mask([0, 1]), preferred=False))
    assert container_request_hints(topo, 2, owned, free, CpuSet([0])) == {"cpu": only_there}
    assert pod_request_hints(topo, 2, [(2, owned)], free, CpuSet([0])) == {"cpu": only_there}
    part = pod_request_hints(topo, 4, [(2, owned)], free, CpuSet())
    assert part == {"cpu": (TopologyHint(Mask([0, 1]), preferred=False),)}, (
        "two more, and only node 0 has any"
    )


def test_sixty_four_nodes() -> None:
    topo = machine([8] * 64, 4)
    available = topo.cpus - CpuSet.parse("0-8")
    result = cpu_hints(topo, available, CpuSet.parse("8"), 17)
    assert isinstance(result, Family)
    assert len(result[0].affinity or ()) == 3
    first = list(islice(result, 3))
    assert [h.affinity for h in first] == [Mask([1, 2, 3]), Mask([1, 2, 4]), Mask([1, 2, 5])]
    assert all(h.preferred for h in first)
    aligned = cpu_hints(topo, available, CpuSet(), 8, by_socket=True)
    assert isinstance(aligned, Family)
    assert aligned[0] == TopologyHint(Mask([2]), preferred=True), "node 1 has seven"
    seen = {h.affinity: h.preferred for h in aligned.for_window(Mask([2, 3, 4]))}
    assert seen[Mask([2, 3])], "two nodes of one socket"
    assert not seen[Mask([3, 4])], "of two"
    assert cpu_hints(topo, CpuSet(), CpuSet(), 1) == ()
