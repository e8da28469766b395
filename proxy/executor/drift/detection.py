"""Drift: another program wrote a container's cpuset. It is detected, repaired and reported.

Theory of operation.

* Detected: as soon as the kernel reports a write (``watch``) or another part suspects one (``compare_soon``;
  for example, at a reload of systemd); right after each start and update that was forwarded, when it
  completes (comparisons after updates that carried the wanted cpuset are gathered, ``GATHER_S``); and on
  timers: at each reconcile, and twice as often if writes are not reported.
* It is drift if the kernel has another cpuset than the one last written for the same wanted set. A cpuset
  that a call in flight brings is not drift; it is compared when the call has completed.
* Repaired at once, unless the same program writes again and again (``engine.write_conflicts``).

Suspicions come in bursts (a reload writes every unit). The first is compared at once. Containers that are
suspected during this comparison, or within ``GATHER_S`` after it, are compared together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container as Holder
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from proxy.engine import write_conflicts as conflicts
from proxy.engine.enforcement import applies_to
from proxy.engine.likely_writer import ANY_CONTAINER, WriterHint, WriterKind
from proxy.engine.node_effects import CompareCpusets
from proxy.engine.reservation_events import ContestedCpus
from proxy.engine.write_conflicts import DriftEvent, WriteConflicts
from proxy.executor.context import NodeContext
from proxy.executor.cpuset_writer import WriteResult
from proxy.executor.drift import reporting
from proxy.executor.drift.attribution import Attribution
from proxy.executor.drift.watch import WriteWatch
from proxy.executor.fact_lookup import KubeletCpus
from proxy.executor.kernel_writes import KernelWrites
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.kernel_ports import WriteEvents

UNKNOWN = WriterKind.UNKNOWN
GATHER_S = 0.02
AT_ONCE = 64
"""How many containers are compared before another job may use the kernel worker."""


class Drift:
    """Compares and repairs cpusets that other programs may have written.

    Attributes:
        watch: Watches for writes that the kernel reports.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        kubelet_cpus: KubeletCpus,
        reports: WriteEvents | None = None,
    ) -> None:
        """Compare nothing yet.

        Args:
            context: Has the containers.
            writes: Makes the kernel follow the state; from now on it writes with ``write``.
            kubelet_cpus: Knows which sets kubelet's CPU manager would write.
            reports: The kernel's reports of cpuset writes; None if there are none.
        """
        self._context = context
        self._writes = writes
        self._attribution: Attribution | None = None
        self._kubelet_cpus = kubelet_cpus
        writes.write_with(self.write)
        writes.subscribe(self.note)
        self.watch = WriteWatch(
            context, lambda ids: self.compare_soon(UNKNOWN, ids), self.conflicting, reports
        )
        self._suspected: set[str] = set()
        context.store.perform_by(CompareCpusets, lambda effect: self.compare_soon(UNKNOWN, effect.ids))
        self._is_comparing = False
        for writer in WriterKind:
            context.telemetry.count(metrics.DRIFT_REPAIRED, 0, author=writer)

    @property
    def known(self) -> WriteConflicts:
        """The known facts about writes of other programs."""
        return self._context.state.facts.drift

    def start(self) -> None:
        """Start listening, and comparing on a timer."""
        self.watch.start()
        self._context.run_always(self._tick)

    def compare_soon(self, writer: str, ids: Iterable[str] | None = None) -> None:
        """Compare some containers with what they should have, at once; callable from the event loop only.

        Args:
            writer: The program that may have written: ``kubelet``, ``systemd``, ``runc`` or ``unknown``.
            ids: The containers; all if None.
        """
        if not applies_to(self._context.state, None):
            return  # nothing would compare them, and they would pile up
        containers = self._context.state.containers
        suspects = list(containers) if ids is None else [i for i in ids if i in containers]
        self.hint(writer, (ANY_CONTAINER,) if ids is None else suspects)
        self._suspected.update(suspects)
        if self._suspected and not self._is_comparing:
            self._is_comparing = True
            self._context.spawn(self._compare_suspected())

    def hint(self, writer: str, ids: Iterable[str]) -> None:
        """Record a program that may write the cpusets of some containers now.

        ``likely_writer.ANY_CONTAINER`` stands for all containers.
        """
        if writer != UNKNOWN:
            hint = WriterHint(WriterKind(writer), self._context.clock())
            self._context.store.handle(conflicts.WriterDetected(hint, tuple(ids)))

    async def _compare_suspected(self) -> None:
        try:
            while self._suspected:
                ids, self._suspected = list(self._suspected), set()
                for at in range(0, len(ids), AT_ONCE):
                    await self._writes.write_now(ids[at : at + AT_ONCE])
                await asyncio.sleep(GATHER_S)
        finally:
            self._is_comparing = False

    async def _tick(self) -> None:
        """Compare on a timer if writes are not reported."""
        while True:
            await self._context.pause(lambda options: options.reconcile_period / 2)
            live = [c.id for c in self._live()]
            if not self.watch.covers(live):
                self.compare_soon(UNKNOWN, live)

    def _live(self) -> list[Container]:
        is_live = self._context.cpuset_writer.is_live
        return [c for c in self._context.state.containers.values() if is_live(c)]

    # -- in the kernel's worker ---------------------------------------------------------------------------

    def write(self, ids: Iterable[str]) -> WriteResult:
        """Write the cpusets of some containers; contested ones only when they are due."""
        writer = self._context.cpuset_writer
        live = list(filter(writer.is_live, self._context.state.existing(ids)))
        self._arm(live)
        wrong = self._wrong_cpusets(live)
        contested = self._not_due(wrong)
        done = writer.write([c.id for c in live if c.id not in contested])
        self._arm_found(live, done)
        done.kernel_cpus, done.unrepaired = wrong, contested
        return done

    def write_all(self) -> WriteResult:
        """Write the cpusets of all containers; contested ones only when they are due."""
        live = self._live()
        self._arm(live, again=True)
        wrong = self._wrong_cpusets(live)
        contested = self._not_due(wrong)
        done = self._context.cpuset_writer.write_all(contested)
        self._arm_found(live, done)
        done.kernel_cpus, done.unrepaired = wrong, contested
        return done

    def _arm_found(self, live: list[Container], done: WriteResult) -> None:
        """Watch the cgroups that a pass of writes has found, and repair what was written to them earlier."""
        if new := self._arm(live):
            late = self._context.cpuset_writer.write(new)
            done.written += late.written
            done.drifted += late.drifted

    def _not_due(self, wrong: Mapping[str, CpuSet]) -> dict[str, CpuSet]:
        return conflicts.not_due(self.known, self._context.state, wrong, self._context.clock())

    def _arm(self, live: list[Container], *, again: bool = False) -> list[str]:
        """Watch the known cgroups; returns the containers that are watched from now on."""
        writer, conflicting = self._context.cpuset_writer, self.conflicting()
        if self._context.store.mode.in_release or self.watch.writes is None:
            return []
        groups = [(c.id, path) for c in live if c.id not in conflicting and (path := writer.known_path(c))]
        return self.watch.arm(groups, again=again)

    def _wrong_cpusets(self, live: list[Container]) -> dict[str, CpuSet]:
        """Return the cpusets in the kernel that differ from what was written and is still wanted, by id."""
        writer, state = self._context.cpuset_writer, self._context.state
        wrong: dict[str, CpuSet] = {}
        for container in live:
            want, path = state.desired_cpus(container), writer.known_path(container)
            if (
                path is None
                or self._context.store.mode.in_release
                or writer.last_written(container.id) != want
            ):
                continue
            try:
                cpus = writer.cgroups.cpus(path)
            except CgroupError:
                continue  # the write reports what is wrong
            if cpus != want:
                wrong[container.id] = cpus
        return wrong

    # -- on the loop --------------------------------------------------------------------------------------

    async def compare_all(self) -> WriteResult:
        """Compare all containers with the kernel."""
        live = {c.id for c in self._live()}
        self.watch.keep(live)
        self._step(conflicts.CpusetsCompared(self._context.clock(), live))
        return await self._writes.run_comparison(self.write_all)

    def note(self, done: WriteResult) -> None:
        """Record what a pass of writes repaired, and what it left."""
        if done.drifted or done.unrepaired:
            self._context.telemetry.count(metrics.CPUSETS_REPAIRED, len(done.drifted))
            repaired = {i: done.kernel_cpus.get(i) for i in done.drifted}
            self._step(conflicts.CpusetsRepaired(self._context.clock(), repaired, done.unrepaired))

    def _step(self, event: DriftEvent) -> None:
        context = self._context
        for effect in context.store.handle(event):
            match effect:
                case conflicts.FindWriters(kernel_cpus):
                    context.spawn(self._find_writers(kernel_cpus))
                case conflicts.CheckCpusets(ids, seconds):
                    context.spawn(self._check(ids, seconds))
                case conflicts.ReportDrift():
                    reporting.report_repairs(context, effect)
                    reporting.report_conflicts(context, effect.began)
                case conflicts.EndConflict(container_id, conflict):
                    self.watch.drop(container_id)
                    reporting.report_end(context, container_id, conflict)

    async def _find_writers(self, kernel_cpus: Mapping[str, CpuSet | None]) -> None:
        if self._attribution is None:
            self._attribution = Attribution(self._context, self._kubelet_cpus)
        writers: Mapping[str, WriterKind] = {}
        try:
            writers = await self._attribution.writers(kernel_cpus, self.known.hints)
        except Exception as error:  # noqa: BLE001  the next repairs must be attributed
            self._context.report_internal_error(error)
        self._step(conflicts.WritersFound(writers))

    async def _check(self, ids: Iterable[str], seconds: float) -> None:
        try:
            await self._writes.write_now(list(ids))
        except Exception as error:  # noqa: BLE001  the next check must come
            self._context.report_internal_error(error)
        await asyncio.sleep(seconds)
        self._step(conflicts.ConflictsDue(self._context.clock()))

    def conflicting(self) -> Holder[str]:
        """Return the ids of containers with a write conflict; callable from any thread."""
        return self.known.conflicts

    def contested(self, cpus: CpuSet) -> tuple[ContestedCpus, ...]:
        """Return the containers that another program puts onto some of these CPUs."""
        return conflicts.contested(self.known, self._context.state, cpus)

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows."""
        counted = self._context.telemetry.registry.values(metrics.DRIFT_REPAIRED)
        by = {key[0]: n for key, n in counted.items() if n}
        page = reporting.conflicts_page(self._context, self.known)
        return {**self.watch.page(), "by": by, "writeConflicts": page, "wars": page}

    async def close(self) -> None:
        """Stop listening; the kernel worker has ended."""
        self.watch.close()
        if self._attribution is not None:
            await asyncio.to_thread(self._attribution.close)
