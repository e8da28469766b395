"""``topoproxy hooks list`` with and without a daemon, and what ``check-config`` reports on hooks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.hooks import file_commands
from proxy.cli.hooks.list_command import duration_or_dash
from proxy.cli.main import run_command_line

Run = Callable[..., tuple[int, str, str]]
GOOD = """
from proxy.hooks.api import Adjustment
API_VERSION = 1
TIMEOUT = 2
def pre_create_container(event):
    return Adjustment(envs={"A": "b"})
"""
HOOKS: list[dict[str, Any]] = [
    {
        "name": "10-well",
        "state": "running",
        "path": "/h/10-well.py",
        "source": "/h/10-well.py",
        "points": ["configure", "pre_create_container"],
        "policy": "Fail",
        "timeout": 0.5,
        "asked": "ok",
        "calls": 7,
        "failures": {},
        "interrupted": 3,
        "in_threads": True,
        "p50_s": 0.000031,
        "max_s": 1.25,
    },
    {
        "name": "20-bad",
        "state": "broken",
        "path": "/h/20-bad.py",
        "error": "cannot load hook /h/20-bad.py: x",
    },
    {
        "name": "koordlet",
        "state": "running",
        "points": ["pre_run_pod_sandbox"],
        "policy": "Ignore",
        "timeout": 0.5,
        "asked": "open",
        "retry_in": 4.2,
        "calls": 3,
        "failures": {"error": 2, "timeout": 1},
        "last_error": "UNAVAILABLE: connection refused",
    },
]
TABLE = """\
NAME      STATE    POLICY  TIMEOUT  CALLS  FAILED  POINTS
10-well   running  Fail    500 ms   7      0       configure, pre_create_container
    PURE, but called in threads: 3 calls took too long on the loop
20-bad    broken   -       -        -      -       -
    cannot load hook /h/20-bad.py: x
koordlet  running  Ignore  500 ms   3      3       pre_run_pod_sandbox
    not called after failures in a row; tried again in 4 s
    UNAVAILABLE: connection refused
"""
WIDE = """\
NAME      STATE    POLICY  TIMEOUT  CALLS  FAILED  P50    MAX     POINTS
10-well   running  Fail    500 ms   7      0       31 us  1.25 s  configure, pre_create_container
    /h/10-well.py
    PURE, but called in threads: 3 calls took too long on the loop
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*message: object) -> tuple[int, str, str]:
        code = run_command_line(list(map(str, message)))
        output = capsys.readouterr()
        assert isinstance(code, int)
        return code, output.out, output.err

    return run_command


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Hook directories with one file of each state; returns their parent directory."""
    for directory in ("etc", "usr", "servers"):
        (tmp_path / directory).mkdir()
    (tmp_path / "c.yaml").write_text(
        f"listen: unix://{tmp_path}/cri.sock\n"
        f"hooks: {{directory: {tmp_path}/etc, vendorDirectory: {tmp_path}/usr, "
        f"serverDirectory: {tmp_path}/servers,\n"
        "  settings: {10-god: {timeout: 1s}}}\n"
    )
    etc = tmp_path / "etc"
    (etc / "10-good.py").write_text(GOOD)
    (tmp_path / "usr/10-good.py").write_text(GOOD)
    (etc / "20-bad.py").write_text("def (")
    (etc / "30-open.py").write_text(GOOD)
    (etc / "30-open.py").chmod(0o666)
    (etc / "40-off.py").symlink_to("/dev/null")
    (etc / "mine.py").write_text(GOOD)
    (tmp_path / "servers/koordlet.json").write_text('{"remote-endpoint": "/run/x.sock"}')
    return tmp_path


def test_the_hooks_of_a_daemon_are_listed(serve_admin: Callable[..., Path], run: Run) -> None:
    config = serve_admin({"/hooks": lambda: {"hooks": HOOKS, "serving": {"socket": "/s"}}})
    assert run("hooks", "list", "--config", config) == (0, TABLE, "")
    assert run("hooks", "list", "--wide", "--config", config)[1].startswith(WIDE)
    data = json.loads(run("hooks", "list", "--json", "--config", config)[1])
    assert data == {
        "schema": "topoproxy-hooks-list/1",
        "daemon": True,
        "hooks": HOOKS,
        "serving": {"socket": "/s"},
    }


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("hangs", "    not called: its calls hang"),
        ("probing", "    tried again now"),
        ("ok", ""),
        ("failing", ""),
    ],
)
def test_the_reason_why_a_hook_is_not_called_is_listed(
    serve_admin: Callable[..., Path], run: Run, state: str, expected: str
) -> None:
    config = serve_admin({"/hooks": lambda: {"hooks": [HOOKS[0] | {"asked": state, "in_threads": False}]}})
    assert run("hooks", "list", "--config", config)[1].splitlines()[2:] == [expected] * bool(expected)


def test_hooks_that_can_be_enabled_are_listed_with_all(
    serve_admin: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"10-well": Path("/s/10-well.py"), "90-more": Path("/s/90-more.py")}
    monkeypatch.setattr("proxy.cli.hooks.list_command.shipped", lambda: others)
    config = serve_admin({"/hooks": lambda: {"hooks": HOOKS}})
    assert run("hooks", "list", "--config", config)[1] == TABLE
    output = run("hooks", "list", "--all", "--config", config)[1].splitlines()
    assert [line.split()[0] for line in output if line[0] != " "] == [
        "NAME", "10-well", "20-bad", "koordlet", "90-more"
    ]  # fmt: skip
    assert output[-1].split()[1:3] == ["not", "enabled"]


def test_a_daemon_without_hooks_reports_why(serve_admin: Callable[..., Path], run: Run) -> None:
    config = serve_admin({"/hooks": lambda: {"hooks": [], "note": "hooks need mode enforce"}})
    code, output, errors = run("hooks", "list", "--config", config)
    assert (code, errors) == (0, "note: hooks need mode enforce\n")
    assert output == "No hooks. topoproxy hooks list --all shows those that come with topoproxy.\n"


def test_a_long_error_is_wrapped_and_not_cut(
    serve_admin: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = " ".join(
        ["cannot trust hook /etc/topoproxy/hooks.d/20-bad.py:", *["word"] * 40, "chmod go-w it"]
    )
    config = serve_admin({"/hooks": lambda: {"hooks": [HOOKS[1] | {"error": message}]}})
    monkeypatch.setenv("COLUMNS", "60")
    assert f"    {message}\n" in run("hooks", "list", "--config", config)[1], (
        "the lines are not wrapped for programs"
    )
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = run("hooks", "list", "--config", config)[1].splitlines()
    assert max(map(len, lines)) <= 60
    assert message in " ".join(line.strip() for line in lines)


@pytest.mark.parametrize("answer", [[], {}, "hello", {"hooks": "all"}, None])
def test_after_an_invalid_answer_the_directories_are_listed(
    serve_admin: Callable[..., Path], run: Run, answer: object
) -> None:
    config = serve_admin({"/hooks": lambda: answer})
    code, _, errors = run("hooks", "list", "--config", config)
    assert code == 0
    reason = "the answer is not JSON" if answer == "hello" else "the process at this socket reports no hooks"
    assert f"{reason} (so this is the state of the directories)" in errors


def test_without_a_daemon_the_directories_are_listed(node: Path, run: Run) -> None:
    code, output, errors = run("hooks", "list", "--config", node / "c.yaml")
    assert code == 0
    first, second = errors.splitlines()
    assert first.endswith("no process listens there (so this is the state of the directories)")
    assert second.startswith(f"note: hook file {node}/etc/mine.py is not used")
    wide = run("hooks", "list", "--wide", "--config", node / "c.yaml")[1].splitlines()
    other_socket = ("--admin", f"unix://{node}/missing.sock")
    assert run("hooks", "list", "--config", node / "c.yaml", *other_socket)[1] == output
    lines = output.splitlines()
    assert [line.split()[:2] for line in lines if line[0] != " "] == [
        ["NAME", "STATE"],
        ["10-good", "loads"],
        ["10-good", "masked"],
        ["20-bad", "broken"],
        ["30-open", "untrusted"],
        ["40-off", "disabled"],
        ["koordlet", "loads"],
    ]
    assert f"    {node}/etc/10-good.py is used instead" in wide
    assert f"    cannot load hook {node}/etc/20-bad.py: SyntaxError: invalid syntax (line 1)" in wide
    assert "2 s" in lines[1]
    data = json.loads(run("hooks", "list", "--json", "--config", node / "c.yaml")[1])
    assert (data["daemon"], len(data["hooks"])) == (False, 6)


def test_disabled_hooks_are_reported(tmp_path: Path, run: Run) -> None:
    (tmp_path / "c.yaml").write_text(f"listen: unix://{tmp_path}/cri.sock\nhooks: {{enabled: false}}\n")
    output = run("hooks", "list", "--config", tmp_path / "c.yaml")[1].splitlines()
    assert output[0] == "hooks.enabled is false in the configuration: no hook runs."


def test_hooks_that_run_are_not_denied_because_of_the_configuration(
    serve_admin: Callable[..., Path], run: Run
) -> None:
    config = serve_admin({"/hooks": lambda: {"hooks": HOOKS}})
    config.write_text(f"{config.read_text()}\nhooks: {{enabled: false}}\n")
    first, _, rest = run("hooks", "list", "--config", config)[1].partition("\n")
    assert (
        first == "hooks.enabled is false in the configuration: it takes effect at the next reload or start."
    )
    assert rest == TABLE


def test_check_config_lists_the_hooks_and_runs_none(node: Path, run: Run) -> None:
    (node / "etc/50-loud.py").write_text(f"open('{node}/ran', 'w')\n")
    code, output, _ = run("check-config", "--config", node / "c.yaml")
    assert code == 0
    assert "# hooks: 10-good, 20-bad, 30-open, 40-off, 50-loud, koordlet (topoproxy hooks list " in output
    assert (
        f"# note: hook {node}/etc/30-open.py cannot be used: {node}/etc/30-open.py can be written" in output
    )
    assert f"# note: hook file {node}/etc/mine.py is not used" in output
    assert "# note: hooks.settings.10-god: there is no such hook; did you mean 10-good?" in output
    assert not (node / "ran").exists()


def test_check_config_reports_settings_of_a_hook_that_is_not_enabled(tmp_path: Path, run: Run) -> None:
    settings = "{30-cpus-file: {timeout: 2s}}"
    (tmp_path / "c.yaml").write_text(
        f"hooks: {{directory: {tmp_path}, vendorDirectory: {tmp_path}/v, settings: {settings}}}\n"
    )
    output = run("check-config", "--config", tmp_path / "c.yaml")[1]
    assert "hooks.settings.30-cpus-file: it is not enabled: topoproxy hooks enable 30-cpus-file" in output


def test_durations_are_printed_with_their_unit() -> None:
    reported = [duration_or_dash(s) for s in (None, "x", 0, 12, 0.25, 0.0000125, 1e-9)]
    assert reported == ["-", "-", "-", "12 s", "250 ms", "12.5 us", "0 us"]


@pytest.mark.parametrize("name", sorted(file_commands.shipped()))
def test_shipped_names_are_unique_without_their_number(name: str) -> None:
    assert file_commands.full_name(name.partition("-")[2], file_commands.shipped(), "use") == name
