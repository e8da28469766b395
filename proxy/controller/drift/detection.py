"""Drift: somebody else wrote a container's cpuset. It is found, put back, told, and fought within reason.

Theory.

* Found: as soon as the kernel tells of a write (``watch``) or somebody suspects one (``suspect``: a
  reload of systemd); right after each start and update that passed, as part of landing it (updates that left
  nothing else to do wait for each other, ``GATHER_S``); and on timers: in each comparison with the runtime,
  and where writes are not told, twice as often.
* It is drift if the kernel holds something else than what was last written there for the same wanted set.
  What a call in flight brings is not; it is looked at when that has landed.
* Put back at once, unless somebody comes again and again: see ``repairs``, where it is also told.

Suspicions come in bursts (a reload writes every unit). The first is looked into at once, and what is
suspected meanwhile, or within ``GATHER_S`` after, is looked into together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container as Holder
from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.controller.context import NodeContext
from proxy.controller.drift.likely_writer import Author
from proxy.controller.drift.watch import WriteWatch
from proxy.controller.enforce import Enforced
from proxy.controller.kernel_writes import KernelWrites
from proxy.controller.kubelet_cpu_manager import BesideKubelet
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.controller.drift.ports import Writes
    from proxy.controller.drift.repairs import Repairs

UNKNOWN = "unknown"
GATHER_S = 0.02
AT_ONCE = 64
"""Containers that are compared before somebody else may use the kernel's worker."""


class Drift:
    """Looks into what somebody else may have written.

    Attributes:
        watch: Has the kernel tell of writes.
        repairs: What was put back, by whom it was written, and who does so again and again. None until
            something was: most nodes need not have it in memory.
        hints: By container id, who was seen that may write its set, and when; by an empty id, everybody's.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        beside: BesideKubelet,
        reports: Writes | None = None,
    ) -> None:
        """Look into nothing yet.

        Args:
            context: Whose containers.
            writes: Has the kernel follow, from now on by ``enforce``.
            beside: Knows which sets kubelet's CPU manager would write.
            reports: Reports writes of the kernel; None where nothing does.
        """
        self._context = context
        self._writes = writes
        self._beside = beside
        writes.write_with(self.enforce)
        writes.subscribe(self.note)
        self.watch = WriteWatch(context, lambda ids: self.suspect(UNKNOWN, ids), self.fought, reports)
        self.repairs: Repairs | None = None
        self.hints: dict[str, tuple[str, float]] = {}
        self._suspected: set[str] = set()
        self._looks = False
        for author in Author:
            context.telemetry.count(metrics.DRIFT_REPAIRED, 0, author=author)

    def start(self) -> None:
        """Begin to listen, and to compare by the clock."""
        if self._context.store.mode.enforces:
            self.watch.start()
            self._context.tend(self._tick)

    def suspect(self, author: str, ids: Iterable[str] | None = None) -> None:
        """Compare some containers with what they should have, at once; callable from the event loop only.

        Args:
            author: Who may have written: ``kubelet``, ``systemd``, ``runc`` or ``unknown``.
            ids: Whose sets; all containers' if None.
        """
        if not self._context.store.mode.enforces:
            return  # nobody would look, and those who are suspected would gather
        there = self._context.state.containers
        some = list(there) if ids is None else [i for i in ids if i in there]
        self.hint(author, ("",) if ids is None else some)
        self._suspected.update(some)
        if self._suspected and not self._looks:
            self._looks = True
            self._context.spawn(self._look())

    def hint(self, author: str, ids: Iterable[str]) -> None:
        """Somebody was seen who may write the sets of some containers now; an empty id stands for all."""
        if author != UNKNOWN:
            now = self._context.clock()
            self.hints.update((container_id, (author, now)) for container_id in ids)

    async def _look(self) -> None:
        try:
            while self._suspected:
                ids, self._suspected = list(self._suspected), set()
                for at in range(0, len(ids), AT_ONCE):
                    await self._writes.follow(ids[at : at + AT_ONCE])
                await asyncio.sleep(GATHER_S)
        finally:
            self._looks = False

    async def _tick(self) -> None:
        """Compare by the clock where writes are not told of."""
        while True:
            await asyncio.sleep(self._context.options.reconcile_period / 2)
            live = [c.id for c in self._live()]
            if not self.watch.covers(live):
                self.suspect(UNKNOWN, live)

    def _live(self) -> list[Container]:
        is_live = self._context.enforcer.is_live
        return [c for c in self._context.state.containers.values() if is_live(c)]

    # -- in the kernel's worker ---------------------------------------------------------------------------

    def enforce(self, ids: Iterable[str]) -> Enforced:
        """Write the sets of some containers; those that are fought about only when it is due."""
        enforcer, there = self._context.enforcer, self._context.state.containers
        live = [c for i in ids if (c := there.get(i)) is not None and enforcer.is_live(c)]
        self._arm(live)
        found = self._found(live)
        left = self.repairs.not_due(found) if self.repairs is not None else {}
        done = enforcer.enforce([c.id for c in live if c.id not in left])
        if new := self._arm(live):
            late = enforcer.enforce(new)  # what was written between finding a group and watching it
            done.written += late.written
            done.drifted += late.drifted
        done.found, done.left = found, left
        return done

    def enforce_all(self) -> Enforced:
        """Write the sets of all containers; those that are fought about only when it is due."""
        live = self._live()
        self._arm(live, again=True)
        found = self._found(live)
        left = self.repairs.not_due(found) if self.repairs is not None else {}
        done = self._context.enforcer.enforce_all(left)
        self._arm(live)
        done.found, done.left = found, left
        return done

    def _arm(self, live: list[Container], *, again: bool = False) -> list[str]:
        """Watch the groups that are known; gives whose are watched from now on."""
        enforcer, fought = self._context.enforcer, self.fought()
        if self._context.store.mode.is_leaving or self.watch.writes is None:
            return []
        groups = [(c.id, path) for c in live if c.id not in fought and (path := enforcer.known_path(c))]
        return self.watch.arm(groups, again=again)

    def _found(self, live: list[Container]) -> dict[str, CpuSet]:
        """Read who has something else than what he was given, and is still to have."""
        enforcer, state = self._context.enforcer, self._context.state
        found: dict[str, CpuSet] = {}
        for container in live:
            want, path = state.wanted(container), enforcer.known_path(container)
            if path is None or self._context.store.mode.is_leaving or enforcer.given(container.id) != want:
                continue
            try:
                cpus = enforcer.cgroups.cpus(path)
            except CgroupError:
                continue  # who writes tells what is wrong
            if cpus != want:
                found[container.id] = cpus
        return found

    # -- on the loop --------------------------------------------------------------------------------------

    async def compare_all(self) -> Enforced:
        """Do a comparison's part that is about the kernel."""
        live = {c.id for c in self._live()}
        self.watch.keep(live)
        self.hints = {i: hint for i, hint in self.hints.items() if i in live or not i}
        if self.repairs is not None:
            self.repairs.keep(live)
        return await self._context.kernel.run(self.enforce_all)

    def note(self, done: Enforced) -> None:
        """Take note of what an enforcement put back, and of what it left."""
        if not done.drifted and not done.left:
            return
        if self.repairs is None:
            from proxy.controller.drift.attribution import Blame
            from proxy.controller.drift.repairs import Repairs

            blame = Blame(self._context, self._beside, lambda: self.hints)
            self.repairs = Repairs(self._context, self._writes, self.watch, blame)
        self.repairs.note(done)

    def fought(self) -> Holder[str]:
        """Give ids of containers that a war is about; callable from any thread."""
        return self.repairs.wars if self.repairs is not None else ()

    def contested(self, mine: CpuSet) -> dict[str, CpuSet]:
        """Give whom somebody, in a war, puts onto CPUs that are to be one's own, and all CPUs of each."""
        return self.repairs.contested(mine) if self.repairs is not None else {}

    def page(self) -> dict[str, object]:
        """Give what ``topoproxy status`` shows."""
        counted = self._context.telemetry.registry.values(metrics.DRIFT_REPAIRED)
        by = {key[0]: n for key, n in counted.items() if n}
        wars = self.repairs.page() if self.repairs is not None else []
        return {**self.watch.page(), "by": by, "writeConflicts": wars, "wars": wars}

    async def close(self) -> None:
        """Listen no more; the kernel's worker has ended."""
        self.watch.close()
        if self.repairs is not None:
            await asyncio.to_thread(self.repairs.close)
