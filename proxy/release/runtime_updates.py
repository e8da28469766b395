"""Send each container's target to the runtime: the slow part of a release.

A container whose target is already saved is skipped. The saved value is known for containers that were placed
or updated since the start, and read from the runtime for the others. A container with a call in flight at the
runtime waits for the next sweep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from proxy.engine.call_events import SavedCpusLearned
from proxy.executor.background import Worker
from proxy.executor.node_executor import NodeExecutor
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Container, Phase
from proxy.release.kernel import ReleasedCpuset, SweepResult
from proxy.telemetry import metrics


@dataclass(slots=True)
class Progress:
    """The progress of the updates that restore the containers' resources at the runtime.

    Attributes:
        reported: Containers that were updated at the runtime, with their new values.
        remaining: The reasons for everything that could not be restored in the last sweep, by container,
            group or part.
        sweeps: How often all containers were checked.
        pending: Ids of containers that the last sweep found and that are not updated yet.
    """

    reported: dict[str, ReleasedCpuset] = field(default_factory=dict)
    remaining: dict[str, str] = field(default_factory=dict)
    sweeps: int = 0
    pending: list[str] = field(default_factory=list)


class RuntimeUpdater:
    """Updates the containers' resources at the runtime."""

    def __init__(self, executor: NodeExecutor, worker: Worker, progress: Progress) -> None:
        """Store the parts.

        Args:
            executor: The node.
            worker: Makes the calls.
            progress: Records the progress.
        """
        self._executor = executor
        self._worker = worker
        self.progress = progress

    def is_due(self, container_id: str, sweep: SweepResult) -> bool:
        """Return whether the runtime may have saved another value than the container must get."""
        executor, due = self._executor, sweep.due[container_id]
        container = executor.state.containers.get(container_id)
        if container is None:
            return False
        if container_id in executor.quotas.known.unsent or not due.exact or container_id in sweep.written:
            return True
        if executor.state.node.erases(container.placement) and not container.request.cpuset_cpus:
            return False  # the runtime has saved only the container's request
        last_sent = self.progress.reported.get(container_id)
        mems = container.placement.mems if last_sent is None else last_sent.mems
        return executor.state.runtime.saved.get(container_id) != due.cpus or mems != due.mems

    async def update_all(self, sweep: SweepResult, pace: Callable[[], Awaitable[None]]) -> None:
        """Update all pending containers; one that cannot be updated now is left for the next sweep."""
        pending = self.progress.pending
        while pending:
            container_id = pending[0]
            try:
                if await self._update(container_id, sweep.due[container_id]):
                    await pace()
            except UnavailableError as error:
                self.progress.remaining["runtime"] = str(error)
                return  # the other updates would fail too
            except RuntimeCallError as error:
                self._executor.quotas.quota_refused(container_id)
                if error.code != GrpcStatus.NOT_FOUND:
                    self.progress.remaining[container_id] = str(error)
            del pending[0]

    async def _update(self, container_id: str, due: ReleasedCpuset) -> bool:
        """Make the runtime save the cpuset that a container must get.

        Returns:
            True if the runtime was updated; False if it had the value already, or if the update has to wait
            for the next sweep.

        Raises:
            UnavailableError, RuntimeCallError: The runtime does not save it.
        """
        executor = self._executor
        container = executor.state.containers.get(container_id)
        if container is None or container.phase is Phase.EXITED or self.is_in_flight(container):
            return False
        quota = executor.quotas.carried(container)
        if container_id not in executor.state.runtime.saved and due.exact and not quota:
            detail = await self._worker.run(executor.runtime.detail, container_id)
            if (detail.cpuset_cpus, detail.cpuset_mems) == (str(due.cpus), str(due.mems)):
                executor.store.handle(SavedCpusLearned(container_id, due.cpus))
                self.progress.reported[container_id] = due
                await executor.unit_properties.set_for_release(container_id, due.cpus, due.mems)
                return False
        call = executor.inflight_calls.track(container_id, due.cpus)
        try:
            executor.store.handle(SavedCpusLearned(container_id, None))
            await self._worker.run(executor.runtime.update_cpuset, container_id, due.cpus, due.mems, quota)
            executor.store.handle(SavedCpusLearned(container_id, due.cpus))
            executor.quotas.saved(container_id, quota)
            await executor.unit_properties.set_for_release(container_id, due.cpus, due.mems)
        except (UnavailableError, asyncio.CancelledError):
            executor.call_tracker.mark_orphaned(call)  # the runtime may still execute it after an undo
            raise
        except BaseException:
            executor.inflight_calls.complete(call)
            raise
        executor.inflight_calls.complete(call)
        self.progress.reported[container_id] = due
        executor.telemetry.count(metrics.RELEASE_UPDATES)
        return True

    def is_in_flight(self, container: Container) -> bool:
        """Return whether a call in flight at the runtime may give a container a set."""
        inflight = self._executor.state.inflight
        return container.phase is Phase.CREATING or inflight.is_awaited_by_release(container.id)
