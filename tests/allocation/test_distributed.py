"""The distributing allocator against plainly written rules, and its edge cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.allocation import even_split
from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.distributed import take_distributed
from proxy.allocation.even_split import Split, split
from proxy.allocation.packed import NotEnoughCpus, take_packed
from proxy.model.idset import CpuSet


def machine(nodes: int, cores: int = 4, threads: int = 2, sockets: int = 1) -> CpuTopology:
    """Build a machine whose siblings are neighbours: core c has CPUs c*threads and up."""
    each = nodes // sockets
    rows = [
        CpuRow(c * threads + t, c * threads, c // cores // each, c // cores, 0)
        for c in range(nodes * cores)
        for t in range(threads)
    ]
    return CpuTopology.of_rows(rows)


def take(topo: CpuTopology, available: str, n: int, group: int = 1) -> str:
    return str(take_distributed(topo, CpuSet.parse(available), n, group=group))


def rounded(x: float) -> float:
    return math.floor(x * 1000 + 0.5) / 1000


def deviation(after: Sequence[int]) -> float:
    mean = rounded(sum(after) / len(after))
    return rounded(math.sqrt(sum((x - mean) ** 2 for x in after) / len(after)))


def rounds(after: list[int], extra: Sequence[int], rest: int, group: int) -> list[int] | None:
    """Distribute; return the groups that gave CPUs, or None if there are too few groups."""
    gave = []
    while rest:
        before = rest
        for i in extra:
            if rest and after[i] >= group:
                after[i] -= group
                rest -= group
                gave.append(i)
        if rest == before:
            return None
    return gave


def plain(counts: Sequence[int], n: int, group: int, fewest: int) -> Split | None:
    """Implement the rules without any shortcut."""
    for k in range(max(fewest, 1), min(n // group, len(counts)) + 1):
        each = n // k // group * group
        best: tuple[float, Split] | None = None
        for members in combinations(range(len(counts)), k):
            if any(counts[i] < each for i in members) or sum(counts[i] // group for i in members) * group < n:
                continue
            after = [c - each * (i in members) for i, c in enumerate(counts)]
            rest = n - each * k
            givers = [i for i in members if after[i] >= group] if rest else []
            sizes = range(len(givers), 0, -1) if rest else [0]
            for extra in (e for size in sizes for e in combinations(givers, size)):
                left = list(after)
                gave = rounds(left, extra, rest, group)
                if gave is not None and (best is None or deviation(left) < best[0]):
                    best = deviation(left), Split(each, members, tuple(gave))
        if best:
            return best[1]
    return None


@given(
    # One very large count makes the deviations of many choices equal to 3 decimals.
    st.lists(st.integers(1, 9) | st.sampled_from([3000, 5000]), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 3),
)
def test_a_split_is_the_one_that_the_rules_choose(
    counts: list[int], groups: int, group: int, fewest: int
) -> None:
    n = groups * group
    if n > sum(counts):
        return
    assert split(counts, n, group, fewest) == plain(counts, n, group, fewest)


@pytest.mark.parametrize(
    ("available", "n", "group", "expected", "why"),
    [
        ("0-31", 0, 1, "", "nothing is wanted"),
        ("0-31", 8, 1, "0-7", "one node would do if it were empty, and it is"),
        ("0-31", 12, 1, "0-5,8-13", "half from each of two nodes"),
        ("2-31", 8, 1, "8-15", "one node that still can"),
        ("2-7,10-15,18-23,26-31", 8, 1, "2-5,10-13", "no node can alone: two, as much from each"),
        ("0-31", 10, 2, "0-5,8-11", "whole cores: the rest is one core, from the first"),
        ("0-31", 9, 2, "0-8", "not a whole number of cores: packed"),
        ("0-3,8-9,16-17", 7, 1, "0-2,8-9,16-17", "two from each of three, and the rest from the fullest"),
        ("0-2,8", 4, 1, "0-2,8", "two from each of two cannot be: packed"),
        ("0-7,40-47", 8, 1, "0-7", "CPUs that the machine does not have are ignored"),
    ],
)
def test_spreads_over_as_few_nodes_as_can_share(
    available: str, n: int, group: int, expected: str, why: str
) -> None:
    assert take(machine(4), available, n, group) == expected, why


def test_the_number_of_nodes_begins_with_what_nodes_have_on_average() -> None:
    topo = CpuTopology.of_rows(CpuRow(c, c, 0, int(c >= 10), 0) for c in range(16))  # ten and six CPUs
    assert take(topo, "0-15", 8) == "0-7"
    assert take(topo, "0-15", 9) == "0-4,10-13", "although node 0 has as many"


def test_the_remainder_is_taken_where_it_balances_the_nodes() -> None:
    # 3 from each leaves 3, 4, 6; of the ways to take two more, 3, 4, 4 is the most even one.
    assert split([6, 7, 9], 11, 1, 3) == Split(3, (0, 1, 2), (2, 2))


def test_rounds_end_when_whole_groups_run_out() -> None:
    assert split([5, 5, 5, 5], 14, 2, 4) == Split(2, (0, 1, 2, 3), (0, 1, 2))
    assert split([3, 3], 6, 2, 1) is None, "six CPUs are free, but only two groups"


def test_missing_cpus_and_invalid_requests_are_refused() -> None:
    with pytest.raises(NotEnoughCpus, match="requested=3, available=2"):
        take(machine(2), "0-1", 3)
    with pytest.raises(NotEnoughCpus, match="requested=4, available=3"):
        take(machine(2), "0-2,90", 4, 2)
    with pytest.raises(ValueError, match="cannot take -1 CPUs"):
        take(machine(2), "0-1", -1)
    with pytest.raises(ValueError, match="groups of 0"):
        take(machine(2), "0-1", 1, 0)


def test_many_different_nodes_are_split_quickly() -> None:
    counts = list(range(20, 84))  # 64 nodes, no two alike
    assert split(counts, 32 * 20, 1, 32) == Split(20, tuple(range(32, 64))), "the fullest"
    odd = split(counts, 32 * 20 + 5, 1, 32)
    assert odd == Split(20, tuple(range(32, 64)), (63, 62, 63, 61, 62)), (
        "until the nodes have equally many free CPUs"
    )


@given(
    st.lists(st.integers(1, 12), min_size=9, max_size=10),
    st.integers(1, 12),
    st.sampled_from([1, 2]),
    st.integers(2, 4),
)
@settings(max_examples=40)
def test_with_more_nodes_than_kubelets_limit_it_is_as_even(
    counts: list[int], groups: int, group: int, fewest: int
) -> None:
    n = groups * group
    if n > sum(counts):
        return

    def spread(found: Split) -> float:
        left = [
            c - found.per_node * (i in found.members) - group * found.extra.count(i)
            for i, c in enumerate(counts)
        ]
        assert sum(left) == sum(counts) - n
        assert min(left) >= 0
        assert set(found.extra) <= set(found.members)
        return deviation(left)

    expected = plain(counts, n, group, fewest)
    full = split(counts, n, group, fewest)
    with mock.patch.object(even_split, "LIMIT", 0):
        soon = split(counts, n, group, fewest)
    with mock.patch.object(even_split, "LIMIT", 10**9):
        assert split(counts, n, group, fewest) == expected
    assert (full is None) == (soon is None) == (expected is None)
    if expected and full and soon:
        assert len(full.members) == len(soon.members) == len(expected.members)
        assert max(spread(full), spread(soon)) <= spread(expected)


def test_many_equal_nodes_are_few_choices() -> None:
    assert split([8] * 64, 12, 2, 2) == Split(6, (0, 1))
    assert split([8] * 64, 14, 2, 2) == Split(6, (0, 1), (0,))


MACHINES = [machine(4), machine(8, 3, 2, 2), machine(1), machine(6, 2, 1, 3), machine(2, 4, 4)]


@given(st.sampled_from(MACHINES), st.integers(0), st.integers(0, 60), st.sampled_from([1, 2, 4]))
def test_allocations_have_the_requested_size_and_use_available_cpus(
    topo: CpuTopology, pick: int, n: int, group: int
) -> None:
    available = CpuSet.from_bits(pick & topo.cpus.bits)
    if n > len(available):
        with pytest.raises(NotEnoughCpus):
            take_distributed(topo, available, n, group=group)
        return
    taken = take_distributed(topo, available, n, group=group)
    assert len(taken) == n
    assert taken <= available


@given(st.sampled_from(MACHINES), st.integers(1, 40))
def test_an_idle_machine_gives_from_no_more_nodes_than_packed(topo: CpuTopology, n: int) -> None:
    if n > len(topo.cpus):
        return

    def nodes(cpus: CpuSet) -> int:
        return sum(1 for bits in topo.nodes.values() if bits & cpus.bits)

    assert nodes(take_distributed(topo, topo.cpus, n)) <= nodes(take_packed(topo, topo.cpus, n))
