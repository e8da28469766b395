"""Write the condition and the amounts of devices of topoproxy into the status of the Node object.

The condition ``TopologyPlacement`` shows whether the pods of the node get their planned CPUs. It is written
only when it changes, not for each pod: each write of a Node object goes to every client that watches nodes.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from proxy.agent.api_client import FIELD_OWNER, JsonObject
from proxy.agent.object_writer import ObjectWriter
from proxy.agent.objects.node_page import NodePage
from proxy.agent.session import AgentSession
from proxy.model.errors import TopoproxyError
from proxy.model.mode import NodeMode
from proxy.observe.device_capacity import node_status_patch

NODES_PATH = "/api/v1/nodes"

Amounts = tuple[dict[str, str], dict[str, str]]
"""Capacity and allocatable of a Node object."""
CONDITION_TYPE = "TopologyPlacement"
_LONGEST_MESSAGE = 500


class NodeCondition(Struct, frozen=True):
    """The condition without its times."""

    status: str
    reason: str
    message: str


def unreachable_condition(error: TopoproxyError) -> NodeCondition:
    """Return the condition of a node whose daemon does not answer, or whose answer cannot be read."""
    return NodeCondition("Unknown", "DaemonUnreachable", str(error)[:_LONGEST_MESSAGE])


def condition_of(page: NodePage) -> NodeCondition:
    """Return the condition of a node by its description."""
    if page.mode == NodeMode.PASSTHROUGH:
        return NodeCondition(
            "False", "Passthrough", "topoproxy is in mode passthrough: it relays calls and publishes nothing"
        )
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
        condition: The condition.
        since: When the condition began to hold (RFC 3339). This is also the time of the heartbeat, because an
            idle node writes nothing.
    """
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node},
        "status": {
            "conditions": [
                {
                    "type": CONDITION_TYPE,
                    "status": condition.status,
                    "reason": condition.reason,
                    "message": condition.message,
                    "lastTransitionTime": since,
                    "lastHeartbeatTime": since,
                }
            ]
        },
    }


StatusFields = tuple[str, Amounts, NodeCondition | None, frozenset[str]]
"""The stored fields of the Node object: its uid, the amounts of extended resources, our condition, and the
resources whose amounts are ours."""


def status_fields(item: JsonObject) -> StatusFields:
    """Return the stored fields of a Node object; the API server may add empty maps for capacity."""
    status = item.get("status") or {}
    amounts = [
        {name: str(amount) for name, amount in (status.get(part) or {}).items() if "/" in name}
        for part in ("capacity", "allocatable")
    ]
    condition = _condition_in(item)
    return (
        str(item["metadata"]["uid"]),
        (amounts[0], amounts[1]),
        condition and condition[0],
        _own_resources(item),
    )


def _own_resources(item: JsonObject) -> frozenset[str]:
    """Return the extended resources whose amounts were last changed by topoproxy."""
    names: set[str] = set()
    for entry in item["metadata"].get("managedFields") or ():
        if entry.get("manager") == FIELD_OWNER and entry.get("subresource") == "status":
            status = (entry.get("fieldsV1") or {}).get("f:status") or {}
            for part in ("f:capacity", "f:allocatable"):
                names.update(key.removeprefix("f:") for key in status.get(part) or {})
    return frozenset(name for name in names if "/" in name)


class PublishedStatus:
    """Our part of the status of one Node object.

    Attributes:
        uid: Of the Node object; empty if there is none.
    """

    def __init__(self, session: AgentSession, writer: ObjectWriter, wall_clock: Callable[[], float]) -> None:
        """Prepare to write; nothing is sent.

        Args:
            session: The node, the API server.
            writer: Writes the status.
            wall_clock: Seconds since the epoch.
        """
        self._session = session
        self._writer = writer
        self._wall_clock = wall_clock
        self._node_path = f"{NODES_PATH}/{session.node}"
        self._path = f"{self._node_path}/status"
        self._devices_path = f"{self._path}#devices"
        self._condition: tuple[NodeCondition, str] | None = None
        self._written_condition: NodeCondition | None = (
            None  # the last condition written, or the one being written
        )
        self._amounts: Amounts = {}, {}
        self._healthy: dict[str, int] = {}
        self._advertised: set[str] = set()
        self.uid = ""

    def node_changed(self, fields: StatusFields | None) -> bool:
        """Handle a change of the Node object (None: deleted); return whether it is a new object."""
        uid, self._amounts, condition, own = fields or ("", ({}, {}), None, frozenset())
        if uid != self.uid:
            self.uid, self._condition, self._written_condition = uid, None, None
            self._advertised = set(own | self._healthy.keys())  # an earlier run may have written amounts
            self._writer.forget(self._path)
            self._writer.forget(self._devices_path)
            if condition is not None and not self._session.config.cluster.node_condition:
                self._writer.want(self._path, None, self._remove_condition)  # of an earlier run
            return True
        before = self._condition and self._condition[0]  # the write that replaces it may be in flight
        if self._written_condition is not None and condition not in (before, self._written_condition):
            self._condition, self._written_condition = None, None  # another program has written it
            self._writer.observed(self._path, None)
        if self._device_operations():  # kubelet has reset amounts
            self._writer.observed(self._devices_path, None)
        return False

    def want_devices(self, healthy: Mapping[str, int]) -> None:
        """Write the healthy devices that topoproxy assigns into the Node object, by resource."""
        self._healthy = dict(healthy)
        self._advertised |= healthy.keys()
        if self._advertised and self.uid:
            self._writer.want(self._devices_path, self._healthy, self._write_devices)

    def _device_operations(self) -> list[dict[str, object]]:
        return node_status_patch(self._healthy, *self._amounts, advertised=self._advertised)

    async def _write_devices(self) -> JsonObject | None:
        withdrawn = self._advertised - self._healthy.keys()
        # Always write the amounts of withdrawn resources: an earlier write of ours may still be in flight.
        capacity, allocatable = (
            {name: amount for name, amount in part.items() if name not in withdrawn} for part in self._amounts
        )
        operations = node_status_patch(self._healthy, capacity, allocatable, advertised=self._advertised)
        answer = await self._session.api.patch(self._path, operations) if operations else None
        self._advertised -= withdrawn - self._healthy.keys()  # from now on they are kubelet's alone
        return answer

    def want_condition(self, condition: NodeCondition) -> None:
        """Write a condition into the Node object."""
        if self._session.config.cluster.node_condition and self.uid:
            content = self.uid, condition
            self._writer.want(self._path, content, lambda: self._write_condition(condition))

    async def _remove_condition(self) -> JsonObject | None:
        """Remove the condition, if it is ours: an apply removes fields that the owner leaves out."""
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._session.node}}
        return await self._session.api.apply(self._path, node)

    async def _write_condition(self, condition: NodeCondition) -> JsonObject | None:
        """Write the condition; its time is that of the last change of its status."""
        if self._condition is None:
            node = await self._session.api.get(self._node_path)
            self._condition = _condition_in(node)
        since = timestamp(self._wall_clock())
        if self._condition is not None and self._condition[0].status == condition.status:
            since = self._condition[1] or since
            if self._condition[0] == condition:
                self._written_condition = condition
                return None
        self._written_condition = condition
        status = condition_status(self._session.node, condition, since)
        answer = await self._session.api.apply(self._path, status)
        self._condition = None if self._written_condition is None else (condition, since)
        return answer


def timestamp(seconds: float) -> str:
    """Return a time since the epoch as the API server writes it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition_in(node: JsonObject) -> tuple[NodeCondition, str] | None:
    """Return our condition of a Node object, and when its status changed; None if the object has none."""
    conditions: list[dict[str, Any]] = (node.get("status") or {}).get("conditions") or []
    for condition in conditions:
        if condition.get("type") == CONDITION_TYPE:
            parts = (str(condition.get(key) or "") for key in ("status", "reason", "message"))
            return NodeCondition(*parts), str(condition.get("lastTransitionTime") or "")
    return None
