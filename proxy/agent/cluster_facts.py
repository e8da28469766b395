"""Read the Node object, labels of namespaces and this node's pods for the daemon.

Theory. Three watches keep three small copies. When one changes, its file is replaced as a whole; changes in
quick succession are one write. While a watch is open and nothing changes, only the file's modification time
is set, to the time of the watch's last event or bookmark. So the daemon knows since when the contents may be
outdated. If the API server does not answer, or does not permit the watch, nothing is written: the last copy
stays, and gets older.

The Node object and namespaces change the rules of the node, so the daemon is notified and reads them at once.
Pods need no notice: the daemon reads the file when it needs one.

An annotation may have 256 KiB, and only a tenth of a Pod object is used. So only the fields that the daemon
reads are kept, and all others are dropped before anything is stored: memory and files stay small, however
large the objects are.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from proxy.agent.api_client import JsonObject
from proxy.agent.session import AgentSession
from proxy.agent.watcher import Watcher
from proxy.atomic_write import write_file
from proxy.backends.cluster.facts_format import ClusterFacts, FactsKind, encode_facts
from proxy.config.schema import Config
from proxy.model.errors import TopoproxyError
from proxy.pools.facts import POD_KEYS
from proxy.pools.node_keys import PREFIXES
from proxy.pools.pod_spec import CONFIG_HASH

BATCH_S = 0.05
"""Changes within this many seconds become one write."""
NAMESPACES_S = 1.0
"""Seconds between two writes of the namespaces: there may be thousands, and any of them may change."""
CONFIRM_S = 10.0
"""Seconds between two confirmations of a file."""
RETRY_S = 0.5
"""Seconds before a file that could not be written is tried again."""
_CANNOT = "cannot write what was read from the cluster"

Item = Mapping[str, Any]
_ANNOTATIONS = frozenset({*POD_KEYS, CONFIG_HASH})
LONGEST_TEXT = 64 << 10
"""Characters of an annotation; no reader takes a longer one."""


def stored_node_json(item: Item) -> bytes:
    """Return the JSON of a Node object's fields that are used.

    Raises:
        ValueError: It is not a Node object.
    """
    metadata = _metadata(item, "name", "uid")
    for part in ("labels", "annotations"):
        texts = _short_texts(item["metadata"].get(part))
        metadata[part] = {key: text for key, text in texts.items() if key.startswith(PREFIXES)}
    status = _selected_fields(item.get("status"), ("capacity", "allocatable"))
    return msgspec.json.encode({"kind": "Node", "metadata": metadata, "status": status})


def stored_namespace_json(item: Item) -> bytes:
    """Return the JSON of a Namespace object's fields that are used.

    Raises:
        ValueError: It is not a Namespace object.
    """
    metadata = _metadata(item, "name")
    return msgspec.json.encode(
        {"metadata": {**metadata, "labels": _short_texts(item["metadata"].get("labels"))}}
    )


def stored_pod_json(item: Item) -> bytes:
    """Return the JSON of a Pod object's fields that are used.

    Raises:
        ValueError: It is not a Pod object.
    """
    metadata = _metadata(item, "namespace", "name", "uid")
    metadata["labels"] = _short_texts(item["metadata"].get("labels"))
    annotations = _short_texts(item["metadata"].get("annotations"))
    metadata["annotations"] = {key: annotations[key] for key in annotations.keys() & _ANNOTATIONS}
    raw_spec = item.get("spec")
    spec = _selected_fields(raw_spec, ("resources", "overhead"))
    for part in ("initContainers", "containers"):
        containers = raw_spec.get(part) if isinstance(raw_spec, Mapping) else None
        if isinstance(containers, list):
            spec[part] = [
                _selected_fields(container, ("name", "restartPolicy", "resources"))
                for container in containers
            ]
    status = _selected_fields(item.get("status"), ("qosClass",))
    return msgspec.json.encode({"metadata": metadata, "spec": spec, "status": status})


def _metadata(item: Item, *names: str) -> dict[str, Any]:
    metadata = item.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise ValueError("it has no metadata.name")  # noqa: TRY004 - one kind of error for all bad input
    return _selected_fields(metadata, names)


def _selected_fields(raw: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: raw[name] for name in names if name in raw} if isinstance(raw, Mapping) else {}


def _short_texts(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        return {}
    return {key: text for key, text in raw.items() if isinstance(text, str) and len(text) <= LONGEST_TEXT}


async def write_facts(session: AgentSession) -> None:
    """Write the facts for the daemon until cancelled; end at once if no directory is configured."""
    directory = session.config.cluster_facts.directory
    if directory is None:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with asyncio.TaskGroup() as tasks:
        for kind, collection, fields, by_node in (
            (FactsKind.NODE, "/api/v1/nodes", stored_node_json, "metadata.name"),
            (FactsKind.PODS, "/api/v1/pods", stored_pod_json, "spec.nodeName"),
        ):
            WatchedFile(session, directory, kind, collection, fields, by_node).follow(tasks)
        tasks.create_task(_write_namespaces(session, directory))


async def _write_namespaces(session: AgentSession, directory: Path) -> None:
    """Write the labels of namespaces while the configuration selects namespaces by them."""

    def selects(config: Config) -> bool:
        return not config.admission.namespace_selector.all

    while True:
        await session.until(selects)
        file = WatchedFile(
            session, directory, FactsKind.NAMESPACES, "/api/v1/namespaces", stored_namespace_json
        )
        async with asyncio.TaskGroup() as tasks:
            following = file.follow(tasks)
            await session.until(lambda config: not selects(config))
            for task in following:
                task.cancel()


class WatchedFile:
    """A file that follows a collection of the API server.

    Attributes:
        watcher: Follows the collection.
    """

    def __init__(
        self,
        session: AgentSession,
        directory: Path,
        kind: FactsKind,
        collection: str,
        fields: Callable[[JsonObject], bytes],
        by_node: str = "",
    ) -> None:
        """Prepare to follow; nothing is requested yet.

        Args:
            session: The session that all parts of the agent share.
            directory: The directory of the file.
            kind: The kind of objects in it.
            collection: The path of the collection.
            fields: Returns the part of an object that is kept, as JSON.
            by_node: The field that selects the objects of this node; empty for all objects.
        """
        self._session = session
        self._kind = kind
        self._path = directory / kind.file_name
        self._changed = asyncio.Event()
        selectors = {"fieldSelector": f"{by_node}={session.node}"} if by_node else {}
        self.watcher: Watcher[bytes] = session.watcher(
            collection, fields, selectors=selectors, changed=lambda key, value: self._changed.set()
        )

    def follow(self, tasks: asyncio.TaskGroup) -> tuple[asyncio.Task[None], ...]:
        """Start to follow the collection and to write the file; return the tasks."""
        return tasks.create_task(self.watcher.run()), tasks.create_task(self.run())

    async def run(self) -> None:
        """Write the file whenever the copy changes, and confirm it while the copy does not change."""
        await self.watcher.listed.wait()
        loop, due, next_write = asyncio.get_running_loop(), True, 0.0
        while True:
            if due:
                await asyncio.sleep(max(BATCH_S, next_write - loop.time()))
                self._changed.clear()
            if not self._is_current():
                due = due or self._changed.is_set()
            elif due:
                if self._kind is FactsKind.NAMESPACES:
                    next_write = loop.time() + NAMESPACES_S
                due = not await self._write()
            else:
                due = not await asyncio.to_thread(self._confirm, time.time() - (self.watcher.age or 0.0))
            try:
                async with asyncio.timeout(RETRY_S if due else CONFIRM_S):
                    await self._changed.wait()
                due = True
            except TimeoutError:
                pass

    def _is_current(self) -> bool:
        """Return whether the copy is current; a copy of the node without the Node object is not."""
        is_known = bool(self.watcher.values) or self._kind is not FactsKind.NODE
        return self.watcher.present and self.watcher.is_open and is_known

    async def _write(self) -> bool:
        """Write the file; return whether that has succeeded."""
        telemetry, watcher = self._session.telemetry, self.watcher
        items = [Raw(watcher.values[key]) for key in sorted(watcher.values)]
        facts = ClusterFacts(self._kind, self._session.node, time.time(), watcher.version, items)
        try:
            await asyncio.to_thread(write_file, self._path, encode_facts(facts))
        except (OSError, ValueError) as error:
            telemetry.problem(_CANNOT, path=self._path, err=error)
            return False
        telemetry.resolved(_CANNOT, path=self._path)
        if self._kind is not FactsKind.PODS:
            try:
                await self._session.daemon.query("/cluster/refresh", act=True)
            except TopoproxyError as error:  # the daemon reads the file when it next starts or reconciles
                telemetry.debug("cannot make the daemon reread a file", path=self._path, err=error)
        return True

    def _confirm(self, at: float) -> bool:
        """Set the file's time to the last confirmation by the API server; return whether the file exists."""
        try:
            os.utime(self._path, (at, at))
        except OSError:
            return False
        return True
