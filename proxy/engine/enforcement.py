"""Where the plan takes effect. It covers all pods; what it is applied to is decided here and nowhere else.

A pod to which the plan is not applied is *observed*: its containers are placed in the state, but its calls
pass unchanged, nothing of it is written, and it is never refused.
"""

from __future__ import annotations

from proxy.engine.state import NodeState
from proxy.model.mode import NodeMode
from proxy.model.workload import Pod


def applies_to(state: NodeState, pod: Pod | None) -> bool:
    """Return whether the plan is applied to a pod.

    Args:
        state: The node as it is.
        pod: The pod; None asks whether there may be a pod to which it is applied.
    """
    return state.mode is NodeMode.ENFORCE
