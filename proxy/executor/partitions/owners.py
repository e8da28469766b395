"""When partitions of owners are made and ended (``apply.partitions``).

Which containers get one is decided in ``proxy.engine.partition``; what the kernel does with a partition is
described in ``proxy.backends.cgroup.partitions``.

* Made: after the container has started, in the background, one at a time. By then the other containers have
  left the CPUs (the create's barrier), and the cpuset is in effect.
* Ended: before anything that depends on it. Each job that writes cpusets first ends the partitions that the
  newest state no longer wants (``clear``, in the kernel worker's thread): their owner has exited, or is to
  have other CPUs, or the node is being released. Where that fails it is reported. A container that cannot
  grow because of it is reported by its own write, which does not take effect.
* After a crash the first pass uses the records to end the partitions that are no longer wanted.
* Compared: in each pass, and as soon as the kernel reports that a partition has changed. A partition that is
  not what it should be is made a member at once, since the tasks of an invalid one may run on all CPUs. It is
  reported with the kernel's reason, and tried again ever more rarely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec import structs

from proxy.engine.enforcement import applies_to
from proxy.engine.partition import KEY, PartitionRecord, partition_cpus, shared_with
from proxy.executor.context import NodeContext
from proxy.executor.observer import Observer
from proxy.executor.partitions.jobs import PartitionJobs
from proxy.executor.partitions.ports import MEMBER, Partitions, PartitionState
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

    def __init__(self, context: NodeContext, kernel: Partitions, asked: str) -> None:
        """Make no partition yet.

        Args:
            context: Has the owners.
            kernel: Makes partitions.
            asked: ``root`` or ``isolated``; empty to end the partitions of an earlier run.
        """
        self._context = context
        self._kernel = kernel
        self._asked = asked
        self._lock = asyncio.Lock()
        self._retries = PassRetries()
        self._is_due = False
        self._isolated: CpuSet | None = None
        self._watcher = PartitionWatcher(self.look_soon)
        self.jobs = PartitionJobs(context, kernel, asked, self._watcher)
        context.enforcer.do_first(self.jobs.clear)
        if asked and kernel.lack:
            context.telemetry.problem(
                "cannot make partitions of exclusive CPUs (apply.partitions)", err=kernel.lack
            )

    def load(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Take over the records of the ledger; the first pass compares them with the kernel."""
        for key, value in entries.items():
            if not key.startswith(KEY):
                continue
            try:
                record = PartitionRecord.load(value)
                known = self.jobs.known.making(key.removeprefix(KEY), record)
                self._context.learn(recorded=False, partitions=known)
            except ValueError as error:
                self._context.telemetry.problem(
                    "cannot use a record of the ledger", record=key, err=str(error)
                )

    def entered(self, container: Container, phase: Phase) -> None:
        """See ``Observer``."""
        if phase is Phase.RUNNING and container.placement.pool is Pool.OWN:
            self.look_soon()

    def given(self, container: Container) -> None:
        """See ``Observer``."""
        self.look_soon()

    def look_soon(self) -> None:
        """Schedule a pass soon, because something has changed."""
        if not self._is_due:
            self._is_due = True
            self._context.spawn(self._soon())

    async def _soon(self) -> None:
        self._is_due = False
        await self.once()

    async def once(self) -> None:
        """End unwanted partitions, compare the existing ones, and make the missing ones."""
        context, jobs = self._context, self.jobs
        leaving = context.store.mode.is_leaving
        if not (leaving or self.jobs.known.records or applies_to(context.state, None)):
            return
        async with self._lock:
            await context.kernel.run(jobs.clear)
            self._take_over_ended()
            if not jobs.known.records and not jobs.kind:
                return
            self._report_lost(await context.kernel.run(jobs.compare))
            self._take_over_ended()
            there = context.state.containers
            why = {i: why for i, why in jobs.known.why.items() if i in there}
            self._context.learn(partitions=structs.replace(jobs.known, why=why))
            owners = [c for c in there.values() if c.placement.pool is Pool.OWN and c.phase is Phase.RUNNING]
            self._retries.begin_pass(set(there))
            for container in owners:
                if container.id not in jobs.known.records and self._retries.due(container.id):
                    await self._make(container)
            self._isolated = await context.kernel.run(self._kernel.isolated)
            self._watcher.wind()

    async def _make(self, container: Container) -> None:
        context, jobs = self._context, self.jobs
        if not jobs.kind:
            return
        if partition_cpus(context.state, container.id) is None:
            context.learn(
                partitions=jobs.known.explained(container.id, shared_with(context.state, container))
            )
            return
        record = await context.kernel.run(jobs.plan, container.id)
        if record is None:
            return  # the state has changed meanwhile; that change schedules another pass
        context.learn(partitions=jobs.known.making(container.id, record))
        await context.journal.flush()
        made = await context.kernel.run(jobs.carry_out, container.id, record)
        self._take_over_ended()
        if made is None:
            return
        context.learn(partitions=jobs.known.explained(container.id, made.reason))
        if made.valid:
            context.telemetry.count(metrics.PARTITIONS_MADE)
            context.telemetry.event(
                "made a partition", **subject(container), cpus=record.cpus, kind=record.kind
            )
        else:
            self._retries.failed(container.id)
            context.telemetry.problem("cannot make a partition", **subject(container), err=made.reason)

    def _report_lost(self, lost: Mapping[str, PartitionState]) -> None:
        context, jobs = self._context, self.jobs
        for container_id, state in lost.items():
            self._retries.failed(container_id)
            container = context.state.containers.get(container_id)
            if container is None:
                continue
            words = f"{state.kind}{'' if state.valid else ' invalid'}".removeprefix("member invalid")
            said = (
                f"the kernel turned it into {words or MEMBER}{f' ({state.reason})' if state.reason else ''}"
            )
            self._context.learn(partitions=jobs.known.explained(container_id, said))
            context.telemetry.count(metrics.PARTITIONS_LOST)
            context.telemetry.problem("the kernel ended a partition", **subject(container), err=said)
        for container_id in jobs.known.records.keys() - lost.keys():
            self._retries.succeeded(container_id)

    def _take_over_ended(self) -> None:
        """Remove the records of partitions that have ended."""
        jobs, ended = self.jobs, list[str]()
        while jobs.ended:
            ended.append(jobs.ended.pop())
        self._context.learn(partitions=jobs.known.without(ended))

    # -- for people ---------------------------------------------------------------------------------------

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
                    "cpus": str(record.cpus if record else state.wanted(container)),
                    "state": record.kind if record else MEMBER,
                    "reason": "" if record else known.why.get(container.id, ""),
                }
            )
        isolated = "" if self._isolated is None else str(self._isolated)
        return {"asked": self._asked, "lack": self._kernel.lack, "isolated": isolated, "containers": rows}

    def close(self) -> None:
        """Stop watching; partitions stay."""
        self._watcher.close()
