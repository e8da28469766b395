"""Ends of the command line: messages and exit codes, no tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from proxy.cli import main as module
from proxy.model.errors import ConfigError, LockedError

CODE = "from proxy.cli.main import main; main()"


def process(*args: str, **more: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CODE, *args], capture_output=True, text=True, timeout=60, **more
    )


def modules_after(word: str) -> str:
    """Name the modules that a command line imports."""
    code = f"import sys\nfrom proxy.cli.main import main\ntry: main([{word!r}])\n"
    code += "finally: print(sorted(sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        module.main(list(args))
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.fixture
def end_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Run a command that ends with an exception."""

    def start(error: BaseException) -> int:
        @click.command()
        def version() -> None:
            raise error

        monkeypatch.setitem(sys.modules, "proxy.cli.version", types.SimpleNamespace(version=version))
        return run("version")

    return start


def test_the_help_has_examples_and_imports_no_command() -> None:
    result = process("--help")
    assert result.returncode == 0
    for word in (*module.COMMANDS, "containerRuntimeEndpoint", "crictl", "/etc/topoproxy/config.yaml"):
        assert word in result.stdout
    reported = modules_after("--help")
    assert "'proxy.cli.main'" in reported
    assert "'proxy.cli.serve'" not in reported


def test_version_imports_few_modules() -> None:
    reported = modules_after("version")
    for name in ("asyncio", "yaml", "grpc", "loguru", "proxy.config", "proxy.topology"):
        assert f"'{name}'" not in reported


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture) -> None:
    assert run() in {0, 2}
    assert "First steps" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        (["statsu"], "There is no command 'statsu'. Did you mean status?"),
        (["zzz"], "There is no command 'zzz'."),
        (["--frob"], "No such option"),
        (["serve", "--frob"], "No such option"),
        (["version", "more"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_reported_with_exit_code_2(
    args: list[str], reported: str, capsys: pytest.CaptureFixture
) -> None:
    assert run(*args) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "reported"),
    [
        (ConfigError("cannot use x: y"), 78, "topoproxy: cannot use x: y\n"),
        (LockedError("cannot listen on x: pid 1"), 75, "topoproxy: cannot listen on x: pid 1\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (
            ValueError("odd"),
            1,
            "topoproxy: internal error: ValueError: odd (TOPOPROXY_DEBUG=1 shows where)\n",
        ),
        (ValueError(), 1, "topoproxy: internal error: ValueError (TOPOPROXY_DEBUG=1 shows where)\n"),
        (SystemExit(7), 7, ""),
    ],
)
def test_each_error_has_its_message_and_exit_code(
    end_with, error: BaseException, code: int, reported: str, capsys: pytest.CaptureFixture
) -> None:
    assert end_with(error) == code
    assert capsys.readouterr().err == reported


def test_a_traceback_is_printed_if_requested(end_with, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOPROXY_DEBUG", "1")
    with pytest.raises(ValueError, match="odd"):
        end_with(ValueError("odd"))


def test_a_missing_part_breaks_only_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "proxy.cli.demo", None)
    assert run("demo") == 1
    assert capsys.readouterr().err == "topoproxy: cannot run demo: proxy.cli.demo is not installed\n"
    assert run("version") == 0


@pytest.mark.parametrize(
    "args", [["check-config", "--defaults"], ["--help"], ["version"], ["topology", "--json"]]
)
def test_a_closed_pipe_ends_the_command_without_a_message(args: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [sys.executable, "-c", CODE, *args],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


def test_every_command_has_a_help_text(capsys: pytest.CaptureFixture) -> None:
    for name in module.COMMANDS:
        if not (Path(module.__file__).parent / f"{name.replace('-', '_')}.py").exists():
            continue
        assert run(name, "--help") == 0
        reported = capsys.readouterr().out
        assert f"Usage: topoproxy {name}" in reported
        assert "\b" not in reported


@pytest.mark.parametrize("args", [["version"], ["topology"], ["--help"], ["demo"]])
def test_a_closed_output_is_reported(args: list[str]) -> None:
    # Python has no sys.stdout if the parent process has closed the descriptor.
    result = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", CODE, *args],
        stderr=subprocess.PIPE,
        timeout=60,
    )
    message = b"topoproxy: cannot write the output: standard output is closed\n"
    assert (result.returncode, result.stderr) == (74, message)


def test_a_service_needs_no_output() -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", CODE, "serve", "--mode", "x"],
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert b"standard output" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("args", [["version"], ["check-config", "--defaults"], ["--help"]])
def test_an_output_without_space_is_reported_without_a_traceback(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", CODE, *args], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (result.returncode, result.stderr) == (
        74,
        "topoproxy: cannot write the output: No space left on device\n",
    )


REDIRECTIONS = {
    "closed": "2>&-",
    "full": "2>/dev/full",
    "all closed": "<&- >&- 2>&-",
    "both full": ">/dev/full 2>&1",
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("redirection", REDIRECTIONS.values(), ids=REDIRECTIONS)
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["serve", "--config", "/none"], 78),
        (["serve", "--listen", "unix:///none/x.sock"], 73),
        (["check-config", "--config", "/none"], 78),
        (["statsu"], 2),
    ],
)
def test_an_error_that_cannot_be_reported_has_its_exit_code(
    args: list[str], code: int, redirection: str
) -> None:
    script = f'exec "$@" {redirection}'
    result = subprocess.run(
        ["/bin/sh", "-c", script, "sh", sys.executable, "-m", "proxy", *args], capture_output=True, timeout=60
    )
    if args[0] != "serve" and redirection == REDIRECTIONS["all closed"]:
        code = 74  # a command other than a service does not begin
    assert (result.returncode, result.stdout, result.stderr) == (code, b"", b"")


def test_an_error_whose_reader_has_ended_has_its_exit_code() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [sys.executable, "-c", CODE, "check-config", "--config", "/none"], stderr=writing, timeout=60
        )
    finally:
        os.close(writing)
    assert result.returncode == 78


def test_a_lost_message_does_not_keep_the_output_from_being_written(tmp_path: Path) -> None:
    code = (
        "import sys; from proxy.standard_streams import flush_or_discard, report\n"
        "print('output'); report('message'); report('another'); flush_or_discard()"
    )
    with (tmp_path / "out").open("w") as out, open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=full, timeout=60)
    assert (result.returncode, (tmp_path / "out").read_text()) == (0, "output\n")


def escaped(args: list[str], directory: Path, encoding: str) -> subprocess.CompletedProcess[bytes]:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": root}
    command = [sys.executable, "-c", CODE, *args]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, timeout=60)


NAME = "\u00e9\u2011\U0001f600\udcff.yaml"


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8:strict", "\u00e9\u2011\U0001f600\\udcff.yaml".encode()),
        ("iso-8859-1:strict", b"\xe9\\u2011\\ud83d\\ude00\\udcff.yaml"),
    ],
)
def test_a_name_that_the_output_cannot_encode_is_escaped(encoding: str, shown: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("mode: observe\n")
    result = escaped(["check-config", "--config", NAME], tmp_path, encoding)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(b"# from " + shown + b"\n")


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-1"])
def test_json_stays_valid_if_the_output_cannot_encode_a_name(encoding: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("mode: loud\n")
    result = escaped(["doctor", "--json", "--config", NAME], tmp_path, f"{encoding}:strict")
    assert (result.returncode, result.stderr) == (1, b"")
    checks = json.loads(result.stdout.decode(encoding))["checks"]
    assert NAME in next(check["text"] for check in checks if check["id"] == "configuration")
