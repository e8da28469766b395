"""Reconciles the state with the runtime and with the kernel.

A reconcile lists what the runtime has and compares it with the state. Unknown containers are adopted (they
were created without passing through the proxy, or before it started). Containers that have exited or vanished
give their CPUs back. Creates with a lost answer are resolved. The cpuset of every live container in the
kernel is compared with the wanted one. The first reconcile after a start of the daemon ends its recovery,
which began with the ledger (``ledger_recovery``): until the recovery is done, calls that need a decision
wait. Reconciles run on a timer, soon after an inconsistency was detected, and as soon as the runtime can be
reached again.

If the runtime sends events (``runtime_events``), a reconcile usually finds exits already handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, structs

from proxy.engine.container_events import ContainerIsBack
from proxy.engine.enforcement import applies_to
from proxy.engine.node_events import RuntimeListed
from proxy.engine.pod_events import PodLearned
from proxy.executor.adoption import Adoption
from proxy.executor.background import TimeSlices, Worker
from proxy.executor.call_tracker import CallTracker
from proxy.executor.confinement import Confinement
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.context import NodeContext
from proxy.executor.cpuset_mems import CpusetMems
from proxy.executor.cpuset_writer import WriteResult
from proxy.executor.create_decisions import CreateDecisions
from proxy.executor.drift.detection import Drift
from proxy.executor.fact_lookup import KubeletCpus
from proxy.executor.kernel_writes import CgroupLocator, KernelWrites
from proxy.executor.listing import Listing, listed
from proxy.executor.machine.hotplug import Hotplug
from proxy.executor.missing_cgroups import MissingCgroups
from proxy.executor.node_policy_sync import NodePolicySync
from proxy.executor.owner_moves import OwnerMoves
from proxy.executor.quotas import OwnerQuotas
from proxy.executor.runtime_events import RuntimeEvents
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.executor.sandboxes import Sandboxes
from proxy.executor.systemd.unit_properties import UnitProperties
from proxy.executor.worker_health import STUCK_S
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.pod_selection import selectable_labels
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.partitions.sync import PartitionSync

GRACE_S = 2.0
"""Seconds for which a create with a lost answer may still turn up in the runtime's list."""
ADDITIONAL_JOB_S = 30.0
"""Seconds that each additional job of a reconcile may take (quotas, memory nodes, partitions)."""
GAP_S = 0.2
AGAIN = Backoff(0.05, 1.0)
"""Seconds before the next reconcile after one that failed."""
REMOVED_AT_ONCE = 64
"""Containers that are removed in one turn of the event loop."""


NOT_RECONCILED = "cannot reconcile with the runtime"
KERNEL_LATE = "cannot compare with the kernel in time"


class ReconcileParts(Protocol):
    """The parts of the executor (``node_executor``) that a reconcile uses."""

    writes: KernelWrites
    lifecycle: ContainerLifecycle
    creates: CreateDecisions
    sandboxes: Sandboxes
    kubelet_cpus: KubeletCpus
    node_policy: NodePolicySync
    hotplug: Hotplug
    runtime_events: RuntimeEvents
    cgroup_locator: CgroupLocator
    drift: Drift
    confinement: Confinement
    quotas: OwnerQuotas
    mems: CpusetMems
    unit_properties: UnitProperties
    owner_moves: OwnerMoves
    partitions: PartitionSync | None
    call_tracker: CallTracker


class ListRequest(Struct, frozen=True):
    """What was known when the runtime's list was requested: a list is already old when it arrives.

    Attributes:
        change: The number of the last change of the state.
        at: The time.
        containers: The ids of the known containers.
        pods: The ids of the known sandboxes, without those whose create is under way.
        ended_sandbox_calls: Tokens of sandboxes whose calls an earlier daemon relayed, if these calls are
            over.
    """

    change: int
    at: float
    containers: frozenset[str]
    pods: frozenset[str]
    ended_sandbox_calls: frozenset[str]


class Reconciler:
    """Reconciles again and again, and remembers whether the runtime can be reached.

    Attributes:
        connected: Whether the runtime answered the last query.
        failure: Why the last reconcile failed at the runtime; empty if it did not.
        runtime_version: Name and version of the runtime.
    """

    def __init__(self, context: NodeContext, parts: ReconcileParts) -> None:
        """Prepare; the first reconcile begins with ``run`` or ``once``.

        Args:
            context: The node with the state to reconcile.
            parts: The other parts of the executor that a reconcile uses.
        """
        self._context = context
        self._parts = parts
        self._worker = Worker("sync", context.report_internal_error)
        context.health.watch(self._worker)
        self.adoption = Adoption(
            context,
            parts.creates,
            parts.kubelet_cpus,
            parts.runtime_events,
            self._worker,
            parts.call_tracker.lookups,
        )
        self._missing_cgroups = MissingCgroups(context, parts.cgroup_locator)
        self._cpuset_comparison: asyncio.Future[WriteResult] | None = None
        self.connected = False
        self._outage_reported = False
        self.failure = ""
        self.runtime_version = ""

    async def run(self) -> None:
        """Start the other parts, then reconcile until cancelled."""
        context = self._context
        self._parts.hotplug.start()
        self._parts.runtime_events.start()
        self._parts.drift.start()
        again = RetryDelays(AGAIN)
        while True:
            wait = context.options.reconcile_period
            try:
                await self.once()
                again.reset()
            except Exception as error:  # noqa: BLE001  whatever the error, the next reconcile must come
                self._failed(error)
                wait = min(wait, again.next())
            if context.state.runtime.lost_creates or context.state.inflight.unattended():
                wait = min(wait, GRACE_S)
            try:
                # Not wait_for: in Python 3.11 it may swallow a cancellation.
                async with asyncio.timeout(wait):
                    await context.reconcile_requested.wait()
                await asyncio.sleep(GAP_S)
            except TimeoutError:
                pass
            context.reconcile_requested.clear()

    def _mark_reconciled(self) -> None:
        """Perform what was postponed until all running containers are known."""
        self._parts.writes.mark_reconciled()
        self._parts.owner_moves.resume()

    def _failed(self, error: Exception) -> None:
        context = self._context
        if isinstance(error, UnavailableError):
            if not self._outage_reported:
                context.telemetry.warning("cannot reach the runtime", err=error)
            self.connected, self._outage_reported = False, True
            self.failure = str(error)
        elif isinstance(error, RuntimeCallError):
            self.failure = str(error)
            context.telemetry.problem(NOT_RECONCILED, err=error)
            if error.code == GrpcStatus.UNIMPLEMENTED:
                # The runtime does not have a method that a reconcile needs: waiting is of no use.
                self._mark_reconciled()
        else:
            context.report_internal_error(error)

    async def once(self) -> None:
        """Reconcile once.

        Raises:
            UnavailableError: The runtime cannot be reached, or did not answer in time.
            RuntimeCallError: The runtime answered with an error.
        """
        context = self._context
        state = context.state
        request = ListRequest(
            state.runtime.changes.number,
            context.clock(),
            frozenset(state.containers),
            frozenset(state.pods) - state.runtime.arriving_sandboxes,
            self._parts.call_tracker.former_calls.ended_sandbox_calls,
        )
        await self._refresh_facts()
        listing = self._parts.runtime_events.corrected(await self._worker.run(listed, context.runtime))
        self.connected, self._outage_reported, self.failure = True, False, ""
        turns = TimeSlices()
        self._resolve_lost_creates(listing, request.change)
        self._end_relayed(listing, request.ended_sandbox_calls)
        await self._update_phases(listing, request, turns)
        await turns.turn()
        await self.adoption.adopt(self._unknown(listing), listing, request.change)
        await turns.now()
        if not context.reconciled.is_set():
            self._learn_labels(listing)
            await turns.through(self._parts.call_tracker.register_suspected_calls())
        await turns.turn()
        self._parts.runtime_events.caught_up()
        if not listing.unread_pods and not listing.unread_containers:
            context.store.handle(RuntimeListed(listing.pods, listing.containers, request.change))
        if applies_to(context.state, None):
            await self._parts.confinement.confine_orphaned_calls()
            await self._reconcile_kernel(listing, request.change)
        else:
            context.forget_errors()
            self._missing_cgroups.report(())
            await self._additional_job(self._parts.quotas.once())  # those of pods that were enforced
        context.telemetry.count(metrics.RECONCILES)
        context.telemetry.resolved(NOT_RECONCILED)
        if not context.reconciled.is_set():
            self._end_recovery()

    async def _refresh_facts(self) -> None:
        """Read the hardware, kubelet's CPUs and the policy; also the runtime's version, if it was away."""
        if not self.connected:
            self.runtime_version = await self._worker.run(self._context.runtime.version)
            await self._parts.cgroup_locator.query_cgroup_driver(self._worker)
        await self._parts.hotplug.reread()
        await self._parts.kubelet_cpus.refresh(self._worker)
        await self._parts.node_policy.refresh(self._worker)

    def _end_relayed(self, listing: Listing, ended_sandbox_calls: frozenset[str]) -> None:
        """Record what became of sandboxes whose calls an earlier daemon relayed, if the list shows it."""
        if listing.unread_pods:
            return
        for token in ended_sandbox_calls:
            self._parts.sandboxes.resolve_relayed(token, listing.pods.values())
        self._parts.call_tracker.former_calls.ended_sandbox_calls -= ended_sandbox_calls

    def _unknown(self, listing: Listing) -> list[RuntimeContainer]:
        """Return the listed containers that the state has neither by id nor as creates without an answer."""
        containers = self._context.state.containers
        new = [c for c in listing.containers.values() if c.id not in containers]
        creating = {
            (c.pod.sandbox_id, c.name, c.attempt) for c in containers.values() if c.phase is Phase.CREATING
        }
        return [
            c
            for c in new
            if c.phase is not Phase.EXITED
            and (c.sandbox_id, c.name, c.attempt) not in creating
            and not listing.is_dead(c)
        ]

    def _end_recovery(self) -> None:
        """End the recovery after a start of the daemon: calls that need a decision wait no longer."""
        context = self._context
        self._mark_reconciled()
        self._sync_all()
        applied = applies_to(context.state, None)
        context.telemetry.event(
            "reconciled with the runtime",
            runtime=self.runtime_version,
            containers=len(context.state.containers),
            owners=len(context.state.owners) if applied else None,
            sharedPool=context.state.pools.shared if applied else None,
        )

    def _learn_labels(self, listing: Listing) -> None:
        """Learn the labels of pods that were read from a ledger without labels."""
        context = self._context
        for sandbox_id, seen in listing.pods.items():
            pod = context.state.pods.get(sandbox_id)
            if pod is not None and not pod.labels and (labels := selectable_labels(seen.labels)):
                context.store.handle(PodLearned(structs.replace(pod, labels=labels)))
        context.enforcement_step_due.set()

    def _sync_all(self) -> None:
        """Compare each running container once: the runtime or systemd may have an older cpuset."""
        context = self._context
        running = [c.id for c in context.state.containers.values() if c.phase is Phase.RUNNING]
        context.sync_later(*running)
        self._parts.unit_properties.changed(running)

    async def _reconcile_kernel(self, listing: Listing, began: int) -> None:
        """Write what differs in the kernel, and report running containers without a cgroup."""
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

    # -- parts of a reconcile -----------------------------------------------------------------------------

    def _resolve_lost_creates(self, listing: Listing, began: int) -> None:
        """Find out how creates ended if their answer was lost."""
        context = self._context
        listed = {(c.sandbox_id, c.name, c.attempt): c.id for c in listing.containers.values()}
        for token, since in context.state.runtime.lost_creates.items():
            container = context.state.containers.get(token)
            if container is None:
                self._parts.lifecycle.failed(token)
                continue
            found = listed.get((container.pod.sandbox_id, container.name, container.attempt))
            if found is not None and not context.state.runtime.changes.is_unchanged(found, began):
                continue  # it may have been removed since: the next list decides
            if found is not None and found not in context.state.containers:
                self._parts.lifecycle.created(token, found)
            elif listing.unread_containers:
                continue  # it may be one of the entries that could not be read
            elif self._is_late(token, since) or self._is_over(container, listing):
                self._parts.lifecycle.failed(token)

    def _is_late(self, token: str, since: float) -> bool:
        """Return whether a create without an answer would have been carried out by now."""
        since = self._parts.call_tracker.former_calls.lost_since(token, since)
        return self._context.clock() - since > GRACE_S

    def _is_over(self, container: Container, listing: Listing) -> bool:
        """Return whether a create that was recorded before a crash can no longer succeed.

        That is so if its sandbox has ended or is gone. The list shows this only in the first reconcile:
        later, a list may be older than the sandbox of a create.
        """
        sandbox_id = container.pod.sandbox_id
        pod = listing.pods.get(sandbox_id)
        over = listing.lacks_pod(sandbox_id) if pod is None else not pod.ready
        return not self._context.reconciled.is_set() and over

    async def _update_phases(self, listing: Listing, request: ListRequest, turns: TimeSlices) -> None:
        """Update the phases in the state from the list, with turns of the event loop in between.

        A list is already old when it arrives. So it is ignored for containers that have changed since it was
        requested, and only a container that was known at that time can have vanished.
        """
        context = self._context
        # A container that was created while its sandbox was stopped never starts, and must keep no CPUs.
        phases = {
            i: Phase.EXITED if listing.is_dead(c) else phase
            for i, c in listing.containers.items()
            if (phase := c.phase) is not None
        }

        def phase_of(container_id: str) -> Phase | None:
            return (
                phases.get(container_id)
                if context.state.runtime.changes.is_unchanged(container_id, request.change)
                else None
            )

        await turns.through(self._parts.call_tracker.end_orphans(phase_of, request.at))
        await self._remove_absent([i for i in request.containers if listing.lacks_container(i)], turns)
        for container_id, phase in phases.items():
            await turns.turn()
            self._take_phase(container_id, phase, request.change)
        await self._update_sandboxes(listing, request.pods, turns)

    async def _remove_absent(self, ids: list[str], turns: TimeSlices) -> None:
        """Remove containers that the runtime no longer has, a few in one turn of the event loop."""
        for at in range(0, len(ids), REMOVED_AT_ONCE):
            containers = self._context.state.containers
            batch = [i for i in ids[at : at + REMOVED_AT_ONCE] if i in containers]
            self._parts.lifecycle.removed([i for i in batch if containers[i].phase is not Phase.CREATING])
            await turns.turn()

    def _take_phase(self, container_id: str, phase: Phase, began: int) -> None:
        """Record the phase that the list has for a container, unless the state is newer."""
        context = self._context
        recorded = context.state.containers.get(container_id)
        if (
            recorded is None
            or not context.state.runtime.changes.is_unchanged(container_id, began)
            or context.state.inflight.of(container_id)
        ):
            return
        if recorded.phase is Phase.EXITED and phase is not Phase.EXITED:
            # The container lives after all: it is adopted like an unknown one.
            self._parts.lifecycle.removed([container_id])
            context.store.handle(ContainerIsBack(container_id))
        elif not (recorded.phase is Phase.RUNNING and phase is Phase.CREATED):
            self._parts.lifecycle.phase(container_id, phase)

    async def _update_sandboxes(self, listing: Listing, known: frozenset[str], turns: TimeSlices) -> None:
        """Record which sandboxes have stopped or are missing in the list."""
        # A sandbox's own process may die before its containers, which keep their CPUs until they end.
        alive = {c.sandbox_id for c in listing.containers.values() if c.phase is Phase.RUNNING}
        for sandbox_id in known:
            await turns.turn()
            pod = listing.pods.get(sandbox_id)
            if pod is None:
                if listing.lacks_pod(sandbox_id):
                    self._parts.sandboxes.handle_missing(sandbox_id, listing.pods.values())
            elif not pod.ready and sandbox_id not in alive:
                self._parts.sandboxes.stopped(sandbox_id)

    def close(self) -> None:
        """End the worker's threads."""
        self._worker.close()
