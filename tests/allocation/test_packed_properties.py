"""The packed allocator held against its rules written down plainly, and the nodes that its CPUs are on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_hints import cpu_hints
from proxy.allocation.cpu_policy import CpuPolicy, CpuState
from proxy.allocation.cpu_static import take_under
from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.distributed import take_distributed
from proxy.allocation.packed import take_packed
from proxy.allocation.policies import decide
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import CpuOptions, TopologyPolicy

Sets = dict[int, set[int]]


@st.composite
def topologies(draw: st.DrawFn) -> CpuTopology:
    """Return a small machine: cores of one or two threads, nodes in sockets or sockets in nodes."""
    inner = draw(st.integers(1, 4))
    outer_of = [draw(st.integers(0, 2)) for _ in range(inner)]
    nodes_inside = draw(st.booleans())
    cores = draw(st.lists(st.tuples(st.integers(0, inner - 1), st.integers(0, 1)), min_size=1, max_size=8))
    threads = [draw(st.integers(1, 2)) for _ in cores] if draw(st.booleans()) else [2] * len(cores)
    ids = draw(st.permutations(range(sum(threads))))
    rows, taken = [], 0
    for (place, cache), count in zip(cores, threads, strict=True):
        cpus = ids[taken : taken + count]
        taken += count
        outside = outer_of[place]
        node, socket = (place, outside) if nodes_inside else (outside, place)
        rows += [CpuRow(cpu, min(cpus), socket, node, 2 * place + cache) for cpu in cpus]
    return CpuTopology.of_rows(rows)


def free_of(topo: CpuTopology, bits: int) -> CpuSet:
    """Return some CPUs of a machine."""
    return CpuSet(cpu for i, cpu in enumerate(topo.cpus) if bits >> i & 1)


class Plain:
    """kubernetes v1.36 pkg/kubelet/cm/cpumanager/cpu_assignment.go, takeByTopologyNUMAPacked, with sets."""

    def __init__(self, topo: CpuTopology, available: CpuSet, n: int) -> None:
        self.free, self.need, self.taken = set(available), n, set[int]()
        kinds = (topo.cores, topo.sockets, topo.nodes, topo.uncores)
        self.cores, self.sockets, self.nodes, self.uncores = (
            {unit: set(CpuSet.from_bits(bits)) for unit, bits in kind.items()} for kind in kinds
        )
        self.threads = max(len(cpus) for cpus in self.cores.values())
        self.uncore_size = len(topo.cpus) // len(self.uncores)
        self.nodes_first = len(self.sockets) >= len(self.nodes)

    def sort(self, units: Sets, within: set[int]) -> list[int]:
        """Fewest free CPUs first, ties by id; only units with a free CPU in ``within``."""
        found = [unit for unit, cpus in units.items() if cpus & within & self.free]
        return sorted(found, key=lambda unit: (len(units[unit] & self.free), unit))

    def inside(self, units: Sets, outer: Sets, order: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(unit for o in order for unit in self.sort(units, outer[o])))

    def orders(self) -> tuple[list[int], list[int], list[int]]:
        """Sockets, nodes and cores in their order."""
        if self.nodes_first:
            nodes = self.sort(self.nodes, self.free)
            sockets = self.inside(self.sockets, self.nodes, nodes)
            return sockets, nodes, self.inside(self.cores, self.sockets, sockets)
        sockets = self.sort(self.sockets, self.free)
        nodes = self.inside(self.nodes, self.sockets, sockets)
        return sockets, nodes, self.inside(self.cores, self.nodes, nodes)

    def take(self, cpus: set[int]) -> None:
        self.taken |= cpus
        self.free -= cpus
        self.need -= len(cpus)

    def whole(self, units: Sets, order: list[int]) -> None:
        for unit in [unit for unit in order if units[unit] <= self.free]:
            if len(units[unit]) <= self.need:
                self.take(units[unit])

    def caches(self) -> list[int]:
        return self.inside(self.uncores, self.nodes, self.orders()[1])

    def by_cache(self) -> None:
        for uncore in self.caches():
            if self.need >= self.uncore_size:
                self.whole(self.uncores, self.caches())
            cores = sorted(c for c in self.cores if self.cores[c] & self.uncores[uncore] & self.free)
            part = set[int]().union(
                *(self.cores[c] & self.free for c in cores[: -(-self.need // self.threads)])
            )
            if self.need % 2 and self.threads > 1 and len(part) > self.need:
                part.remove(max(part))
            if len(part) == self.need:
                self.take(part)

    def run(self, *, uncore: bool, spread: bool) -> set[int]:
        levels = [
            lambda: self.whole(self.sockets, self.orders()[0]),
            lambda: self.whole(self.nodes, self.orders()[1]),
        ]
        for level in reversed(levels) if self.nodes_first else levels:
            level()
        if uncore and self.need:
            self.by_cache()
        if not spread:
            self.whole(self.cores, self.orders()[2])
        sockets, _, cores = self.orders()
        singles = [self.sockets[s] for s in sockets] if spread else [self.cores[c] for c in cores]
        for cpu in [cpu for cpus in singles for cpu in sorted(cpus & self.free)]:
            if self.need:
                self.take({cpu})
        return self.taken


@given(topologies(), st.integers(0), st.integers(0, 16), st.booleans(), st.booleans())
def test_steps_match_the_plain_rules(
    topo: CpuTopology, bits: int, n: int, uncore: bool, spread: bool
) -> None:
    free = free_of(topo, bits)
    n = min(n, len(free))
    expected = Plain(topo, free, n).run(uncore=uncore, spread=spread)
    assert set(take_packed(topo, free, n, prefer_uncore=uncore, spread=spread)) == expected


@given(topologies(), st.integers(0), st.integers(1, 16), st.sampled_from([1, 2]))
def test_spreading_takes_the_same_from_as_many_nodes(
    topo: CpuTopology, bits: int, n: int, group: int
) -> None:
    free = free_of(topo, bits)
    n = min(n, len(free))
    taken = take_distributed(topo, free, n, group=group)
    assert taken <= free
    assert len(taken) == n
    assert taken == take_distributed(topo, free, n, group=group), "the same again"


OPTIONS = st.sampled_from(
    [
        CpuOptions(),
        CpuOptions(prefer_align_cpus_by_uncorecache=True),
        CpuOptions(distribute_cpus_across_cores=True),
        CpuOptions(distribute_cpus_across_numa=True),
    ]
)


@given(topologies(), st.integers(0), st.integers(1, 16), OPTIONS)
def test_under_its_own_hint_a_request_is_on_as_few_nodes_as_can_be(
    topo: CpuTopology, bits: int, n: int, options: CpuOptions
) -> None:
    free = free_of(topo, bits)
    hints = cpu_hints(topo, free, CpuSet(), n)
    parts = [bits & free.bits for bits in topo.nodes.values()]
    fewest = next(
        (
            size
            for size in range(1, len(parts) + 1)
            if any(
                sum(part.bit_count() for part in some) >= n for some in itertools.combinations(parts, size)
            )
        ),
        None,
    )
    assert bool(hints) == (fewest is not None)
    if fewest is None:
        return
    merged = decide(TopologyPolicy.BEST_EFFORT, [{"cpu": hints}], Mask(topo.nodes)).hint
    state, policy = CpuState(free), CpuPolicy.of(topo, options)
    taken = take_under(policy, state, n, merged.affinity, CpuSet())
    assert taken <= free
    assert len(taken) == n
    touched = [node for node, part in topo.nodes.items() if part & taken.bits]
    assert len(touched) == fewest
    assert Mask(touched) == merged.affinity
    smallest_empty = next(
        size
        for size in range(1, len(parts) + 1)
        if size == len(parts)
        or any(
            sum(b.bit_count() for b in some) >= n
            for some in itertools.combinations(topo.nodes.values(), size)
        )
    )
    assert merged.preferred == (fewest == smallest_empty), "as few as on an empty machine"
