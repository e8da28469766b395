"""Keeps the table of nodes current by watches of the API server.

Four collections are followed: bound pods that have not ended, nodes, Numatopologies and
NodeResourceTopologies. When an object arrives, it is reduced to the fields that decisions read. When one of a
node's objects changes, the facts of the node are joined again; a malformed object makes the node unknown,
with the reason.

The NodeResourceTopologies are followed in a version that the cluster has: v1alpha2, or the only one that
there is, such as Koordinator's v1alpha1. Until the API server has reported its versions, nothing is decided.
While the collection is missing, the versions are queried again at intervals.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from proxy.agent.api_client import ApiClient, ApiServerError, JsonObject, retry_after
from proxy.agent.objects.node_resource_topology import GROUP
from proxy.agent.objects.node_resource_topology import collection_path as topology_path
from proxy.agent.objects.numatopology import PATH as NUMATOPOLOGIES
from proxy.agent.watcher import Key, Watcher
from proxy.executor.background import run_with_restarts
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import InputError, TopoproxyError
from proxy.model.kubelet import NodeMeta
from proxy.pools.node_keys import PREFIXES
from proxy.pools.node_meta import node_meta_of
from proxy.scheduler.node_facts import join_facts
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.numatopology import NumatopologyFacts, read_numatopology
from proxy.scheduler.pod_demand import PodDemand, has_ended, read_demand
from proxy.scheduler.resource_topology import ResourceTopologyFacts, read_resource_topology
from proxy.scheduler.taints import Taint, taints_of
from proxy.telemetry.port import Telemetry

T = TypeVar("T")
TICK_S = 1.0
PREFERRED_VERSION = "v1alpha2"
"""The version of the NodeResourceTopologies that is followed if the cluster has it."""
PAUSES = Backoff(0.25, 4.0)
"""Seconds before the API server is queried again for its versions."""
DISCOVERY_S = 60.0
"""Seconds after which a collection that is missing is looked for in other versions."""


class BoundPod(Struct, frozen=True):
    """A pod that is bound to a node."""

    demand: PodDemand
    running: bool


class NodeWithTaints(Struct, frozen=True):
    """The fields of a Node object that decisions read."""

    meta: NodeMeta
    taints: tuple[Taint, ...]


class Unreadable(Struct, frozen=True):
    """An object with malformed content."""

    reason: str


class ClusterView:
    """Keeps a table current."""

    def __init__(self, api: ApiClient, table: NodeTable, telemetry: Telemetry) -> None:
        """Prepare to follow the cluster.

        Args:
            api: The API server.
            table: The table to keep current.
            telemetry: The log.
        """
        self._table = table
        self._telemetry = telemetry
        self._api = api
        self._keys: dict[Key, str] = {}
        self.pods = Watcher(
            api, "/api/v1/pods", _bound_pod, telemetry, changed=self._pod_changed,
            selectors={"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"},
        )  # fmt: skip
        self.nodes = Watcher(api, "/api/v1/nodes", _node, telemetry, changed=self._node_changed)
        self.numatopologies = self._object_watcher(NUMATOPOLOGIES, read_numatopology)
        self.topologies = self._topology_watcher(PREFERRED_VERSION)
        self._version = ""

    @property
    def age(self) -> float | None:
        """Seconds since the oldest copy was known to be current; None until all were listed.

        A collection that does not exist, or that could never be read, does not count, except the pods.
        """
        watchers = self._watchers()
        ages = [each.age for each in watchers if each.present or each.age is not None or each is self.pods]
        return None if not self.listed or None in ages else max(age for age in ages if age is not None)

    @property
    def listed(self) -> bool:
        """Whether everything has been listed."""
        return all(watcher.listed.is_set() for watcher in self._watchers())

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        parts = [watcher.run for watcher in (self.nodes, self.numatopologies, self.pods)]
        async with asyncio.TaskGroup() as group:
            for part in (*parts, self._follow_topologies, self._tick):
                group.create_task(run_with_restarts(part, self._telemetry.fault))
            group.create_task(self._freeze())

    def _watchers(self) -> tuple[Watcher[Any], ...]:
        return self.nodes, self.numatopologies, self.topologies, self.pods

    def _object_watcher(self, path: str, reader: Callable[[JsonObject], T]) -> Watcher[T | Unreadable]:
        def digest(raw: JsonObject) -> T | Unreadable:
            try:
                return reader(raw)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                return Unreadable(f"{raw.get('kind', 'its object')} cannot be read: {error}")

        return Watcher(
            self._api, path, digest, self._telemetry, changed=lambda key, value: self._join(key[1])
        )

    def _topology_watcher(self, version: str) -> Watcher[ResourceTopologyFacts | Unreadable]:
        return self._object_watcher(topology_path(version), read_resource_topology)

    async def _follow_topologies(self) -> None:
        """Follow the NodeResourceTopologies; look for their version again while there are none."""
        following: asyncio.Future[None] | None = None
        try:
            while True:
                version = await self._served_version()
                if following is None or version != self._version:
                    if following is not None:
                        following.cancel()
                        await asyncio.gather(following, return_exceptions=True)
                    self._follow_version(version)
                    run = run_with_restarts(self.topologies.run, self._telemetry.fault)
                    following = asyncio.ensure_future(run)
                await asyncio.sleep(DISCOVERY_S)
                while self.topologies.present:
                    await asyncio.sleep(DISCOVERY_S)
        finally:
            if following is not None:
                following.cancel()

    def _follow_version(self, version: str) -> None:
        """Replace the copy by an empty one of a version; nothing is decided until it has been listed."""
        before = self.topologies.values
        self._telemetry.resolved("cannot follow the cluster", path=topology_path(self._version))
        self.topologies, self._version = self._topology_watcher(version), version
        for _, name in before:
            self._join(name)

    async def _served_version(self) -> str:
        """Wait until the API server has reported its versions, and return the version to follow."""
        path, pauses = f"/apis/{GROUP}", RetryDelays(PAUSES)
        while True:
            try:
                group = await self._api.get(path)
            except TopoproxyError as error:
                if isinstance(error, ApiServerError) and error.status in (403, 404):
                    group = {}
                else:
                    self._telemetry.problem("cannot follow the cluster", path=path, err=error)
                    await asyncio.sleep(max(pauses.next(), retry_after(error)))
                    continue
            self._telemetry.resolved("cannot follow the cluster", path=path)
            found = [each.get("version") for each in group.get("versions") or () if isinstance(each, dict)]
            return PREFERRED_VERSION if PREFERRED_VERSION in found or not found else str(found[0])

    async def _freeze(self) -> None:
        """Exempt the listed objects from garbage collection: collecting over them would delay an answer."""
        while not self.listed:
            await asyncio.sleep(TICK_S)
        gc.collect()
        gc.freeze()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._table.tick(asyncio.get_running_loop().time())

    def _pod_changed(self, key: Key, pod: BoundPod | None) -> None:
        now = asyncio.get_running_loop().time()
        before = self._keys.get(key)
        if before is not None and (pod is None or pod.demand.key != before):
            del self._keys[key]
            self._table.release(before, now)
        if pod is not None:
            self._keys[key] = pod.demand.key
            self._table.observe(pod.demand, now, running=pod.running)

    def _node_changed(self, key: Key, node: NodeWithTaints | None) -> None:
        if node is None:
            self._table.remove(key[1])
            return
        allocatable = node.meta.allocatable.items()
        self._table.put_allocatable(
            key[1],
            {name: amount if name == "cpu" else amount // 1000 for name, amount in allocatable},
            asyncio.get_running_loop().time() if self.nodes.listed.is_set() else -inf,
        )
        self._table.put_taints(key[1], node.taints)
        self._join(key[1])

    def _join(self, name: str) -> None:
        node = self.nodes.values.get(("", name))
        if node is None:
            return
        numa, zones = self.numatopologies.values.get(("", name)), self.topologies.values.get(("", name))
        for facts in (numa, zones):
            if isinstance(facts, Unreadable):
                self._table.put_unknown(name, facts.reason)
                return
        assert not isinstance(numa, Unreadable)
        assert not isinstance(zones, Unreadable)
        self._put(name, node.meta, numa, zones)

    def _put(
        self, name: str, meta: NodeMeta, numa: NumatopologyFacts | None, zones: ResourceTopologyFacts | None
    ) -> None:
        try:
            node = join_facts(name, meta, numa, zones)
        except ValueError as error:
            self._table.put_unknown(name, str(error))
        except (ArithmeticError, LookupError, TypeError) as error:  # the other objects must still be read
            self._table.put_unknown(name, f"its objects cannot be read: {error!r}")
        else:
            self._table.put(node, asyncio.get_running_loop().time())


def _bound_pod(raw: JsonObject) -> BoundPod | None:
    if has_ended(raw) or not (raw.get("spec") or {}).get("nodeName"):
        return None
    try:
        demand = read_demand(raw)
    except InputError as error:
        raise ValueError(str(error)) from None
    return BoundPod(demand, (raw.get("status") or {}).get("phase") == "Running")


def _node(raw: JsonObject) -> NodeWithTaints:
    meta = node_meta_of(raw)
    used = replace(
        meta,
        labels={key: value for key, value in meta.labels.items() if key.startswith(PREFIXES)},
        annotations={key: value for key, value in meta.annotations.items() if key.startswith(PREFIXES)},
        capacity={},
        allocatable={key: value for key, value in meta.allocatable.items() if key in ("cpu", "memory")},
    )
    return NodeWithTaints(used, taints_of(raw))
