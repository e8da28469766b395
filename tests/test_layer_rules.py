"""What ``make lint`` refuses besides imports in the wrong direction."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from tests.testkit import layer_rules
from tests.testkit.layer_rules import ROOT, assignments, impurities, pure_packages, violations


def test_nothing_breaks_the_rules() -> None:
    assert violations() == []


def test_the_packages_are_those_of_the_contract() -> None:
    packages = pure_packages()
    assert {"engine", "model", "relay"} <= {package.name for package in packages}
    assert all((package / "__init__.py").is_file() for package in packages)


@pytest.mark.parametrize(
    "source",
    [
        "import datetime",
        "from datetime import UTC, datetime",
        "import os.path, re",
        "def f():\n    import time",
        "import secrets",
        "from uuid import uuid4",
        "import concurrent.futures",
        "import contextvars",
        "import sys",
        "from . import state",
        "import grpc",
        "async def f(): pass",
        "async def f(x):\n    await x",
        "open('/proc/stat')",
        "def f():\n    print(1)",
        "__import__('os')",
        "def f():\n    global count\n    count = 1",
    ],
)
def test_impure_code_is_reported(source: str) -> None:
    assert list(impurities(source))


def test_computations_on_values_are_pure() -> None:
    source = (
        "import re\nfrom msgspec import Struct\nfrom proxy.model.idset import CpuSet\nopen = re.compile('x')"
    )
    assert list(impurities(source)) == []


@pytest.mark.parametrize(
    "line",
    [
        "executor.state = after",
        "self._executor.state = after",
        "before, executor.state = executor.state, after",
        "self.store._state = after",
        "executor.store.state: object = after",
        "self._context.state.runtime.saved[container_id] = cpus",
        "del executor.state.runtime.awaiting_sync[container_id]",
        "executor.state.runtime.lost_creates.pop(token, None)",
        "self._store.state.inflight.calls.clear()",
        "context.state.mode = mode",
        "executor.state.reservation_cpus.update(more)",
    ],
)
def test_an_assignment_of_the_state_is_reported(line: str) -> None:
    assert [number for number, _ in assignments(line)] == [1]


def test_violations_are_printed_and_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_rules, "ALLOWED", layer_rules.ALLOWED - {"struct"})
    assert layer_rules.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert all(line.startswith("proxy/") and line.endswith("imports struct") for line in printed)


def test_lint_runs_the_rules() -> None:
    steps = subprocess.run(
        ["make", "--dry-run", "lint"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "-m tests.testkit.layer_rules" in steps.stdout


def test_contributing_names_every_package_of_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    modules = [name.split(".")[1] for layer in layers for name in re.split(" [:|] ", layer)]
    guide = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("| layer |")[2].partition("**Read a create.**")[0]
    )
    assert [name for name in modules if f"`{name}`" not in guide and f"`{name}.py`" not in guide] == []
