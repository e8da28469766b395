"""The properties of each mode of the node."""

from __future__ import annotations

import pytest

from proxy.config.load import parse
from proxy.model.errors import ConfigError
from proxy.model.mode import NodeMode


@pytest.mark.parametrize(
    ("mode", "enforces", "in_release"),
    [
        (NodeMode.PASSTHROUGH, False, False),
        (NodeMode.OBSERVE, False, False),
        (NodeMode.ENFORCE, True, False),
        (NodeMode.RELEASING, False, True),
        (NodeMode.RELEASED, False, True),
    ],
)
def test_properties_of_each_mode(mode: NodeMode, enforces: bool, in_release: bool) -> None:
    assert (mode.enforces, mode.in_release) == (enforces, in_release)


@pytest.mark.parametrize("mode", NodeMode)
def test_a_mode_that_a_release_sets_cannot_be_configured(mode: NodeMode) -> None:
    if mode.in_release:
        with pytest.raises(ConfigError, match="enforce, observe or passthrough"):
            parse(f"mode: {mode}", "test")
    else:
        assert parse(f"mode: {mode}", "test").mode is mode
