"""Manual pages and completions: they match the commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import completions
import manpages
import pytest

ROOT = Path(__file__).parents[2]
PAGES = manpages.pages("2026-11-23")
COMMANDS = dict(manpages.commands())


def plain(text: str) -> str:
    return text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")


def test_each_command_has_a_page_and_each_page_a_command() -> None:
    expected = {f"{'-'.join(command)}.8" for command in COMMANDS}
    assert set(PAGES) == {*expected, "topoproxy.yaml.5"}
    assert "topoproxy-takeover-plan.8" in expected


@pytest.mark.parametrize("command", COMMANDS, ids="-".join)
def test_a_page_has_the_options_the_exit_codes_and_no_markup(command: tuple[str, ...]) -> None:
    text = plain(PAGES[f"{'-'.join(command)}.8"])
    for part in COMMANDS[command].params:
        if part.param_type_name == "option" and not part.hidden:
            assert all(option in text for option in part.opts), part.opts
    assert re.search(r"(?m)^\.B 0$", text)
    assert "\b" not in text


@pytest.mark.skipif(not shutil.which("man"), reason="there is no man")
@pytest.mark.parametrize("name", ["topoproxy.8", "topoproxy-explain.8", "topoproxy.yaml.5"])
def test_man_formats_a_page_without_a_warning(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(PAGES[name])
    command = ["man", "--warnings", "-E", "UTF-8", "-l", str(tmp_path / name)]
    environment = {**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert done.stderr == ""
    assert "NAME" in done.stdout


def complete(shell: str, *args: str) -> list[str]:
    """Run the command for completions as the script of a shell does."""
    line = ["topoproxy", *args]
    environment = {**os.environ, completions.VARIABLE: f"{shell}_complete", "COMP_WORDS": " ".join(line)}
    environment["COMP_CWORD"] = args[-1] if shell == "fish" else str(len(args))
    command = [sys.executable, "-m", "proxy"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_scripts_exist_for_three_shells_and_call_the_command() -> None:
    scripts = completions.scripts()
    assert set(scripts) == {"bash", "zsh", "fish"}
    for shell, text in scripts.items():
        assert f"{completions.VARIABLE}={shell}_complete" in text
    subprocess.run(["bash", "-n"], input=scripts["bash"], text=True, check=True)
    assert scripts["zsh"].startswith("#compdef topoproxy")


def test_bash_completes_commands_subcommands_and_options() -> None:
    assert complete("bash", "sta") == ["plain,status"]
    assert "plain,plan" in complete("bash", "takeover", "p")
    assert complete("bash", "status", "--wait") == ["plain,--wait-ready"]


def test_zsh_and_fish_complete_with_descriptions() -> None:
    assert complete("zsh", "doct")[:2] == ["plain", "doctor"]
    assert complete("fish", "doct")[0].startswith("plain,doctor")
