"""The CPUs in use, computed from two readings of counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.be_usage import (
    ABOVE,
    Rates,
    Shares,
    UsageGroup,
    UsageQuery,
    UsageReading,
    rates,
    shares_of,
    usage_of,
    usage_of_removed,
    usage_query,
)
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.pools.be_suppression import Usage
from proxy.topology.regular_machine import regular_machine

S = 1_000_000_000
CPUS = 16


def reading(at: float, node: float, **groups: dict[str, float]) -> UsageReading:
    """Return a reading; arguments are in seconds, counters in nanoseconds."""
    each = {key: {path: int(used * S) for path, used in usage.items()} for key, usage in groups.items()}
    return UsageReading(int(at * S), int(node * S), each)


def between(before: UsageReading, after: UsageReading) -> Rates:
    found = rates(before, after, CPUS)
    assert found is not None
    return found


def test_usage_is_the_growth_of_a_counter_divided_by_the_time() -> None:
    found = between(reading(10, 100, a={"x": 5}), reading(12, 108, a={"x": 8}))
    assert found == Rates(4.0, {"a": 1.5})


def test_usage_of_all_cgroups_of_a_pod_is_added_up() -> None:
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
def test_cgroups_that_appear_or_vanish_between_readings(
    before: dict[str, float], now: float, used: float | None
) -> None:
    found = between(reading(0, 0, a=before), reading(1, 5, a={"x": now}))
    assert found.groups.get("a") == used


def test_a_container_that_has_gone_is_not_counted() -> None:
    assert between(reading(0, 0, a={"x": 1}), reading(1, 1)).groups == {}


@pytest.mark.parametrize(
    ("at", "node"),
    [
        pytest.param(0.0, 1.0, id="at one moment"),
        pytest.param(0.005, 1.0, id="closer than the node's counter can show"),
        pytest.param(-5.0, 1.0, id="a clock that jumped"),
        pytest.param(1.0, -1.0, id="the node's counter went backwards"),
    ],
)
def test_invalid_readings_yield_no_usage(at: float, node: float) -> None:
    assert rates(reading(100, 100), reading(100 + at, 100 + node), CPUS) is None


def test_readings_ten_milliseconds_apart_yield_a_usage() -> None:
    assert between(UsageReading(0, 0, {}), UsageReading(10_000_000, 10_000_000, {})).node == 1.0


def test_usage_of_pods_that_have_gone_is_counted() -> None:
    groups = {"a": 1.0, "b": 2.0, "other": 9.0}
    assert usage_of_removed(5.0, ("a", "b", "unknown"), groups) == 2.0
    assert usage_of_removed(2.5, ("a", "b"), groups) == 0.0  # two files are never read at one moment
    assert usage_of_removed(None, ("a",), groups) == 0.0


COUNTER = st.integers(0, 2**62)


@given(
    st.integers(0, 2**62),
    st.integers(-(10**12), 10**12),
    st.tuples(COUNTER, COUNTER),
    st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xy"), COUNTER, max_size=2)),
    st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xy"), COUNTER, max_size=2)),
)
def test_usage_is_never_negative_or_above_the_size_of_the_machine(
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


MACHINE = regular_machine(1, 1, 4, 2)  # CPUs 0-7
BEST, BURST = KubeQos.BEST_EFFORT, KubeQos.BURSTABLE


def node(*pods: Pod, containers: tuple[Container, ...] = (), **rules: CpuSet) -> NodeState:
    return NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE), **rules), pods, containers)  # type: ignore[arg-type]


def pod(uid: str, parent: str, qos: QosClass = QosClass.NONE, kube: KubeQos = BURST) -> Pod:
    return Pod(f"s-{uid}", uid, "ns", uid, 0, qos, kube, parent)


def shares(key: str, of: Pod) -> Container:
    return Container(key, key, of, Request(), Placement(Pool.SHARED, CpuSet(), Mask((0,))), Phase.RUNNING)


def test_the_counters_of_all_pods_are_read() -> None:
    """The usage of a pod without a cgroup of its own is the sum of its containers."""
    batch, web = pod("a", "/b/a", QosClass.BE), pod("b", "/b/b", QosClass.LS)
    best, second = pod("d", "/e/d", kube=BEST), pod("c", "/e/c", QosClass.LS, BEST)
    bare, other = pod("e", "", kube=BEST), pod("f", "")
    containers = (shares("x", bare), shares("z", web))
    assert usage_query(node(batch, web, best, second, bare, other, containers=containers)) == UsageQuery(
        {
            **{key: UsageGroup(key) for key in ("/b/a", "/b/b", "/e/d", "/e/c")},
            "s-e": UsageGroup("", ("x",)),
            "s-f": UsageGroup(""),
        },
        be=frozenset({"/b/a", "/e/d", "/e/c", "s-e"}),
        inside=frozenset({"/e/c", "/e/d"}),
        parents=("/e/c", "/e/d"),
    )


def test_a_pod_without_a_cgroup_is_read_by_the_cgroups_of_its_containers() -> None:
    bare = pod("e", "")
    there = node(bare, containers=(shares("x", bare), shares("y", bare)))
    assert {*usage_query(there).groups["s-e"].containers} == {"x", "y"}


@pytest.mark.parametrize("turned", [False, True])
def test_a_cgroup_shared_with_pods_of_other_classes_is_not_counted_as_be(turned: bool) -> None:
    there = (pod("a", "/b", QosClass.BE), pod("b", "/b", QosClass.LS))
    found = usage_query(node(*(reversed(there) if turned else there)))
    assert (found.groups, found.be) == ({"/b": UsageGroup("/b")}, frozenset())


@pytest.mark.parametrize(("above", "lost"), [(None, 0.0), (1.5, 0.0), (2.0, 0.5), (1.0, 0.0)])
def test_the_budget_counts_online_cpus_and_pods_that_have_gone(above: float | None, lost: float) -> None:
    query = UsageQuery({}, frozenset({"a"}), frozenset({"a"}), ("a",))
    used = {"a": 1.5, "b": 2.0}
    read = Rates(6.0, used if above is None else {**used, ABOVE: above})
    state = node(reserved=CpuSet((0, 9)), node_reservation=CpuSet((1, 2, 10)))
    usage = usage_of(state, query, read)
    assert (usage.capacity, usage.allocatable, usage.reservation, usage.node) == (8000, 7000, 2000, 6.0)
    pods_of_be = {key: its for key, its in usage.pods.items() if key in usage.be_pods}
    assert sum(pods_of_be.values()) == 1.5 + lost
    assert len(pods_of_be) == (2 if lost else 1)
    assert {key: its for key, its in usage.pods.items() if key not in usage.be_pods} == {"b": 2.0}
    assert shares_of(usage) == Shares(6.0, 1.5 + lost, 2.0, 6.0 - 3.5 - lost)


def test_the_system_uses_nothing_if_pods_seem_to_use_more_than_the_node() -> None:
    usage = Usage(8000, 8000, 3.0, pods={"a": 1.0, "b": 2.5}, be_pods=frozenset("a"))
    assert shares_of(usage) == Shares(3.0, 1.0, 2.5, 0.0)
