"""To which pods the plan is applied."""

from __future__ import annotations

import pytest

from proxy.engine.enforcement import applies_to
from proxy.engine.handle import handle
from proxy.engine.node_events import ModeChanged
from proxy.engine.state import NodeState
from proxy.model.mode import NodeMode
from tests.engine.test_handle import LS, NODE


@pytest.mark.parametrize("mode", list(NodeMode))
def test_the_mode_decides_for_all_pods(mode: NodeMode) -> None:
    state, _ = handle(NodeState.empty(NODE), ModeChanged(mode))
    assert applies_to(state, LS) is (mode is NodeMode.ENFORCE)
    assert applies_to(state, None) is (mode is NodeMode.ENFORCE)
