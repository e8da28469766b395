"""kube-scheduler tries unschedulable pods again when an object shows room for one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from proxy.extender import retries as retries_module
from proxy.extender.retries import RETRIED_AT
from proxy.model.backoff import Backoff
from tests.extender.running_extender import (
    CAPACITIES,
    NODES,
    NUMATOPOLOGIES,
    ClusterApi,
    RunningExtender,
    scheduler_pod,
)
from tests.scheduler.objects import Json, numatopology
from tests.testkit.simulated_clock import run_simulated
from tests.testkit.waiting import until

PATH = f"{CAPACITIES}/extender"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries_module, "TICK_S", 0.01)
    monkeypatch.setattr(retries_module, "CHANGE_INTERVAL_S", 0.02)
    monkeypatch.setattr(retries_module, "PAUSES", Backoff(0.01, 0.02))


@asynccontextmanager
async def retrying(extender: RunningExtender) -> AsyncIterator[None]:
    task = asyncio.ensure_future(extender.retries.run())
    try:
        await until(lambda: changes(extender) == 1)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def changes(extender: RunningExtender) -> int:
    return extender.api.count("PATCH", PATH)


def on_small_nodes(test: Callable[[RunningExtender], Awaitable[None]]) -> None:
    api = ClusterApi()
    for name in ("n1", "n2"):
        api.add_node(name, free="1-3")

    async def run() -> None:
        extender = RunningExtender(api)
        async with extender.following(), retrying(extender):
            await test(extender)

    run_simulated(run())


async def some_turns() -> None:
    await asyncio.sleep(0.15)


def test_an_unschedulable_pod_is_tried_again_when_it_fits() -> None:
    async def test(extender: RunningExtender) -> None:
        assert await extender.filter(scheduler_pod("four", 4), "n1", "n2") == []
        first = extender.api.collections[CAPACITIES]["extender"]["metadata"]["annotations"][RETRIED_AT]
        extender.api.add_node("n1", free="1-15")
        await until(lambda: changes(extender) == 2)
        stored = extender.api.collections[CAPACITIES]["extender"]
        assert stored["metadata"]["annotations"][RETRIED_AT] != first
        assert stored["storageClassName"] == "extender"
        extender.api.add_node("n2", free="1-15")
        await some_turns()
        assert changes(extender) == 2, "kube-scheduler tries the pod again: it waits for nothing"

    on_small_nodes(test)


def test_nothing_is_written_if_no_unschedulable_pod_fits() -> None:
    async def test(extender: RunningExtender) -> None:
        assert await extender.filter(scheduler_pod("eight", 8), "n1", "n2") == []
        assert await extender.filter(scheduler_pod("two", 2), "n1", "n2") == ["n1", "n2"]
        extender.api.add_node("n1", free="1-5")
        await until(lambda: len(extender.table.node("n1").free) == 5)
        await some_turns()
        assert changes(extender) == 1

    on_small_nodes(test)


def test_a_pod_that_kube_scheduler_tries_by_itself_needs_no_change() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_node("full", free="1-7", pods={"ended": "8-14"})
        await until(lambda: extender.table.node("full") is not None)
        answer = await extender.call("filter", Pod=scheduler_pod("large", 8), NodeNames=["full"])
        assert "a node still shows CPUs" in answer["Error"]
        extender.api.add_node("full", free="1-15")
        await until(lambda: len(extender.table.node("full").free) == 15)
        await some_turns()
        assert changes(extender) == 1

    on_small_nodes(test)


@pytest.mark.parametrize(
    ("spec", "tolerations", "tried"),
    [
        ({"taints": [{"key": "gpu", "value": "a", "effect": "NoSchedule"}]}, [], False),
        ({"taints": [{"key": "gpu", "value": "a", "effect": "NoSchedule"}]}, [{"operator": "Exists"}], True),
        ({"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]}, [], True),
        ({"unschedulable": True}, [], False),
    ],
)
def test_a_pod_is_not_tried_again_for_a_node_whose_taints_keep_it_away(
    spec: Json, tolerations: list[Json], tried: bool
) -> None:
    async def test(extender: RunningExtender) -> None:
        status = {"allocatable": {"cpu": "15", "memory": "64Gi"}}
        extender.api.put(NODES, "n1", spec=spec, status=status)
        await until(lambda: bool(extender.table._rows["n1"].taints) or tried)
        waiting = scheduler_pod("four", 4)
        waiting["spec"]["tolerations"] = tolerations
        assert await extender.filter(waiting, "n2") == []
        extender.api.put(NUMATOPOLOGIES, "n1", spec=numatopology("n1", pods={}, free="1-15")["spec"])
        await until(lambda: len(extender.table.node("n1").free) == 15)
        if tried:
            await until(lambda: changes(extender) == 2)
        else:
            await some_turns()
            assert changes(extender) == 1

    on_small_nodes(test)


def test_a_change_that_fails_is_made_later() -> None:
    async def test(extender: RunningExtender) -> None:
        assert await extender.filter(scheduler_pod("four", 4), "n1", "n2") == []
        extender.api.answers[PATH] = [403, 500]
        extender.api.add_node("n1", free="1-15")
        await until(lambda: changes(extender) == 4)
        await some_turns()
        assert changes(extender) == 4

    on_small_nodes(test)


def test_a_change_that_fails_is_not_repeated_before_the_api_server_permits_it() -> None:
    async def test(extender: RunningExtender) -> None:
        assert await extender.filter(scheduler_pod("four", 4), "n1", "n2") == []
        extender.api.answers[PATH], extender.api.retry_after = [429], "1"
        extender.api.add_node("n1", free="1-15")
        await until(lambda: changes(extender) == 2)
        await asyncio.sleep(0.5)
        assert changes(extender) == 2
        await until(lambda: changes(extender) == 3)

    on_small_nodes(test)


def test_the_end_of_a_bind_without_an_answer_is_noticed() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_node("n1", free="1-7")
        await until(lambda: len(extender.table.node("n1").free) == 7)
        lost, waiting = scheduler_pod("lost", 4), scheduler_pod("waiting", 4)
        assert await extender.filter(lost, "n1") == ["n1"]
        extender.api.bind_status = 500
        assert "cannot bind" in await extender.bind(lost, "n1")
        assert await extender.filter(waiting, "n1") == []
        extender.table.release("lost", asyncio.get_running_loop().time())
        await until(lambda: changes(extender) == 2)

    on_small_nodes(test)
