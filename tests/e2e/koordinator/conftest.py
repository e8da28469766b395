"""Fixtures of the tests with real programs of Koordinator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules in this directory are imported by name

from crio import DIRECTORY as CRIO
from daemon import DaemonProcess, ModeledNode
from peers import KoordletHookServer, RuntimeProxy, koordinator_skip_reason

from proxy.config.load import parse
from proxy.frontends.hookserver.registration import registration

if TYPE_CHECKING:
    from private_runtime import PrivateRuntime


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    if reason := koordinator_skip_reason() or (CRIO and "on containerd only"):
        pytest.skip(reason)


@pytest.fixture
def make_runtime_proxy(runtime: PrivateRuntime, tmp_path: Path) -> Iterator[Callable[..., RuntimeProxy]]:
    """Create runtime proxies of Koordinator; all are stopped after the test."""
    made: list[RuntimeProxy] = []

    def make(socket: Path | None = None, directory: str = "koord") -> RuntimeProxy:
        made.append(RuntimeProxy(tmp_path / directory, socket or runtime.socket))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def start_koordlet(tmp_path: Path) -> Iterator[Callable[..., KoordletHookServer]]:
    """Start hook servers of koordlet; all are stopped after the test."""
    made: list[KoordletHookServer] = []

    def make(servers: Path, **options: str) -> KoordletHookServer:
        made.append(KoordletHookServer(tmp_path / "koordlet", servers))
        made[-1].start(**options)
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def start_serving_daemon(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> Callable[..., DaemonProcess]:
    """Start daemons that serve as hook servers; their own hook directories belong to the test."""

    def make(**config: Any) -> DaemonProcess:
        for name in ("hooks.d", "servers"):
            (tmp_path / name).mkdir(mode=0o755, exist_ok=True)
        hooks = {"directory": f"{tmp_path}/hooks.d", "vendorDirectory": f"{tmp_path}/no-hooks.d"}
        hooks |= {"serverDirectory": f"{tmp_path}/servers", "serve": f"{tmp_path}/hooks.sock"}
        return start_daemon(hooks={**hooks, **config.pop("hooks", {})}, **config)

    return make


@pytest.fixture
def start_node(
    runtime: PrivateRuntime,
    start_serving_daemon: Callable[..., DaemonProcess],
    make_runtime_proxy: Callable[..., RuntimeProxy],
) -> Iterator[Callable[..., ModeledNode]]:
    """Start a daemon and a runtime proxy of Koordinator that calls it; return a client of the proxy."""
    clients: list[Any] = []

    def make(daemon: DaemonProcess | None = None, socket: Path | None = None, **config: Any) -> ModeledNode:
        daemon = daemon or start_serving_daemon(**config)
        peer = make_runtime_proxy(socket)
        text = (daemon.directory / "config.yaml").read_text()
        (peer.servers / "topoproxy.json").write_text(registration(parse(text, "test")))
        peer.start(runtime.cgroup)
        clients.append(peer.client(runtime.cgroup))
        return ModeledNode(runtime, daemon, clients[-1])

    yield make
    for client in clients:
        client.close()
    runtime.clear()
