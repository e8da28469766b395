from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.pools.be_cpu_choice import pick
from proxy.pools.cpu_location import CpuLocation

# Two sockets with a node each, four cores, siblings four apart.
LOCATIONS = [CpuLocation(cpu, cpu % 4, cpu % 4 // 2, cpu % 4 // 2) for cpu in range(8)]
SOME = st.lists(st.sampled_from(LOCATIONS), unique=True)


def test_nodes_give_pairs_in_turn_and_then_a_single_cpu() -> None:
    assert pick(5, LOCATIONS) == (0, 4, 2, 6, 1)
    assert pick(1, LOCATIONS) == (0,)
    assert pick(2, LOCATIONS) == (0, 4)
    assert pick(8, reversed(LOCATIONS)) == (0, 4, 2, 6, 1, 5, 3, 7)


def test_nodes_take_turns_in_the_order_of_their_cpus() -> None:
    pairs = [CpuLocation(cpu, cpu // 2, 0, cpu // 4) for cpu in range(16)]  # 4 nodes of 2 cores
    assert pick(7, pairs) == (0, 1, 4, 5, 8, 9, 12), "the single one continues where the pairs ended"
    singles = [CpuLocation(cpu, cpu, 0, cpu // 2) for cpu in range(6)]  # 3 nodes of 2 CPUs
    assert pick(4, singles) == (0, 2, 4, 1)


def test_the_larger_bucket_first() -> None:
    uneven = [s for s in LOCATIONS if s.cpu not in (0, 1)]
    assert pick(3, uneven) == (2, 6, 4)
    assert pick(1, uneven) == (2,)


def test_three_threads_of_a_core_are_a_pair_and_a_single() -> None:
    locations = [CpuLocation(cpu, 0, 0, 0) for cpu in range(3)]
    assert pick(3, [*locations, CpuLocation(9, 5, 0, 0)]) == (0, 1, 2)


@given(st.integers(-1, 9), SOME)
def test_the_requested_number_of_cpus_or_none_is_chosen(count: int, locations: list[CpuLocation]) -> None:
    chosen = pick(count, locations)
    assert len(chosen) == (count if 0 < count <= len(locations) else 0)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {location.cpu for location in locations}
    assert pick(count, list(reversed(locations))) == chosen, "the order of the locations does not matter"


@given(st.integers(1, 8))
def test_nodes_differ_by_a_pair_at_most(count: int) -> None:
    nodes = Counter(LOCATIONS[cpu].node for cpu in pick(count, LOCATIONS))
    assert abs(nodes[0] - nodes[1]) <= 2
