from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.koordinator.later_containers import Stage, fit, fullest_cores
from proxy.model.idset import CpuSet

CORES = st.lists(st.integers(0, 3), min_size=1, max_size=4)
"""The free CPUs of each core, which has one more."""
STAGE = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def machine(sizes: list[int]) -> tuple[CpuTopology, CpuSet]:
    """Return cores, and the free CPUs of them: all but the first of each core."""
    rows = [
        CpuRow(4 * core + thread, core, 0, 0, 0)
        for core, size in enumerate(sizes)
        for thread in range(size + 1)
    ]
    return CpuTopology.of_rows(rows), CpuSet(row.cpu for row in rows if row.cpu % 4)


def possible(sizes: tuple[int, ...], stage: Stage) -> bool:
    """Try every choice of cores for the first container, then for the next one, and so on."""
    if not stage:
        return True
    usable = [core for core, size in enumerate(sizes) if size]
    return any(
        possible(tuple(size - (core in chosen) for core, size in enumerate(sizes)), stage[1:])
        for chosen in combinations(usable, stage[0])
    )


@given(CORES, STAGE)
def test_containers_fit_if_some_choice_of_cores_serves_them_all(sizes: list[int], stage: Stage) -> None:
    topology, free = machine(sizes)
    assert fit(topology, free, [stage]) == possible(tuple(sizes), stage)


@given(CORES, st.lists(STAGE, max_size=3))
def test_every_stage_has_all_free_cpus(sizes: list[int], stages: list[Stage]) -> None:
    topology, free = machine(sizes)
    assert fit(topology, free, stages) == all(fit(topology, free, [stage]) for stage in stages)


@given(CORES, st.integers(1, 4), STAGE)
def test_no_choice_leaves_more_than_one_from_the_fullest_cores(
    sizes: list[int], count: int, stage: Stage
) -> None:
    topology, free = machine(sizes)
    must, may = fullest_cores(topology, free, count)
    first, rest = topology.one_of_each_core(must), topology.one_of_each_core(may)
    ones = topology.one_of_each_core(free)
    if len(ones) < count:
        assert first == ones
        return
    assert len(first) < count <= len(first) + len(rest)
    left = {
        fit(topology, free - first - CpuSet(chosen), [stage])
        for chosen in combinations(rest, count - len(first))
    }
    assert left == {any(fit(topology, free - CpuSet(any_), [stage]) for any_ in combinations(ones, count))}
