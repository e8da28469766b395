"""Settings and fixtures that all tests share."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.testkit import shuffle

# In CI the same examples run each time: a new failure must mean that the code has changed.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
# Any failing example detects a mutant; the search for the smallest one can take minutes.
settings.register_profile("mutation", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("ci" if os.environ.get("CI") else "here")

SEED = pytest.StashKey[int]()
EXIT_S = 120
"""Seconds for reports and for the end of threads, after the last test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--shuffle``, which ``make test`` uses."""
    help_text = "run the tests in random order; SEED repeats the order of an earlier run"
    parser.addoption("--shuffle", metavar="SEED", nargs="?", const=shuffle.RANDOM, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed once for the run."""
    option = config.getoption("--shuffle")
    if option is not None:
        config.stash[SEED] = shuffle.seed_of(option)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Print the seed before the first test."""
    return f"random order: --shuffle={config.stash[SEED]}" if SEED in config.stash else None


@pytest.hookimpl(tryfirst=True)  # before pytest groups tests by their session fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle what was collected."""
    if SEED in config.stash:
        shuffle.shuffle(items, config.stash[SEED])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seed again where the failures are listed."""
    if SEED in config.stash and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"random order: repeat it with --shuffle={config.stash[SEED]}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    """Bound the time to exit: a thread that never ends would keep the process alive without end."""
    threading.Thread(target=_end_process, args=(int(exitstatus),), daemon=True).start()


def _end_process(status: int) -> None:
    """Print which threads are left, and exit."""
    time.sleep(EXIT_S)
    print(f"the tests have ended, but not their threads within {EXIT_S} s:", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(sys.__stderr__)
    os._exit(status)


@pytest.fixture
def slow_socket() -> Iterator[Callable[[Path, Path, float], None]]:
    """Return a function that listens at a path and forwards a client to a server only after a delay."""
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one peer has closed the connection before it read everything
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def forward(listener: socket.socket, server_path: Path, delay: float) -> None:
        with listener, socket.socket(socket.AF_UNIX) as server:
            client, _ = listener.accept()
            time.sleep(delay)
            server.connect(str(server_path))
            with client:
                back = threading.Thread(target=pump, args=(server, client))
                back.start()
                pump(client, server)
                back.join()

    def open_slow_socket(path: Path, server_path: Path, delay: float) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        threads.append(threading.Thread(target=forward, args=(listener, server_path, delay), daemon=True))
        threads[-1].start()

    yield open_slow_socket
    for thread in threads:
        thread.join(30)
