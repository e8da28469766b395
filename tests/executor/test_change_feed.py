"""The feed of changes: a client gets each change at once, and costs nothing while nothing changes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from proxy.agent.daemon_client import DaemonClient
from proxy.demo.client import DemoPod
from proxy.model.errors import InputError, RuntimeCallError
from proxy.model.workload import KubeQos
from tests.testkit.daemon import run, temporary_node

STATIC = "cpuManagerPolicy: static\nreconcilePeriod: 1h\n"
OWNER = DemoPod("owner", kube_qos=KubeQos.GUARANTEED, cpus=2)


async def get_changes(client: DaemonClient, since: str = "", wait: float = 0.0) -> Any:
    return await client.query("/changes", {"since": since, "wait": str(wait)}, timeout=30)


def test_a_follower_is_woken_by_a_create_and_reads_it() -> None:
    with temporary_node() as node:
        daemon = node.daemon(STATIC)

        async def scenario() -> None:
            client = DaemonClient(daemon.config.admin_path)
            first = (await get_changes(client))["version"]
            waiting = asyncio.create_task(get_changes(client, first, 20))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            began = time.monotonic()
            launched = await node.launch(OWNER)
            woken = await waiting
            assert woken["version"] != first
            assert time.monotonic() - began < 15
            page: Any = await client.query("/node", {"node": "n1"})
            (pod,) = page["pods"]
            (container,) = pod["containers"]
            assert (pod["name"], container["name"], container["pool"]) == ("owner", "main", "own")
            assert container["cpus"] == node.cpus(launched) != ""
            assert page["name"] == "n1"
            allocs = page["koordinator"]["annotations"]["node.koordinator.sh/pod-cpu-allocs"]
            assert container["cpus"] in allocs
            assert page["version"] == (await get_changes(client))["version"]

        run(daemon, scenario)


def test_an_idle_node_answers_after_the_wait_with_the_same_version() -> None:
    with temporary_node() as node:
        daemon = node.daemon(STATIC)

        async def scenario() -> None:
            client = DaemonClient(daemon.config.admin_path)
            first = (await get_changes(client))["version"]
            began = time.monotonic()
            again = await get_changes(client, first, 0.3)
            assert (again["version"], again["notices"]) == (first, [])
            assert time.monotonic() - began >= 0.3

        run(daemon, scenario)


def test_each_rejection_is_a_notice_and_a_new_follower_gets_no_old_ones() -> None:
    with temporary_node() as node:
        daemon = node.daemon(STATIC)

        async def scenario() -> None:
            client = DaemonClient(daemon.config.admin_path)
            version = (await get_changes(client))["version"]
            for _ in range(2):
                with pytest.raises(RuntimeCallError):
                    await node.launch(DemoPod("wide", kube_qos=KubeQos.GUARANTEED, cpus=40))
            seen: list[Any] = []

            async def gather() -> bool:
                seen[:] = (await get_changes(client, version))["notices"]
                return len(seen) == 2

            async with asyncio.timeout(60):
                while not await gather():
                    await asyncio.sleep(0.01)
            assert {each["message"] for each in seen} == {"rejected a container"}
            assert seen[0]["keys"]["pod"] == "demo/wide"
            assert (await get_changes(client, "another.1"))["notices"] == []
            page: Any = await client.query("/node")
            assert [each["pod"] for each in page["rejections"]] == ["demo/wide"]

        run(daemon, scenario)


def test_a_wait_that_is_not_a_number_is_refused() -> None:
    with temporary_node() as node:
        daemon = node.daemon(STATIC)

        async def scenario() -> None:
            with pytest.raises(InputError, match="is not a number"):
                await DaemonClient(daemon.config.admin_path).query("/changes", {"wait": "x"})

        run(daemon, scenario)
