"""The shim: one socket; managed resources register with topoproxy, other ones with kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.telemetry import metrics
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.device_plugin import REGISTRATION, ScriptedPlugin, device
from tests.testkit.waiting import until

MANAGED, KUBELETS = "example.com/ours", "example.com/theirs"


class PlayedKubelet:
    """The registration server of kubelet, which dials the plugin as kubelet does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "kubelet.sock"
        self.requests: list[bytes] = []
        self.refuse = ""
        self._server: grpc.Server | None = None

    def start(self) -> PlayedKubelet:
        """Remove all sockets, as kubelet does, and serve."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._server = grpc.server(ThreadPoolExecutor(2))
        handlers = {"Register": grpc.unary_unary_rpc_method_handler(self._register)}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1beta1.Registration", handlers),)
        )
        assert self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()

    def _register(self, content: bytes, context: grpc.ServicerContext) -> bytes:
        if self.refuse:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        path = self.directory / pb.RegisterRequest.FromString(content).endpoint
        with grpc.insecure_channel(f"unix:{path}") as channel:
            get_options: Any = channel.unary_unary("/v1beta1.DevicePlugin/GetDevicePluginOptions")
            get_options(b"", timeout=60)
        self.requests.append(content)
        return b""


class ShimNode(DaemonNode):
    """A node with kubelet's directory and one for the shim."""

    @property
    def shim(self) -> Path:
        return self.directory / "shim"

    def serving(self) -> Any:
        return self.daemon(
            f"kubelet: {{stateDir: {self.directory}/kubelet}}\n"
            f"devicePlugins: {{enabled: true, socketDirectory: {self.directory}/plugins, "
            f"shim: [{MANAGED}], shimDirectory: {self.shim}}}\n"
        )


@pytest.fixture
def node() -> Iterator[ShimNode]:
    with temporary_node(ShimNode) as created:
        yield created


@pytest.fixture
def kubelet(node: ShimNode) -> Iterator[PlayedKubelet]:
    created = PlayedKubelet(node.directory / "kubelet" / "device-plugins").start()
    yield created
    created.stop()


@pytest.fixture
def plugins(node: ShimNode) -> Iterator[dict[str, ScriptedPlugin]]:
    node.shim.mkdir()
    created = {
        name: ScriptedPlugin(node.shim, [device(name)], name, f"{name.partition('/')[2]}.sock")
        for name in (MANAGED, KUBELETS)
    }
    yield created
    for plugin in created.values():
        plugin.stop()


def raw_register(socket: Path, content: bytes) -> None:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call: Any = channel.unary_unary(REGISTRATION)
        call(content, timeout=30, wait_for_ready=True)


def test_registrations_go_to_the_manager_of_the_resource(
    node: ShimNode, kubelet: PlayedKubelet, plugins: dict[str, ScriptedPlugin]
) -> None:
    daemon: Any = node.serving()
    socket = node.shim / "kubelet.sock"

    async def scenario() -> None:
        await until(socket.exists)
        for plugin in plugins.values():
            plugin.start()
        await asyncio.to_thread(plugins[MANAGED].register, socket)
        await until(lambda: daemon.executor.state.devices.healthy(MANAGED) == {MANAGED})
        assert kubelet.requests == []
        options = b"\x22\x02\x08\x01"  # a field that topoproxy does not declare
        request = pb.RegisterRequest(version="v9", endpoint="theirs.sock", resource_name=KUBELETS)
        await asyncio.to_thread(raw_register, socket, request.SerializeToString() + options)
        assert [pb.RegisterRequest.FromString(content) for content in kubelet.requests] == [
            pb.RegisterRequest.FromString(request.SerializeToString() + options)
        ]
        assert options in kubelet.requests[0]
        assert [row["resource"] for row in daemon.parts.pages.status()["devicePlugins"]["resources"]] == [
            MANAGED
        ]
        counted = daemon.executor.telemetry.value
        assert counted(metrics.DEVICE_PLUGIN_REGISTRATIONS, result="forwarded") == 1
        await asyncio.to_thread(plugins[KUBELETS].register, socket)
        assert len(kubelet.requests) == 2
        assert daemon.parts.pages.status()["devicePlugins"]["shim"]["resources"] == [MANAGED]

    run(daemon, scenario)


def test_a_refusal_by_kubelet_is_passed_on_unchanged(
    node: ShimNode, kubelet: PlayedKubelet, plugins: dict[str, ScriptedPlugin]
) -> None:
    daemon: Any = node.serving()
    socket = node.shim / "kubelet.sock"
    kubelet.refuse = "the ResourceName is invalid"

    async def scenario() -> None:
        await until(socket.exists)
        plugin = plugins[KUBELETS].start()
        (kubelet.directory / "taken.sock").touch()
        for endpoint, code, message in (
            (None, grpc.StatusCode.UNKNOWN, "the ResourceName is invalid"),
            ("../x.sock", grpc.StatusCode.INVALID_ARGUMENT, "leads out of the directory"),
            ("below/x.sock", grpc.StatusCode.INVALID_ARGUMENT, "the endpoint is not in this directory"),
            ("taken.sock", grpc.StatusCode.UNAVAILABLE, "cannot make the link"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(plugin.register, socket, endpoint=endpoint)
            error: Any = caught.value
            assert error.code() is code
            assert message in error.details()

    run(daemon, scenario)


def test_plugins_register_again_after_a_restart_of_kubelet(
    node: ShimNode, kubelet: PlayedKubelet, plugins: dict[str, ScriptedPlugin]
) -> None:
    daemon: Any = node.serving()
    socket, link = node.shim / "kubelet.sock", kubelet.directory / "theirs.sock"

    async def scenario() -> None:
        await until(socket.exists)
        for plugin in plugins.values():
            plugin.start()
            await asyncio.to_thread(plugin.register, socket)
        assert link.readlink() == plugins[KUBELETS].path

        def made_at() -> int | None:
            with contextlib.suppress(FileNotFoundError):  # it is removed before it is made again
                return socket.stat().st_mtime_ns
            return None

        before = made_at()
        kubelet.stop()
        await asyncio.to_thread(kubelet.start)
        await until(lambda: made_at() not in (None, before))
        assert not plugins[KUBELETS].path.exists()
        assert plugins[MANAGED].path.exists()
        assert daemon.executor.state.devices.healthy(MANAGED) == {MANAGED}
        plugins[KUBELETS].start()
        await asyncio.to_thread(plugins[KUBELETS].register, socket)
        assert len(kubelet.requests) == 2

    run(daemon, scenario)
    assert link.is_symlink()
    foreign = kubelet.directory / "foreign.sock"
    foreign.symlink_to("/run/elsewhere/foreign.sock")

    async def again() -> None:
        await until(socket.exists)
        assert not link.is_symlink()
        assert foreign.is_symlink()

    run(node.serving(), again)


def test_a_link_to_a_former_directory_of_the_shim_is_replaced(
    node: ShimNode, kubelet: PlayedKubelet, plugins: dict[str, ScriptedPlugin]
) -> None:
    daemon: Any = node.serving()
    socket, link = node.shim / "kubelet.sock", kubelet.directory / "theirs.sock"
    link.symlink_to(node.directory / "former-shim" / "theirs.sock")

    async def scenario() -> None:
        await until(socket.exists)
        plugins[KUBELETS].start()
        await asyncio.to_thread(plugins[KUBELETS].register, socket)
        assert link.readlink() == plugins[KUBELETS].path
        assert len(kubelet.requests) == 1

    run(daemon, scenario)


def test_a_socket_that_cannot_be_removed_does_not_close_the_shim(
    node: ShimNode, kubelet: PlayedKubelet, plugins: dict[str, ScriptedPlugin]
) -> None:
    daemon: Any = node.serving()
    socket = node.shim / "kubelet.sock"

    async def scenario() -> None:
        await until(socket.exists)
        plugins[KUBELETS].start()
        await asyncio.to_thread(plugins[KUBELETS].register, socket)
        before = socket.stat().st_mtime_ns
        await asyncio.to_thread(plugins[KUBELETS].stop)
        plugins[KUBELETS].path.unlink(missing_ok=True)
        plugins[KUBELETS].path.mkdir()
        kubelet.stop()
        await asyncio.to_thread(kubelet.start)
        await until(lambda: socket.exists() and socket.stat().st_mtime_ns != before)
        plugins[MANAGED].start()
        await asyncio.to_thread(plugins[MANAGED].register, socket)

    run(daemon, scenario)


def test_without_kubelet_only_managed_resources_can_register(
    node: ShimNode, plugins: dict[str, ScriptedPlugin]
) -> None:
    daemon: Any = node.serving()
    socket = node.shim / "kubelet.sock"

    async def scenario() -> None:
        await until(socket.exists)
        for plugin in plugins.values():
            plugin.start()
        await asyncio.to_thread(plugins[MANAGED].register, socket)
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(plugins[KUBELETS].register, socket)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE

    run(daemon, scenario)
