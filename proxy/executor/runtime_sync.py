"""Makes the cpusets of moved containers last, off the critical path.

A write to the kernel takes effect at once, but does not last: runc's saved state undoes it at the next update
of any resource, and systemd at the next daemon-reload. So the cpuset of a moved container is also sent to the
runtime, a few containers a second. Such a call counts as in flight, so that a shrink that needs the same
container waits for it. A call without an answer may still be carried out, and continues to count as in flight
(``engine.inflight``). As long as it does, nothing is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib

from proxy.engine.call_events import ResendWanted, RuntimeSyncStarted, SavedCpusLearned
from proxy.engine.node_effects import Change
from proxy.engine.pod_fence import Fence
from proxy.engine.runtime_sync_step import SyncStep, no_longer_transient, sync_step
from proxy.executor.adoption import saved_cpus
from proxy.executor.background import Worker
from proxy.executor.call_tracker import CallTracker
from proxy.executor.context import NodeContext
from proxy.executor.cpuset_mems import CpusetMems
from proxy.executor.observer import Observer
from proxy.executor.quotas import OwnerQuotas
from proxy.executor.systemd.unit_properties import UnitProperties
from proxy.model.backoff import Backoff, RetryTimes
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject_of

EXIT_EVENT_S = 0.2
"""Seconds to wait before a refusal is checked: when a container has just exited, a runtime refuses to update
it some moments before it lists the container as exited."""

AWAY_S = 1.0
"""Seconds before the next cpuset is sent to a runtime that does not answer."""
NOT_SAVED = "cannot save a cpuset at the runtime"
SILENT = Backoff(4.0, 256.0)
"""Seconds before the cpuset of a container is sent again after an update without a good answer."""
_CALLING = (SyncStep.LEARN, SyncStep.SEND)
"""The steps that call the runtime."""


class RuntimeSync(Observer):
    """Sends cpusets to the runtime, one container at a time."""

    def __init__(
        self,
        context: NodeContext,
        call_tracker: CallTracker,
        quotas: OwnerQuotas,
        mems: CpusetMems,
        unit_properties: UnitProperties,
    ) -> None:
        self._context = context
        self._quotas = quotas
        self._mems = mems
        self._unit_properties = unit_properties
        self._call_tracker = call_tracker
        self._worker = Worker("runtime-sync", context.report_internal_error)
        context.health.watch(self._worker)
        self._silent = RetryTimes[str](SILENT)
        self._refused = set[str]()

    def changed(self, change: Change) -> None:
        """See ``Observer``."""
        if change.after.pools.be_now is None:
            return  # as nearly always: no cpuset is passing
        if ids := no_longer_transient(change.before, change.after):
            self._context.sync_later(*ids)
            self._unit_properties.changed(ids)

    async def run(self) -> None:
        """Send the CPUs of containers to the runtime until cancelled."""
        context = self._context
        while True:
            while context.state.runtime.awaiting_sync and (rate := context.options.settle_per_second) > 0:
                if await self._sync_next():
                    await asyncio.sleep(1 / rate)
            await context.runtime_sync_due.wait()
            context.runtime_sync_due.clear()

    async def _sync_next(self) -> bool:
        """Handle the first of the containers that await a sync; see ``_sync``."""
        container_id = next(iter(self._context.state.runtime.awaiting_sync))
        self._context.store.handle(RuntimeSyncStarted(container_id))
        return await self._sync(container_id)

    async def _sync(self, container_id: str) -> bool:
        """Send a container's cpuset if that is due; returns whether the runtime was called."""
        context, fencing = self._context, self._unit_properties.fencing
        is_queried = False
        step = sync_step(context.state, container_id)
        if step in _CALLING and self._backs_off(container_id):
            return False
        if step is SyncStep.LEARN:
            is_queried = await self._learn(container_id)
            step = sync_step(context.state, container_id)  # a cpuset that is still unknown is sent
        if step not in _CALLING:
            self._resend_after_call(container_id, step)
            return is_queried
        is_unsent = container_id in context.state.facts.quotas.unsent
        if not is_unsent and self._unit_properties.bypasses_runtime(context.state.containers[container_id]):
            return is_queried
        fence = await fencing.fitting(container_id)
        # While the fence was written, the container may have ended, or its pod may have been released.
        step = sync_step(context.state, container_id)
        if step not in _CALLING:
            await fencing.remove(fence)
            self._resend_after_call(container_id, step)
            return is_queried
        await self._send(context.state.containers[container_id], fence)
        return True

    def _resend_after_call(self, container_id: str, step: SyncStep) -> None:
        """Have a cpuset sent when the call in flight that the step waits for is over."""
        if step is SyncStep.AWAIT:
            self._context.store.handle(ResendWanted(container_id))

    async def _send(self, container: Container, fence: Fence | None) -> None:
        """Send a container's cpuset, and process the answer."""
        context, container_id = self._context, container.id
        want, quota = context.state.desired_cpus(container), self._quotas.carried(container)
        call = context.inflight_calls.track(container_id, want)
        self._unit_properties.fencing.bind(call, fence)
        refused = ""
        try:
            async with self._call_tracker.under_way(call):
                mems = self._mems.renewed(container)
                await self._worker.run(context.runtime.update_cpuset, container_id, want, mems, quota)
                self._quotas.saved(container_id, quota)
                context.telemetry.count(metrics.RUNTIME_UPDATES)
        except UnavailableError:
            self._put_off(container_id)
            await asyncio.sleep(AWAY_S)
            return
        except RuntimeCallError as error:
            self._quotas.quota_refused(container_id)
            refused = "" if error.code == GrpcStatus.NOT_FOUND else str(error)
        except Exception as error:  # noqa: BLE001  one odd container must not stop the others
            context.report_internal_error(error)
        if refused and await self._runs(container_id):
            which = subject_of(context.state.containers, container_id)
            context.telemetry.problem(NOT_SAVED, **which, err=refused)
            self._refused.add(container_id)
            self._put_off(container_id)
            context.sync_later(container_id)
        else:
            self._silent.succeeded(container_id)
            if container_id in self._refused:
                self._refused.discard(container_id)
                context.telemetry.resolved(NOT_SAVED, containerID=container_id)

    def _put_off(self, container_id: str) -> None:
        """Delay the next attempt to send a container's cpuset, longer each time."""
        self._silent.keep(self._context.state.containers)
        self._refused.intersection_update(self._context.state.containers)
        self._silent.failed(container_id, self._context.clock())

    async def _learn(self, container_id: str) -> bool:
        """Read from the runtime what it has saved for a container that was sent no cpuset since the start.

        A cpuset that the runtime does not report stays unknown, and the wanted one is sent once.
        """
        context = self._context
        calls = context.state.inflight.of(container_id)
        try:
            detail = await self._worker.run(context.runtime.detail, container_id)
        except UnavailableError:
            return False  # the call that sends the cpuset waits for the runtime
        except RuntimeCallError:
            return True
        saved = saved_cpus(detail.cpuset_cpus)
        new = container_id not in context.state.runtime.saved
        if saved and new and not calls and not context.state.inflight.of(container_id):
            context.store.handle(SavedCpusLearned(container_id, saved))
        return True

    def _backs_off(self, container_id: str) -> bool:
        """Return whether a container waits after an update without a good answer, and retry it later."""
        remaining_s = self._silent.remaining(container_id, self._context.clock())
        if remaining_s:
            asyncio.get_running_loop().call_later(remaining_s, self._context.sync_later, container_id)
        return bool(remaining_s)

    async def _runs(self, container_id: str) -> bool:
        """Return whether a container still runs after a refused update; if not, the refusal is harmless."""
        await asyncio.sleep(EXIT_EVENT_S)
        try:
            listed = await self._worker.run(self._context.runtime.list_containers, container_id)
        except Exception:  # noqa: BLE001  a container not known to have exited counts as running
            return True
        return any(container.phase is Phase.RUNNING for container in listed)

    async def finish(self, limit: float) -> None:
        """Send the remaining cpusets, without pauses, for at most ``limit`` seconds."""
        context = self._context
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while context.state.runtime.awaiting_sync and context.options.settle_per_second > 0:
                    await self._sync_next()

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
