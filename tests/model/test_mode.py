"""What each mode of the node means to those that ask."""

from __future__ import annotations

import pytest

from proxy.config.schema import Mode
from proxy.model.mode import NodeMode


@pytest.mark.parametrize(
    ("mode", "enforces", "is_leaving"),
    [
        (NodeMode.PASSTHROUGH, False, False),
        (NodeMode.OBSERVE, False, False),
        (NodeMode.ENFORCE, True, False),
        (NodeMode.RELEASING, False, True),
        (NodeMode.RELEASED, False, True),
    ],
)
def test_what_a_mode_means(mode: NodeMode, enforces: bool, is_leaving: bool) -> None:
    assert (mode.enforces, mode.is_leaving) == (enforces, is_leaving)


def test_each_mode_that_can_be_configured_is_a_mode_of_the_node() -> None:
    assert [NodeMode(mode.value) for mode in Mode] == [
        NodeMode.ENFORCE,
        NodeMode.OBSERVE,
        NodeMode.PASSTHROUGH,
    ]
