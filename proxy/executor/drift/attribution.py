"""Finds the likely writer of a cpuset, from the evidence around the write and from what the runtime saved.

The rules are in ``proxy.engine.likely_writer``. The runtime is queried because a client may have updated a
container at the runtime's own socket: then the runtime has saved that cpuset, will write it again at the next
update of any resource, and must be sent ours. The runtime is queried about a few containers at once, and
about each container at most once in ``AGAIN_S``. It is queried later about the others, and about those for
which it did not answer, as they may have been updated since.

CRI-O (1.34, server/container_update_resources.go, UpdateContainerResources) stores the resources of an update
after runc has written them, so its answer may predate the update. If the answer explains nothing, the runtime
is queried once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from proxy.engine.call_events import SavedCpusLearned
from proxy.engine.likely_writer import (
    Evidence,
    WriterHint,
    WriterKind,
    hinted_writer,
    kubelet_sets,
    likely_writer,
)
from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.executor.fact_lookup import KubeletCpus
from proxy.executor.runtime_ports import Runtime
from proxy.model.errors import TopoproxyError, UnavailableError
from proxy.model.idset import CpuSet

QUERIES_AT_ONCE = 16
AGAIN_S = 10.0
"""Seconds in which the runtime is queried at most once about a container."""
PAUSE_S = 1.0
"""Seconds between two rounds of later queries."""
STORED_S = 0.5
"""Seconds in which a runtime stores what it has just written."""


class Attribution:
    """Weighs the evidence around a write, and queries the runtime."""

    def __init__(self, context: NodeContext, kubelet_cpus: KubeletCpus) -> None:
        """Query nothing yet.

        Args:
            context: Has the containers.
            kubelet_cpus: Knows which sets kubelet's CPU manager would write.
        """
        self._context = context
        self._kubelet_cpus = kubelet_cpus
        self._worker = Worker("attribution", context.report_internal_error)
        context.health.watch(self._worker)
        self._queried: dict[str, float] = {}
        self._due: set[str] = set()
        self._is_query_scheduled = False

    async def writers(
        self, found: Mapping[str, CpuSet | None], hints: Mapping[str, WriterHint]
    ) -> dict[str, WriterKind]:
        """Find the likely writers.

        Args:
            found: By container id, the cpuset in the kernel; None if it was not read.
            hints: The programs that were seen lately.
        """
        seen = {i: hinted_writer(hints, i, self._context.clock()) for i in found}
        saved = {i: self._context.state.runtime.saved.get(i) for i in found}
        answered = await self._query(found)
        writers = self._weigh(found, saved | answered, seen)
        unexplained = [i for i, writer in writers.items() if writer is WriterKind.UNKNOWN and i in answered]
        if not unexplained:
            return writers
        await asyncio.sleep(STORED_S)
        for container_id in unexplained:
            self._queried.pop(container_id, None)
        return self._weigh(found, saved | answered | await self._query(unexplained), seen)

    def _weigh(
        self,
        found: Mapping[str, CpuSet | None],
        saved: Mapping[str, CpuSet | None],
        seen: Mapping[str, WriterKind],
    ) -> dict[str, WriterKind]:
        """Return the likely writer of each container's cpuset."""
        containers, manager = self._context.state.containers, self._kubelet_cpus.manager
        return {
            i: likely_writer(Evidence(cpus, saved.get(i), kubelet_sets(manager, containers[i]), seen[i]))
            if cpus is not None and i in containers
            else seen[i]
            for i, cpus in found.items()
        }

    async def _query(self, ids: Iterable[str]) -> dict[str, CpuSet]:
        """Query the runtime for its saved cpusets; have ours sent if the saved ones differ."""
        context, now = self._context, self._context.clock()
        self._queried = {i: at for i, at in self._queried.items() if now - at < AGAIN_S}
        self._due &= context.state.containers.keys()
        wanted = dict.fromkeys((*ids, *self._due))
        chosen = [i for i in wanted if i not in self._queried and not context.state.inflight.of(i)][
            :QUERIES_AT_ONCE
        ]
        self._queried.update(dict.fromkeys(chosen, now))
        self._due = wanted.keys() - chosen
        began = context.state.runtime.changes.number
        saved, unanswered = await self._worker.run(_saved, context.runtime, chosen)
        for container_id in unanswered:
            self._queried.pop(container_id, None)
        self._due.update(unanswered)
        if self._due and not self._is_query_scheduled:
            self._is_query_scheduled = True
            context.spawn(self._query_later())
        for container_id, cpus in saved.items():
            container = context.state.containers.get(container_id)
            if container is None or context.state.inflight.of(container_id):
                continue
            is_known = context.state.runtime.saved.get(container_id) == cpus
            if context.state.runtime.changes.is_unchanged(container_id, began) and not is_known:
                context.store.handle(SavedCpusLearned(container_id, cpus))
                context.sync_later(container_id)
        return saved

    async def _query_later(self) -> None:
        """Query the runtime later about the containers that were left out."""
        try:
            while self._due:
                await asyncio.sleep(PAUSE_S)
                await self._query(())
        finally:
            self._is_query_scheduled = False

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _saved(runtime: Runtime, ids: list[str]) -> tuple[dict[str, CpuSet], list[str]]:
    """Read the saved cpusets of some containers from the runtime; runs in a worker.

    Returns:
        The cpusets by id, without containers that are gone; and the ids from the first one on for which the
        runtime did not answer.
    """
    saved: dict[str, CpuSet] = {}
    for number, container_id in enumerate(ids):
        try:
            cpus = CpuSet.parse(runtime.detail(container_id).cpuset_cpus)
        except UnavailableError:
            return saved, ids[number:]
        except (TopoproxyError, ValueError):
            continue
        if cpus:
            saved[container_id] = cpus
    return saved, []
