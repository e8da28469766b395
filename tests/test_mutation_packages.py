"""``make mutate`` names files that exist: otherwise it cannot try a package after a rename."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_all_sources_and_tests_of_the_packages_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "mutation")
    from mutate import PACKAGES

    named = chain.from_iterable(
        (*part.changed, *part.tests, *part.waiting) for parts in PACKAGES.values() for part in parts
    )
    assert [name for name in named if not (ROOT / name).exists()] == []
    for module in ("mutate", "changes", "quick_first"):
        del sys.modules[module]
