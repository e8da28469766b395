"""The order and the limits of tests that try a mutant: a plugin for pytest, loaded by ``mutate.py``.

Most mutants are noticed by a test that takes milliseconds, so the tests of the changed module come first, and
the quicker ones before the slower ones. A test may take some times as long as it took without any mutant, so
that a loop that never ends is noticed in seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TIMES = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that ``mutate.py`` passes."""
    parser.addoption("--measured", metavar="FILE", help="write how long each test takes")
    parser.addoption("--times", metavar="FILE", help="how long each test takes without any mutant")
    parser.addoption("--first", metavar="NAME", default="", help="the file whose tests come first")


def pytest_configure(config: pytest.Config) -> None:
    """Read the times, or measure them."""
    times = config.getoption("--times")
    config.stash[TIMES] = json.loads(Path(times).read_text()) if times else {}
    if config.getoption("--measured"):
        config.pluginmanager.register(Measurement())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the tests in order, and limit each."""
    times, first = config.stash[TIMES], config.getoption("--first")
    items.sort(key=lambda item: (item.path.name != first, times.get(item.nodeid, 0.0)))
    for item in items:
        if item.nodeid in times:
            item.add_marker(pytest.mark.timeout(limit_of(times[item.nodeid])), append=False)


def limit_of(seconds: float) -> float:
    """Return how long something may take with a mutant if it takes this long without."""
    return 10 + 4 * seconds


class Measurement:
    """Adds up how long each test takes, with its fixtures."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a part of a test."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the sums."""
        Path(session.config.getoption("--measured")).write_text(json.dumps(self._seconds))
