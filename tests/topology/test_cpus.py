from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.topology.cpus import group_by_key, group_cpus


def test_agreeing_sets_are_the_groups() -> None:
    reported = {0: 0b0101, 2: 0b0101, 1: 0b1010, 3: 0b1010}
    assert group_cpus(reported) == reported


def test_a_cpu_belongs_to_the_set_that_most_members_name() -> None:
    reported = {0: 0b0111, 1: 0b0111, 2: 0b0100, 3: 0b1000}
    assert group_cpus(reported) == {0: 0b0111, 1: 0b0111, 2: 0b0111, 3: 0b1000}


def test_a_cpus_own_set_wins_a_tie() -> None:
    assert group_cpus({0: 0b11, 1: 0b10}) == {0: 0b01, 1: 0b10}


def test_groups_hold_only_cpus_that_reported_something() -> None:
    assert group_cpus({0: 0b111, 1: 0b111}) == {0: 0b11, 1: 0b11}


def test_no_data_gives_no_groups() -> None:
    assert group_cpus({}) == {}
    assert group_by_key({}) == {}


def test_equal_keys_are_a_group() -> None:
    assert group_by_key({0: -1, 3: -1, 5: 7}) == {0: 0b1001, 3: 0b1001, 5: 0b100000}


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 1023)))
def test_groups_always_partition_the_cpus(raw: dict[int, int]) -> None:
    reported = {cpu: bits | 1 << cpu for cpu, bits in raw.items()}
    groups = group_cpus(reported)
    assert groups.keys() == reported.keys()
    for cpu, bits in groups.items():
        assert bits >> cpu & 1
        assert all(groups[other] == bits for other in reported if bits >> other & 1)
    assert set(groups) >= {i for bits in groups.values() for i in range(10) if bits >> i & 1}
