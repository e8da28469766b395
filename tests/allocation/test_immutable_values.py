"""Values of a pure layer are immutable: code that holds one may keep it."""

from __future__ import annotations

import proxy.allocation
from tests.testkit.mutable_values import mutable_values


def test_values_cannot_be_changed() -> None:
    working = {"_Taking"}  # the search for devices fills one, and returns another value
    assert mutable_values(proxy.allocation) == working
