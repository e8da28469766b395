"""Pods that found no node: which ones are kept, and the search for moves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.extender import waiting_pods as module
from proxy.extender.waiting_pods import FORGET_S, MOST_ADVISED, MOST_WAITING, WaitingPods
from proxy.scheduler.node_table import NodeTable
from tests.scheduler.objects import demand, node
from tests.testkit.simulated_clock import run_simulated

if TYPE_CHECKING:
    import pytest


def full_node() -> NodeTable:
    """Return a node that lacks CPUs for 8, and one where either of its pods fits."""
    table = NodeTable()
    table.put(node("n1", pods={"x": "1-2", "y": "8-9"}, free="3-7,10-15"))
    table.put(node("n2", pods={}, free="1-3"))
    for name in ("x", "y"):
        table.observe(demand(name, 2, node="n1"), 0.0, running=True)
    return table


def test_a_pod_that_is_no_longer_tried_does_not_wait() -> None:
    async def test() -> None:
        pods = WaitingPods(NodeTable())
        pods.record_unschedulable(demand("deleted", 8))
        await asyncio.sleep(FORGET_S - 1)
        pods.record_unschedulable(demand("tried", 8))
        assert (await pods.advice())["waiting"] == ["default/deleted", "default/tried"]
        await asyncio.sleep(2)
        assert (await pods.advice())["waiting"] == ["default/tried"]
        pods.record_placed("tried")
        assert (await pods.advice())["waiting"] == []

    run_simulated(test())


def test_moves_are_searched_for_the_pods_that_were_tried_last() -> None:
    async def test() -> None:
        pods = WaitingPods(full_node())
        for number in range(MOST_WAITING + 1):
            pods.record_unschedulable(demand(f"p{number}", 8))
        pods.record_unschedulable(demand("p1", 8))  # once more
        page = await pods.advice()
        assert isinstance(page["waiting"], list)
        assert len(page["waiting"]) == MOST_WAITING
        assert isinstance(page["moves"], list)
        last = ["p1", *(f"p{number}" for number in range(MOST_WAITING, MOST_WAITING - MOST_ADVISED + 1, -1))]
        assert [move["pod"] for move in page["moves"]] == [f"default/{name}" for name in last]
        assert page["complete"]
        page = await pods.advice("default/p7")
        assert page["moves"] == [{"pod": "default/p7", "node": "n1", "move": "default/y", "to": "n2"}]

    run_simulated(test())


def test_other_requests_are_answered_during_the_search() -> None:
    async def test() -> None:
        pods = WaitingPods(full_node())
        for number in range(3):
            pods.record_unschedulable(demand(f"p{number}", 8))
        search = asyncio.ensure_future(pods.advice())
        turns = 0
        while not search.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 6

    run_simulated(test())


def test_the_search_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEARCH_S", -1.0)

    async def test() -> None:
        pods = WaitingPods(full_node())
        pods.record_unschedulable(demand("a", 8))
        page = await pods.advice()
        assert (page["waiting"], page["complete"]) == (["default/a"], False)

    run_simulated(test())
