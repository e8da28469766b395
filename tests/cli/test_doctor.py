"""``topoproxy doctor`` on a node without a daemon: lines, advice, exit code, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli.main import cli, run_command_line
from proxy.doctor.checks import CHECKS
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs
from tests.testkit.answers import check_answer

DOCUMENT = Path(__file__).parents[2] / "docs/doctor.md"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_sysfs(regular_machine(2, 1, 4, 2), tmp_path / "machine")
    (tmp_path / "proc").mkdir()
    cpuset = tmp_path / "cgroup/cpuset"
    cpuset.mkdir(parents=True)
    (cpuset / "cpuset.cpus").write_text("0-15\n")
    none = tmp_path / "none"
    file = tmp_path / "c.yaml"
    file.write_text(
        f"listen: unix://{tmp_path}/cri.sock\nruntime: unix://{tmp_path}/runtime.sock\n"
        f"stateDir: {tmp_path}/state\nsysfsRoot: {tmp_path}/machine/sys\nprocfsRoot: {tmp_path}/proc\n"
        f"cgroupRoot: {tmp_path}/cgroup\nkubelet: {{stateDir: {none}}}\n"
        f"hooks: {{directory: {none}, vendorDirectory: {none}, serverDirectory: {none}}}\n"
    )
    file.chmod(0o600)
    return file


def doctor(*args: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, args)])


def test_each_check_has_a_line_and_each_failure_its_advice(config: Path) -> None:
    done = doctor("--config", config)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    check_lines = [line for line in lines if line[:4].strip() in ("ok", "WARN", "FAIL", "skip")]
    assert [line.split()[1] for line in check_lines] == list(CHECKS)
    assert [line.split()[1] for line in check_lines if line.startswith("FAIL")] == ["runtime", "daemon"]
    for number, line in enumerate(lines):
        if line.startswith(("FAIL", "WARN")):
            assert lines[number + 1].strip().startswith("advice: ")
    assert lines[-1] == f"{len(CHECKS)} checks: 2 failed, 0 with a warning"


def test_an_ignored_check_does_not_change_the_exit_code(config: Path) -> None:
    done = doctor("--config", config, "--ignore", "runtime", "--ignore", "daemon")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == f"{len(CHECKS)} checks: none failed"
    assert doctor("--config", config, "--ignore", "daemon").exit_code == 1


def test_the_json_matches_its_schema(config: Path) -> None:
    done = doctor("--config", config, "--json")
    answer = json.loads(done.stdout)
    check_answer(answer)
    assert (done.exit_code, answer["ok"]) == (1, False)
    assert [each["id"] for each in answer["checks"]] == list(CHECKS)
    answer = json.loads(
        doctor("--config", config, "--json", "--ignore", "runtime", "--ignore", "daemon").stdout
    )
    assert answer["ok"] is True


def test_an_invalid_configuration_is_a_finding(config: Path) -> None:
    config.write_text(f"{config.read_text()}mod: observe\n")
    answer = json.loads(doctor("--config", config, "--json").stdout)
    found = {each["id"]: each for each in answer["checks"]}
    assert found["configuration"]["result"] == "fail"
    assert "mod" in found["configuration"]["text"]


def test_a_check_that_does_not_exist_is_a_wrong_command_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["doctor", "--config", str(config), "--ignore", "everything"]) == 2
    assert (
        "cannot ignore everything: there is no such check (there are: configuration"
        in capsys.readouterr().err
    )


def test_the_page_describes_each_check() -> None:
    rows = [line.split("`")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert rows == list(CHECKS)
