"""The condition ``TopologyPlacement`` of a Node object: whether its pods get the CPUs that they are due.

It changes when the answer does, not with each pod: each write of a Node object goes to every client that
watches nodes.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from proxy.agent.objects.node_page import NodePage

TYPE = "TopologyPlacement"


class NodeCondition(Struct, frozen=True):
    """The condition without its times."""

    status: str
    reason: str
    message: str


UNREACHABLE = NodeCondition("Unknown", "DaemonUnreachable", "topoproxy does not answer on its admin socket")


def condition_of(page: NodePage) -> NodeCondition:
    """Return the condition that a node has."""
    if not page.published:
        return NodeCondition(
            "False", "Released", f"topoproxy is in mode {page.mode}: containers are as without it"
        )
    if page.mode == "observe":
        return NodeCondition("False", "Observing", "topoproxy decides and changes nothing (mode observe)")
    if not page.applied:
        return NodeCondition("False", "Paused", "topoproxy does not apply its plan on this node")
    policies = page.policies
    return NodeCondition(
        "True",
        "Enforcing",
        f"cpuManagerPolicy {policies.cpu_manager_policy}, topologyManagerPolicy "
        f"{policies.topology_manager_policy}, scope {policies.topology_manager_scope}",
    )


def condition_status(node: str, condition: NodeCondition, since: str) -> dict[str, Any]:
    """Return the Node object with only the condition, for a server-side apply of its status.

    Args:
        node: The name of the Node object.
        condition: What holds.
        since: When it began to hold (RFC 3339); it is also the time of the heartbeat, as an idle node writes
            nothing.
    """
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node},
        "status": {
            "conditions": [
                {
                    "type": TYPE,
                    "status": condition.status,
                    "reason": condition.reason,
                    "message": condition.message,
                    "lastTransitionTime": since,
                    "lastHeartbeatTime": since,
                }
            ]
        },
    }
