"""The executor's node in memory, for tests of releases."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.conftest import run_scenario as run_scenario
from tests.release.leaving_node import Node


@pytest.fixture(params=[1, 2])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="tp-") as directory:
        made = Node(Path(directory), request.param)
        made.runtime.start()
        yield made
        made.runtime.stop()
