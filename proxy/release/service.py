"""Release the node in the daemon, in steps that survive a crash.

Order. The executor pauses: from then on no call is held and no container is moved, not even by queued work
(``NodeMode.RELEASING``). The record goes into the ledger. CFS quotas and BE (best effort) suppression are
reverted. Every container's cpuset is widened in the kernel. Then the runtime is updated, one container at a
time, so that its saved values agree. A call that was at the runtime when the release began may later give one
of our sets to a container, so the release waits for such calls. At the end all containers are checked once
more: the release is over when a sweep after a new list of the runtime finds nothing to do. Then the record is
*released*. A daemon that starts with a record continues the release, and changes nothing until ``undo``.

A sweep costs as much as a reconcile, and a container that already has its set costs the runtime nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from proxy.engine.enforcement import plan_may_be_in_effect
from proxy.engine.node_events import ModeChanged
from proxy.engine.pod_fence import planned_cpus
from proxy.executor.background import Worker
from proxy.executor.node_executor import NodeExecutor
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import InputError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.release.kernel import SweepResult, target_of, widen_cpusets
from proxy.release.on_demand import RELEASE_RECORD
from proxy.release.runtime_updates import Progress, RuntimeUpdater
from proxy.telemetry import metrics

RELEASING, RELEASED = NodeMode.RELEASING.value, NodeMode.RELEASED.value
UPDATES_PER_SECOND = 10.0
"""How many containers a second are updated at the runtime if the configuration sets no limit."""
PAUSES = Backoff(0.1, 30.0)
"""Seconds between two sweeps while something could not be restored."""
RECONCILE_LIMIT_S = 10.0
QUEUED_WRITES_S = 1.0
"""Seconds that the release waits for kernel writes that were queued before it."""


def enter_mode(executor: NodeExecutor, mode: NodeMode) -> None:
    """Set the mode of an executor; in a release it holds no call and moves no container."""
    executor.store.handle(ModeChanged(mode))
    executor.cpuset_writer.forget()
    executor.enforcement_step_due.set()  # the steps of staged enforcement wait for the end of a release


class Release:
    """Restores every container, and keeps calls unchanged until it is undone.

    Attributes:
        since: When the release began, in seconds since the epoch.
    """

    def __init__(self, executor: NodeExecutor, suppression_is_off: Callable[[], bool] = lambda: True) -> None:
        """Store the parts; the caller then calls ``recover`` or ``begin``.

        Args:
            executor: The node.
            suppression_is_off: Returns whether BE suppression has no effect on any pod.
        """
        self._executor = executor
        self._suppression_is_off = suppression_is_off
        self._worker = Worker("release", executor.report_internal_error)
        executor.health.watch(self._worker)
        self._running: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._lasting = True
        self._mode_after = NodeMode.ENFORCE
        self._planned: Mapping[str, CpuSet] = {}
        """The CPUs that were planned, and written, when the release began, by cgroup parent."""
        self._updater = RuntimeUpdater(executor, self._worker, Progress())
        self.since = 0.0

    @property
    def stage(self) -> str:
        """``releasing``, ``released``, or empty."""
        mode = self._executor.store.mode
        return mode.value if mode.in_release else ""

    @property
    def progress(self) -> Progress:
        """How far the release has come."""
        return self._updater.progress

    # -- the record ---------------------------------------------------------------------------------------

    def recover(self, record: Mapping[str, object]) -> None:
        """Continue the last daemon's release; called before the executor adopts any container."""
        stage, since = record.get("stage"), record.get("since")
        # A record that cannot be read counts as a release, so that no container is moved by mistake.
        self._enter_release(NodeMode.RELEASED if stage == RELEASED else NodeMode.RELEASING)
        self.since = float(since) if isinstance(since, int | float) else self._executor.wall_clock()
        self._executor.telemetry.warning(
            "containers are not placed, whatever the mode (topoproxy release --undo)",
            node=self.stage,
            mode=self._mode_after,
        )
        if self.stage == RELEASING:
            self._start()

    def _enter_release(self, mode: NodeMode) -> None:
        """Leave the configured mode; ``undo`` enters it again. Until then no reload changes the mode."""
        self._mode_after = self._executor.store.mode
        self._planned = planned_cpus(self._executor.state)
        enter_mode(self._executor, mode)

    async def _finish_queued_writes(self) -> None:
        """Wait until the kernel has the present plan, unless the worker is stuck.

        In a release nothing is written for a plan. If a list lacked a planned CPU only because its write was
        still queued, it would be taken for one of another program (``proxy.release.kernel``).
        """
        await asyncio.sleep(0)  # tasks that write what has just changed queue their jobs
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUEUED_WRITES_S):
                await self._executor.kernel.run(lambda: None)

    async def _record(self, stage: str) -> None:
        ledger_writer = self._executor.ledger_writer
        kept = self._lasting and stage
        ledger_writer.put(RELEASE_RECORD, {"stage": stage, "since": self.since} if kept else None)
        await ledger_writer.flush()

    # -- what commands query ------------------------------------------------------------------------------

    async def begin(self, *, lasting: bool = True) -> None:
        """Begin the release, after an ``undo`` that is under way; a release that has begun continues.

        Args:
            lasting: Whether the next daemon stays released too; False at a stop.
        """
        async with self._lock:
            if not self.stage:
                self._lasting = lasting
                self.since = self._executor.wall_clock()
                self._updater.progress = Progress()
                planned = planned_cpus(self._executor.state)
                await self._finish_queued_writes()
                self._enter_release(NodeMode.RELEASING)
                self._planned = {at: cpus & planned.get(at, cpus) for at, cpus in self._planned.items()}
                await self._record(self.stage)
                self._executor.telemetry.event(
                    "release: every container gets back what it would have had without topoproxy"
                )
            self._start()

    async def undo(self) -> None:
        """Enter the configured mode again, as at a start: calls wait until all containers are reconciled.

        Raises:
            InputError: There is nothing to undo.
        """
        async with self._lock:
            if not self.stage:
                raise InputError("cannot undo the release: the node is not released")
            await self._end()
            executor = self._executor
            self._updater.progress = Progress()
            await self._record("")
            executor.reconciled.clear()
            enter_mode(executor, self._mode_after)
            executor.reconcile_requested.set()
            executor.telemetry.event("release undone", mode=self._mode_after)

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy release`` and ``status`` show."""
        progress, refs = self.progress, self._executor.state.containers
        existing = [i for i, c in refs.items() if c.phase is not Phase.EXITED]
        updated = sum(i in progress.reported for i in existing)  # only existing ones: others are gone by now
        return {
            "stage": self.stage,
            "since": self.since,
            "containers": len(existing),
            "updated": updated,
            "told": updated,  # the former name, for one release
            "pending": len(progress.pending),
            "left": [progress.remaining[key] for key in sorted(progress.remaining)],
        }

    # -- doing --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.stage == RELEASING and (self._running is None or self._running.done()):
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        pauses = RetryDelays(PAUSES)
        while True:
            if await self._try_sweep(self._pace):
                return
            await asyncio.sleep(pauses.next())
            if not self.progress.remaining:
                pauses.reset()

    async def _pace(self) -> None:
        per_second = self._executor.options.settle_per_second
        await asyncio.sleep(1 / (per_second if per_second > 0 else UPDATES_PER_SECOND))

    async def finish(self, limit: float) -> bool:
        """Restore without pauses, within a time limit; used at a stop.

        Returns:
            True when all is done.
        """
        await self._end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while not await self._try_sweep(lambda: asyncio.sleep(0)):
                    await asyncio.sleep(PAUSES.first)
                return True
        return False

    async def _try_sweep(self, pace: Callable[[], Awaitable[None]]) -> bool:
        """Sweep once; an internal error is reported, and must not prevent the next sweep."""
        try:
            return await self.sweep(pace)
        except Exception as error:  # noqa: BLE001  whatever it is
            self._executor.report_internal_error(error)
            self.progress.remaining["release"] = f"internal error: {type(error).__name__}: {error}"
            return False

    async def sweep(self, pace: Callable[[], Awaitable[None]]) -> bool:
        """Check all containers once, and restore those that differ.

        Args:
            pace: Waits between two updates of the runtime.

        Returns:
            True when nothing was left to do.
        """
        executor, progress = self._executor, self.progress
        progress.remaining = {}
        # If the runtime does not answer, the kernel's values are restored anyway, by the ledger.
        listed = not progress.sweeps or await self._wait_for_reconcile()
        await executor.kubelet_cpus.refresh(self._worker)
        await executor.quotas.once()
        if executor.partitions is not None:
            await executor.partitions.once()
        result = await self._widen_in_kernel()
        progress.remaining |= result.errors
        progress.pending = [i for i in result.due if self._updater.is_due(i, result)]
        clean = bool(progress.sweeps) and listed and not progress.pending and not result.written
        progress.sweeps += 1
        await self._updater.update_all(result, pace)
        if not self._is_over(clean):
            return False
        await self._record(RELEASED)
        executor.store.handle(ModeChanged(NodeMode.RELEASED))  # only after the record is on the disk
        executor.telemetry.event("released", containers=len(progress.reported))
        return True

    def _is_over(self, clean: bool) -> bool:
        executor, remaining = self._executor, self.progress.remaining
        if executor.quotas.groups is not None and executor.quotas.known.records:
            remaining["quotas"] = f"{len(executor.quotas.known.records)} CFS quotas are not restored yet"
        if executor.partitions is not None and executor.partitions.jobs.known.records:
            remaining["partitions"] = (
                f"{len(executor.partitions.jobs.known.records)} partitions are not removed yet"
            )
        if not self._suppression_is_off():
            remaining["suppression"] = "the CFS quota of BE pods is not removed yet"
        in_flight = any(self._updater.is_in_flight(c) for c in executor.state.containers.values())
        return clean and not (in_flight or remaining or executor.state.runtime.lost_creates)

    async def _wait_for_reconcile(self) -> bool:
        """Wait for a reconcile with the runtime's list; False if none ends in time."""
        executor = self._executor
        reconciles = executor.telemetry.value(metrics.RECONCILES)
        # A reconcile may be under way with an older list, so wait for two.
        for _ in range(2):
            executor.reconcile_requested.set()
            try:
                async with asyncio.timeout(RECONCILE_LIMIT_S):
                    while executor.telemetry.value(metrics.RECONCILES) == reconciles:
                        await asyncio.sleep(0.02)
            except TimeoutError:
                self.progress.remaining["runtime"] = "the runtime does not answer"
                return False
            reconciles = executor.telemetry.value(metrics.RECONCILES)
        return True

    async def _widen_in_kernel(self) -> SweepResult:
        executor = self._executor
        state, manager = executor.state, executor.kubelet_cpus.manager
        targets = [
            (c, target_of(c, state.node.machine, manager))
            for c in state.containers.values()
            if c.phase not in (Phase.EXITED, Phase.CREATING) and plan_may_be_in_effect(state, c.pod)
        ]
        pods = [pod for pod in state.pods.values() if plan_may_be_in_effect(state, pod)]
        return await executor.kernel.run(
            widen_cpusets, executor.cpuset_writer, state, targets, pods, self._planned
        )

    # -- the end ------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Stop the running work; wait for a call that is at the runtime."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None
        await self._worker.run(lambda: None)

    async def stop(self) -> None:
        """Stop the running work; the next daemon continues from the record."""
        await self._end()

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
