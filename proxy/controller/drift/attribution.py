"""Finding out who has probably written a cpuset: what was seen around it, and what the runtime has saved.

``proxy.controller.drift.likely_writer`` holds the rules. The runtime is asked because somebody may have
updated a container at its own socket: then it has saved that set, will write it again at the next update of
anything, and has to be told ours. A few containers are asked about at once, each now and then; whoever is not
asked about for that reason is asked about later, as he may have been updated since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from proxy.controller.context import NodeContext
from proxy.controller.drift.likely_writer import Author, Evidence, likely
from proxy.controller.kubelet_cpu_manager import BesideKubelet
from proxy.controller.worker import Worker
from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from proxy.controller.runtime_ports import Runtime
    from proxy.model.workload import Container

HINT_S = 3.0
"""How long a write may come after what it was caused by."""
AT_ONCE = 16
AGAIN_S = 10.0
"""So long the runtime is not asked again about a container."""
PAUSE_S = 1.0
"""Seconds between two looks at who is to be asked about later."""


class Blame:
    """Weighs who was seen to be at work, and asks the runtime."""

    def __init__(
        self,
        context: NodeContext,
        beside: BesideKubelet,
        hints: Callable[[], Mapping[str, tuple[str, float]]],
    ) -> None:
        """Prepare to ask.

        Args:
            context: Whose containers.
            beside: Knows which sets kubelet's CPU manager would write.
            hints: By container id, what was seen that may write its set, and when; by an empty id, all sets.
        """
        self._context = context
        self._beside = beside
        self._hints = hints
        self._worker = Worker("blame", context.broken)
        context.health.watch(self._worker)
        self._asked: dict[str, float] = {}
        self._owed: set[str] = set()
        self._later = False

    def _hinted(self, container_id: str) -> Author:
        """Tell who was seen last that may have written."""
        never = "", float("-inf")
        hints = self._hints()
        seen = max(hints.get(container_id, never), hints.get("", never), key=lambda hint: hint[1])
        lately = self._context.clock() - seen[1] <= HINT_S
        return next((author for author in Author if lately and author == seen[0]), Author.UNKNOWN)

    async def authors(self, found: Mapping[str, CpuSet | None]) -> dict[str, Author]:
        """Tell who has probably written.

        Args:
            found: By container id, what was there; None where nobody has read it.
        """
        context = self._context
        saved = {i: context.saved.get(i) for i in found}
        hints = {i: self._hinted(i) for i in found}
        saved.update(await self._ask(found))
        there = context.state.containers
        return {
            i: likely(Evidence(cpus, saved[i], self._kubelets(there[i]), hints[i]))
            if cpus is not None and i in there
            else hints[i]
            for i, cpus in found.items()
        }

    def _kubelets(self, container: Container) -> list[CpuSet]:
        """Give the sets that kubelet's CPU manager would write for a container."""
        manager = self._beside.manager
        if manager.policy != "static":
            return []
        its = manager.held.get(container.pod.uid, {}).get(container.name)
        return [cpus for cpus in (its, manager.default) if cpus]

    async def _ask(self, ids: Iterable[str]) -> dict[str, CpuSet]:
        """Ask the runtime what it has saved; have it told ours where that is something else."""
        context, now = self._context, self._context.clock()
        self._asked = {i: at for i, at in self._asked.items() if now - at < AGAIN_S}
        self._owed &= context.state.containers.keys()
        wanted = dict.fromkeys((*ids, *self._owed))
        some = [i for i in wanted if i not in self._asked and not context.flights.of(i)][:AT_ONCE]
        self._asked.update(dict.fromkeys(some, now))
        self._owed = wanted.keys() - some
        if self._owed and not self._later:
            self._later = True
            context.spawn(self._ask_later())
        began = context.news.number
        told = await self._worker.run(_saved, context.runtime, some)
        for container_id, cpus in told.items():
            container = context.state.containers.get(container_id)
            if container is None or context.flights.of(container_id):
                continue
            if context.news.none(container_id, began) and context.saved.get(container_id) != cpus:
                context.saved[container_id] = cpus
                context.unsettled[container_id] = None
                context.to_settle.set()
        return told

    async def _ask_later(self) -> None:
        """Ask about those who were not asked about at once, when it is time."""
        try:
            while self._owed:
                await asyncio.sleep(PAUSE_S)
                await self._ask(())
        finally:
            self._later = False

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _saved(runtime: Runtime, ids: list[str]) -> dict[str, CpuSet]:
    """Ask what the runtime has saved for some containers; runs in a worker. It ends with what is not told."""
    told: dict[str, CpuSet] = {}
    for container_id in ids:
        try:
            cpus = CpuSet.parse(runtime.detail(container_id).cpuset_cpus)
        except (TopoproxyError, ValueError):
            break
        if cpus:
            told[container_id] = cpus
    return told
