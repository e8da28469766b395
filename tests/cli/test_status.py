"""``topoproxy status`` against a daemon's admin socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.admin.server import Reply
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.cli.status import status
from proxy.model.errors import UnavailableError, UsageError
from proxy.model.idset import CpuSet, Mask


@pytest.fixture
def daemon(serve_admin) -> Path:
    """A daemon's admin socket in a thread; returns the configuration file that names it."""
    return serve_admin({"/status": lambda: {"version": "9.9", "pools": {"shared": "0-3"}}})


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(status, [str(w) for w in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_status_page_is_printed(daemon: Path) -> None:
    page = run("--config", daemon)
    assert page.startswith("topoproxy 9.9\n")
    assert "shared  0-3" in page


def test_the_json_is_the_answer_of_the_daemon(daemon: Path) -> None:
    assert json.loads(run("--json", "--config", daemon)) == {"version": "9.9", "pools": {"shared": "0-3"}}


def test_metrics_are_printed_unchanged(serve_admin) -> None:
    config = serve_admin({"/metrics": lambda: "# TYPE a gauge\na 1\n"})
    assert run("--metrics", "--config", config) == "# TYPE a gauge\na 1\n"


def test_the_cpusets_of_the_cgroups_are_printed(daemon: Path, tmp_path: Path) -> None:
    groups = FakeCgroups(tmp_path / "tree", CpuSet.parse("0-3"), Mask([0]), 2)
    groups.mkdir("kubepods")
    groups.write("kubepods", CpuSet.parse("2-3"), None)
    daemon.write_text(f"{daemon.read_text()}cgroupRoot: {tmp_path}/tree\n")
    page = run("--cgroups", "--config", daemon)
    assert page.startswith("topoproxy 9.9\n")
    assert page.endswith("\nCGROUP    CPUS  MEMS  POD  CONTAINER\nkubepods  2-3   0\n")
    data = json.loads(run("--cgroups", "--json", "--config", daemon))
    row = {"cgroup": "kubepods", "cpus": "2-3", "mems": "0", "pod": "", "container": ""}
    assert (data["cpusets"], "cgroups" in data) == ([row], False)
    assert "CGROUP" not in run("--config", daemon)


def test_a_named_socket_needs_no_configuration(daemon: Path) -> None:
    socket = daemon.with_name("admin.sock")
    daemon.write_text("broken: [")
    assert run("--admin", f"unix://{socket}", "--config", daemon).startswith("topoproxy 9.9")


def test_a_missing_daemon_is_an_error(tmp_path: Path) -> None:
    message = (
        r"no process listens there \(systemctl status topoproxy shows whether it runs, --admin names another"
    )
    with pytest.raises(UnavailableError, match=message) as caught:
        run("--admin", tmp_path / "no.sock")
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        ("--metrics --json", "cannot show --json with --metrics"),
        ("--metrics --cgroups", "cannot show --cgroups with --metrics"),
        ("--metrics --memory --json", "cannot show --memory and --json with --metrics"),
        ("--memory --cgroups", "cannot show cpusets and memory together"),
    ],
)
def test_an_option_without_effect_is_refused(daemon: Path, args: str, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        run(*args.split(), "--config", daemon)


def test_a_wrong_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot use --admin: 'tcp://x'"):
        run("--admin", "tcp://x")


class Readiness:
    """The answers of a daemon that is ready after this number of queries of ``/readyz``."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.queries = 0

    def readyz(self) -> Reply:
        self.queries += 1
        return Reply(200, "ok\n") if self.queries > self.after else Reply(503, "[-]state failed: not yet\n")

    def status(self) -> dict[str, object]:
        ready = self.queries > self.after
        check = {"name": "state", "ok": ready, "reason": "" if ready else "not yet", "required": True}
        return {"version": "9.9", "ready": ready, "checks": [check]}


def test_a_daemon_that_is_not_ready_is_reported_with_exit_status_1(serve_admin) -> None:
    config = serve_admin({"/status": Readiness(1).status})
    page = run("--config", config, code=1)
    assert "NOT READY" in page
    assert "Problems (1)\n  NOT READY: not yet\n" in page
    assert json.loads(run("--json", "--config", config, code=1))["ready"] is False


def test_wait_ends_when_the_daemon_is_ready(serve_admin) -> None:
    soon = Readiness(2)
    config = serve_admin({"/status": soon.status, "/readyz": soon.readyz})
    assert "No problems." in run("--wait-ready", "--config", config)
    assert soon.queries == 3


def test_wait_ends_at_its_timeout(serve_admin, tmp_path: Path) -> None:
    never = Readiness(1000)
    config = serve_admin({"/status": never.status, "/readyz": never.readyz})
    assert "NOT READY" in run("--wait-ready=500ms", "--config", config, code=1)
    assert 1 <= never.queries <= 4
    with pytest.raises(UnavailableError, match="no process listens there"):
        run("--wait-ready=300ms", "--admin", f"unix://{tmp_path}/none.sock")


def test_a_wait_needs_a_duration(daemon: Path) -> None:
    result = CliRunner().invoke(status, ["--wait-ready=soon", "--config", str(daemon)])
    assert (result.exit_code, "'soon' is not a duration such as 10s" in result.output) == (2, True)


def test_cgroups_are_printed_with_the_names_of_pods_and_containers(serve_admin, tmp_path: Path) -> None:
    row = {"id": "abc", "ref": "ns/web/main", "pod_uid": "1-2", "sandbox": "def"}
    config = serve_admin({"/status": lambda: {"containers": [row], "cgroups": {"version": 1}}})
    groups = FakeCgroups(tmp_path / "tree", CpuSet.parse("0-3"), Mask([0]), 1)
    for path in ("kubepods", "kubepods/pod1-2", "kubepods/pod1-2/abc", "kubepods/pod1-2/def"):
        groups.mkdir(path)
        groups.write(path, CpuSet.parse("2-3"), Mask([0]))
    config.write_text(f"{config.read_text()}cgroupRoot: {tmp_path}/tree\n")
    assert run("--cgroups", "--config", config).splitlines()[-5:] == [
        "CGROUP               CPUS  MEMS  POD     CONTAINER",
        "kubepods             2-3   0",
        "kubepods/pod1-2      2-3   0     ns/web",
        "kubepods/pod1-2/abc  2-3   0     ns/web  main",
        "kubepods/pod1-2/def  2-3   0     ns/web  (sandbox)",
    ]
    data = json.loads(run("--cgroups", "--json", "--config", config))
    assert data["cgroups"] == {"version": 1}, "a key never changes its type"
    assert data["cpusets"][2]["container"] == "main"
