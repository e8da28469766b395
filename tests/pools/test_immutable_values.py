"""Values of a pure layer are immutable: code that holds one may keep it."""

from __future__ import annotations

import proxy.pools
from tests.testkit.mutable_values import mutable_values


def test_values_cannot_be_changed() -> None:
    assert mutable_values(proxy.pools) == set()
