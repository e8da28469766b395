"""What a look at a unit shows about the masks that the runtime sends."""

from __future__ import annotations

import pytest

from proxy.engine.systemd_masks import MaskOrder, observed_order
from proxy.model.idset import CpuSet

MEANT, REVERSE, OTHER = CpuSet.parse("4-15"), CpuSet.parse("0-7,12-15"), CpuSet.parse("3")


@pytest.mark.parametrize("known", MaskOrder)
@pytest.mark.parametrize(
    ("has", "sent", "shows"),
    [
        pytest.param(REVERSE, True, MaskOrder.REVERSED, id="reversed"),
        pytest.param(REVERSE, False, MaskOrder.REVERSED, id="reversed, and no other program writes that"),
        pytest.param(MEANT, True, MaskOrder.RIGHT, id="right"),
        pytest.param(MEANT, False, None, id="right, but perhaps by our own hand"),
        pytest.param(OTHER, True, None, id="another program's"),
    ],
)
def test_a_look_at_a_unit(known: MaskOrder, has: CpuSet, sent: bool, shows: MaskOrder | None) -> None:
    assert observed_order(known, has, MEANT, REVERSE, sent=sent) is (shows or known)


@pytest.mark.parametrize("known", MaskOrder)
def test_a_set_that_reads_the_same_both_ways_shows_nothing(known: MaskOrder) -> None:
    assert observed_order(known, MEANT, MEANT, MEANT, sent=True) is known
