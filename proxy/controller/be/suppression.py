"""BE suppression at work: BE pods live on what the others leave, up to a threshold of the node.

Every period the counters of CPU time are read; two readings make the CPUs in use, these the budget of BE pods
(``proxy.pools.be_suppression``), and the budget is put into force in one of two ways:

* ``cpuset``: the state's BE pool is narrowed. Whoever is in it follows, by kernel writes only: a set that
  changes every second is not made lasting (``proxy.controller.runtime_sync``). Containers that come get the
  narrowed set by themselves. CPUs of LSE pods are not in the BE pool, so they cannot be chosen. Groups above
  containers are narrowed only where requests are erased (``proxy.controller.be.groups``).
* ``cfs-quota``: the group above all BE pods gets a quota (``proxy.controller.be.quota``).

Everything is given back when the daemon stops, when the other way (or none) is configured, and when nobody
can tell the usage for a while: BE pods must not starve on a figure that is no longer true. After a crash the
next start gives back: narrowed sets because a fresh state has none, quotas by the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from proxy.controller.be.quota import BeQuota
from proxy.controller.be.rates import rates
from proxy.controller.be.text import quota_words, reason
from proxy.controller.be.usage import ABOVE, UsageQuery, asked_of, usage_of
from proxy.controller.context import NodeContext
from proxy.controller.kernel_ports import UsageGroup, UsageReading, UsageSource
from proxy.controller.kernel_writes import KernelWrites
from proxy.controller.store import Follow
from proxy.controller.worker import Worker
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import CgroupError, TopoproxyError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import SuppressMode
from proxy.model.workload import Pool, QosClass
from proxy.pools.be_suppression import THRESHOLD, Usage, budget, how_many, suppressed
from proxy.pools.cpu_location import CpuLocation, seats_of
from proxy.pools.quota import UNLIMITED
from proxy.pools.shared import AnnotatedCpus, Withheld
from proxy.telemetry import metrics

PATIENCE = 10
"""Rounds without a figure after which everything is given back."""
SLACK_MILLI = 250
"""By how much a budget must be beyond whole CPUs to add one: else BE pods would move with every flutter."""
READ_LIMIT_S = 10.0
STOP_LIMIT_S = 5.0
LONGEST_WAIT_S = 60.0
"""Between two attempts to give back what an earlier run took, at most."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is configured.

    Attributes:
        mode: How BE pods are suppressed.
        threshold: Percent of the node's CPUs that all may use together.
        least: Percent of the node's CPUs that BE pods have in any case; None for nothing.
        period: Seconds between rounds.
    """

    mode: SuppressMode = SuppressMode.OFF
    threshold: int = THRESHOLD
    least: int | None = None
    period: float = 1.0


@dataclass(frozen=True, slots=True)
class SuppressionChange:
    """A change of what BE pods have: seconds since the epoch, and both in words."""

    when: float
    before: str
    after: str
    why: str


class Suppression:
    """The controller."""

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        settings: Settings,
        usage: UsageSource | None,
        quota: Callable[[Worker], BeQuota],
    ) -> None:
        """Prepare; ``run`` begins.

        Args:
            context: Whose BE containers.
            writes: Has the kernel follow.
            settings: What is configured.
            usage: Reads CPU time; None where nobody counts it.
            quota: Makes the one who writes quotas, with the worker given.
        """
        self._context = context
        self._writes = writes
        self.settings = settings
        self._usage = usage
        self._worker = Worker("suppress", context.broken)
        context.health.watch(self._worker)
        self.quota = quota(self._worker)
        self._last: UsageReading | None = None
        self._reading: asyncio.Future[UsageReading] | None = None
        self._failures = 0
        self.above = min(self.quota.written, default="")
        """The group above all BE pods, once it is known."""
        self._seats: tuple[object, tuple[CpuLocation, ...]] = (None, ())
        self.figures: tuple[int, Usage] | None = None
        """The budget of the last round in milli-CPUs, and what it came from."""
        self.change: SuppressionChange | None = None

    async def run(self) -> None:
        """Suppress for ever; or, where nothing is to be suppressed, give back what an earlier run took."""
        settings, synced = self.settings, self._context.synced
        waits, wait = RetryDelays(Backoff(2 * settings.period, LONGEST_WAIT_S)), settings.period
        waited = 0
        while True:
            try:
                if settings.mode is not SuppressMode.QUOTA or waited >= PATIENCE:
                    await self.quota.give_back()
                if not self._context.store.mode.enforces:
                    await self._give_back("the node is released")
                elif settings.mode is SuppressMode.OFF:
                    if not self.quota.written:
                        return
                    wait = waits.next()
                elif synced.is_set():
                    waited = 0
                    await self.once()
                else:
                    waited += 1  # nobody knows yet which pods there are
            except Exception as error:  # noqa: BLE001  whatever it is, the next round must come
                self._context.broken(error)
            await asyncio.sleep(wait)

    async def once(self) -> None:
        """Make one round."""
        context = self._context
        context.telemetry.count(metrics.BE_SUPPRESS_ROUNDS)
        asked = asked_of(context.state)
        try:
            reading = await self._read(asked)
        except (TopoproxyError, TimeoutError, OSError) as error:
            await self._cannot(str(error) or "it takes too long")
            return
        before, self._last = self._last, reading
        if before is None:
            return
        found = rates(before, reading, len(context.state.node.machine.online))
        if found is None:
            await self._cannot("the counters went backwards")
            return
        self._failures = 0
        usage = usage_of(context.state, asked, found)
        milli = budget(usage, self.settings.threshold, self.settings.least)
        self.figures = (milli, usage)
        if self.settings.mode is SuppressMode.CPUSET:
            await self._narrow(milli)
        else:
            await self._follow_quota(milli, len(asked.inside))

    async def _read(self, asked: UsageQuery) -> UsageReading:
        """Read the counters; a reading that hangs is waited for again, not joined by more of them."""
        if self._usage is None:
            raise CgroupError("cannot read the CPU time of pods: nobody counts it")
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._worker.run(self._look, self._usage, asked))
        done, _ = await asyncio.wait([self._reading], timeout=READ_LIMIT_S)
        if not done:
            raise TimeoutError(f"cannot read the CPU time of pods: nothing came for {READ_LIMIT_S:g} s")
        reading, self._reading = self._reading, None
        return reading.result()

    def _look(self, usage: UsageSource, asked: UsageQuery) -> UsageReading:
        """Runs in the worker."""
        self.above = usage.best_effort(asked.parents) or self.above
        groups = dict(asked.groups)
        if self.above:
            groups[ABOVE] = UsageGroup(self.above)
        return usage.read(groups)

    async def _cannot(self, why: str) -> None:
        """There is no figure this time."""
        context = self._context
        context.telemetry.count(metrics.BE_SUPPRESS_UNREADABLE)
        self._failures += 1
        if self._failures < PATIENCE:
            return
        context.telemetry.problem(
            "cannot suppress BE pods: they have all CPUs of their pool meanwhile", err=why
        )
        self.figures = None
        if self._failures == PATIENCE or self.quota.written:
            await self._give_back("their usage cannot be read")

    # -- CPUs ---------------------------------------------------------------------------------------------

    async def _narrow(self, milli: int) -> None:
        state = self._context.state
        pool, now, machine = state.pools.be, state.pools.of(Pool.BE), state.node.machine
        if self._seats[0] is not machine:
            self._seats = (machine, seats_of(machine))
        limit: CpuSet | None = None
        count = how_many(milli, len(now), len(machine.online))
        if count > len(now) >= how_many(milli - SLACK_MILLI, len(now), len(machine.online)):
            return
        if count < len(pool):
            lsr = [
                AnnotatedCpus(QosClass.LSR, owner.cpus) for owner in state.owners.values() if not owner.hard
            ]
            withheld = Withheld(reserved=machine.online - pool)
            limit = suppressed(self._seats[1], lsr, withheld, milli, now)
            if not limit:
                return
        await self._limit(limit, self._why())

    async def _limit(self, limit: CpuSet | None, why: str) -> None:
        """Narrow the BE pool (None: no longer) and have the kernel follow."""
        context = self._context
        after = context.state.suppressing(limit)
        done = context.store.change(after, "BE pool suppressed", follow=Follow.CALLER)
        was, now = done.before.pools.of(Pool.BE), done.after.pools.of(Pool.BE)
        if was == now:
            return
        self._changed(f"CPUs {was}", f"CPUs {now}", why)
        if done.moved:
            await self._writes.follow(done.moved)
        else:  # groups above BE containers may hold the pool too
            await context.kernel.run(context.enforcer.enforce, ())

    # -- quota --------------------------------------------------------------------------------------------

    async def _follow_quota(self, milli: int, pods: int) -> None:
        if not self.above:
            if pods:
                self._context.telemetry.problem(
                    "cannot suppress BE pods by a CFS quota: there is no cgroup above them called besteffort"
                )
            return
        was = self.quota.in_force
        try:
            written = await self.quota.follow(self.above, milli, len(self._context.state.node.machine.online))
        except CgroupError as error:
            if pods:
                self._context.telemetry.problem("cannot write the CFS quota of BE pods", err=error)
            return
        if written:
            self._changed(quota_words(was), quota_words(self.quota.in_force), self._why())

    def _why(self) -> str:
        return reason(self.figures, self.settings.threshold)

    def _changed(self, before: str, after: str, why: str) -> None:
        context = self._context
        context.telemetry.count(metrics.BE_SUPPRESS_CHANGES)
        self.change = SuppressionChange(context.wall(), before, after, why)
        context.telemetry.debug("changed what BE pods have", now=after, before=before, reason=why)

    # -- giving back --------------------------------------------------------------------------------------

    async def _give_back(self, why: str) -> None:
        await self._limit(None, why)
        had = self.quota.in_force
        if self.quota.written and await self.quota.give_back():
            self._changed(quota_words(had), quota_words(UNLIMITED), why)

    async def stop(self) -> None:
        """Give everything back; ``run`` has ended."""
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._give_back("the daemon stops")
        except (TimeoutError, TopoproxyError) as error:
            self._context.telemetry.problem(
                "cannot restore what BE pods had", err=str(error) or "it takes too long"
            )

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
        if self._usage is not None:
            self._usage.close()
