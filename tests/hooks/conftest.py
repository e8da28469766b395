"""Tests of a shipped hook run on the copy of that file that a node may have, too (``tests/old_hooks``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

OLD = Path(__file__).resolve().parents[1] / "old_hooks/b3705ac"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a module that names the file of its hook twice."""
    if isinstance(getattr(metafunc.module, "HOOK", None), Path):
        metafunc.parametrize("hook_version", ["current", OLD.name], indirect=True)


@pytest.fixture(autouse=True)
def hook_version(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the file that a module tests."""
    if getattr(request, "param", "") == OLD.name:
        monkeypatch.setattr(request.module, "HOOK", OLD / request.module.HOOK.name)
