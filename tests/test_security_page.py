"""SECURITY.md: every row of the threat model names tests, and they exist."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text()
PARTIES = {
    "Pod author": "P",
    "Namespace administrator": "N",
    "Hook author": "H",
    "Device plugin": "D",
    "Root on the node": "R",
    "Container runtime": "C",
    "kubelet": "K",
    "API server": "A",
    "Local user without root": "L",
    "Client of the CRI socket": "S",
}
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@dataclass(frozen=True)
class Row:
    """A row of the threat model."""

    party: str
    name: str
    influence: str
    bound: str
    tests: str


def rows() -> list[Row]:
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if re.fullmatch(r"[A-Z]\d+", cells[0].strip()):
                assert len(cells) == 4, line
                found.append(Row(title, *cells))
    return found


ROWS = rows()


@cache
def functions(file: str) -> frozenset[str]:
    """Return the names of the functions that a file defines."""
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_every_party_has_rows_with_their_own_numbers() -> None:
    numbers = {letter: [row.name for row in ROWS if row.party == party] for party, letter in PARTIES.items()}
    assert numbers == {letter: [f"{letter}{i + 1}" for i in range(len(of))] for letter, of in numbers.items()}
    assert all(numbers.values())
    assert sum(map(len, numbers.values())) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_names_tests_that_exist(row: Row) -> None:
    assert row.influence
    assert row.bound
    named = TEST.findall(row.tests)
    assert named, f"{row.name} names no test"
    assert TEST.sub("", row.tests).strip(", ") == ""
    for file, function in named:
        assert (ROOT / file).is_file(), file
        tests = {name for name in functions(file) if name.startswith("test_")}
        assert function in tests if function else tests, f"{row.name}: there is no {function} in {file}"


def test_tests_that_are_named_elsewhere_exist() -> None:
    for file, function in TEST.findall(PAGE):
        assert not function or function in functions(file), f"{file}::{function}"


def test_a_vulnerability_is_reported_in_private_and_to_no_address() -> None:
    section = PAGE.partition("## Report a vulnerability")[2].partition("\n## ")[0]
    assert "private vulnerability reporting" in section
    assert not re.search(r"[\w.]+@[\w.]+", PAGE)


def test_the_readme_links_to_it() -> None:
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text()
