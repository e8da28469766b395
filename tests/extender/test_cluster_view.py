"""The view finds the version of the NodeResourceTopologies, whenever their CRD is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.agent import watcher as watcher_module
from proxy.agent.objects.node_resource_topology import GROUP, collection_path
from proxy.extender import cluster_view as module
from proxy.model.backoff import Backoff
from proxy.scheduler.node_facts import SchedulableNode, join_facts
from tests.extender.running_extender import NODES, TOPOLOGIES, ClusterApi, RunningExtender
from tests.testkit.simulated_clock import run_simulated
from tests.testkit.waiting import until

OLD = collection_path("v1alpha1")
DISCOVERY = f"/apis/{GROUP}"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", Backoff(0.01, 0.05))
    monkeypatch.setattr(module, "DISCOVERY_S", 0.05)
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(watcher_module, "PAUSES", Backoff(0.01, 0.05))
    monkeypatch.setattr(watcher_module, "ABSENT_S", 0.05)


def koordinator_api() -> ClusterApi:
    """Return a cluster with a node that has a NodeResourceTopology of v1alpha1 only."""
    api = ClusterApi()
    api.put(NODES, "n1", status={"allocatable": {"cpu": "16", "memory": "64Gi"}})
    del api.collections[TOPOLOGIES]
    api.groups[GROUP] = ["v1alpha1"]
    install(api)
    return api


def install(api: ClusterApi) -> None:
    api.collections[OLD] = {}
    amount = {"name": "cpu", "capacity": "8", "allocatable": "8", "available": "8"}
    zones = [{"name": f"node-{number}", "type": "Node", "resources": [amount]} for number in range(2)]
    api.put(OLD, "n1", topologyPolicies=["SingleNUMANodeContainerLevel"], zones=zones)


def follow(api: ClusterApi, test: Callable[[RunningExtender], Awaitable[None]]) -> None:
    async def run() -> None:
        extender = RunningExtender(api)
        await extender.hold_lease()
        task = asyncio.ensure_future(extender.view.run())
        try:
            await test(extender)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_simulated(run())


@pytest.mark.parametrize("answers", [[], [429], [500, 503, 429]])
def test_the_version_is_asked_for_until_the_api_server_answers(answers: list[int]) -> None:
    api = koordinator_api()
    api.answers[DISCOVERY] = [*answers]

    async def test(extender: RunningExtender) -> None:
        await until(lambda: extender.view.age is not None)
        assert api.answers[DISCOVERY] == []
        assert extender.table.node("n1") is not None

    follow(api, test)


def test_nothing_is_decided_before_the_version_is_known() -> None:
    api = koordinator_api()
    api.answers[DISCOVERY] = [429] * 1000

    async def test(extender: RunningExtender) -> None:
        await until(extender.view.pods.listed.is_set)
        await until(extender.view.nodes.listed.is_set)
        await asyncio.sleep(0.1)
        assert extender.view.age is None
        api.answers[DISCOVERY] = []
        await until(lambda: extender.view.age is not None)

    follow(api, test)


def test_a_kind_that_is_installed_later_is_noticed() -> None:
    api = koordinator_api()
    del api.collections[OLD], api.groups[GROUP]

    async def test(extender: RunningExtender) -> None:
        await until(lambda: extender.view.age is not None)
        assert extender.table.node("n1") is None
        install(api)
        api.groups[GROUP] = ["v1alpha1"]
        await until(lambda: extender.table.node("n1") is not None)
        await until(lambda: extender.view.age is not None)

    follow(api, test)


def test_a_version_that_the_cluster_no_longer_has_is_replaced() -> None:
    api = koordinator_api()

    async def test(extender: RunningExtender) -> None:
        await until(lambda: extender.table.node("n1") is not None)
        api.groups[GROUP] = ["v1alpha2", "v1alpha1"]
        await asyncio.sleep(0.2)
        assert api.count("GET", TOPOLOGIES) == 0, "what is followed is not replaced"
        api.groups[GROUP] = ["v1alpha2"]
        api.collections[TOPOLOGIES] = api.collections.pop(OLD)
        api.end_watches()
        await until(lambda: api.count("GET", TOPOLOGIES) > 1)
        await until(lambda: extender.table.node("n1") is not None)

    follow(api, test)


@pytest.mark.parametrize("error", [ValueError("cannot take -1 CPUs"), ZeroDivisionError(), KeyError("x")])
def test_a_node_that_cannot_be_joined_does_not_keep_others_from_being_read(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(name: str, *facts: Any) -> SchedulableNode:
        if name == "n1":
            raise error
        return join_facts(name, *facts)

    monkeypatch.setattr(module, "join_facts", failing)
    api = koordinator_api()
    api.add_node("n2")

    async def test(extender: RunningExtender) -> None:
        await until(lambda: extender.view.age is not None)
        assert extender.table.node("n1") is None
        assert extender.table.node("n2") is not None

    follow(api, test)
