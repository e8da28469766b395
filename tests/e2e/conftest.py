"""Fixtures of the end-to-end tests: a bed for the whole run, a daemon in front of it for each test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file are plain modules

from bed import Bed, why_not
from crio import DIRECTORY as CRIO
from crio import CrioBed, why_not_crio
from daemon import Daemon, Node

if TYPE_CHECKING:
    from cri import Cri


def pytest_runtest_setup() -> None:
    """Make SIGTERM (a CI that has waited enough) end the run as Ctrl-C does: nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 143))


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """A private runtime that is shared by all tests; each test leaves it without pods."""
    if reason := why_not() or (CRIO and why_not_crio()):
        pytest.skip(reason)
    bed = (CrioBed if CRIO else Bed)(tmp_path_factory.mktemp("bed")).start()
    yield bed
    bed.stop()


@pytest.fixture
def cri(bed: Bed) -> Iterator[Cri]:
    """A client of the runtime itself."""
    with bed.client() as client:
        yield client
    bed.clear()


@pytest.fixture
def proxies(bed: Bed, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Make daemons in front of the bed; all are ended after the test."""
    made: list[Daemon] = []

    def make(directory: Path | None = None, **config: object) -> Daemon:
        daemon = Daemon(directory or tmp_path / f"proxy{len(made)}", bed, config)
        made.append(daemon)
        daemon.start()
        return daemon

    yield make
    for daemon in made:
        daemon.stop()
    bed.widen()


@pytest.fixture
def proxy(proxies: Callable[..., Daemon]) -> Daemon:
    """One daemon with the settings of most tests."""
    return proxies()


@pytest.fixture
def calm_node(bed: Bed, proxies: Callable[..., Daemon]) -> Iterator[Node]:
    """As ``node``, but the daemon compares nothing by itself: only the calls show it what happens."""
    daemon = proxies(reconcilePeriod="1h")
    with daemon.client() as client:
        yield Node(bed, daemon, client)
    bed.clear()


@pytest.fixture
def node(bed: Bed, proxy: Daemon) -> Iterator[Node]:
    """A client of the daemon that also knows what each container's CPUs should be."""
    with proxy.client() as client:
        yield Node(bed, proxy, client)
    bed.clear()
