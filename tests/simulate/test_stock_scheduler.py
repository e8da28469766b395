"""The rules of the stock scheduler, by numbers that follow from its source.

tests/cluster/test_stock_scheduler.py compares them with the real one.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from proxy.pools.pod_spec import pod_spec
from proxy.simulate.fleet.stock_scheduler import StockDemand, StockScheduler, enough_nodes, stock_demand
from proxy.simulate.nodes import PODS, SimulatedNode

GI = 1 << 30


def simulated_node(cpu: int = 4000, memory: int = 8 * GI, pods: int = 110, **more: int) -> SimulatedNode:
    nothing: Any = None
    return SimulatedNode("n", nothing, nothing, {"cpu": cpu, "memory": memory, PODS: pods, **more})


def demand(**amounts: object) -> StockDemand:
    containers = [{"name": "c", "resources": {"requests": amounts, "limits": amounts}}]
    raw = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers}}
    return stock_demand(pod_spec(raw))


@pytest.mark.parametrize(
    ("nodes", "percentage", "enough"),
    [
        (50, 0, 50),
        (99, 5, 99),
        (100, 0, 100),
        (1000, 0, 420),
        (5000, 0, 500),
        (6000, 0, 300),
        (1000, 100, 1000),
    ],
)
def test_the_search_stops_at_enough_nodes(nodes: int, percentage: int, enough: int) -> None:
    assert enough_nodes(nodes, percentage) == enough


def test_a_container_without_a_request_is_scored_with_the_defaults_and_fits_with_nothing() -> None:
    found = demand()
    assert found.needs == {}
    assert found.scored == (100, 200 << 20)


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ([simulated_node(), simulated_node(8000, 16 * GI)], 1),  # more is free
        (
            [simulated_node(4000, 64 * GI), simulated_node(8000, 16 * GI)],
            1,
        ),  # by CPU 75 and 87, by memory 96 and 87
        ([simulated_node(500), simulated_node()], 1),  # no room
        ([simulated_node(pods=0), simulated_node()], 1),
        ([simulated_node(memory=GI), simulated_node()], 1),
    ],
)
def test_the_best_node_is_chosen(nodes: list[SimulatedNode], chosen: int) -> None:
    assert StockScheduler(nodes, random.Random(1)).choose(demand(cpu=1, memory="2Gi")) == chosen


def test_a_node_that_the_pod_balances_is_better() -> None:
    scheduler = StockScheduler([simulated_node(), simulated_node()], random.Random(1))
    scheduler.take(0, demand(cpu=1))
    scheduler.take(1, demand(memory="2Gi"))
    assert {scheduler.choose(demand(cpu="100m")) for _ in range(5)} == {1}, "its memory was used, no CPU"


def test_no_room_is_no_node_until_a_pod_leaves() -> None:
    scheduler = StockScheduler([simulated_node(1000)], random.Random(1))
    pod = demand(cpu=1)
    assert scheduler.choose(pod) == 0
    scheduler.take(0, pod)
    assert scheduler.choose(pod) == -1
    assert list(scheduler.fitting(pod)) == []
    scheduler.take(0, pod, -1)
    assert scheduler.choose(pod) == 0


def test_what_no_node_offers_fits_nowhere() -> None:
    nodes = [simulated_node(), simulated_node(**{"example.com/gpu": 1})]
    assert StockScheduler(nodes, random.Random(1)).choose(demand(**{"example.com/gpu": 1})) == 1
    assert StockScheduler(nodes, random.Random(1)).choose(demand(**{"example.com/nic": 1})) == -1


def test_equal_nodes_share_and_the_search_goes_on_where_it_ended() -> None:
    scheduler = StockScheduler([simulated_node() for _ in range(300)], random.Random(1))
    chosen = [scheduler.choose(demand(cpu=1)) for _ in range(3)]
    assert 0 <= chosen[0] < 144 <= chosen[1] < 288, "48 percent of 300"
    assert chosen[2] >= 288 or chosen[2] < 132


def test_an_extender_leaves_out_nodes_and_adds_to_scores() -> None:
    scheduler = StockScheduler([simulated_node() for _ in range(4)], random.Random(1))
    assert scheduler.choose(demand(cpu=1), lambda nodes: ([2, 3], [0, 5])) == 3
    assert scheduler.choose(demand(cpu=1), lambda nodes: ([], [])) == -1
    assert scheduler.choose(demand(cpu=1), lambda nodes: ([1], [0])) == 1
