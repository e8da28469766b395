from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.cgroup.v2_values import parse_cpu_usage, parse_quota, quota_text
from proxy.model.errors import CgroupError
from tests.oracles.cgroup_v2_values import (
    CpuTimes,
    Throttling,
    cpu_times,
    memory_figures,
    memory_pages,
    shares_of,
    throttling,
    weight_of,
)

STAT = (
    "usage_usec 6\nuser_usec 1\nsystem_usec 2\nnr_periods 3\nnr_throttled 4\nthrottled_usec 5\nnr_bursts 9\n"
)


def test_a_quota_is_read_and_written_as_in_cpu_max() -> None:
    assert parse_quota("150000 100000\n") == 150_000
    assert parse_quota("max 100000") == -1
    assert (quota_text(-1), quota_text(2000)) == ("max", "2000")


@pytest.mark.parametrize("text", ["", "max", "1 2 3", "x 100000", "1.0 100000", "1_0 100000"])
def test_a_cpu_max_that_is_not_a_quota_is_refused(text: str) -> None:
    with pytest.raises(CgroupError, match=r"^cannot read cpu\.max: "):
        parse_quota(text)


def test_the_limits_of_weights_and_shares_correspond() -> None:
    assert (shares_of(1), shares_of(10_000)) == (2, 262_144)
    assert (weight_of(2), weight_of("262144")) == (1, 10_000)
    assert weight_of("1024") == 39


@given(st.integers(1, 10_000))
def test_a_weight_comes_back_no_larger(weight: int) -> None:
    assert 0 <= weight - weight_of(shares_of(weight)) <= 1
    assert weight == 1 or shares_of(weight) > shares_of(weight - 1)


@pytest.mark.parametrize("weight", [0, -1, 10_001])
def test_weights_out_of_range_are_refused(weight: int) -> None:
    with pytest.raises(CgroupError, match=f"cannot turn weight {weight} into shares"):
        shares_of(weight)


@pytest.mark.parametrize("shares", ["1", 262_145, "x", ""])
def test_shares_that_are_no_number_or_out_of_range_are_refused(shares: str | int) -> None:
    with pytest.raises(CgroupError, match="cannot"):
        weight_of(shares)


def test_cpu_times_are_read_from_cpu_stat() -> None:
    assert cpu_times(STAT) == CpuTimes(6, 1, 2, 3, 4, 5)
    assert parse_cpu_usage(STAT) == 6000
    assert throttling(STAT) == Throttling(3, 4, 5000)
    with pytest.raises(CgroupError, match=r"^cannot read cpu\.stat: it has no nr_periods$"):
        throttling("usage_usec 1")
    with pytest.raises(CgroupError, match=r"^cannot read cpu\.stat: 'x' is not a whole number$"):
        parse_cpu_usage("usage_usec x")
    with pytest.raises(CgroupError, match=r"^cannot read cpu\.stat: -1 is not a time$"):
        parse_cpu_usage("usage_usec -1")
    assert parse_cpu_usage("usage_usec 0") == 0


def test_memory_figures_are_read_and_a_missing_one_is_named() -> None:
    lines = "anon 1\nfile 2\ninactive_anon 3\nactive_anon 4\ninactive_file 5\nactive_file 6\nunevictable 7\n"
    reported = memory_figures(lines)
    assert (reported["rss"], reported["cache"], reported["inactive_file"], reported["unevictable"]) == (
        1,
        2,
        5,
        7,
    )
    with pytest.raises(CgroupError, match=r"it has no unevictable$"):
        memory_figures(lines.replace("unevictable", "slab"))


def test_pages_by_node() -> None:
    text = "anon N0=8191 N3=4096\nfile N0=4095 N3=4096\nshmem N0=4096 N3=0\n"
    assert memory_pages(text, (0, 3)) == {0: 1, 3: 2}
    assert memory_pages("anon N0=4096\nfile N0=0") == {0: 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "anon N0=1",
        "file N0=1\nanon N0=1",
        "anon N0=1 N3=1\nfile N0=1 N3=1",
        "anon N0=x\nfile N0=1",
        "anon N0=1\nfile N0=1 N1=1",
        "anon\nfile",
    ],
)
def test_pages_that_cannot_be_read(text: str) -> None:
    with pytest.raises(CgroupError, match=r"^cannot read memory\.numa_stat: "):
        memory_pages(text)
