"""The byte order of the runtime's masks, derived from a unit's property, and its reports."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.engine.systemd_masks import MaskOrder, ReportReversedMask, UnitCpusRead, step
from proxy.model.idset import CpuSet
from proxy.topology.regular_machine import regular_machine
from tests.testkit.playbook import Playbook

MACHINE = regular_machine(2, 1, 4, 2)
MEANT, REVERSE, OTHER = CpuSet.parse("4-15"), CpuSet.parse("0-7,12-15"), CpuSet.parse("3")


@pytest.mark.parametrize("known", MaskOrder)
@pytest.mark.parametrize(
    ("has", "sent", "shows"),
    [
        pytest.param(REVERSE, True, MaskOrder.REVERSED, id="reversed"),
        pytest.param(REVERSE, False, None, id="reversed, but perhaps the cpuset of an earlier plan"),
        pytest.param(MEANT, True, MaskOrder.CORRECT, id="right"),
        pytest.param(MEANT, False, None, id="right, but perhaps by our own hand"),
        pytest.param(OTHER, True, None, id="another program's"),
    ],
)
def test_the_mask_of_a_unit_is_compared_with_the_sent_mask(
    known: MaskOrder, has: CpuSet, sent: bool, shows: MaskOrder | None
) -> None:
    assert step(known, UnitCpusRead(has, MEANT, REVERSE, sent))[0] is (shows or known)


@pytest.mark.parametrize("known", MaskOrder)
def test_a_symmetric_mask_leaves_the_byte_order_unknown(known: MaskOrder) -> None:
    assert step(known, UnitCpusRead(MEANT, MEANT, MEANT, sent=True)) == (known, ())


def test_a_reversed_mask_is_reported_once() -> None:
    play = Playbook(NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE))), handle)
    wrong, right = UnitCpusRead(REVERSE, MEANT, REVERSE, True), UnitCpusRead(MEANT, MEANT, REVERSE, True)
    assert play >> UnitCpusRead(OTHER, MEANT, REVERSE, sent=True)
    assert play.state.facts.masks is MaskOrder.UNKNOWN
    assert play >> right
    assert play >> wrong << ReportReversedMask(wrong, is_new=True)
    assert play >> wrong << ReportReversedMask(wrong, is_new=False)
    assert play.state.facts.masks is MaskOrder.REVERSED
    assert play >> right
    assert play.state.facts.masks is MaskOrder.CORRECT
    assert play >> wrong << ReportReversedMask(wrong, is_new=True), "the runtime was replaced twice"
