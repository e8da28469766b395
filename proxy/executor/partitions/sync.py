"""When partitions of owners are made and ended (``apply.partitions``).

``proxy.engine.partition`` decides which containers get one; ``proxy.backends.cgroup.partitions`` describes
what the kernel does with a partition.

* Made: after the container has started, in the background, one at a time. By then the other containers have
  left the CPUs (the create's barrier), and the cpuset is in effect.
* Ended: before anything that depends on it. Each job that writes cpusets first ends the partitions that the
  newest state no longer wants (``clear``, in the kernel worker's thread): their owner has exited or gets
  other CPUs, or the node is being released. A failure is reported. If a container cannot grow because of the
  failure, the write of that container's cpuset has no effect, and is reported too.
* After a crash, the first check uses the records to end the partitions that are no longer wanted.
* Compared: at reconciles, and as soon as the kernel reports that a partition has changed. A partition that is
  not what it should be is made a member at once, since the tasks of an invalid one may run on all CPUs. It is
  reported with the kernel's reason, and tried again ever more rarely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from proxy.engine import partition as engine
from proxy.engine.enforcement import applies_to
from proxy.engine.partition import MEMBER, PartitionState
from proxy.executor.context import NodeContext
from proxy.executor.observer import Observer
from proxy.executor.partitions.jobs import PartitionJobs
from proxy.executor.partitions.ports import Partitions
from proxy.executor.partitions.watcher import PartitionWatcher
from proxy.model.backoff import PassRetries
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool
from proxy.telemetry import metrics
from proxy.telemetry.port import subject


class PartitionSync(Observer):
    """Makes and ends the partitions of owners.

    Attributes:
        jobs: The jobs of the kernel worker's thread, and the known facts.
    """

    def __init__(self, context: NodeContext, kernel: Partitions, wanted: str) -> None:
        """Make no partition yet.

        Args:
            context: Has the owners.
            kernel: Makes partitions.
            wanted: ``root`` or ``isolated``; empty to end the partitions of an earlier run.
        """
        self._context = context
        self._kernel = kernel
        self._wanted = wanted
        self._lock = asyncio.Lock()
        self._retries = PassRetries()
        self._is_due = False
        self._isolated: CpuSet | None = None
        self._watcher = PartitionWatcher(self.check_soon)
        self.jobs = PartitionJobs(context, kernel, wanted, self._watcher)
        context.cpuset_writer.do_first(self.jobs.clear)
        if wanted and kernel.unsupported_reason:
            context.telemetry.problem(
                "cannot make partitions of exclusive CPUs (apply.partitions)", err=kernel.unsupported_reason
            )

    def load(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Load the records of the ledger; the first check compares them with the kernel."""
        records, invalid = engine.PartitionFacts.load(entries)
        self._context.store.handle(engine.PartitionsRead(records))
        self.jobs.loaded(records)
        for key, error in invalid.items():
            self._context.telemetry.problem("cannot use a record of the ledger", record=key, err=error)

    def entered(self, container: Container, phase: Phase) -> None:
        """See ``Observer``."""
        if phase is Phase.RUNNING and container.placement.pool is Pool.OWN:
            self.check_soon()

    def cpus_assigned(self, container: Container) -> None:
        """See ``Observer``."""
        self.check_soon()

    def check_soon(self) -> None:
        """Schedule a check soon, because something has changed."""
        if not self._is_due:
            self._is_due = True
            self._context.spawn(self._soon())

    async def _soon(self) -> None:
        self._is_due = False
        await self.once()

    async def once(self) -> None:
        """End unwanted partitions, compare the existing ones, and make the missing ones."""
        context, jobs = self._context, self.jobs
        in_release = context.store.mode.in_release
        if not (in_release or self.jobs.known.records or applies_to(context.state, None)):
            return
        async with self._lock:
            await context.kernel.run(jobs.clear)
            self._take_over_ended()
            if not jobs.known.records and not jobs.kind:
                return
            self._take_over_compared(await context.kernel.run(jobs.compare))
            self._take_over_ended()
            self._retries.start_pass(set(context.state.containers))
            if jobs.kind:
                await self._make_missing()
            self._isolated = await context.kernel.run(self._kernel.isolated)
            self._watcher.watch_again()

    async def _make_missing(self) -> None:
        context = self._context
        later = frozenset(i for i in context.state.containers if not self._retries.due(i))
        for effect in context.store.handle(engine.PartitionsDue(later)):
            if isinstance(effect, engine.MakePartitions):
                for container_id in effect.ids:
                    await self._make(container_id)

    async def _make(self, container_id: str) -> None:
        context, jobs = self._context, self.jobs
        record = await context.kernel.run(jobs.plan, container_id)
        container = context.state.containers.get(container_id)
        if record is None or container is None:
            return  # the state has changed since; that change schedules another check
        context.store.handle(engine.PartitionPlanned(container_id, record))
        await context.ledger_writer.flush()
        partition = await context.kernel.run(jobs.carry_out, container_id, record)
        self._take_over_ended()
        if partition is None:
            return
        if partition.valid:
            context.store.handle(engine.PartitionMade(container_id))
            context.telemetry.count(metrics.PARTITIONS_MADE)
            context.telemetry.event(
                "made a partition", **subject(container), cpus=record.cpus, kind=record.kind
            )
        else:
            context.store.handle(engine.PartitionRefused(container_id, partition.reason))
            self._retries.failed(container_id)
            context.telemetry.problem("cannot make a partition", **subject(container), err=partition.reason)

    def _take_over_compared(self, lost: Mapping[str, PartitionState]) -> None:
        """Report the partitions that the kernel has ended."""
        context = self._context
        for container_id in self.jobs.known.records:
            if container_id in lost:
                self._retries.failed(container_id)
            elif not self.jobs.is_unmade(container_id):
                self._retries.succeeded(container_id)
        for effect in context.store.handle(engine.PartitionsCompared(lost)):
            if isinstance(effect, engine.ReportLostPartitions):
                for container, change in effect.lost:
                    context.telemetry.count(metrics.PARTITIONS_LOST)
                    context.telemetry.problem(
                        "the kernel ended a partition", **subject(container), err=change
                    )

    def _take_over_ended(self) -> None:
        """Remove the records of partitions that have ended."""
        jobs, ended = self.jobs, list[str]()
        while jobs.ended:
            ended.append(jobs.ended.pop())
        if ended:
            self._context.store.handle(engine.PartitionsEnded(tuple(ended)))

    # -- status page --------------------------------------------------------------------------------------

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows."""
        state, known = self._context.state, self.jobs.known
        owners = [c for c in state.containers.values() if c.placement.pool is Pool.OWN]
        rows = []
        for container in sorted(owners, key=lambda c: (c.ref, c.id)):
            if container.phase is Phase.EXITED:
                continue
            record = known.records.get(container.id)
            rows.append(
                {
                    "id": container.id,
                    "ref": container.ref,
                    "cpus": str(record.cpus if record else state.desired_cpus(container)),
                    "state": record.kind if record and not self.jobs.is_invalid(container.id) else MEMBER,
                    "reason": known.obstacles.get(container.id, ""),
                }
            )
        isolated = "" if self._isolated is None else str(self._isolated)
        return {
            "asked": self._wanted,
            "lack": self._kernel.unsupported_reason,
            "isolated": isolated,
            "containers": rows,
        }

    def close(self) -> None:
        """Stop watching; partitions stay."""
        self._watcher.close()
