"""Fixtures of the end-to-end tests: one runtime for the whole run, a daemon in front of it for each test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules in this directory are imported by name

from crio import DIRECTORY as CRIO
from crio import PrivateCrio, crio_skip_reason
from daemon import DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, skip_reason

if TYPE_CHECKING:
    from cri import Cri


def pytest_runtest_setup() -> None:
    """Make SIGTERM (sent by a CI after its timeout) end the run as Ctrl-C does: with all cleanup."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 143))


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRuntime]:
    """A private runtime that all tests share; each test removes its pods."""
    if reason := skip_reason() or (CRIO and crio_skip_reason()):
        pytest.skip(reason)
    runtime = (PrivateCrio if CRIO else PrivateRuntime)(tmp_path_factory.mktemp("bed")).start()
    yield runtime
    runtime.stop()


@pytest.fixture
def cri(runtime: PrivateRuntime) -> Iterator[Cri]:
    """A client that is connected directly to the runtime."""
    with runtime.client() as client:
        yield client
    runtime.clear()


@pytest.fixture
def start_daemon(runtime: PrivateRuntime, tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Start daemons in front of the runtime; all are stopped after the test."""
    made: list[DaemonProcess] = []

    def make(directory: Path | None = None, **config: object) -> DaemonProcess:
        daemon = DaemonProcess(directory or tmp_path / f"proxy{len(made)}", runtime, config)
        made.append(daemon)
        daemon.start()
        return daemon

    yield make
    for daemon in made:
        daemon.stop()
    runtime.widen()


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A daemon with the default settings of the tests."""
    return start_daemon()


@pytest.fixture
def calm_node(runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]) -> Iterator[ModeledNode]:
    """Like ``node``, but without periodic reconciles: only calls and events reveal changes."""
    daemon = start_daemon(reconcilePeriod="1h")
    with daemon.client() as client:
        yield ModeledNode(runtime, daemon, client)
    runtime.clear()


@pytest.fixture
def node(runtime: PrivateRuntime, daemon: DaemonProcess) -> Iterator[ModeledNode]:
    """A client of the daemon that computes the expected CPUs of each container."""
    with daemon.client() as client:
        yield ModeledNode(runtime, daemon, client)
    runtime.clear()
