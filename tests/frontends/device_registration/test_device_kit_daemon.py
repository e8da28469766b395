"""Plugins of the author kit with a daemon, and resources that kubelet also manages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.admin.client import query_admin
from proxy.api.kubelet import podresources_pb2 as pb
from proxy.device_kit.api import AllocateAnswer, DeviceMount, DeviceNode, DevicePlugin, PluginDevice
from proxy.device_kit.testing import running
from proxy.executor import device_manager_conflicts
from proxy.executor.device_ports import DevicePluginError
from tests.testkit.answers import check_answer
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.waiting import until

VF = "example.com/vf"
ANSWER = AllocateAnswer(
    {"VF": "a"},
    {"example.com/vf": "a"},
    (DeviceMount("/lib/vf", "/vf/lib", read_only=True),),
    (DeviceNode("/dev/null", "/dev/vf", "rw"),),
    ("example.com/vf=a",),
)


class Functions(DevicePlugin):
    """Two devices; ``ill`` ones are unhealthy."""

    resource = VF
    period_s = 0.05

    def __init__(self) -> None:
        self.ill: set[str] = set()
        self.prepared: list[Sequence[str]] = []

    def devices(self) -> Iterator[PluginDevice]:
        yield from (PluginDevice(name, name not in self.ill, (node,)) for node, name in enumerate("ab"))

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        if len(ids) > 1:
            raise ValueError("one function a container")
        return ANSWER

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        return [*must_include, *sorted(set(available) - set(must_include), reverse=True)][:size]

    def pre_start(self, ids: Sequence[str]) -> None:
        self.prepared.append(ids)


class KubeletLists:
    """kubelet's pod-resources API."""

    def __init__(self, path: Path) -> None:
        self.devices: list[pb.ContainerDevices] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        answers = {
            "List": lambda _, __: b"",
            "GetAllocatableResources": lambda _, __: pb.AllocatableResourcesResponse(
                devices=self.devices
            ).SerializeToString(),
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in answers.items()
        }
        service = grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)
        self._server.add_generic_rpc_handlers((service,))
        assert self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()


class KitNode(DaemonNode):
    """A node that serves device plugins."""

    @property
    def plugins(self) -> Path:
        return self.directory / "plugins"

    def serving(self) -> Any:
        return self.daemon(
            f"devicePlugins: {{enabled: true, socketDirectory: {self.plugins}, timeout: 5s}}\n"
            f"kubelet: {{podResources: 'unix://{self.directory}/kubelet.sock', timeout: 5s}}\n"
        )


@pytest.fixture
def node() -> Iterator[KitNode]:
    with temporary_node(KitNode) as created:
        created.plugins.mkdir()
        yield created


@pytest.fixture
def kubelet(node: KitNode) -> Iterator[KubeletLists]:
    created = KubeletLists(node.directory / "kubelet.sock")
    yield created
    created.stop()


def healthy(daemon: Any) -> set[str]:
    return set(daemon.executor.state.devices.healthy(VF))


def test_all_calls_of_a_plugin_of_the_kit_are_used(node: KitNode, kubelet: KubeletLists) -> None:
    daemon, plugin = node.serving(), Functions()

    async def scenario() -> None:
        await until(lambda: healthy(daemon) == {"a", "b"})
        assert [list(d.nodes) for d in daemon.executor.state.devices.registered[VF].values()] == [[0], [1]]
        plugins = daemon.executor.device_plugins
        assert plugins.offers_preference(VF)
        assert plugins.needs_pre_start(VF)
        assert await plugins.preferred(VF, frozenset("ab"), frozenset(), 1) == ("b",)
        assert await plugins.allocate(VF, ("a",)) == ANSWER
        with pytest.raises(DevicePluginError, match="one function a container"):
            await plugins.allocate(VF, ("a", "b"))
        await plugins.pre_start(VF, ("a",))
        assert plugin.prepared == [("a",)]
        plugin.ill = {"a"}
        await until(lambda: healthy(daemon) == {"b"})
        page = await asyncio.to_thread(query_admin, node.directory / "admin.sock", "/devices/capacity", 30)
        assert [(r["capacity"], r["allocatable"]) for r in page["resources"]] == [("2", "1")]

    with running(plugin, node.plugins):
        run(daemon, scenario)


def test_a_plugin_of_the_kit_registers_again_after_a_daemon_restart(
    node: KitNode, kubelet: KubeletLists
) -> None:
    with running(Functions(), node.plugins):
        for _ in range(3):
            daemon = node.serving()

            async def scenario(daemon: Any = daemon) -> None:
                await until(lambda: healthy(daemon) == {"a", "b"})
                assert await daemon.executor.device_plugins.allocate(VF, ("a",)) == ANSWER

            run(daemon, scenario)


def test_a_resource_of_kubelet_is_refused_until_kubelet_has_released_it(
    node: KitNode, kubelet: KubeletLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.devices = [pb.ContainerDevices(resource_name=VF, device_ids=["a", "b"])]
    monkeypatch.setattr(device_manager_conflicts, "PERIOD_S", 0.1)
    daemon = node.serving()
    message = f"cannot manage {VF}: kubelet's device manager manages it too (2 devices)"

    async def scenario() -> None:
        def refused() -> list[str]:
            return [row["reason"] for row in daemon.parts.pages.status()["devicePlugins"]["refused"]]

        await until(lambda: refused())
        assert refused()[0].startswith(message)
        assert healthy(daemon) == set()
        page = await asyncio.to_thread(query_admin, node.directory / "admin.sock", "/devices", 30)
        check_answer(page)
        assert page["refused"][0]["resource"] == VF
        assert message in str(daemon.executor.telemetry.problems())

        kubelet.devices = []
        await until(lambda: healthy(daemon) == {"a", "b"})
        assert refused() == []
        assert message not in str(daemon.executor.telemetry.problems())

        kubelet.devices = [pb.ContainerDevices(resource_name=VF, device_ids=["a", "b"])]
        await until(lambda: VF not in daemon.executor.state.devices.registered)
        assert refused()[0].startswith(message)
        assert daemon.parts.pages.status()["devicePlugins"]["resources"] == []

    with running(Functions(), node.plugins):
        run(daemon, scenario)
