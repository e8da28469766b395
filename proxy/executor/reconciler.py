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
from typing import Protocol

from proxy.engine.enforcement import applies_to
from proxy.engine.node_events import RuntimeListed
from proxy.executor.adoption import Adoption
from proxy.executor.background import TimeSlices, Worker
from proxy.executor.confinement import Confinement
from proxy.executor.context import NodeContext
from proxy.executor.create_decisions import CreateDecisions
from proxy.executor.fact_lookup import KubeletCpus
from proxy.executor.kernel_comparison import KernelComparison, KernelParts
from proxy.executor.list_comparison import GRACE_S, ListComparison, ListParts
from proxy.executor.listing import listed
from proxy.executor.machine.hotplug import Hotplug
from proxy.executor.node_policy_sync import NodePolicySync
from proxy.executor.owner_moves import OwnerMoves
from proxy.executor.runtime_events import RuntimeEvents
from proxy.executor.systemd.unit_properties import UnitProperties
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Phase
from proxy.telemetry import metrics

GAP_S = 0.2
AGAIN = Backoff(0.05, 1.0)
"""Seconds before the next reconcile after one that failed."""
NOT_RECONCILED = "cannot reconcile with the runtime"


class ReconcileParts(ListParts, KernelParts, Protocol):
    """The parts of the executor (``node_executor``) that a reconcile uses."""

    creates: CreateDecisions
    kubelet_cpus: KubeletCpus
    node_policy: NodePolicySync
    hotplug: Hotplug
    runtime_events: RuntimeEvents
    confinement: Confinement
    unit_properties: UnitProperties
    owner_moves: OwnerMoves


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
        self._lists = ListComparison(context, parts)
        self._kernel = KernelComparison(context, parts, self._worker)
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
        request = self._lists.request()
        await self._refresh_facts()
        listing = self._parts.runtime_events.corrected(await self._worker.run(listed, context.runtime))
        self.connected, self._outage_reported, self.failure = True, False, ""
        turns = TimeSlices()
        await self._lists.record(listing, request, turns)
        await turns.turn()
        await self.adoption.adopt(self._lists.unknown(listing), listing, request.change)
        await turns.now()
        if not context.reconciled.is_set():
            self._lists.learn_labels(listing)
            await turns.through(self._parts.call_tracker.register_suspected_calls())
        await turns.turn()
        self._parts.runtime_events.caught_up()
        if not listing.unread_pods and not listing.unread_containers:
            context.store.handle(RuntimeListed(listing.pods, listing.containers, request.change))
        if applies_to(context.state, None):
            await self._parts.confinement.confine_orphaned_calls()
            await self._kernel.reconcile(listing, request.change)
        else:
            await self._kernel.reconcile_without_plan()
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

    def _sync_all(self) -> None:
        """Compare each running container once: the runtime or systemd may have an older cpuset."""
        context = self._context
        running = [c.id for c in context.state.containers.values() if c.phase is Phase.RUNNING]
        context.sync_later(*running)
        self._parts.unit_properties.changed(running)

    def close(self) -> None:
        """End the worker's threads."""
        self._worker.close()
