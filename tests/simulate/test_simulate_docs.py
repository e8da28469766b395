"""The examples of docs/simulate.md and docs/simulate-cluster.md, tried line by line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"^`([\w.-]+)`:\n\n```\w+\n(.*?)^```", re.M | re.S)
CONSOLE = re.compile(r"^(<!-- shortened -->\n)?```console\n\$ (.*?)\n(.*?)```", re.M | re.S)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a command topoproxy."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "topoproxy"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m proxy "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not there")
@pytest.mark.parametrize(("page", "least"), [("simulate.md", 5), ("simulate-cluster.md", 1)])
def test_every_example_of_the_docs_prints_what_the_page_shows(place: Path, page: str, least: int) -> None:
    root, text = str(DOCS.parent), (DOCS / page).read_text()
    for name, body in FILE.findall(text):
        (place / name).write_text(body)
    path = f"{place}/bin{os.pathsep}{os.environ['PATH']}"
    surroundings = {**os.environ, "PATH": path, "PYTHONPATH": root, "COLUMNS": "100"}
    examples = CONSOLE.findall(text)
    assert len(examples) >= least
    for shortened, command, expected in examples:
        done = subprocess.run(
            ["sh", "-c", command], cwd=place, env=surroundings, capture_output=True, text=True, timeout=300
        )
        reported = done.stdout + done.stderr
        if shortened:
            assert reported.endswith(expected.removeprefix("[...]")), command
        else:
            assert reported == expected, command
