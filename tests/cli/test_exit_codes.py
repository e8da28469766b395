"""Exit codes: the table in the docs, the help of the commands, and how commands end."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import click
import pytest

from proxy.cli.exit_codes import ALL, DOC_PAGE, EXIT_CODES, codes_of, table
from proxy.cli.main import EX_IOERR, cli, run_command_line
from proxy.model import errors
from proxy.model.errors import TopoproxyError
from tests.testkit.commands import commands

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "simulate": ["pods.yaml"],
    "hooks validate": ["50-a.py"],
    "hooks run": ["50-a.py", "--example", "configure"],
    "hooks new": ["50-mine"],
    "hooks enable": ["30-cpus-file"],
    "hooks disable": ["30-cpus-file"],
    "upgrade": ["--now"],
}
"""Required arguments of the commands."""


EACH = commands()


def those_with(code: int) -> list[str]:
    (found,) = [each.commands for each in EXIT_CODES if each.code == code]
    return list(found)


def end(command: str, *args: str) -> int:
    code = run_command_line([*command.split(), *ARGUMENTS.get(command, []), *args])
    assert isinstance(code, int)
    return code


def test_the_page_has_the_table_of_the_code() -> None:
    assert table() in (ROOT / DOC_PAGE).read_text()


def test_the_table_names_existing_commands_and_errors() -> None:
    codes = [each.code for each in EXIT_CODES]
    assert codes == sorted(set(codes))
    assert {name for each in EXIT_CODES if each.commands != ALL for name in each.commands} <= EACH.keys()
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TopoproxyError)
    ]
    assert {kind.exit_code for kind in kinds} | {EX_IOERR} <= set(codes)


@pytest.mark.parametrize("name", EACH)
def test_each_help_names_its_codes_and_the_page(name: str) -> None:
    command = EACH[name]
    text = command.get_help(click.Context(command, info_name=name))
    assert text.endswith(f"Exit codes ({DOC_PAGE}): {', '.join(map(str, codes_of(name)))}")
    prose = " ".join((command.help or "").split())
    for sentence in re.findall(r"(?:[Ee]nds? with|Exit codes) .*", prose):
        for code in re.findall(r"\b(?:[012]|6[4-9]|7[0-9])\b(?! (?:s|CPUs)\b)", sentence):
            assert int(code) in codes_of(name), sentence


@pytest.mark.parametrize("name", ["", *EACH])
def test_the_prose_of_each_help_has_no_stray_blanks(name: str) -> None:
    command = EACH[name] if name else cli
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if not paragraph.startswith("\b"):
            assert [line for line in paragraph.splitlines() if line.startswith(" ")] == []


def test_the_help_of_the_groups_leads_to_the_page() -> None:
    for name in ("hooks", "takeover"):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert DOC_PAGE in command.get_help(click.Context(command, info_name=name))
    assert DOC_PAGE in cli.get_help(click.Context(cli, info_name="topoproxy"))


@pytest.mark.parametrize("name", EACH)
def test_a_wrong_command_line_is_2(name: str) -> None:
    assert end(name, "--no-such-option") == 2


@pytest.mark.parametrize("name", those_with(78))
def test_an_invalid_configuration_is_78(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "50-a.py").write_text("")
    (tmp_path / "c.yaml").write_text("mode: sometimes\n")
    (tmp_path / "pods.yaml").write_text("")
    if name == "upgrade":  # else it is a finding
        assert run_command_line([name, "--describe", "--config", "c.yaml"]) == 78
    else:
        assert end(name, "--config", "c.yaml") == 78


def test_every_command_that_reads_the_configuration_is_in_the_row() -> None:
    reading = {
        name for name, command in EACH.items() if any("--config" in each.opts for each in command.params)
    }
    assert reading - {"bundle", "doctor"} == set(those_with(78)), "there it is a finding"


@pytest.mark.parametrize("name", EACH)
def test_an_unreadable_file_is_not_a_wrong_command_line(name: str) -> None:
    """An unreadable file has the code of its error, not that of a wrong command line."""
    types = [each.type for each in EACH[name].params]
    assert not any(kind.readable for kind in types if isinstance(kind, click.Path))


@pytest.mark.parametrize("name", [name for name in those_with(69) if name != "demo"])
def test_a_missing_daemon_is_69(name: str, tmp_path: Path) -> None:
    assert end(name, "--admin", f"unix://{tmp_path}/none.sock") == 69


def test_every_command_that_queries_the_daemon_is_in_the_row() -> None:
    querying = {
        name for name, command in EACH.items() if any("--timeout" in each.opts for each in command.params)
    }
    others = {"hooks list", "devices", "bundle", "doctor", "attach", "detach"}
    assert querying - others == set(those_with(69)) - {"demo"}, "these commands read files instead"


@pytest.mark.parametrize(
    "args",
    [
        ["topology", "--machine", "m.json"],
        ["simulate", "pod.yaml", "--machine", "m.json"],
        ["topology", "--machine", "none.json"],
        ["simulate", "pod.yaml", "--machine", "none.json"],
        ["topology", "--sysfs-root", "empty"],
        ["simulate", "pod.yaml", "--sysfs-root", "empty"],
        ["simulate", "m.json", "--sysfs-root", "/sys"],
        ["hooks", "validate", "50-a.py"],
        ["hooks", "run", "50-a.py", "--example", "configure"],
    ],
)
def test_an_invalid_file_is_65(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.json").write_text('{"schema": "machine-facts/1"}')
    (tmp_path / "pod.yaml").write_text("{kind: Pod, metadata: {name: a}, spec: {containers: [{name: a}]}}")
    (tmp_path / "50-a.py").write_text("this is no Python\n")
    assert run_command_line(args) == 65


def test_a_daemon_whose_machine_cannot_be_read_ends_with_65(tmp_path: Path) -> None:
    from proxy.process import run_and_report

    config = run_command_line(
        [
            "serve",
            "--sysfs-root",
            str(tmp_path),
            "--state-dir",
            str(tmp_path),
            "--listen",
            f"unix://{tmp_path}/s",
        ]
    )
    assert not isinstance(config, int)
    assert run_and_report(config) == 65
