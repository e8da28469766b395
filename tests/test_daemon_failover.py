"""The requests that a hook server receives about pods and containers created without the daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.topology.regular_machine import regular_machine
from tests.hooks.remote.conftest import METHODS, HookServer
from tests.testkit.daemon import DaemonNode

MACHINE = regular_machine(1, 1, 4, 2)
LABELS = {"koordinator.sh/qosClass": "LS", "app": "db"}
ANNOTATIONS = {"example.com/team": "storage", "note": "x" * 3000}


class Node(DaemonNode):
    """A node whose daemon can be started again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, MACHINE)
        self.runtime.start()
        self.server = HookServer(directory / "hook.sock")
        self.server.start()
        servers = directory / "servers"
        servers.mkdir(mode=0o755)
        hooks = [name.removesuffix("Hook") for name in METHODS]
        registration = {"remote-endpoint": str(self.server.path), "runtime-hooks": hooks}
        (servers / "koordlet.json").write_text(json.dumps(registration))
        (servers / "koordlet.json").chmod(0o644)

        self.settings = f"""
hooks:
  directory: {directory}/hooks.d
  vendorDirectory: {directory}/vendor
  serverDirectory: {directory}/servers
"""

    def create(self, socket: str = "cri") -> tuple[str, str]:
        """Run a pod with a container that has been created and not started."""
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name="db-0", uid="u-7", namespace="shop", attempt=2),
            labels=LABELS,
            annotations=ANNOTATIONS,
            linux=pb.LinuxPodSandboxConfig(cgroup_parent="/kubepods/burstable/podu-7"),
        )
        with self.client(socket) as client:
            sandbox = client.call("RunPodSandbox", pb.RunPodSandboxRequest(config=config)).pod_sandbox_id
            request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, sandbox_config=config)
            request.config.metadata.name, request.config.metadata.attempt = "main", 3
            request.config.annotations["own"] = "1"
            request.config.linux.resources.cpu_shares = 512
            return sandbox, client.call("CreateContainer", request).container_id

    def use(self, sandbox: str, container: str) -> None:
        """Make each call that a hook server is notified of."""
        with self.client() as client:
            client.start(container)
            client.update(container, pb.LinuxContainerResources(cpu_shares=1024))
            client.stop(container)
            client.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.server.stop()
    one.runtime.stop(0)


async def requests_to_server(node: Node, names: set[str]) -> dict[str, Any]:
    """Wait until the server has received these requests, and return them by hook."""
    async with asyncio.timeout(60):
        while not names <= {name.removesuffix("Hook") for name, _ in node.server.received}:
            await asyncio.sleep(0.02)
    return {name.removesuffix("Hook"): request for name, request in node.server.received}


def check(reported: dict[str, Any]) -> None:
    for name in (
        "PreStartContainer",
        "PostStartContainer",
        "PreUpdateContainerResources",
        "PostStopContainer",
    ):
        request = reported[name]
        meta = request.pod_meta
        assert (meta.name, meta.namespace, meta.uid, meta.attempt) == ("db-0", "shop", "u-7", 2), name
        assert dict(request.pod_labels) == LABELS, name
        assert dict(request.pod_annotations) == ANNOTATIONS, name
        assert request.pod_cgroup_parent == "/kubepods/burstable/podu-7", name
        assert (request.container_meta.name, request.container_meta.attempt) == ("main", 3), name
        assert dict(request.container_annotations) == {"own": "1"}, name
    stopped = reported["PostStopPodSandbox"]
    assert (stopped.pod_meta.uid, stopped.pod_meta.attempt) == ("u-7", 2)
    assert (dict(stopped.labels), dict(stopped.annotations)) == (LABELS, ANNOTATIONS)


HOOKS = {
    "PreStartContainer",
    "PostStartContainer",
    "PreUpdateContainerResources",
    "PostStopContainer",
    "PostStopPodSandbox",
}


def test_a_container_made_before_the_restart(node: Node) -> None:
    async def whole() -> None:
        daemon = node.daemon()
        await daemon.start()
        try:
            sandbox, container = await asyncio.to_thread(node.create)
        finally:
            await daemon.stop()
        node.server.received.clear()
        daemon = node.daemon()
        await daemon.start()
        try:
            await asyncio.to_thread(node.use, sandbox, container)
            check(await requests_to_server(node, HOOKS))
        finally:
            await daemon.stop()

    asyncio.run(whole())


def test_a_container_known_only_from_the_runtimes_list(node: Node) -> None:
    async def whole() -> None:
        sandbox, container = await asyncio.to_thread(node.create, "runtime")
        daemon = node.daemon()
        await daemon.start()
        try:
            await asyncio.to_thread(node.use, sandbox, container)
            check(await requests_to_server(node, HOOKS))
        finally:
            await daemon.stop()

    asyncio.run(whole())


def test_a_container_made_at_the_runtime_while_the_daemon_runs(node: Node) -> None:
    """The first call for the container names an id that the daemon does not know yet."""

    async def whole() -> None:
        daemon = node.daemon()
        await daemon.start()
        try:
            assert daemon.executor is not None
            await daemon.executor.reconciled.wait()
            sandbox, container = await asyncio.to_thread(node.create, "runtime")
            await asyncio.to_thread(node.use, sandbox, container)
            check(await requests_to_server(node, HOOKS))
        finally:
            await daemon.stop()

    asyncio.run(whole())
