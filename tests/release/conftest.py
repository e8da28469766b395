"""The keeper's node in memory, for what leaves it."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helper beside this file is a plain module

from leaving_node import Node  # noqa: E402 - after the path


def _load(name: str, path: Path) -> object:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


live = _load("keeper_world", HERE.parent / "keeper/conftest.py").live  # type: ignore[attr-defined]


@pytest.fixture(params=[1, 2])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        made = Node(Path(folder), request.param)
        made.runtime.start()
        yield made
        made.runtime.stop()
