"""Choose and apply the TopoproxyConfig that selects this node, and report the result.

Before the settings are written, they are checked together with the node's own file, by the rules of that
file. Then they are written to a file for the daemon, and the daemon reloads. If the daemon refuses them
(because the machine cannot meet them, or running containers prevent it), the file gets its previous content
back, so that a restart does not use them either; they are tried again from time to time. Settings of an
object that no longer applies are removed from the file in any case. If the daemon refuses that reload, the
settings stay in effect until it accepts a reload, or restarts. Whatever happens here, the daemon itself
ignores keys that it does not permit (``proxy.config.cluster_config``).

Of the objects whose selector matches the labels of the Node object, the one with the highest priority
applies; of those with equal priority, the one whose name sorts first. Two objects are never merged: a node
gets all its settings from the cluster from a single object.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from proxy.agent.api_client import ApiServerError, retry_after
from proxy.agent.config_objects import (
    ANNOTATION,
    COLLECTION,
    ConfigAnswer,
    ConfigObject,
    applicable_object,
    config_object,
    has_room,
    node_annotation,
    object_status,
    reported_nodes,
)
from proxy.agent.session import AgentSession
from proxy.agent.watcher import REFUSALS_UNTIL_ABSENT
from proxy.atomic_write import write_file
from proxy.config.cluster_config import FILE_NAME, IGNORED
from proxy.config.load import SIZE_LIMIT, load
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import ConfigError, TopoproxyError
from proxy.observe.json_access import as_list, as_map
from proxy.open_file import open_file

PAUSES = Backoff(1.0, 30.0)
RELOAD_S = 60.0
SPREAD_S = 5.0
"""Seconds over which nodes spread their reports: thousands of nodes must not write at once."""
RECHECK_S = 60.0
"""Seconds after which refused settings are checked again by the rules of the node's own file, and a refused
reload is tried again: the operator may have changed the file, and containers may have ended."""
CANNOT_REMOVE = "cannot reload the daemon without settings from the cluster"
TOO_MANY = "Too many"
"""A part of the API server's message when a list is full."""
_LONGEST_REASON = 500
"""Characters of a reason."""


def _node_identity(item: Mapping[str, Any]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the uid of a Node object, and its labels."""
    metadata = item["metadata"]
    return str(metadata.get("uid") or ""), tuple(sorted((metadata.get("labels") or {}).items()))


async def follow_cluster_config(session: AgentSession) -> None:
    """Follow until cancelled, as soon as the node permits settings from the cluster.

    If the node no longer permits them, it reports that, as for each key that it does not permit. When the
    agent starts on a node that permits none, it removes the reports of an earlier run.
    """
    directory = session.config.cluster_facts.directory
    await _remove_earlier_reports(session)
    if directory is None:
        return
    await session.until(lambda config: bool(config.cluster_config.allowed))
    path = directory / FILE_NAME
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    follower = ConfigFollower(session, path)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.objects.run())
        tasks.create_task(follower.nodes.run())
        tasks.create_task(follower.run())


async def _remove_earlier_reports(session: AgentSession) -> None:
    """Remove the reports of an earlier run while the node permits no settings from the cluster."""
    pauses, refusals = RetryDelays(PAUSES), 0
    directory = session.config.cluster_facts.directory
    while directory is None or not session.config.cluster_config.allowed:
        requested = 0.0
        try:
            await _remove_reports(session)
            if directory is not None:
                await asyncio.to_thread(_write_or_remove, directory / FILE_NAME, None)
        except ApiServerError as error:
            refusals += error.status == 403
            if error.status == 404 or refusals >= REFUSALS_UNTIL_ABSENT:
                return  # without the object or the permission, no earlier run can have reported
            requested = retry_after(error)
        except (OSError, TopoproxyError):
            pass  # the watches report the error
        else:
            return
        await asyncio.sleep(max(pauses.next(), requested))


async def _remove_reports(session: AgentSession) -> None:
    """Remove the annotation of the Node object, and the entries of the node in the status of objects."""
    path = f"/api/v1/nodes/{session.node}"
    node = await session.api.get(path)
    if ANNOTATION not in ((node.get("metadata") or {}).get("annotations") or {}):
        return
    names = []
    try:
        async for page in session.api.pages(COLLECTION, {}):
            items = page.get("items") or ()
            names += [item["metadata"]["name"] for item in items if session.node in reported_nodes(item)]
    except ApiServerError as error:
        if error.status != 404:  # the CRD was removed
            raise
    for name in names:
        value, owner = object_status(name), f"topoproxy-{session.node}"
        await session.api.apply(f"{COLLECTION}/{name}/status", value, owner=owner)
    await session.api.merge(path, {"metadata": {"annotations": node_annotation(None)}})


class ConfigFollower:
    """Applies the settings of the selected object to the daemon.

    Attributes:
        objects, nodes: Follow the TopoproxyConfig objects, and the labels of the node.
    """

    def __init__(self, session: AgentSession, path: Path) -> None:
        """Prepare; nothing is requested yet.

        Args:
            session: The node, the daemon, the API server.
            path: The file that the daemon reads.
        """
        self._session = session
        self._path = path
        self._changed = asyncio.Event()
        self._observed: tuple[str, str, int, str] | None = None
        self._answer: ConfigAnswer | None = None
        self._written: ConfigAnswer | None = None
        self._written_to: str | None = None
        self._report_at, self._retry_at = 0.0, math.inf
        self._awaits_daemon = False
        self._before: bytes | None = None
        self._broken_rule = ""
        self.objects = session.watcher(
            COLLECTION, config_object, changed=lambda key, value: self._changed.set()
        )
        self.nodes = session.watcher(
            "/api/v1/nodes",
            _node_identity,
            selectors={"fieldSelector": f"metadata.name={session.node}"},
            changed=lambda key, value: self._changed.set(),
            metadata_only=True,
        )

    async def run(self) -> None:
        """Follow until cancelled."""
        pauses = RetryDelays(PAUSES)
        await self.objects.listed.wait()
        await self.nodes.listed.wait()
        while True:
            self._changed.clear()
            if await self.step():
                pauses.reset()
                with contextlib.suppress(TimeoutError):
                    seconds = self._report_at - asyncio.get_running_loop().time()
                    async with asyncio.timeout(seconds if seconds > 0 else RECHECK_S):
                        await self._changed.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pauses.next()):
                        await self._changed.wait()

    async def step(self) -> bool:
        """Apply the selected object to the daemon, and report; return whether nothing is left to do."""
        node = next(iter(self.nodes.values.values()), None)
        if node is None or not self.objects.present:
            return True  # without the node or permission to read, the last settings stay in effect
        uid, labels = node
        selected = applicable_object(self.objects.values.values(), dict(labels))
        identity = (
            ("", "", 0, "")
            if selected is None
            else (selected.uid, selected.name, selected.generation, selected.text)
        )
        broken = (
            "" if selected is None else await asyncio.to_thread(self._refusal_by_node_file, selected.text)
        )
        now = asyncio.get_running_loop().time()
        if (identity, broken) != (self._observed, self._broken_rule) or now >= self._retry_at:
            try:
                answer, refusal = await self._apply_object(selected, broken)
            except (OSError, TopoproxyError) as error:
                self._session.telemetry.problem("cannot apply the settings of the cluster", err=error)
                return False
            self._observed, self._broken_rule = identity, broken
            now = asyncio.get_running_loop().time()
            self._retry_at = now + RECHECK_S if refusal else math.inf
            if answer != self._answer or self._written_to is None:
                self._answer = answer
                self._report_at = max(self._report_at, now + random.uniform(0, SPREAD_S))  # noqa: S311
            self._session.telemetry.resolved("cannot apply the settings of the cluster")
        if now < self._report_at or (self._answer is None and self._retry_at < math.inf):
            return True  # an earlier run's answer stays as long as its settings
        return await self._report(selected, uid) and await self._remove_from_other_objects(selected)

    async def _apply_object(
        self, selected: ConfigObject | None, broken: str
    ) -> tuple[ConfigAnswer | None, str]:
        """Apply the settings of an object to the daemon, or none.

        Args:
            selected: The object.
            broken: Why the node's own file does not permit its settings; empty if it does.

        Returns:
            The answer of the node, and why the daemon has refused the reload; empty if the daemon has not.

        Raises:
            OSError: The file cannot be written.
            UnavailableError: The daemon does not answer; it reads the file when it starts.
        """
        if (
            not self._awaits_daemon
        ):  # otherwise the daemon has not answered yet whether it accepts the present file
            self._before = _content(self._path)
        refusal = ""
        if not broken:
            after = None if selected is None else selected.text.encode()
            if _content(self._path) != after:
                self._awaits_daemon = True
                await asyncio.to_thread(_write_or_remove, self._path, after)
            refusal = await self._reload()
        reason = broken or refusal
        if selected is not None and reason and _content(self._path) != self._before:
            await asyncio.to_thread(_write_or_remove, self._path, self._before)
        self._awaits_daemon = False
        return (
            self._answer_without_object(refusal)
            if selected is None
            else self._answer_to_object(selected, reason)
        ), refusal

    def _answer_to_object(self, selected: ConfigObject, reason: str) -> ConfigAnswer:
        """Return the answer to an object; log it if it is new."""
        name, generation = selected.name, selected.generation
        answer = ConfigAnswer(name, generation, not reason, reason[:_LONGEST_REASON], selected.uid)
        if answer != self._answer and reason:
            self._session.telemetry.event(
                "refused the settings of the cluster", source=selected.name, reason=reason
            )
        elif answer != self._answer:
            self._session.telemetry.event(
                "applied the settings of the cluster", source=selected.name, reason=""
            )
        self._session.telemetry.resolved(CANNOT_REMOVE)
        return answer

    def _answer_without_object(self, refusal: str) -> ConfigAnswer | None:
        """Return the answer if no object applies: the former one if its settings cannot be removed."""
        if not refusal:
            self._session.telemetry.resolved(CANNOT_REMOVE)
            return None
        self._session.telemetry.problem(CANNOT_REMOVE, err=refusal)
        reason = f"the object no longer applies; {CANNOT_REMOVE}: {refusal}"[:_LONGEST_REASON]
        return self._answer and structs.replace(self._answer, reason=reason)

    def _refusal_by_node_file(self, text: str) -> str:
        """Return why the rules of the node's own file refuse settings; empty if they do not."""
        if len(text) > SIZE_LIMIT:
            return f"the settings are larger than {SIZE_LIMIT} bytes"
        origin = self._session.config.origin
        try:
            load(origin.file if origin is not None else None, cluster=text)
        except ConfigError as error:
            return str(error)
        return ""

    async def _reload(self) -> str:
        """Reload the daemon; return why it refuses the settings, or an empty text if it accepts them."""
        answer = as_map(await self._session.daemon.query("/reload", act=True, timeout=RELOAD_S))
        reload = as_map(answer.get("reload"))
        if reload.get("result") == "refused":
            return str(reload.get("reason", ""))
        return next((str(note) for note in as_list(reload.get("notes")) if str(note).startswith(IGNORED)), "")

    async def _report(self, selected: ConfigObject | None, uid: str) -> bool:
        """Report the answer in the Node object with this uid, and in its object; return whether it worked."""
        answer, session = self._answer, self._session
        if (answer, uid) == (self._written, self._written_to):
            return True
        try:
            annotations = {"metadata": {"annotations": node_annotation(answer)}}
            await session.api.merge(f"/api/v1/nodes/{session.node}", annotations)
            if answer is not None and selected is not None and has_room(selected, session.node):
                await self._write_object_status(answer)
        except TopoproxyError as error:
            session.telemetry.problem("cannot report which settings of the cluster are in effect", err=error)
            self._report_at = asyncio.get_running_loop().time() + retry_after(error)
            return False
        session.telemetry.resolved("cannot report which settings of the cluster are in effect")
        self._written, self._written_to = answer, uid
        return True

    async def _write_object_status(self, answer: ConfigAnswer) -> None:
        """Write the answer to the status of the object, unless other nodes have filled its list."""
        node = self._session.node
        path, owner = f"{COLLECTION}/{answer.name}/status", f"topoproxy-{node}"
        try:
            await self._session.api.apply(path, object_status(answer.name, answer, node), owner=owner)
        except ApiServerError as error:
            if error.status != 422 or TOO_MANY not in str(error):
                raise

    async def _remove_from_other_objects(self, selected: ConfigObject | None) -> bool:
        """Remove this node from the status of objects that it does not use; return whether that succeeded."""
        session = self._session
        for config in tuple(self.objects.values.values()):
            if session.node not in config.nodes or (selected is not None and config.name == selected.name):
                continue
            path, owner = f"{COLLECTION}/{config.name}/status", f"topoproxy-{session.node}"
            try:
                await session.api.apply(path, object_status(config.name), owner=owner)
            except TopoproxyError as error:
                session.telemetry.problem(
                    "cannot remove the node from the status of an object", path=path, err=error
                )
                self._report_at = asyncio.get_running_loop().time() + retry_after(error)
                return False
            session.telemetry.resolved("cannot remove the node from the status of an object", path=path)
        return True


def _content(path: Path) -> bytes | None:
    try:
        with open_file(path) as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def _write_or_remove(path: Path, data: bytes | None) -> None:
    """Write a file, or remove it."""
    if data is None:
        path.unlink(missing_ok=True)
    else:
        write_file(path, data)
