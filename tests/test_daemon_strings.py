"""The daemon between a client and a runtime that do not check whether strings are UTF-8."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.model.idset import CpuSet
from proxy.telemetry import metrics
from proxy.topology.regular_machine import regular_machine
from tests.go_strings import MARK, GoClient, GoRuntime
from tests.testkit.daemon import DaemonNode
from tests.testkit.waiting import LIMIT_S, until

MACHINE = regular_machine(1, 1, 4, 2)


class Node(DaemonNode):
    """A node whose runtime does not check strings, and whose daemon can be started again."""

    settings = "reconcilePeriod: 1s"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, MACHINE)
        self.runtime = GoRuntime(directory / "runtime.sock", self.cgroups).start()
        self.direct = GoClient(directory / "runtime.sock")
        self.running: Any = None

    async def start(self) -> GoClient:
        self.running = self.daemon()
        await self.running.start()
        return GoClient(self.directory / "cri.sock")

    async def is_reconciled(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.running.executor.reconciled.wait()

    def cpus(self, container_id: str) -> str:
        """Return the CPUs of the container's cgroup."""
        return str(self.cgroups.cpus(self.runtime.containers[container_id].cgroup))

    def requested_cpus(self, container: str) -> str:
        """Return the CPUs in the request to create the container."""
        return str(self.runtime.containers[container].config.linux.resources.cpuset_cpus)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.direct.close()
    one.runtime.stop(0)


def run_daemon(node: Node, scenario: Callable[[GoClient], Any]) -> None:
    async def whole() -> None:
        client = await node.start()
        try:
            await node.is_reconciled()
            await scenario(client)
        finally:
            client.close()
            await node.running.stop()

    asyncio.run(whole())


def test_a_container_of_a_pod_with_odd_strings_is_placed(node: Node) -> None:
    async def scenario(client: GoClient) -> None:
        owner = await asyncio.to_thread(client.run, "owner", "LSE", _resource_status='{"cpuset":"2-3"}')
        odd = await asyncio.to_thread(client.run, "odd", "LS", note=f"{MARK} and more")
        assert (node.requested_cpus(odd), node.cpus(odd)) == ("0-1,4-7", "0-1,4-7")
        assert node.cpus(owner) == "2-3"
        placed = {c.pod.name: c for c in node.running.executor.state.containers.values()}
        assert placed.keys() == {"owner", "odd"}
        assert not node.running.executor.telemetry.value(metrics.REQUESTS_UNDECODABLE)

    run_daemon(node, scenario)


def test_an_odd_annotation_of_koordinators_counts_as_malformed(node: Node) -> None:
    async def scenario(client: GoClient) -> None:
        status = f'{{"cpuset":"2-3","note":"{MARK}"}}'
        odd = await asyncio.to_thread(client.run, "odd", "LS", _resource_status=status)
        assert node.cpus(odd) == "0-7"
        reported = [str(each["what"]) for each in node.running.executor.telemetry.problems()]
        assert any("ns/odd" in what and "resource-status" in what for what in reported)

    run_daemon(node, scenario)


def test_reconciles_continue_with_a_sandbox_that_has_odd_strings(node: Node) -> None:
    async def scenario(client: GoClient) -> None:
        executor = node.running.executor
        plain = await asyncio.to_thread(client.run, "plain")
        await asyncio.to_thread(client.run, "odd", note=MARK, **{MARK: "a key"})
        passes = executor.telemetry.value(metrics.RECONCILES)
        executor.reconcile_requested.set()
        await until(lambda: executor.telemetry.value(metrics.RECONCILES) > passes)
        behind = await asyncio.to_thread(node.direct.run, "behind", "", more=MARK)
        node.cgroups.write(node.runtime.containers[plain].cgroup, CpuSet.parse("5"), None)
        executor.reconcile_requested.set()
        await until(lambda: behind in executor.state.containers and node.cpus(plain) == "0-7")
        assert not any("deserializing" in str(each["what"]) for each in executor.telemetry.problems())

    run_daemon(node, scenario)


def test_a_restart_beside_a_sandbox_with_odd_strings(node: Node) -> None:
    async def scenario(client: GoClient) -> None:
        await asyncio.to_thread(client.run, "odd", note=MARK)
        await asyncio.to_thread(client.run, "owner", "LSE", _resource_status='{"cpuset":"2-3"}')

    async def after(client: GoClient) -> None:
        there = {c.pod.name for c in node.running.executor.state.containers.values()}
        assert there == {"odd", "owner"}
        late = await asyncio.to_thread(client.run, "late")
        assert node.requested_cpus(late) == "0-1,4-7"
        other = await asyncio.to_thread(client.run, "other", "LSE", _resource_status='{"cpuset":"4-5"}')
        assert node.cpus(other) == "4-5"

    run_daemon(node, scenario)
    run_daemon(node, after)


def test_a_start_without_a_ledger_adopts_a_pod_with_odd_strings(node: Node) -> None:
    async def scenario(_client: GoClient) -> None:
        containers = node.running.executor.state.containers
        assert {(c.pod.name, c.pod.uid) for c in containers.values()} == {("odd", r"uid-odd")}

    node.direct.run("odd", "LS", note=MARK)
    run_daemon(node, scenario)
