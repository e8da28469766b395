"""BE suppression: reads usage counters each period, and performs what ``proxy.engine.suppression`` decides.

The engine computes what BE pods get; the executor reads, writes and reports.

* A narrowed BE pool is a change of the state. The containers in it follow by kernel writes only: a cpuset
  that changes every second is not sent to the runtime (``proxy.executor.runtime_sync``). New containers get
  the narrowed cpuset. CPUs of LSE pods are not in the BE pool, so they cannot be chosen. Groups above
  containers are narrowed only if the cpusets in requests are erased (``proxy.executor.best_effort.groups``).
* A quota is recorded in the ledger before it is written, so that it can be removed after a crash. The quota
  in effect is read before each decision: kubelet sets its own values now and then.

Everything is restored when the daemon stops, when the other kind of suppression (or none) is configured, and
when usage cannot be read for a while. After a crash, the next start restores everything: cpusets because a
fresh state narrows none, quotas because the ledger has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
from collections.abc import Iterable, Mapping

from proxy.engine import suppression as engine
from proxy.engine.be_usage import ABOVE, UsageGroup, UsageQuery, UsageReading, usage_query
from proxy.engine.node_effects import Change
from proxy.engine.node_events import NodeEvent
from proxy.engine.suppression import (
    MISSED_ROUNDS,
    BeSuppression,
    LimitQuota,
    SuppressionSettings,
    WriteBeQuota,
)
from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.executor.kernel_ports import GroupQuotas, UsageSource
from proxy.executor.kernel_writes import KernelWrites
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import CgroupError, TopoproxyError
from proxy.model.koordinator import SuppressMode
from proxy.pools.claims import UNLIMITED
from proxy.telemetry import metrics

UNREADABLE = "cannot suppress BE pods: they have all CPUs of their pool meanwhile"
NO_GROUP = "cannot suppress BE pods by a CFS quota: there is no cgroup above them called besteffort"
READ_LIMIT_S = 10.0
STOP_LIMIT_S = 5.0
LONGEST_WAIT_S = 60.0
"""The longest wait between two attempts to remove the quotas of an earlier run."""


class Suppression:
    """Keeps BE pods within the CPU time that other pods leave.

    Attributes:
        settings: The configuration.
        usage: Reads CPU time; None if nothing counts it.
        groups: Reads and writes quotas; None if the cpu controller is missing.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        settings: SuppressionSettings,
        usage: UsageSource | None,
        groups: GroupQuotas | None,
        record: Mapping[str, object] | None,
    ) -> None:
        """Suppress nothing before ``run``.

        Args:
            context: Has the BE containers.
            writes: Makes the kernel follow the state.
            settings: The configuration.
            usage: Reads CPU time; None if nothing counts it.
            groups: Reads and writes quotas; None if the cpu controller is missing.
            record: The ledger's record under ``SUPPRESSION_RECORD``: what an earlier run has written.
        """
        self._context = context
        self._writes = writes
        self.settings = settings
        self.usage = usage
        self.groups = groups
        self._changed = asyncio.Event()
        self._worker = Worker("suppress", context.report_internal_error)
        context.health.watch(self._worker)
        self._reading: asyncio.Future[tuple[str, UsageReading]] | None = None
        context.store.handle(engine.BeQuotasRead(BeSuppression.load((record or {}).get("quota"))))

    @property
    def known(self) -> BeSuppression:
        """The known facts about BE suppression."""
        return self._context.state.facts.suppression

    def reconfigure(
        self, settings: SuppressionSettings, usage: UsageSource | None, groups: GroupQuotas | None
    ) -> None:
        """Suppress by other settings from now on; see ``__init__``."""
        self.settings, self.usage, self.groups = settings, usage, groups
        self._changed.set()

    async def run(self) -> None:
        """Suppress until cancelled; if suppression is off, remove what an earlier run has written."""
        while True:
            settings = self.settings
            await self._run(settings)
            if self.settings.mode is not settings.mode:
                await self._end_suppression("the configuration has changed")

    async def _run(self, settings: SuppressionSettings) -> None:
        """Suppress until the settings change."""
        self._changed.clear()
        reconciled = self._context.reconciled
        waits, wait = RetryDelays(Backoff(2 * settings.period, LONGEST_WAIT_S)), settings.period
        waited = 0
        while self.settings is settings:
            try:
                if settings.mode is not SuppressMode.QUOTA or waited >= MISSED_ROUNDS:
                    await self._remove_quotas(sorted(self.known.written))
                if reason := engine.suppression_obstacle(self._context.state, settings):
                    await self._end_suppression(reason)
                elif settings.mode is SuppressMode.OFF:
                    wait = waits.next() if self.known.written else math.inf
                elif reconciled.is_set():
                    waited = 0
                    await self.once()
                else:
                    waited += 1  # the pods are not known yet
            except Exception as error:  # noqa: BLE001  no fault may prevent the next round
                self._context.report_internal_error(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait if wait < math.inf else None):
                    await self._changed.wait()

    async def once(self) -> None:
        """Do one round."""
        context = self._context
        context.telemetry.count(metrics.BE_SUPPRESS_ROUNDS)
        query = usage_query(context.state)
        try:
            above, reading = await self._read(query)
        except (TopoproxyError, TimeoutError, OSError) as error:
            event = engine.BeUsageUnreadable(context.wall_clock(), str(error) or "it takes too long")
            await self._handle(event)
        else:
            await self._handle(engine.BeUsageRead(context.wall_clock(), self.settings, query, reading, above))
            if not self.known.failures:
                context.telemetry.resolved(UNREADABLE)

    async def _handle(self, event: NodeEvent) -> None:
        """Apply an event to the state, and carry out its effects."""
        context = self._context
        for effect in context.store.handle(event):
            match effect:
                case Change(moved=moved):
                    await self._write_pool(moved)
                case engine.ReportBeChange(change):
                    context.telemetry.count(metrics.BE_SUPPRESS_CHANGES)
                    keys = {"now": change.after, "before": change.before, "reason": change.reason}
                    context.telemetry.debug("changed what BE pods have", **keys)
                case LimitQuota():
                    await self._limit_quota(effect)
                case engine.RemoveBeQuotas(paths, reason):
                    await self._remove_quotas(paths, reason)
                case engine.ReportNoBeGroup():
                    context.telemetry.problem(NO_GROUP)
                case engine.ReportUnreadable(cause, lasts):
                    context.telemetry.count(metrics.BE_SUPPRESS_UNREADABLE)
                    if lasts:
                        context.telemetry.problem(UNREADABLE, err=cause)

    async def _read(self, query: UsageQuery) -> tuple[str, UsageReading]:
        """Read the counters; while a reading hangs, wait for it again instead of starting another."""
        if self.usage is None:
            raise CgroupError("cannot read the CPU time of pods: nothing counts it")
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._worker.run(self._read_usage, self.usage, query))
        done, _ = await asyncio.wait([self._reading], timeout=READ_LIMIT_S)
        if not done:
            raise TimeoutError(f"cannot read the CPU time of pods: nothing came for {READ_LIMIT_S:g} s")
        reading, self._reading = self._reading, None
        return reading.result()

    def _read_usage(self, usage: UsageSource, query: UsageQuery) -> tuple[str, UsageReading]:
        """Find the group above all BE pods, and read usage; runs in the worker."""
        above = usage.best_effort_group(query.parents) or self.known.above
        return above, usage.read({**query.groups, ABOVE: UsageGroup(above)} if above else query.groups)

    async def _write_pool(self, moved: list[str]) -> None:
        """Write the BE pool to the kernel."""
        if moved:
            await self._writes.write_now(moved)
        else:  # groups above BE containers may hold the pool too
            self._context.report_errors(await self._writes.run(self._context.cpuset_writer.write, ()))

    # -- quotas -------------------------------------------------------------------------------------------

    async def _limit_quota(self, limit: LimitQuota) -> None:
        context = self._context
        try:
            groups = self._quota_files()
            quota = await self._worker.run(groups.quota, limit.path)
            for effect in context.store.handle(engine.BeQuotaRead(limit, quota)):
                if isinstance(effect, WriteBeQuota):
                    await context.ledger_writer.flush()
                    await self._worker.run(groups.set_quota, limit.path, effect.quota)
                    await self._handle(engine.BeQuotaWritten(context.wall_clock(), effect))
        except CgroupError as error:
            if limit.matters:
                context.telemetry.problem("cannot write the CFS quota of BE pods", err=error)

    def _quota_files(self) -> GroupQuotas:
        if self.groups is None:
            raise CgroupError("cannot set a CFS quota: the cpu controller is not there")
        return self.groups

    async def _remove_quotas(self, paths: Iterable[str], reason: str = "") -> None:
        """Remove quotas that topoproxy wrote."""
        before = self.known.written
        for path in paths:
            try:
                if self.groups is None:
                    continue
                await self._worker.run(self.groups.set_quota, path, UNLIMITED)
            except CgroupError as error:
                if error.errno != errno.ENOENT:
                    telemetry = self._context.telemetry
                    telemetry.problem("cannot write the CFS quota of BE pods", path=path, err=error)
                    continue
            await self._handle(engine.BeQuotaRemoved(self._context.wall_clock(), path, reason))
        if self.known.written != before:
            await self._context.ledger_writer.flush()

    # -- giving back --------------------------------------------------------------------------------------

    async def _end_suppression(self, reason: str) -> None:
        await self._handle(engine.SuppressionEnded(self._context.wall_clock(), reason))

    async def stop(self) -> None:
        """Restore everything; ``run`` has ended."""
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._end_suppression("the daemon stops")
        except (TimeoutError, TopoproxyError) as error:
            self._context.telemetry.problem(
                "cannot restore what BE pods had", err=str(error) or "it takes too long"
            )

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
        if self.usage is not None:
            self.usage.close()
