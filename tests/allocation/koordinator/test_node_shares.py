"""The division of requests over nodes, nodes for bursts, amplified CPUs, and resource status texts."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.koordinator.burst import burst_nodes
from proxy.allocation.koordinator.node_shares import InsufficientError, cpu_unit, divide, whole_cpus
from proxy.allocation.koordinator.resource_status import show, status_text
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NumaStrategy
from proxy.pools.annotations import RESOURCE_STATUS, resource_status
from tests.oracles.amplified_cpu import amplified, counted_request, counted_usage


def cpu(*milli: int) -> dict[int, dict[str, int]]:
    return {node: {"cpu": amount} for node, amount in enumerate(milli)}


@pytest.mark.parametrize(
    ("available", "nodes", "wanted", "unit", "expected"),
    [
        (cpu(4000, 4000), "0-1", 5001, 1, {0: 2500, 1: 2501}),
        (cpu(4000, 1500), "0-1", 5000, 1, {0: 3500, 1: 1500}),
        (cpu(4000, 1500), "0-1", 5000, 1000, {0: 4000, 1: 1000}),
        (cpu(8000, 3000), "0-1", 8000, 2000, {0: 6000, 1: 2000}),
        (cpu(0, 9000, 1000, 4000), "1-3", 9000, 1000, {1: 4000, 2: 1000, 3: 4000}),
        (cpu(0, 9000), "0-1", 2000, 1000, {1: 2000}),
        (cpu(4000, 4000), "1", 4000, 1000, {1: 4000}),
    ],
)
def test_an_amount_is_divided_evenly_unless_a_node_has_too_little(
    available: dict[int, dict[str, int]], nodes: str, wanted: int, unit: int, expected: dict[int, int]
) -> None:
    shares = divide({"cpu": wanted}, available, Mask.parse(nodes), unit)
    assert {node: own["cpu"] for node, own in shares.items()} == expected
    assert list(shares) == sorted(shares)


def test_missing_resources_are_named() -> None:
    available = {0: {"cpu": 4000, "memory": 10}, 1: {"cpu": 1000, "gpu": 1}}
    wanted = {"memory": 11, "cpu": 6000, "gpu": 1, "disk": 5}
    with pytest.raises(InsufficientError) as caught:
        divide(wanted, available, Mask([0, 1]))
    assert caught.value.reasons == ("Insufficient NUMA cpu", "Insufficient NUMA memory")
    with pytest.raises(InsufficientError, match=r"^Insufficient NUMA gpu$"):
        divide({"gpu": 1}, available, Mask([0]))
    with pytest.raises(InsufficientError, match="cpu"):
        divide({"cpu": 2500}, available, Mask([0]), 1000)
    assert divide({"disk": 5}, available, Mask([0])) == {}, "no node has this resource"
    assert divide({"memory": 7}, available, Mask([0, 5])) == {0: {"memory": 7}}


def test_the_unit_is_a_whole_core_if_full_cores_are_required() -> None:
    assert cpu_unit(2, required_full=False) == 1000
    assert cpu_unit(2, required_full=True) == 2000
    assert whole_cpus({0: {"cpu": 2999}, 1: {"memory": 1}, 2: {"cpu": 999}, 3: {"cpu": 1000}}) == {0: 2, 3: 1}


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 9000), min_size=1, max_size=5),
    st.integers(0, 20),
    st.sampled_from((1, 1000, 2000)),
)
def test_succeeds_exactly_if_the_nodes_have_enough_units(has: dict[int, int], n: int, unit: int) -> None:
    available = {node: {"cpu": amount} for node, amount in has.items()}
    try:
        shares = divide({"cpu": n * unit}, available, Mask(has), unit)
    except InsufficientError:
        assert sum(amount // unit for amount in has.values()) < n
        return
    parts = {node: own["cpu"] for node, own in shares.items()}
    assert sum(parts.values()) == n * unit
    assert all(part <= has[node] and part % unit == 0 for node, part in parts.items())
    free = [parts.get(node, 0) for node in has if parts.get(node, 0) < has[node] // unit * unit]
    assert not free or max(parts.values(), default=0) - min(free) <= unit, "as even as the nodes permit"


def pools(*sizes: int) -> dict[int, CpuSet]:
    return {node: CpuSet(range(node * 100, node * 100 + size)) for node, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "limit", "tight", "loose"),
    [
        ((8, 4, 6), 4000, "1", "0"),
        ((8, 4, 6), 4001, "2", "0"),
        ((8, 4, 6), 9000, "1-2", "0,2"),
        ((8, 4, 6), 15000, "0-2", "0-2"),
        ((8, 4, 6), 19000, "0-2", "0-2"),
        ((8, 0, 6), None, "0,2", "0,2"),
        ((8, 0, 6), 0, "0,2", "0,2"),
        ((4, 4, 4), 4000, "0", "0"),
        ((0, 0), 1000, "", ""),
    ],
)
def test_pools_that_suit_a_limit(sizes: tuple[int, ...], limit: int | None, tight: str, loose: str) -> None:
    assert str(burst_nodes(pools(*sizes), limit)) == tight
    assert str(burst_nodes(pools(*sizes), limit, NumaStrategy.LEAST_ALLOCATED)) == loose


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(1, 20000),
    st.sampled_from((NumaStrategy.MOST_ALLOCATED, NumaStrategy.LEAST_ALLOCATED)),
)
def test_the_same_as_trying_all_choices(sizes: list[int], limit: int, strategy: NumaStrategy) -> None:
    sign = 1 if strategy is NumaStrategy.MOST_ALLOCATED else -1
    held = [node for node, size in enumerate(sizes) if size]
    choices = [
        (k, sign * total, Mask(nodes).bits)
        for k in range(1, len(held) + 1)
        for nodes in itertools.combinations(held, k)
        if (total := sum(sizes[node] for node in nodes)) * 1000 >= limit
    ]
    expected = Mask.from_bits(min(choices)[2]) if choices else Mask(held)
    assert burst_nodes(pools(*sizes), limit, strategy) == expected


def test_amplified_cpus_are_rounded_up_and_no_further() -> None:
    assert [amplified(1000, ratio) for ratio in (1.5, 1, 0.5, -1, "1.001", "1.0001")] == [
        1500,
        1000,
        1000,
        1000,
        1001,
        1001,
    ]
    assert amplified(3000, 1.1) == 3300, "3301 in binary fractions"
    assert counted_request(2000, 1.5, bound=True) == 3000
    assert counted_request(2000, 1.5, bound=False) == 2000
    assert counted_usage(6000, 2, 1.25) == 6500
    with pytest.raises(ValueError, match="cannot amplify CPUs: 'much' is no ratio"):
        amplified(1, "much")


def test_a_resource_status_survives_a_round_trip() -> None:
    shares = {
        1: {"memory": 3 << 30, "cpu": 1500},
        0: {"cpu": 4000, "kubernetes.io/batch-cpu": 2000, "gpu": 3},
    }
    text = status_text(CpuSet.parse("0-3,8"), shares)
    assert json.loads(text) == {
        "cpuset": "0-3,8",
        "numaNodeResources": [
            {"node": 0, "resources": {"cpu": "4", "gpu": "3", "kubernetes.io/batch-cpu": "2k"}},
            {"node": 1, "resources": {"cpu": "1500m", "memory": "3Gi"}},
        ],
    }
    status, problem = resource_status({RESOURCE_STATUS: text})
    assert problem == ""
    assert status.cpus == CpuSet.parse("0-3,8")
    assert [(share.node, share.cpu, share.batch_cpu) for share in status.shares] == [
        (0, 4000, 2000),
        (1, 1500, 0),
    ]
    assert (status_text(), status_text(CpuSet(), {})) == ("{}", "{}")


def test_amounts_as_kubernetes_writes_them() -> None:
    assert [show("gpu", n) for n in (0, 1, 999, 1000, 1500, 2_000_000)] == [
        "0",
        "1",
        "999",
        "1k",
        "1500",
        "2M",
    ]
    assert show("x", 10**21) == "1000E"
    assert show("hugepages-2Mi", 4 << 20) == "4Mi"
    assert show("cpu", 2500) == "2500m"
