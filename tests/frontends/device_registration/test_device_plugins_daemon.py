"""The daemon with ``devicePlugins``: real plugins register, and its status and state follow them."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.admin.status_text import render
from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.telemetry import metrics
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.device_plugin import REGISTRATION, ScriptedPlugin, device
from tests.testkit.waiting import until

NAME = "example.com/dev"


class PluginNode(DaemonNode):
    """A node with a directory for device plugins."""

    @property
    def plugins(self) -> Path:
        return self.directory / "plugins"

    @property
    def server(self) -> Path:
        return self.plugins / "kubelet.sock"

    def serving(self, more: str = "") -> Any:
        text = f"devicePlugins: {{enabled: true, socketDirectory: {self.plugins}, timeout: 2s}}\n{more}"
        return self.daemon(text)


@pytest.fixture
def node() -> Iterator[PluginNode]:
    with temporary_node(PluginNode) as created:
        yield created


@pytest.fixture
def plugin(node: PluginNode) -> Iterator[ScriptedPlugin]:
    node.plugins.mkdir()
    created = ScriptedPlugin(node.plugins, [device("a", 0), device("b", 1)])
    yield created
    created.stop()


def row(daemon: Any) -> dict[str, Any]:
    return next(iter(daemon.parts.pages.status()["devicePlugins"]["resources"]), {})


def refused(call: Callable[..., None], *args: Any, **more: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **more)
    error: Any = caught.value
    return error.code(), error.details()


def test_a_plugin_registers_and_its_devices_are_in_the_state(
    node: PluginNode, plugin: ScriptedPlugin
) -> None:
    daemon: Any = node.serving()

    async def scenario() -> None:
        await until(node.server.exists)
        assert stat.S_IMODE(node.server.stat().st_mode) == 0o600
        plugin.start()
        await asyncio.to_thread(plugin.register, node.server)
        await until(lambda: row(daemon).get("healthy") == 2)
        assert daemon.executor.state.devices.healthy(NAME) == {"a", "b"}
        answer = await daemon.executor.device_plugins.allocate(NAME, ("a",))
        assert answer.envs == {"DEVICES": "a"}
        text = render(daemon.parts.pages.status())
        assert f"{NAME} serving 2 2 {plugin.path}" in " ".join(text.split())
        assert daemon.executor.telemetry.value(metrics.DEVICE_PLUGIN_REGISTRATIONS, result="registered") == 1
        plugin.stop()
        await until(lambda: daemon.executor.state.devices.healthy(NAME) == frozenset())
        assert row(daemon)["devices"] == 2

    run(daemon, scenario)
    assert not node.server.exists()


def test_invalid_registrations_are_refused(node: PluginNode, plugin: ScriptedPlugin) -> None:
    daemon: Any = node.serving()
    invalid, away = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE

    async def scenario() -> None:
        await until(node.server.exists)
        plugin.start()
        register = plugin.register

        async def check(code: Any, message: str, **more: Any) -> None:
            found = await asyncio.to_thread(refused, register, node.server, **more)
            assert found[0] is code
            assert message in found[1]

        await check(invalid, "API version 'v1alpha' (supported: v1beta1)", version="v1alpha")
        await check(invalid, "API version ''", version="")
        for endpoint in ("../x.sock", "kubelet.sock", ""):
            await check(invalid, "cannot use the endpoint", endpoint=endpoint)
        await check(away, "cannot register example.com/dev: the device plugin at", endpoint="none.sock")
        for name in ("cpu", "kubernetes.io/x", "example.com/"):
            plugin.resource = name
            await check(invalid, "is not the name of an extended resource")
        with grpc.insecure_channel(f"unix:{node.server}") as channel:
            call: Any = channel.unary_unary(REGISTRATION)
            code, message = await asyncio.to_thread(refused, call, b"\xff", timeout=60)
            assert (code, message) == (invalid, "cannot read the registration: RegisterRequest expected")
            long = pb.RegisterRequest(version="v1beta1", endpoint="x" * 20_000).SerializeToString()
            code, _ = await asyncio.to_thread(refused, call, long, timeout=60)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert row(daemon) == {}
        telemetry = daemon.executor.telemetry
        assert telemetry.value(metrics.DEVICE_PLUGIN_REGISTRATIONS, result="refused") == 10
        assert "cannot register a device plugin" in str(telemetry.problems())

    run(daemon, scenario)


WATCHER = """\
import ctypes, os, sys
libc = ctypes.CDLL(None)
fd = libc.inotify_init()
libc.inotify_add_watch(fd, sys.argv[1].encode(), 0x100 | 0x200 | 0x40 | 0x80)
print("watching", flush=True)
while True:
    data = os.read(fd, 4096)
    while data:
        mask, length = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
        print(hex(mask), data[16:16 + length].rstrip(b"\\0").decode(), flush=True)
        data = data[16 + length:]
"""


def test_a_start_removes_sockets_and_creates_the_one_that_plugins_watch(
    node: PluginNode, plugin: ScriptedPlugin
) -> None:
    """Plugins register again on IN_CREATE of kubelet.sock, as after a bind by kubelet."""
    plugin.start()
    (node.plugins / "kept").touch()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(node.server))
    command = [sys.executable, "-c", WATCHER, str(node.plugins)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"

        async def scenario() -> None:
            await until(lambda: not plugin.path.exists())
            await asyncio.to_thread(plugin.start)
            await asyncio.to_thread(plugin.register, node.server)

        run(node.serving(), scenario)
        events = []
        while "0x100 kubelet.sock\n" not in events:
            events.append(watcher.stdout.readline())
        watcher.kill()
    assert events.index("0x200 plugin.sock\n") < events.index("0x200 kubelet.sock\n")
    assert sorted(entry.name for entry in node.plugins.iterdir()) == ["kept", "plugin.sock"]


def test_a_socket_in_use_is_kept_until_it_is_free(node: PluginNode, plugin: ScriptedPlugin) -> None:
    node.plugins.joinpath("other").touch()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(node.server))
        other.listen()
        plugin.start()
        daemon: Any = node.serving()

        async def scenario() -> None:
            await until(lambda: "another process answers" in str(daemon.executor.telemetry.problems()))
            assert plugin.path.exists()
            other.close()
            await until(lambda: not plugin.path.exists())
            await asyncio.to_thread(plugin.start)
            await asyncio.to_thread(plugin.register, node.server)

        run(daemon, scenario)


def test_plugins_register_again_after_a_restart(node: PluginNode, plugin: ScriptedPlugin) -> None:
    for _ in range(2):
        daemon: Any = node.serving()

        async def scenario(daemon: Any = daemon) -> None:
            await until(node.server.exists)
            await asyncio.to_thread(plugin.start)
            await asyncio.to_thread(plugin.register, node.server)
            await until(lambda: row(daemon).get("healthy") == 2)

        run(daemon, scenario)
        plugin.stop()


def test_the_deadline_changes_at_a_reload(node: PluginNode, plugin: ScriptedPlugin) -> None:
    file = node.directory / "config.yaml"

    def text(timeout: str) -> str:
        return f"devicePlugins: {{enabled: true, socketDirectory: {node.plugins}, timeout: {timeout}}}\n"

    file.write_text(node.configuration(text("30s")))
    daemon: Any = node.daemon(text("30s"), file=file)

    async def scenario() -> None:
        await until(node.server.exists)
        plugin.start()
        await asyncio.to_thread(plugin.register, node.server)
        await until(lambda: row(daemon).get("healthy") == 2)
        file.write_text(node.configuration(text("200ms")))
        outcome = await daemon.parts.reload.run("admin")
        assert outcome.result == "applied", outcome
        plugin.hanging.clear()
        with pytest.raises(Exception, match=r"no answer within 0\.2 s"):
            await daemon.executor.device_plugins.allocate(NAME, ("a",))

    run(daemon, scenario)


def test_no_module_is_loaded_if_device_plugins_are_off() -> None:
    code = (
        "import sys, proxy.daemon, proxy.assembly\n"
        "parts = ('backends.device_plugins', 'frontends.device_registration')\n"
        "sys.exit(', '.join(name for name in sys.modules if name.partition('.')[2].startswith(parts)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_daemon_with_device_plugins_off_has_no_plugins_and_no_page(node: PluginNode) -> None:
    daemon: Any = node.daemon()

    async def scenario() -> None:
        assert daemon.executor.device_plugins is None
        assert "devicePlugins" not in daemon.parts.pages.status()
        assert not node.plugins.exists()

    run(daemon, scenario)
