"""Publishes the node: from the daemon's description to objects, annotations, Events and a condition.

The follower (``node_follower``) brings each new description, pure functions (``objects``) make objects of it,
and the writer (``object_writer``) writes those that differ. Which objects are published follows from the
configuration and from the APIs that the cluster has; CRDs that are installed later are detected.

Objects are owned by the Node object, so that they vanish with it. They are removed when the node is released.
When the agent ends they stay, because it is usually started again soon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import msgspec

from proxy.agent.api_client import ApiServerError, JsonObject, retry_after
from proxy.agent.event_writer import EventWriter
from proxy.agent.node_follower import DaemonNotice, NodeFollower
from proxy.agent.node_status import (
    NODES_PATH,
    PublishedStatus,
    StatusFields,
    condition_of,
    status_fields,
    unreachable_condition,
)
from proxy.agent.object_removal import ObjectVersion, object_version, remove_object
from proxy.agent.object_writer import ObjectWriter, Write
from proxy.agent.objects import node_resource_topology as nrt
from proxy.agent.objects import numatopology as volcano
from proxy.agent.objects.node_page import NodePage
from proxy.agent.objects.pod_events import notice_event, placed_events
from proxy.agent.pod_annotations import PodAnnotations
from proxy.agent.session import AgentSession
from proxy.agent.watcher import Key, Watcher
from proxy.config.cluster import TopologyObject
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import TopoproxyError
from proxy.model.mode import NodeMode
from proxy.observe.device_capacity import healthy_devices

KOORDINATOR_GROUPS = frozenset({"scheduling.koordinator.sh", "slo.koordinator.sh"})
DISCOVER_S, MISSING_API_S = 300.0, 10.0
"""Seconds between two readings of the APIs, and seconds after a reading that lacks an API in use: an API
server that has just started may not serve all CRDs yet."""
RETRY_S = 2.0
"""Seconds before the APIs are read again if the API server did not answer."""
UNKNOWN_PAUSES = Backoff(2.0, 30.0)
"""The same if it refused."""
CANNOT_DISCOVER = "cannot read which APIs the cluster has"
CANNOT_PUBLISH_TOPOLOGY = "cannot write the NodeResourceTopology of the node"
FINGERPRINT_S, FIGURES_S = 0.5, 15.0
"""Seconds for which a new fingerprint waits, because a new sandbox usually has a container by then; and
seconds for which the figures for people wait, because they change once more when a container has been
created."""


class Publisher:
    """Publishes one node."""

    def __init__(self, session: AgentSession, wall_clock: Callable[[], float] = time.time) -> None:
        """Prepare to publish; nothing is sent.

        Args:
            session: The node, the daemon, the API server.
            wall_clock: Seconds since the epoch.
        """
        self._session = session
        self._settings = session.config.cluster
        self.writer = ObjectWriter(session.telemetry)
        self.follower = NodeFollower(
            session.daemon, session.node, session.telemetry, self._page_changed, self._daemon_unreachable
        )
        self._status = PublishedStatus(session, self.writer, wall_clock)
        self._node_selector = {"fieldSelector": f"metadata.name={session.node}"}
        self._unreachable_cause: TopoproxyError | None = None
        self._groups: dict[str, list[str]] = {}
        self._has_pod_allocations = True
        self._scheduler_content: tuple[object, object] = None, None
        self._annotations = PodAnnotations(session, self.writer)
        self._events = EventWriter(session, self.writer, wall_clock)
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._existing: set[str] = set()

    async def run(self) -> None:
        """Publish until cancelled."""
        node = self._session.watcher(
            NODES_PATH,
            status_fields,
            selectors=self._node_selector,
            changed=self._node_changed,
            metadata_only=False,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.writer.run())
                tasks.create_task(self.follower.run())
                tasks.create_task(self._discover(tasks))
                tasks.create_task(node.run())
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    # -- what the cluster has -----------------------------------------------------------------------------

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        """Read repeatedly which APIs the cluster has."""
        telemetry, pauses = self._session.telemetry, RetryDelays(UNKNOWN_PAUSES)
        while True:
            pause = DISCOVER_S
            try:
                found = await self._session.api.get("/apis")
            except TopoproxyError as error:
                if isinstance(error, ApiServerError):  # the watch of the Node reports others
                    telemetry.problem(CANNOT_DISCOVER, err=error)
                pause = pauses.next() if isinstance(error, ApiServerError) else RETRY_S
                await asyncio.sleep(max(pause, retry_after(error)))
                continue
            pauses.reset()
            telemetry.resolved(CANNOT_DISCOVER)
            groups = {
                str(group.get("name")): [
                    str(version.get("version")) for version in group.get("versions") or ()
                ]
                for group in found.get("groups") or ()
            }
            if groups != self._groups:
                self._groups = groups
                self._report_missing_version()
                pause = MISSING_API_S if self._drop_unused_collections() else DISCOVER_S
                self._watch_published_objects(tasks)
                self._withdraw_turned_off()
                self._publish()
            await asyncio.sleep(pause)

    def _report_missing_version(self) -> None:
        """Report that the cluster cannot store the form of NodeResourceTopology that is configured."""
        form = self._settings.node_resource_topology
        if form is TopologyObject.NFD and nrt.GROUP in self._groups and self._lacks_nfd_version:
            err = f"it serves {', '.join(self._groups[nrt.GROUP])}, and NFD's form needs {nrt.NFD_VERSION}"
            self._session.telemetry.problem(CANNOT_PUBLISH_TOPOLOGY, err=err)
        else:
            self._session.telemetry.resolved(CANNOT_PUBLISH_TOPOLOGY)

    def _drop_unused_collections(self) -> bool:
        """Stop watching and writing objects in collections that are no longer used for publishing.

        Two versions of NodeResourceTopology are views of one object: if both were written, it would never
        settle.

        Returns:
            Whether there were any.
        """
        former = self._watchers.keys() - {self._numatopology_collection, self._topology_collection}
        for collection in former:
            self._watchers.pop(collection).cancel()
            path = f"{collection}/{self._session.node}"
            self.writer.forget(path)
            self._existing.discard(path)
            self._scheduler_content = None, None
        return bool(former)

    def _watch_published_objects(self, tasks: asyncio.TaskGroup) -> None:
        """Watch the objects that are published, to notice other writers."""
        for collection in (self._numatopology_collection, self._topology_collection):
            if not collection or collection in self._watchers:
                continue
            path = f"{collection}/{self._session.node}"
            watcher: Watcher[ObjectVersion] = self._session.watcher(
                collection,
                object_version,
                selectors=self._node_selector,
                changed=partial(self._object_changed, path),
                metadata_only=True,
            )
            self._watchers[collection] = tasks.create_task(watcher.run())

    def _withdraw_turned_off(self) -> None:
        """Remove the objects of an earlier run that are turned off: schedulers would read them for ever."""
        turned_off = []
        if not self._settings.numatopology and "nodeinfo.volcano.sh" in self._groups:
            turned_off.append(volcano.PATH)
        if self._settings.node_resource_topology is TopologyObject.NONE and self._groups.get(nrt.GROUP):
            turned_off.append(nrt.collection_path(self._groups[nrt.GROUP][0]))
        for collection in turned_off:
            path = f"{collection}/{self._session.node}"
            self.writer.want(
                path, None, partial(remove_object, self._session.api, path), once=True, gives_up=True
            )

    def _object_changed(self, path: str, _: Key, value: ObjectVersion | None) -> None:
        """Handle a new version of an object, or its end; withdraw an object of an earlier run."""
        version, has_own_fields = value or (None, False)
        self.writer.observed(path, version)
        if not has_own_fields:
            self._existing.discard(path)
        elif path not in self._existing:
            self._existing.add(path)
            if (page := self.follower.page) is not None and not page.published:
                self._publish()

    @property
    def _numatopology_collection(self) -> str:
        """The collection of Numatopology objects; empty if none is published."""
        return volcano.PATH if self._settings.numatopology and "nodeinfo.volcano.sh" in self._groups else ""

    @property
    def _topology_collection(self) -> str:
        """The collection of NodeResourceTopology objects; empty if none is published."""
        versions = self._groups.get(nrt.GROUP, [])
        if not versions or self._settings.node_resource_topology is TopologyObject.NONE:
            return ""
        if not self._is_koordinator_form:
            return nrt.collection_path(nrt.NFD_VERSION) if nrt.NFD_VERSION in versions else ""
        return nrt.collection_path("v1alpha1" if "v1alpha1" in versions else versions[0])

    @property
    def _is_koordinator_form(self) -> bool:
        """Whether the object is written as Koordinator's agent does."""
        form = self._settings.node_resource_topology
        if form is not TopologyObject.AUTO:
            return form is TopologyObject.KOORDINATOR
        return not KOORDINATOR_GROUPS.isdisjoint(self._groups) or self._lacks_nfd_version

    @property
    def _lacks_nfd_version(self) -> bool:
        """Whether the cluster has no version in which NFD's form can be written."""
        return nrt.NFD_VERSION not in self._groups.get(nrt.GROUP, ())

    def _node_changed(self, key: Key, fields: StatusFields | None) -> None:
        """Handle a change of the Node object; a new one of this name lacks the condition and the objects."""
        if self._status.node_changed(fields):
            if not self._status.uid:
                self._forget()
            self._publish()

    def _forget(self) -> None:
        """Write nothing for a deleted Node object: the API server deletes the objects that it owned."""
        for path in self.writer.paths:
            self.writer.forget(path)
        self._annotations.forget()

    # -- what the daemon reports -----------------------------------------------------------------------------

    def _page_changed(self, before: NodePage | None, page: NodePage, notices: list[DaemonNotice]) -> None:
        self._unreachable_cause = None
        if page.mode == NodeMode.PASSTHROUGH:
            self._session.telemetry.event("the daemon is in mode passthrough: nothing is published")
        self._publish()
        if not self._settings.events or not page.published:
            return
        for event in placed_events(before, page):
            self._events.write_occurrence(event)
        self._events.write_rejections(page)
        for notice in notices:
            noticed = notice_event(notice.message, notice.keys, page)
            if noticed is not None:
                self._events.write_occurrence(noticed)

    def _daemon_unreachable(self, error: TopoproxyError) -> None:
        self._unreachable_cause = error
        self._publish()

    # -- what is written ----------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Write all objects that follow from the known facts."""
        page = self.follower.page
        if self._unreachable_cause is not None:
            self._status.want_condition(unreachable_condition(self._unreachable_cause))
        elif page is not None:
            self._status.want_condition(condition_of(page))
        if not self._status.uid:
            return
        if page is not None and page.published and self._settings.pod_annotations:
            self._annotations.update(page)
        if page is not None or not self._settings.pod_annotations:
            self._annotations.withdraw_earlier()
        if page is None:
            return
        self._status.want_devices(healthy_devices(page.device_resources) if page.published else {})
        if not page.published:
            self.withdraw()
            return
        if collection := self._numatopology_collection:
            self._want(
                collection,
                volcano.numatopology(page, allocations=self._has_pod_allocations),
                self._numatopology_write,
            )
        if collection := self._topology_collection:
            version = collection.split("/")[3]
            koordinator = self._is_koordinator_form
            value = nrt.koordinator_topology(page, version) if koordinator else nrt.nfd_topology(page)
            before, self._scheduler_content = self._scheduler_content, nrt.scheduler_content(value)
            pauses = 0.0, FINGERPRINT_S, FIGURES_S
            unchanged = sum(
                field == published for field, published in zip(before, self._scheduler_content, strict=True)
            )
            self._want(collection, value, self._apply_write, pauses[unchanged])

    def withdraw(self) -> None:
        """Remove everything that was published about the node and its pods."""
        for collection in (self._numatopology_collection, self._topology_collection):
            if collection:
                path = f"{collection}/{self._session.node}"
                remove = partial(remove_object, self._session.api, path)
                if path in self._existing:  # it may be from an earlier run
                    self.writer.want(path, None, remove)
                self.writer.withdraw(path, remove)
        self._annotations.withdraw()

    def _want(
        self,
        collection: str,
        value: JsonObject,
        write: Callable[[str, JsonObject], Write],
        delay_s: float = 0.0,
    ) -> None:
        path = f"{collection}/{self._session.node}"
        owned = nrt.with_owner(value, self._session.node, self._status.uid)
        self.writer.want(path, msgspec.json.encode(owned), write(path, owned), delay_s=delay_s)

    def _apply_write(self, path: str, value: JsonObject) -> Write:
        return lambda: self._session.api.apply(path, value)

    def _numatopology_write(self, path: str, value: JsonObject) -> Write:
        """Return a write of a Numatopology that leaves out a field which the CRD does not have."""

        async def write() -> JsonObject:
            try:
                return await self._session.api.apply(path, value)
            except ApiServerError as error:
                if volcano.POD_ALLOCATIONS not in str(error):
                    raise
                self._has_pod_allocations = False
                reduced = {key: part for key, part in value["spec"].items() if key != volcano.POD_ALLOCATIONS}
                return await self._session.api.apply(path, {**value, "spec": reduced})

        return write


async def publish(session: AgentSession) -> None:
    """Publish the node until cancelled: a part of the agent."""
    await Publisher(session).run()
