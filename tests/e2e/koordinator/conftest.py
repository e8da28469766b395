"""Fixtures of the tests with real programs of Koordinator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules in this directory are imported by name

from crio import DIRECTORY as CRIO
from daemon import Daemon, Node
from peers import HookServer, RuntimeProxy, koordinator_skip_reason

from proxy.config.load import parse
from proxy.frontends.hookserver.registration import registration

if TYPE_CHECKING:
    from private_runtime import PrivateRuntime


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    if reason := koordinator_skip_reason() or (CRIO and "on containerd only"):
        pytest.skip(reason)


@pytest.fixture
def peers(runtime: PrivateRuntime, tmp_path: Path) -> Iterator[Callable[..., RuntimeProxy]]:
    """Create runtime proxies of Koordinator; all are stopped after the test."""
    made: list[RuntimeProxy] = []

    def make(socket: Path | None = None, directory: str = "koord") -> RuntimeProxy:
        made.append(RuntimeProxy(tmp_path / directory, socket or runtime.socket))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def koordlets(tmp_path: Path) -> Iterator[Callable[..., HookServer]]:
    """Start hook servers of koordlet; all are stopped after the test."""
    made: list[HookServer] = []

    def make(servers: Path, **options: str) -> HookServer:
        made.append(HookServer(tmp_path / "koordlet", servers))
        made[-1].start(**options)
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def serving(runtime: PrivateRuntime, proxies: Callable[..., Daemon], tmp_path: Path) -> Callable[..., Daemon]:
    """Start daemons that serve as hook servers; their own hook directories belong to the test."""

    def make(**config: Any) -> Daemon:
        for name in ("hooks.d", "servers"):
            (tmp_path / name).mkdir(mode=0o755, exist_ok=True)
        hooks = {"directory": f"{tmp_path}/hooks.d", "vendorDirectory": f"{tmp_path}/no-hooks.d"}
        hooks |= {"serverDirectory": f"{tmp_path}/servers", "serve": f"{tmp_path}/hooks.sock"}
        return proxies(hooks={**hooks, **config.pop("hooks", {})}, **config)

    return make


@pytest.fixture
def through(
    runtime: PrivateRuntime, serving: Callable[..., Daemon], peers: Callable[..., RuntimeProxy]
) -> Iterator[Callable[..., Node]]:
    """Start a daemon and a runtime proxy of Koordinator that calls it; return a client of the proxy."""
    clients: list[Any] = []

    def make(daemon: Daemon | None = None, socket: Path | None = None, **config: Any) -> Node:
        daemon = daemon or serving(**config)
        peer = peers(socket)
        text = (daemon.directory / "config.yaml").read_text()
        (peer.servers / "topoproxy.json").write_text(registration(parse(text, "test")))
        peer.start(runtime.cgroup)
        clients.append(peer.client(runtime.cgroup))
        return Node(runtime, daemon, clients[-1])

    yield make
    for client in clients:
        client.close()
    runtime.clear()
