"""Which owners' CPUs are partitions, and when they are made and ended (``apply.partitions``).

Theory. A partition is an addition: the cpusets hold without it, and whatever goes wrong with it costs the
partition only. What the kernel does with one is in ``proxy.backends.cgroup.partitions``; here is who and
when.

* Who: a container that runs, owns CPUs, and has them in force. Not one whose CPUs others may use: BE
  containers those of an LSR pod, several containers those of their pod. The kernel would take them away from
  the others without a word.
* Made: after the container has started, beside everything else, one at a time. By then the others have left
  (the create's barrier), and the set is in force.
* Ended: before anything that depends on it. Each job that writes cpusets first ends the partitions that the
  newest state no longer wants (``clear``, in the kernel worker's thread): their owner has ended, or is to
  have other CPUs, or all is being released. So nobody grows onto CPUs that the kernel withholds; where
  ending fails it is told, and whoever cannot grow is told by his own write that does not take effect.
* Known: a *record* (``x/`` and the container's id) with all that will be written goes to the ledger before it
  is written. After a crash the first pass ends, by the records, what is no longer wanted.
* Compared: in each pass, and as soon as the kernel tells that one has changed. One that is not what it should
  be is made a member at once, since an invalid one may run on everybody's CPUs; it is told with the kernel's
  reason, and tried again ever more rarely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from proxy.controller.context import NodeContext
from proxy.controller.observer import Observer
from proxy.controller.partitions.jobs import Jobs, PartitionRecord, shared_with
from proxy.controller.partitions.ports import MEMBER, Partitions, PartitionState
from proxy.controller.partitions.watcher import Bell
from proxy.model.backoff import PassRetries
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

KEY = "x/"


class OwnersPartitions(Observer):
    """Makes and ends the partitions of a keeper's owners.

    Attributes:
        jobs: What is done in the kernel worker's thread.
        why: Why a container has none, by its id, in words.
    """

    def __init__(self, context: NodeContext, kernel: Partitions, asked: str) -> None:
        self._context = context
        self._kernel = kernel
        self.why: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._retries = PassRetries()
        self._stirred = False
        self._isolated: CpuSet | None = None
        self._bell = Bell(self.stir)
        self.jobs = Jobs(context, kernel, asked, self._bell)
        context.enforcer.do_first(self.jobs.clear)
        if asked and kernel.lack:
            context.telemetry.problem(
                "cannot make partitions of exclusive CPUs (apply.partitions)", err=kernel.lack
            )

    def load(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Take over what the ledger holds; the first pass compares it."""
        for key, value in entries.items():
            if not key.startswith(KEY):
                continue
            try:
                self.jobs.records[key.removeprefix(KEY)] = PartitionRecord.load(value)
            except ValueError as error:
                self._context.telemetry.problem(
                    "cannot use a record of the ledger", record=key, err=str(error)
                )

    # -- deciding -----------------------------------------------------------------------------------------

    def entered(self, container: Container, phase: Phase) -> None:
        """See ``Observer``."""
        if phase is Phase.RUNNING and container.placement.pool is Pool.OWN:
            self.stir()

    def given(self, container: Container) -> None:
        """See ``Observer``."""
        self.stir()

    def stir(self) -> None:
        """Something has changed: look soon."""
        if not self._stirred:
            self._stirred = True
            self._context.spawn(self._soon())

    async def _soon(self) -> None:
        self._stirred = False
        await self.once()

    async def once(self) -> None:
        """End what is not wanted, compare what is there, and make what is missing."""
        context = self._context
        if not context.store.mode.writes:
            return
        async with self._lock:
            self._forget()
            await context.kernel.run(self.jobs.clear)
            self._forget()
            if not self.jobs.records and (not self.jobs.asked or self._kernel.lack):
                return
            self._say_lost(await context.kernel.run(self.jobs.compare))
            self._forget()
            there = context.state.containers
            self.why = {i: why for i, why in self.why.items() if i in there}
            owners = [c for c in there.values() if c.placement.pool is Pool.OWN and c.phase is Phase.RUNNING]
            self._retries.begin_pass(set(there))
            for container in owners:
                if container.id not in self.jobs.records and self._retries.due(container.id):
                    await self._make(container)
            self._isolated = await context.kernel.run(self._kernel.isolated)
            self._bell.wind()

    async def _make(self, container: Container) -> None:
        context, state = self._context, self._context.state
        if self.jobs.wanted(state, container.id) is None:
            if self.jobs.asked and not context.store.mode.is_leaving and not self._kernel.lack:
                self.why[container.id] = shared_with(state, container, state.wanted(container))
            return
        record = await context.kernel.run(self.jobs.plan, container.id)
        if record is None:
            return  # it has changed meanwhile: whoever did that looks again
        self.jobs.records[container.id] = record
        context.journal.put(KEY + container.id, record.dump())
        await context.journal.flush()
        made = await context.kernel.run(self.jobs.carry_out, container.id, record)
        self._forget()
        if made is None:
            return
        if made.valid:
            self.why.pop(container.id, None)
            context.telemetry.count(metrics.PARTITIONS_MADE)
            context.telemetry.event(
                "made a partition", **subject(container), cpus=record.cpus, kind=record.kind
            )
            return
        self._retries.failed(container.id)
        self.why[container.id] = made.reason
        context.telemetry.problem("cannot make a partition", **subject(container), err=made.reason)

    def _say_lost(self, lost: Mapping[str, PartitionState]) -> None:
        context = self._context
        for container_id, state in lost.items():
            self._retries.failed(container_id)
            container = context.state.containers.get(container_id)
            if container is None:
                continue
            words = f"{state.kind}{'' if state.valid else ' invalid'}".removeprefix("member invalid")
            said = f"the kernel made it {words or MEMBER}{f' ({state.reason})' if state.reason else ''}"
            self.why[container_id] = said
            context.telemetry.count(metrics.PARTITIONS_LOST)
            context.telemetry.problem("the kernel ended a partition", **subject(container), err=said)
        for container_id in self.jobs.records.keys() - lost.keys():
            self._retries.succeeded(container_id)

    def _forget(self) -> None:
        """Let go of the records of what has ended."""
        while self.jobs.over:
            container_id = self.jobs.over.pop()
            if self.jobs.records.pop(container_id, None) is not None:
                self._context.journal.put(KEY + container_id, None)

    # -- for people ---------------------------------------------------------------------------------------

    def page(self) -> dict[str, object]:
        """Give what ``topoproxy status`` shows."""
        there = self._context.state.containers
        owners = [c for c in there.values() if c.placement.pool is Pool.OWN and c.phase is not Phase.EXITED]
        rows = []
        for container in sorted(owners, key=lambda c: (c.ref, c.id)):
            record = self.jobs.records.get(container.id)
            rows.append(
                {
                    "id": container.id,
                    "ref": container.ref,
                    "cpus": str(record.cpus) if record else str(self._context.state.wanted(container)),
                    "state": record.kind if record else MEMBER,
                    "reason": "" if record else self.why.get(container.id, ""),
                }
            )
        isolated = "" if self._isolated is None else str(self._isolated)
        return {"asked": self.jobs.asked, "lack": self._kernel.lack, "isolated": isolated, "containers": rows}

    def close(self) -> None:
        """Watch nothing any more; partitions stay."""
        self._bell.close()
