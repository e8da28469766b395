"""docs/upgrade.md and docs/stability.md: they name the checks and the parts that there are."""

from __future__ import annotations

from pathlib import Path

from proxy.upgrade.checks import CHECKS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_describes_each_check() -> None:
    lines = (DOCS / "upgrade.md").read_text().splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(CHECKS)


def test_every_part_of_the_interface_has_a_row() -> None:
    text = (DOCS / "stability.md").read_text()
    for word in ("configuration", "commands", "exit codes", "JSON answers", "metrics", "hook API", "ledger"):
        assert f"| {word}" in text
