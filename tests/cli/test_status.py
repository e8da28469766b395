"""``topoproxy status`` against a daemon's admin socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.cli.status import status
from proxy.model.errors import UnavailableError, UsageError
from proxy.model.idset import CpuSet, Mask


@pytest.fixture
def daemon(serve_admin) -> Path:
    """A daemon's admin socket in a thread; gives the configuration that leads to it."""
    return serve_admin({"/status": lambda: {"version": "9.9", "pools": {"shared": "0-3"}}})


def run(*words: object) -> str:
    done = CliRunner().invoke(status, [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_page(daemon: Path) -> None:
    page = run("--config", daemon)
    assert page.startswith("topoproxy 9.9\n")
    assert "shared  0-3" in page


def test_json_is_what_the_daemon_says(daemon: Path) -> None:
    assert json.loads(run("--json", "--config", daemon)) == {"version": "9.9", "pools": {"shared": "0-3"}}


def test_metrics_are_printed_as_they_come(serve_admin) -> None:
    config = serve_admin({"/metrics": lambda: "# TYPE a gauge\na 1\n"})
    assert run("--metrics", "--config", config) == "# TYPE a gauge\na 1\n"


def test_the_kernels_cpusets(daemon: Path, tmp_path: Path) -> None:
    groups = FakeCgroups(tmp_path / "tree", CpuSet.parse("0-3"), Mask([0]), 2)
    groups.mkdir("kubepods")
    groups.write("kubepods", CpuSet.parse("2-3"), None)
    daemon.write_text(f"{daemon.read_text()}cgroupRoot: {tmp_path}/tree\n")
    page = run("--cgroups", "--config", daemon)
    assert page.startswith("topoproxy 9.9\n")
    assert page.endswith("\nCGROUP    CPUS  MEMS\nkubepods  2-3   0\n")
    data = json.loads(run("--cgroups", "--json", "--config", daemon))
    assert data["cpusets"] == [{"cgroup": "kubepods", "cpus": "2-3", "mems": "0"}]
    assert "CGROUP" not in run("--config", daemon)


def test_a_named_socket_needs_no_configuration(daemon: Path) -> None:
    socket = daemon.with_name("admin.sock")
    daemon.write_text("broken: [")
    assert run("--admin", f"unix://{socket}", "--config", daemon).startswith("topoproxy 9.9")


def test_no_daemon_answers(tmp_path: Path) -> None:
    words = (
        r"no process listens there \(systemctl status topoproxy shows whether it runs, --admin names another"
    )
    with pytest.raises(UnavailableError, match=words) as caught:
        run("--admin", tmp_path / "no.sock")
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--metrics --json", "cannot show --json in numbers for Prometheus"),
        ("--metrics --cgroups", "cannot show --cgroups in numbers for Prometheus"),
        ("--metrics --memory --json", "cannot show --memory and --json in numbers"),
        ("--memory --cgroups", "cannot show cpusets beside memory"),
    ],
)
def test_no_option_is_ignored(daemon: Path, words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(*words.split(), "--config", daemon)


def test_a_wrong_socket(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot use --admin: 'tcp://x'"):
        run("--admin", "tcp://x")
