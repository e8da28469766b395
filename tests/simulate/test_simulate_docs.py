"""The examples of docs/simulate.md, tried line by line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"
FILE = re.compile(r"^`([\w.-]+)`:\n\n```\w+\n(.*?)^```", re.M | re.S)
CONSOLE = re.compile(r"^(<!-- shortened -->\n)?```console\n\$ (.*?)\n(.*?)```", re.M | re.S)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the files of the page, and a command topoproxy."""
    for name, body in FILE.findall(PAGE.read_text()):
        (tmp_path / name).write_text(body)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "topoproxy"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m proxy "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not there")
def test_every_example(place: Path) -> None:
    root = str(PAGE.parents[1])
    path = f"{place}/bin{os.pathsep}{os.environ['PATH']}"
    surroundings = {**os.environ, "PATH": path, "PYTHONPATH": root, "COLUMNS": "100"}
    examples = CONSOLE.findall(PAGE.read_text())
    assert len(examples) >= 5
    for shortened, command, expected in examples:
        done = subprocess.run(
            ["sh", "-c", command], cwd=place, env=surroundings, capture_output=True, text=True, timeout=60
        )
        said = done.stdout + done.stderr
        if shortened:
            assert said.endswith(expected.removeprefix("[...]")), command
        else:
            assert said == expected, command
