"""docs/configuration.md matches the declarations of the settings."""

from __future__ import annotations

from pathlib import Path

from proxy.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "make configuration"
