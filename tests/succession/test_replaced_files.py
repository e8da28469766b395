"""A daemon whose files are replaced while it runs, as a package does before it replaces the daemon."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import proxy
from proxy.admin.client import query_admin
from proxy.demo.client import DemoPod
from proxy.model.errors import ReplacedFilesError, UnavailableError
from proxy.observe.json_access import as_map
from proxy.replaced_files import ReplacedFilesGuard
from proxy.upgrade.replacement import replace_daemon
from tests.succession.conftest import LIMIT_S, ProcessNode
from tests.testkit.captured_log import telemetry

ANSWERED = ("/status", "/readyz", "/metrics", "/hooks", "/interface", "/release", "/successor")
REFUSED = ("/explain", "/report", "/node", "/devices", "/takeover", "/observe/report")
OLD = f"since version {proxy.__version__} was started: restart the daemon (topoproxy upgrade --now)"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of topoproxy's files, from which the daemon is started."""
    files = tmp_path / "proxy"
    shutil.copytree(Path(proxy.__file__).parent, files)
    monkeypatch.chdir(tmp_path)  # python -m looks there first
    return files


@pytest.fixture
def upgraded(installed: Path, node: ProcessNode) -> ProcessNode:
    """Start the daemon, and replace all of its files."""
    for file in installed.rglob("*.py"):
        text = file.read_bytes()
        file.unlink()
        file.write_bytes(text)
    return node


def test_what_an_upgrade_needs_is_answered_and_the_rest_names_the_restart(upgraded: ProcessNode) -> None:
    for route in ANSWERED:
        assert query_admin(upgraded.admin, route, LIMIT_S)
    for route in REFUSED:
        with pytest.raises(UnavailableError) as caught:
            query_admin(upgraded.admin, route, LIMIT_S, {"view": "plan"} if route == "/takeover" else None)
        assert f"for {route}: cannot import proxy." in str(caught.value)
        assert str(caught.value).endswith(f"the files of topoproxy were replaced {OLD}")
    with upgraded.client() as client:
        client.launch(DemoPod("after"))
    assert "internal error" not in upgraded.log
    new = replace_daemon(upgraded.admin, LIMIT_S)
    assert (new.pid != upgraded.popen.pid, new.reason) == (True, "")
    for route in REFUSED:
        assert query_admin(upgraded.admin, route, LIMIT_S, {"view": "plan"} if route == "/takeover" else None)


def test_a_release_and_a_stop_need_no_file(upgraded: ProcessNode) -> None:
    query_admin(upgraded.admin, "/release/start", LIMIT_S, act=True)
    upgraded.wait(lambda: as_map(query_admin(upgraded.admin, "/release"))["stage"] == "released")
    upgraded.popen.send_signal(signal.SIGTERM)
    assert upgraded.popen.wait(LIMIT_S) == 0
    assert "cannot import" not in upgraded.log


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("proxy.hook_assembly", ["proxy.frontends.cri.hook_view", "proxy.hooks.status_data"]),
        ("proxy.process", ["proxy.public_interfaces", "proxy.executor.status_data", "proxy.observe.metrics"]),
    ],
)
def test_calls_and_pages_with_hooks_import_nothing(module: str, needed: list[str]) -> None:
    program = [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert set(needed) <= set(done.stdout.split())


def test_the_guard_refuses_only_topoproxys_modules_and_only_after_a_replacement(tmp_path: Path) -> None:
    marker = tmp_path / "__init__.py"
    marker.write_text("")
    guard = ReplacedFilesGuard(marker)
    guard.find_spec("proxy.observe.koordinator")
    (tmp_path / "new").write_text("")
    (tmp_path / "new").rename(marker)
    with pytest.raises(ReplacedFilesError, match=r"cannot import proxy\.observe\.koordinator: the files"):
        guard.find_spec("proxy.observe.koordinator")
    for other in ("proxy", "proxying.x", "yaml"):
        guard.find_spec(other)
    marker.unlink()
    with pytest.raises(ReplacedFilesError):
        guard.find_spec("proxy.x")


def test_a_background_task_reports_it_as_a_problem_and_no_internal_error() -> None:
    reported = telemetry()
    reported.fault(ReplacedFilesError("cannot import proxy.x: the files were replaced"))
    reported.fault(ReplacedFilesError("cannot import proxy.x: the files were replaced"))
    (problem,) = reported.problems()
    assert problem["message"] == "cannot use a part of topoproxy before a restart"
    assert "internal error" not in str(problem)


def test_a_command_line_is_not_guarded() -> None:
    assert not any(isinstance(each, ReplacedFilesGuard) for each in sys.meta_path)
