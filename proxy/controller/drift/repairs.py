"""What is done about drift once it is found: told, counted by who has probably written, and fought.

A set that is wrong is put back at once. Where somebody writes it again and again (``wars``) it is told as a
problem, and put back ever more seldom; but as long as CPUs are at stake that somebody owns, every second.
While a war is on nobody watches for its writes: it is looked at by the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine

from proxy.controller.context import NodeContext
from proxy.controller.drift.attribution import Blame
from proxy.controller.drift.likely_writer import NEXT, Author
from proxy.controller.drift.watch import WriteWatch
from proxy.controller.drift.write_conflicts import QUIET_S, War, Wars
from proxy.controller.enforce import Enforced
from proxy.controller.kernel_writes import KernelWrites
from proxy.model.idset import CpuSet, union
from proxy.model.workload import Container, Pool
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

SOONEST_S, LATEST_S = 0.25, 1.0
"""Seconds between two looks at who is fought about."""
WRITE_CONFLICT = "another program keeps writing the cpuset of a container"
MANY = 5
"""More of a kind are not named one by one."""


class Repairs:
    """Knows what was put back.

    Attributes:
        wars: Who is fought about.
        blame: Finds out who wrote.
    """

    def __init__(self, context: NodeContext, writes: KernelWrites, watch: WriteWatch, blame: Blame) -> None:
        self._context = context
        self._writes = writes
        self._watch = watch
        self.wars = Wars()
        self.blame = blame
        self._fresh: dict[str, tuple[int, CpuSet | None]] = {}
        self._began: dict[str, War] = {}
        self._by: dict[str, Author] = {}
        self._doing: set[str] = set()

    def not_due(self, found: dict[str, CpuSet]) -> dict[str, CpuSet]:
        """Give those of whom it is not time to put the set back; callable from any thread."""
        now = self._context.clock()
        return {
            i: cpus
            for i, cpus in found.items()
            if i in self.wars and self.wars.waits(i, now, urgent=self._is_urgent(i, cpus))
        }

    def _is_urgent(self, container_id: str, found: CpuSet) -> bool:
        """Tell whether somebody's own CPUs are at stake."""
        state = self._context.state
        container = state.containers.get(container_id)
        if container is None:
            return False
        if container.placement.pool is Pool.OWN:
            return True
        owned = union(owner.cpus.bits for owner in state.owners.values())
        return bool((found - state.wanted(container)).bits & owned)

    def note(self, done: Enforced) -> None:
        """Take note of what an enforcement put back, and of what it left."""
        context, now = self._context, self._context.clock()
        for container_id, cpus in done.left.items():
            self.wars.left(container_id, cpus, now)
        for container_id in done.drifted:
            context.telemetry.count(metrics.CPUSETS_REPAIRED)
            found = done.found.get(container_id)
            self._fresh[container_id] = self._fresh.get(container_id, (0, None))[0] + 1, found
            if war := self.wars.repaired(container_id, found or CpuSet(), now):
                context.telemetry.count(metrics.WRITE_CONFLICTS)
                self._began[container_id] = war
        if self._fresh:
            self._once("judge", self._judge)
        if self.wars:
            self._once("fight", self._fight)

    def _once(self, what: str, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Have something done beside, unless it is being done."""
        if what in self._doing:
            return
        self._doing.add(what)

        async def done() -> None:
            try:
                await work()
            finally:
                self._doing.discard(what)

        self._context.spawn(done())

    # -- telling ------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        """Find out who wrote, and tell. A war is told once, when it begins."""
        context = self._context
        while self._fresh:
            fresh, self._fresh = self._fresh, {}
            began, self._began = self._began, {}
            authors = await self.blame.authors({i: found for i, (_, found) in fresh.items()})
            repaired: list[tuple[Container, CpuSet | None, Author]] = []
            for container_id, author in authors.items():
                times, found = fresh[container_id]
                context.telemetry.count(metrics.DRIFT_REPAIRED, times, author=author)
                container = context.state.containers.get(container_id)
                if container_id in self.wars:
                    self._by[container_id] = author
                elif container is not None:
                    repaired.append((container, found, author))
            for container, found, author in repaired[:MANY]:
                self._log(container, found, author)
            if len(repaired) > MANY:
                more = len(repaired) - MANY
                context.telemetry.warning("drift: another program wrote more cpusets: put back", count=more)
            self._tell_wars(began, authors)

    def _log(self, container: Container, found: CpuSet | None, author: Author) -> None:
        self._context.telemetry.warning(
            "drift: another program wrote a cpuset: put back",
            **subject(container),
            cpus=self._context.state.wanted(container),
            found=found if found is None else str(found) or "none",
            probably=None if author is Author.UNKNOWN else author,
        )

    def _tell_wars(self, began: dict[str, War], authors: dict[str, Author]) -> None:
        context, there = self._context, self._context.state.containers
        some = [(there[i], war, authors.get(i, Author.UNKNOWN)) for i, war in began.items() if i in there]
        for container, war, author in some[:MANY]:
            urgent = self._is_urgent(container.id, war.found)
            pace = "each second, as exclusive CPUs are at stake" if urgent else "less and less often"
            context.telemetry.problem(
                WRITE_CONFLICT,
                **subject(container),
                cpus=context.state.wanted(container),
                found=str(war.found) or None,
                probably=None if author is Author.UNKNOWN else author,
                times=war.times,
                seconds=round(max(war.repaired - war.began, 0.1), 1),
                putBack=pace,
                advice=NEXT[author],
            )
        if len(some) > MANY:
            context.telemetry.problem("another program keeps writing the cpusets of many containers")

    # -- fighting -----------------------------------------------------------------------------------------

    async def _fight(self) -> None:
        """Look at who is fought about, by the clock, until it is quiet."""
        context = self._context
        while self.wars:
            now = context.clock()
            over = self.wars.ended(now)
            for container_id, war in over.items():
                self._watch.drop(container_id)
                self._tell_end(container_id, war)
            fought = self.wars.all()
            await self._writes.follow([*fought, *over])  # who is over is watched again
            soon = min((war.due(urgent=True) - now for war in fought.values()), default=0.0)
            await asyncio.sleep(min(LATEST_S, max(SOONEST_S, soon)))

    def _tell_end(self, container_id: str, war: War) -> None:
        container = self._context.state.containers.get(container_id)
        if container is not None:
            self._context.telemetry.resolved(WRITE_CONFLICT, pod=container.pod.ref, container=container.name)
            self._context.telemetry.event(
                "drift: no other program writes the cpuset any more",
                **subject(container),
                times=war.times,
                seconds=round(war.repaired - war.began),
                quiet=QUIET_S,
            )

    def contested(self, mine: CpuSet) -> dict[str, CpuSet]:
        """Give whom somebody, in a war, puts onto CPUs that are to be one's own, and all CPUs of each."""
        state = self._context.state
        return {
            i: war.found
            for i, war in self.wars.all().items()
            if (c := state.containers.get(i)) is not None and (war.found - state.wanted(c)) & mine
        }

    # -- the rest -----------------------------------------------------------------------------------------

    def keep(self, there: Collection[str]) -> None:
        """Forget who is not there."""
        self.wars.keep(there, self._context.clock())
        self._by = {i: author for i, author in self._by.items() if i in self.wars}

    def page(self) -> list[dict[str, object]]:
        """Give the wars as ``topoproxy status`` shows them."""
        context, now = self._context, self._context.clock()
        there = context.state.containers
        return [
            {
                "container": there[i].ref,
                "id": i,
                "by": str(self._by.get(i, Author.UNKNOWN)),
                "cpus": str(context.state.wanted(there[i])),
                "found": str(war.found),
                "times": war.times,
                "seconds": round(now - war.began, 1),
                "next_s": round(max(0.0, war.due(urgent=self._is_urgent(i, war.found)) - now), 1),
            }
            for i, war in sorted(self.wars.all().items())
            if i in there
        ]

    def close(self) -> None:
        """End the worker."""
        self.blame.close()
