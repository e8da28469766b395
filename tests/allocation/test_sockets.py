"""``align-by-socket`` on machines whose hints are not listed, against the lists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.allocation import cpu_hints as hints_room
from proxy.allocation import hint_family as family_room
from proxy.allocation import hint_sampling as listing_room
from proxy.allocation import sockets as sockets_room
from proxy.allocation.cpu_hints import cpu_hints
from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.demand import Demand, to_bits
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.hint_sampling import listable
from proxy.allocation.merge import merge
from proxy.allocation.sockets import SocketFamily, Sockets
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask


@st.composite
def machines(draw: st.DrawFn) -> CpuTopology:
    """Nodes in sockets, not all alike; now and then a node that straddles two sockets."""
    nodes = draw(st.integers(1, 10))
    homes = draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes))
    sizes = draw(st.lists(st.integers(1, 3), min_size=nodes, max_size=nodes))
    rows, cpu = [], 0
    for node, (home, size) in enumerate(zip(homes, sizes, strict=True)):
        for i in range(size):
            socket = (home + 1) % 4 if i == 2 and draw(st.booleans()) else home
            rows.append(CpuRow(cpu, cpu, socket, node, node))
            cpu += 1
    return CpuTopology.of_rows(rows)


@st.composite
def cpu_requests(draw: st.DrawFn) -> tuple[CpuTopology, CpuSet, CpuSet, int]:
    topo = draw(machines())
    free = CpuSet.from_bits(draw(st.integers(0, topo.cpus.bits))) if draw(st.booleans()) else topo.cpus
    again = CpuSet([draw(st.integers(0, len(topo.cpus) - 1))]) if draw(st.integers(0, 3)) == 0 else CpuSet()
    return topo, free - again, again, draw(st.integers(1, len(topo.cpus)))


def lazily(case: tuple[CpuTopology, CpuSet, CpuSet, int]) -> Sequence[TopologyHint]:
    with mock.patch.object(hints_room, "MOST_LISTED_NODES", 0):
        return cpu_hints(*case, by_socket=True)


def merged(lists: Sequence[Sequence[TopologyHint]]) -> TopologyHint:
    return merge(lists, Mask(range(10))).hint


def short(*families: Sequence[TopologyHint]) -> list[Sequence[TopologyHint]]:
    with (
        mock.patch.object(listing_room, "MOST_LISTED_NODES", 0),
        mock.patch.object(family_room, "MOST_LISTED_NODES", 0),
    ):
        (answer,) = listable([{str(i): f for i, f in enumerate(families)}])
    assert answer is not None
    return [hints for hints in answer.values() if hints is not None]


@given(cpu_requests())
def test_a_family_knows_its_best_hint(case: tuple[CpuTopology, CpuSet, CpuSet, int]) -> None:
    whole = cpu_hints(*case, by_socket=True)
    family = lazily(case)
    assert bool(family) == bool(whole)
    if isinstance(family, SocketFamily):
        assert tuple(family) == whole
        ranked = sorted(
            whole, key=lambda h: (not h.preferred, h.affinity and (len(h.affinity), h.affinity.bits))
        )
        assert family.best() == ranked[0]
        assert family.best_few(4)[0] == ranked[0]
        assert merged(short(family)) == merged([whole])
        node = ranked[-1].affinity
        around = Mask([node.first()]) if node else Mask()
        inside = [h for h in ranked if h.affinity and around <= h.affinity]
        assert family.best(around) == inside[0]


@given(
    cpu_requests(),
    st.lists(st.integers(0, 5), min_size=10, max_size=10),
    st.integers(1, 20),
    st.integers(0, 3),
)
def test_a_preferred_result_is_found_together_with_memory(
    case: tuple[CpuTopology, CpuSet, CpuSet, int], free: list[int], want: int, used: int
) -> None:
    whole = cpu_hints(*case, by_socket=True)
    nodes = tuple(case[0].nodes)
    free = free[: len(nodes)]
    assume(whole and sum(free) >= want)
    capacity = sorted((amount + used for amount in free), reverse=True)
    size = next(n for n in range(1, len(nodes) + 1) if sum(capacity[:n]) >= want)
    memory = Family(
        (), nodes, 1, (Demand(want, tuple((1 << i, n) for i, n in zip(nodes, free, strict=True))),), size
    )
    expected = merged([whole, tuple(memory)])
    result = merged(short(lazily(case), memory))
    assert result.preferred == expected.preferred
    if expected.preferred:
        assert result == expected


@given(
    cpu_requests(),
    st.lists(
        st.tuples(st.sets(st.integers(0, 9), min_size=1).map(to_bits), st.booleans()), min_size=1, max_size=4
    ),
)
def test_through_a_window(
    case: tuple[CpuTopology, CpuSet, CpuSet, int], window: list[tuple[int, bool]]
) -> None:
    seen = [hint(bits, preferred) for bits, preferred in window]
    whole = cpu_hints(*case, by_socket=True)
    assume(whole)
    (answer,) = listable([{"window": seen, "cpu": lazily(case)}])
    assert answer is not None
    assert merged([seen, answer["cpu"] or ()]) == merged([seen, whole])


def grid(sockets: int, nodes: int, cpus: int = 1) -> CpuTopology:
    total = sockets * nodes * cpus
    return CpuTopology.of_rows(CpuRow(c, c, c // (nodes * cpus), c // cpus, 0) for c in range(total))


@given(st.integers(0, 2**12 - 1), st.integers(1, 12))
def test_many_equal_sockets_still_give_an_aligned_set(free: int, want: int) -> None:
    topo = grid(6, 2)
    case = (topo, CpuSet.from_bits(free), CpuSet(), want)
    whole = cpu_hints(*case, by_socket=True)
    with mock.patch.object(sockets_room, "CHOICES", 0):
        family = lazily(case)
        best = family.best() if isinstance(family, Family) else None
    assert (best is None) == (not whole)
    if best is not None:
        assert best.preferred == any(h.preferred for h in whole)


def test_a_large_machine() -> None:
    topo = grid(32, 2, 8)
    busy = CpuSet(cpu for cpu in range(512) if cpu % 16 not in (3, 4, 5, 12, 13, 14))
    family = cpu_hints(topo, topo.cpus - busy, CpuSet(), 6, by_socket=True)
    assert isinstance(family, SocketFamily)
    assert family.best() == hint(0b11, preferred=True), "two half-used nodes of one socket"
    apart = cpu_hints(topo, topo.cpus - busy, CpuSet(), 96, by_socket=True)
    assert isinstance(apart, SocketFamily)
    with pytest.raises(OverflowError):
        len(apart)
    result = apart.best()
    assert result is not None
    assert (len(result.affinity or ()), result.preferred) == (32, False), (
        "16 sockets are needed now, and the target is 6"
    )


def test_alignment_by_socket_is_recognized() -> None:
    topo = grid(3, 2)
    sockets = Sockets.of(topo, 3)
    assert sockets.aligned_socket_count == 2
    aligned = [bits for bits in range(64) if sockets.is_aligned(bits)]
    assert len(aligned) == 3 * 9, "CPUs of both nodes of two sockets"
    assert (
        Sockets.of(CpuTopology.of_rows(CpuRow(c, c, c, 0, 0) for c in range(4)), 1).aligned_socket_count == 0
    )
    assert list(Sockets((), 1).choices(())) == []
    assert sum(1 for _ in itertools.chain(sockets.choices(()))) == 3
