from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Never

import pytest
from click.testing import CliRunner

from proxy.cli.main import run_command_line
from proxy.cli.topology import topology
from proxy.model.errors import TopologyError, UsageError
from proxy.topology.facts import machine_to_json
from proxy.topology.picture import render
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

MACHINE = regular_machine(2, 1, 4, 2)


def run(*args: str) -> str:
    result = CliRunner().invoke(topology, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_sysfs(MACHINE, tmp_path)
    return tmp_path


def test_picture_of_a_root(root: Path) -> None:
    assert run("--sysfs-root", str(root)) == render(MACHINE, width=80) + "\n"
    assert run("--sysfs-root", str(root / "sys")) == render(MACHINE, width=80) + "\n"


def test_json_is_the_facts_one_row_per_line(root: Path) -> None:
    text = run("--sysfs-root", str(root), "--json")
    facts = json.loads(text)
    want = json.loads(json.dumps(machine_to_json(MACHINE)))
    for key in ("cpus", "counts", "cpu_columns", "cpu_rows", "llc", "cores", "packages", "smt"):
        assert facts[key] == want[key]
    assert facts["numa"]["nodes"] == want["numa"]["nodes"]
    assert "  [0, 0, 0, 0, null, 0, 0, 0, 0],\n" in text
    assert '  "0": {"cpus": "0-3,8-11", "level": 3, "id": 0, "size": "32768K"},\n' in text


def test_json_output_is_a_valid_description(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(run("--sysfs-root", str(root), "--json"))
    assert run("--machine", str(path)) == run("--sysfs-root", str(root))
    assert run("--machine", str(path), "--json") == path.read_text()


def test_the_option_ascii_prints_only_ascii(root: Path) -> None:
    assert run("--sysfs-root", str(root), "--ascii").isascii()


def test_memory_is_read_from_the_given_proc(root: Path, tmp_path: Path) -> None:
    proc = tmp_path / "other"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 5 kB\n")
    facts = json.loads(run("--sysfs-root", str(root), "--procfs-root", str(proc), "--json"))
    assert facts["memory"]["total_bytes"] == 5 * 1024


def test_a_directory_without_a_machine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="cannot read the machine"):
        run("--sysfs-root", str(tmp_path))


def test_a_machine_that_may_not_be_read_has_its_message_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def denied(path: Path, *_: object, **__: object) -> Never:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    monkeypatch.setattr("proxy.open_file.os.open", denied)
    for args in (
        ["topology", "--sysfs-root", str(tmp_path)],
        ["devices", "--sysfs-root", str(tmp_path), "--admin", "unix:///none/a"],
        ["topology", "--machine", str(tmp_path / "m.json")],
        ["simulate", str(tmp_path), "--machine", str(tmp_path / "m.json")],
    ):
        assert run_command_line(args) == 77, args
        message = capsys.readouterr().err
        assert message.startswith("topoproxy: cannot read ")
        assert message.endswith(": Permission denied\n")


@pytest.mark.parametrize("option", ["--sysfs-root", "--procfs-root"])
def test_two_machines_are_refused(root: Path, option: str) -> None:
    with pytest.raises(UsageError, match=f"cannot use --machine and {option} together"):
        run("--machine", str(root / "m.json"), option, str(root))
