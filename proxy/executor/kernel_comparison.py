"""Compares the cpusets, quotas, memory nodes and partitions in the kernel with the plan, in a reconcile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.executor.cpuset_mems import CpusetMems
from proxy.executor.cpuset_writer import WriteResult
from proxy.executor.drift.detection import Drift
from proxy.executor.kernel_writes import CgroupLocator, KernelWrites
from proxy.executor.listing import Listing
from proxy.executor.missing_cgroups import MissingCgroups
from proxy.executor.quotas import OwnerQuotas
from proxy.executor.worker_health import STUCK_S
from proxy.model.workload import Container, Phase

if TYPE_CHECKING:
    from proxy.executor.partitions.sync import PartitionSync

ADDITIONAL_JOB_S = 30.0
"""Seconds that each additional job of a reconcile may take (quotas, memory nodes, partitions)."""
KERNEL_LATE = "cannot compare with the kernel in time"


class KernelParts(Protocol):
    """The parts of the executor that the comparison with the kernel uses."""

    writes: KernelWrites
    cgroup_locator: CgroupLocator
    drift: Drift
    quotas: OwnerQuotas
    mems: CpusetMems
    partitions: PartitionSync | None


class KernelComparison:
    """Writes what differs in the kernel, and reports running containers without a cgroup."""

    def __init__(self, context: NodeContext, parts: KernelParts, worker: Worker) -> None:
        """Prepare; nothing is compared yet.

        Args:
            context: The node with the plan.
            parts: The parts of the executor that read and write the kernel.
            worker: Queries the runtime for the cgroups of containers.
        """
        self._context = context
        self._parts = parts
        self._worker = worker
        self._missing_cgroups = MissingCgroups(context, parts.cgroup_locator)
        self._cpuset_comparison: asyncio.Future[WriteResult] | None = None

    async def reconcile(self, listing: Listing, began: int) -> None:
        """Write what differs in the kernel, and report running containers without a cgroup.

        Args:
            listing: The runtime's list.
            began: The number of the last change of the state when the list was requested.
        """
        context = self._context
        done = await self._compare_cpusets()
        if done is None:
            return
        context.telemetry.resolved(KERNEL_LATE)
        context.report_errors(done, is_complete=True)
        running = [i for i, c in listing.containers.items() if c.phase is Phase.RUNNING]
        found = await self._parts.cgroup_locator.find(running, self._worker)
        await self._parts.writes.write_now(found)
        self._missing_cgroups.report(self._running([i for i in done.lost if i not in found], listing, began))
        await self._additional_job(self._parts.quotas.once())
        await self._additional_job(self._parts.mems.once())
        if self._parts.partitions is not None:
            await self._additional_job(self._parts.partitions.once())

    async def reconcile_without_plan(self) -> None:
        """Compare only the quotas (those of pods that were enforced): the plan is not applied to the node."""
        self._context.forget_errors()
        self._parts.mems.forget_failures()
        self._missing_cgroups.report(())
        await self._additional_job(self._parts.quotas.once())

    async def _compare_cpusets(self) -> WriteResult | None:
        """Compare all containers with the kernel; None on a timeout: the next reconcile has the result.

        A reconcile does not wait for a kernel that hangs: calls that wait after a start of the daemon need
        only what the runtime reports.
        """
        late, self._cpuset_comparison = self._cpuset_comparison, None
        comparing = late or asyncio.ensure_future(self._parts.drift.compare_all())
        await asyncio.wait((comparing,), timeout=STUCK_S)
        if not comparing.done():
            self._cpuset_comparison = comparing
            self._context.telemetry.problem(KERNEL_LATE, seconds=STUCK_S)
            return None
        return comparing.result()

    async def _additional_job(self, work: Awaitable[None]) -> None:
        """Perform an additional job of a reconcile: a fault in it must not fail the reconcile."""
        try:
            async with asyncio.timeout(ADDITIONAL_JOB_S):
                await work
        except TimeoutError:
            self._context.telemetry.problem("cannot compare everything in time", seconds=ADDITIONAL_JOB_S)
        except Exception as error:  # noqa: BLE001  see above
            self._context.report_internal_error(error)

    def _running(self, ids: list[str], listing: Listing, began: int) -> list[Container]:
        """Return the containers that run, according to the runtime's list."""
        state = self._context.state
        return [
            container
            for container_id in ids
            if (container := state.containers.get(container_id)) is not None
            and (seen := listing.containers.get(container_id)) is not None
            and seen.phase is Phase.RUNNING
            and state.runtime.changes.is_unchanged(container_id, began)
        ]
