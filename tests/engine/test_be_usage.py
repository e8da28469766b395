"""From two readings to CPUs in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.be_usage import Rates, UsageReading, gone, rates

S = 1_000_000_000
CPUS = 16


def reading(at: float, node: float, **groups: dict[str, float]) -> UsageReading:
    """Seconds in, nanoseconds out."""
    each = {key: {path: int(used * S) for path, used in usage.items()} for key, usage in groups.items()}
    return UsageReading(int(at * S), int(node * S), each)


def between(before: UsageReading, after: UsageReading) -> Rates:
    found = rates(before, after, CPUS)
    assert found is not None
    return found


def test_what_a_counter_grew_by_over_the_time_between() -> None:
    found = between(reading(10, 100, a={"x": 5}), reading(12, 108, a={"x": 8}))
    assert found == Rates(4.0, {"a": 1.5})


def test_groups_of_one_pod_count_together() -> None:
    found = between(reading(0, 0, a={"x": 1, "y": 1}), reading(1, 9, a={"x": 2, "y": 4}))
    assert found.groups == {"a": 4.0}


@pytest.mark.parametrize(
    ("before", "now", "used"),
    [
        pytest.param({}, 3, 3.0, id="came since"),
        pytest.param({"x": 50}, 3, 3.0, id="removed and made again"),
        pytest.param({}, 400, None, id="older than what we know of it"),
        pytest.param({"x": 900}, 400, None, id="backwards, and more than the machine could do"),
    ],
)
def test_groups_come_and_go(before: dict[str, float], now: float, used: float | None) -> None:
    found = between(reading(0, 0, a=before), reading(1, 5, a={"x": now}))
    assert found.groups.get("a") == used


def test_a_container_that_is_gone_is_left_out() -> None:
    assert between(reading(0, 0, a={"x": 1}), reading(1, 1)).groups == {}


@pytest.mark.parametrize(
    ("at", "node"),
    [
        pytest.param(0.0, 1.0, id="at one moment"),
        pytest.param(0.005, 1.0, id="closer than the node's counter can tell"),
        pytest.param(-5.0, 1.0, id="a clock that jumped"),
        pytest.param(1.0, -1.0, id="the node's counter went backwards"),
    ],
)
def test_readings_without_content(at: float, node: float) -> None:
    assert rates(reading(100, 100), reading(100 + at, 100 + node), CPUS) is None


def test_what_pods_used_that_are_gone() -> None:
    groups = {"a": 1.0, "b": 2.0, "other": 9.0}
    assert gone(5.0, ("a", "b", "unknown"), groups) == 2.0
    assert gone(2.5, ("a", "b"), groups) == 0.0  # two files are never read at one moment
    assert gone(None, ("a",), groups) == 0.0


COUNTER = st.integers(0, 2**62)


@given(
    st.integers(0, 2**62),
    st.integers(-(10**12), 10**12),
    st.tuples(COUNTER, COUNTER),
    st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xy"), COUNTER, max_size=2)),
    st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xy"), COUNTER, max_size=2)),
)
def test_usage_is_never_negative_or_above_the_machines(
    at: int,
    step: int,
    node: tuple[int, int],
    before: dict[str, dict[str, int]],
    after: dict[str, dict[str, int]],
) -> None:
    found = rates(UsageReading(at, node[0], before), UsageReading(at + step, node[1], after), CPUS)
    if found is None:
        assert step < 10_000_000 or node[1] < node[0]
        return
    assert 0 <= found.node <= CPUS
    assert all(0 <= used <= CPUS for used in found.groups.values())
    assert found.groups.keys() <= after.keys()


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, CPUS)), min_size=1, max_size=20))
def test_rates_add_up_to_the_counter(steps: list[tuple[int, float]]) -> None:
    at, used, total = 0, 0, 0.0
    last = UsageReading(0, 0, {"a": {"x": 0}})
    for tenths, rate in steps:
        elapsed = tenths * S // 10
        at, used = at + elapsed, used + int(rate * elapsed)
        now = UsageReading(at, used, {"a": {"x": used}})
        total += between(last, now).groups["a"] * elapsed
        last = now
    assert total == pytest.approx(used, rel=1e-6, abs=100)
