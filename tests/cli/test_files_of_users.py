"""Invalid files of users: a one-line error, and the exit code for bad input."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.cli.main import run_command_line

CONTENTS = {
    "text": b"hello\n",
    "list": b"- 1\n- a\n",
    "number": b"42",
    "empty": b"",
    "binary": b"\xe2\x28\xa1\x00\xff",
    "nested": b"[" * 50_000 + b"]" * 50_000,
    "repeated": b'{"a": 1, "a": 2}',
    "not a number": b'{"a": NaN}',
}
HOOK = str(Path(__file__).parents[2] / "hooks/20-quota-off.py")
READ = "cannot read {file}"
NO_NODES = "cannot simulate a cluster without nodes"
EXPECTED: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {
    ("simulate", "--cluster"): (
        65,
        {
            "text": f"{READ}, line 1: the document is text, not an object",
            "list": f"{READ}, line 1: the document is a list, not an object",
            "number": f"{READ}, line 1: the document is the value '42', not an object",
            "empty": NO_NODES,
            "binary": f"{READ}, line 1: byte 0 is not UTF-8",
            "nested": f"{READ}: it is nested too deeply",
            "repeated": f"{READ}: the key 'a' is there twice",
        },
    ),
    ("simulate",): (
        65,
        {
            "text": f"{READ}, line 1: the document is text, not an object",
            "list": f"{READ}, line 1: the document is a list, not an object",
            "empty": "cannot simulate pods: no pods found in ",
            "nested": f"{READ}: it is nested too deeply",
        },
    ),
    ("topology", "--machine"): (
        65,
        {
            "text": "cannot read the machine description {file}: not JSON",
            "number": "cannot read the machine description {file}: the description must be a JSON object",
            "empty": "cannot read the machine description {file}: not JSON",
            "binary": "cannot read the machine description {file}: byte 0 is not UTF-8",
            "nested": "cannot read the machine description {file}: it is nested too deeply",
            "repeated": "cannot read the machine description {file}: the key 'a' is there twice",
            "not a number": "cannot read the machine description {file}: NaN is not a JSON value",
        },
    ),
    ("hooks", "run", HOOK, "--event"): (
        65,
        {
            "text": "cannot use the event {file}: it is not JSON",
            "empty": "cannot use the event {file}: it is not JSON",
            "binary": "cannot use the event {file}: byte 0 is not UTF-8",
            "nested": "cannot use the event {file}: it is nested too deeply",
            "repeated": "cannot use the event {file}: the key 'a' is there twice in one object",
            "not a number": "cannot use the event {file}: NaN is not a JSON value",
        },
    ),
    ("upgrade", "--check", "--from"): (
        65,
        {
            "text": f"{READ}: not JSON",
            "number": "cannot use {file}: it is not what topoproxy upgrade --describe prints",
            "empty": f"{READ}: not JSON",
            "binary": f"{READ}: byte 0 is not UTF-8",
            "nested": f"{READ}: it is nested too deeply",
            "repeated": f"{READ}: the key 'a' is there twice in one object",
        },
    ),
    ("check-config", "--config"): (
        78,
        {
            "text": "cannot use the configuration {file}: line 1: must be keys with values",
            "list": "cannot use the configuration {file}: line 1: must be keys with values",
            "binary": "cannot use the configuration {file}: byte 0 is not UTF-8",
            "nested": "cannot use the configuration {file}: it is nested too deeply",
        },
    ),
}


@pytest.mark.parametrize(
    ("command", "content"),
    [(command, content) for command, (_, expected) in EXPECTED.items() for content in expected],
    ids=lambda part: part if isinstance(part, str) else " ".join(Path(item).name for item in part),
)
def test_garbage_is_refused_in_one_line(
    command: tuple[str, ...], content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "garbage"
    file.write_bytes(CONTENTS[content])
    code, expected = EXPECTED[command]
    assert run_command_line([*command, str(file)]) == code
    errors = capsys.readouterr().err
    assert errors.startswith(f"topoproxy: {expected[content].format(file=file)}"), errors
    assert errors.count("\n") == 1


PIPES: dict[tuple[str, ...], tuple[int, str]] = {
    ("simulate",): (65, READ),
    ("simulate", os.devnull, "--devices"): (65, READ),
    ("topology", "--machine"): (65, "cannot read the machine description {file}"),
    ("hooks", "run", HOOK, "--event"): (65, "cannot read the event {file}"),
    ("hooks", "run", "--example", "configure"): (65, "cannot read hook {file}"),
    ("upgrade", "--check", "--from"): (65, READ),
    ("check-config", "--config"): (78, "cannot read the configuration {file}"),
    ("serve", "--config"): (78, "cannot read the configuration {file}"),
    ("agent", "--config"): (78, "cannot read the configuration {file}"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("command", PIPES, ids=" ".join)
def test_a_named_pipe_is_no_file(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "10-pipe.py"
    os.mkfifo(file)
    code, expected = PIPES[command]
    assert run_command_line([*command, str(file)]) == code
    assert capsys.readouterr().err == f"topoproxy: {expected.format(file=file)}: it is not a regular file\n"


@pytest.mark.timeout(30)
def test_a_named_pipe_among_the_drop_ins_is_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("mode: observe\n")
    drop_in = tmp_path / "config.d/10-pipe.yaml"
    drop_in.parent.mkdir()
    os.mkfifo(drop_in)
    assert run_command_line(["check-config", "--config", str(tmp_path / "c.yaml")]) == 78
    assert "config.d/10-pipe.yaml: it is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("simulate",),
        ("topology", "--machine"),
        ("hooks", "run", HOOK, "--event"),
        ("upgrade", "--check", "--from"),
        ("check-config", "--config"),
    ],
    ids=" ".join,
)
def test_a_file_that_may_not_be_read_has_the_code_of_permissions(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, opened = tmp_path / "10-denied.py", os.open

    def denied(path: Path, *args: int, **more: int) -> int:
        if Path(path) == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr("proxy.open_file.os.open", denied)
    assert run_command_line([*command, str(file)]) == 77
    errors = capsys.readouterr().err
    assert errors.startswith("topoproxy: cannot read ")
    assert errors.endswith(f"{file}: Permission denied\n")


def test_a_directory_that_may_not_be_searched_is_not_taken_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched = os.scandir

    def denied(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return searched(path)

    monkeypatch.setattr("os.scandir", denied)
    assert run_command_line(["simulate", str(tmp_path)]) == 77
    assert capsys.readouterr().err == f"topoproxy: cannot read {tmp_path}: Permission denied\n"


def test_a_name_that_is_too_long_is_no_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a" * 300
    for command in ("simulate", "topology --machine", f"hooks run {HOOK} --event", "upgrade --check --from"):
        assert run_command_line([*command.split(), name]) == 65
        assert capsys.readouterr().err.endswith(f"{name}: File name too long\n")
    (tmp_path / "fleet.yaml").write_text("kind: Fleet\nnodes: [{}]\n")
    assert run_command_line(["simulate", "--cluster", "fleet.yaml", "--svg", f"{name}/x.svg"]) == 73
    error = capsys.readouterr().err
    assert error == f"topoproxy: cannot write the picture {name}/x.svg: File name too long\n"


def test_a_closed_standard_input_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    for command in (["simulate", "-"], ["hooks", "run", HOOK, "--event", "-"]):
        assert run_command_line(command) == 65
        assert capsys.readouterr().err.endswith("standard input is closed\n")
