"""Adopts unknown containers: they were created without passing through the proxy, or before it started.

The runtime's list shows neither the CPUs nor the cgroup of a container. So the runtime is queried for the
status of each container, in batches. Then ``engine.adoption`` assigns them the CPUs that they run on, and the
ledger records it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from msgspec import structs

from proxy.allocation.memory.request import huge_pages
from proxy.engine.admission import sum_requests
from proxy.engine.adoption import parse_cpus
from proxy.engine.container_create import Plan
from proxy.engine.container_events import ContainerFound
from proxy.engine.enforcement import applies_to
from proxy.engine.pod_events import PodLearned
from proxy.executor.background import TimeSlices, Worker
from proxy.executor.bad_input import NOT_AS_REQUESTED
from proxy.executor.context import NodeContext
from proxy.executor.create_decisions import CreateDecisions
from proxy.executor.fact_lookup import KubeletCpus
from proxy.executor.listing import Listing, listed
from proxy.executor.runtime_events import RuntimeEvents
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.defects import InputDefect
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.explanation import FOUND
from proxy.model.machine import Bounds
from proxy.model.workload import Container, KubeQos, Phase, Pod, Pool, Request
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.facts import parent_of, pod_facts
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

SILENT_LIMIT = 3
"""After this many status calls in a row without an answer, the runtime counts as unreachable."""
ADOPT_AT_ONCE = 64
"""Containers that are looked up, adopted and recorded together, before the event loop gets a turn."""
saved_cpus = functools.lru_cache(maxsize=64)(parse_cpus)
"""Parse the CPUs that the runtime has saved; None if invalid. Most containers have the same."""


def by_pod(found: list[RuntimeContainer]) -> Iterator[list[RuntimeContainer]]:
    """Yield containers in batches; the containers of one sandbox are in the same batch."""
    sandboxes: dict[str, list[RuntimeContainer]] = {}
    for container in found:
        sandboxes.setdefault(container.sandbox_id, []).append(container)
    batch: list[RuntimeContainer] = []
    for containers in sandboxes.values():
        batch += containers
        if len(batch) >= ADOPT_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def request_in(detail: RuntimeDetail) -> Request:
    """Return a container's requests and limits, as the runtime reports them."""
    return Request(
        detail.cpu_shares,
        detail.cpu_quota,
        detail.cpu_period,
        detail.memory_limit,
        detail.cpuset_cpus,
        detail.cpuset_mems,
        huge_pages(detail.hugepage_limits),
    )


def listed_pod(listed: RuntimePod, cgroups_path: str, bounds: Bounds) -> Pod:
    """Return a pod as the runtime lists it.

    Args:
        listed: Its sandbox.
        cgroups_path: ``linux.cgroupsPath`` of one of its containers; empty if unknown.
        bounds: CPUs and NUMA nodes that its annotations may name.
    """
    pod = pod_facts(
        listed.id,
        listed.uid,
        listed.namespace,
        listed.name,
        listed.attempt,
        listed.labels,
        listed.annotations,
        parent_of(cgroups_path),
        bounds,
    )
    if not cgroups_path:
        # Without a cgroup parent the Kubernetes QoS class is unknown, and "Guaranteed" might be wrong.
        pod = structs.replace(pod, kube_qos=KubeQos.BURSTABLE)
    return pod


def _shares(request: Request) -> int:
    return request.cpu_shares


class Adoption:
    """Queries the runtime about unknown containers and adopts them."""

    def __init__(
        self,
        context: NodeContext,
        creates: CreateDecisions,
        kubelet_cpus: KubeletCpus,
        runtime_events: RuntimeEvents,
        worker: Worker,
        lookups: Worker,
    ) -> None:
        """Prepare; nothing is requested yet.

        Args:
            context: The node with the containers to adopt.
            creates: Keeps records of decisions.
            kubelet_cpus: Reads the assignments of kubelet's CPU manager, before CPUs are taken.
            runtime_events: Corrects lists by the exit events that have arrived.
            worker: Makes the requests of a reconcile.
            lookups: Makes the requests for which a client's call waits, so that the call does not wait for a
                reconcile.
        """
        self._context = context
        self._creates = creates
        self._kubelet_cpus = kubelet_cpus
        self._runtime_events = runtime_events
        self._worker = worker
        self._lookups = lookups

    async def adopt_one(self, container_id: str, *, strict: bool = False) -> bool:
        """Adopt one unknown container that a call names.

        Args:
            container_id: Its id.
            strict: Whether the call must not continue without an answer of the runtime.

        Returns:
            True if the container is known now.

        Raises:
            UnavailableError: ``strict`` is set, and the runtime does not answer.
        """
        context = self._context
        began = context.state.runtime.changes.number
        try:
            listing = await self._lookups.run(listed, context.runtime, container_id)
            listing = self._runtime_events.corrected(listing)
            needed = container_id if strict else ""
            await self._adopt(list(listing.containers.values()), listing, began, self._lookups, needed)
        except (UnavailableError, RuntimeCallError) as error:
            if strict and isinstance(error, UnavailableError):
                raise
            context.telemetry.problem("cannot adopt a container", containerID=container_id, err=error)
        return container_id in context.state.containers

    async def adopt(self, found: list[RuntimeContainer], listing: Listing, began: int) -> None:
        """Adopt containers, if their pod is in the list and the runtime returns their status.

        Args:
            found: The containers, from the list.
            listing: The list.
            began: The number of the last change when the list was requested: a container that has changed
                since (for example, has ended) is not adopted.

        Raises:
            UnavailableError: The runtime does not answer any more.
        """
        await self._adopt(found, listing, began, self._worker)

    async def _adopt(
        self, found: list[RuntimeContainer], listing: Listing, began: int, worker: Worker, needed: str = ""
    ) -> None:
        context = self._context
        if found:
            await self._kubelet_cpus.reread()
        for of_pod in by_pod(found):
            container_ids = [*(c.id for c in of_pod), *self._ended_siblings(of_pod, listing)]
            details = await worker.run(self._details, container_ids, needed)
            totals = self._totals(of_pod, listing, details)
            turns = TimeSlices()
            for seen in of_pod:
                await turns.turn()
                pod, detail = listing.pods.get(seen.sandbox_id), details.get(seen.id)
                new = seen.id not in context.state.containers and context.state.runtime.changes.is_unchanged(
                    seen.id, began
                )
                if (
                    pod is not None
                    and detail is not None
                    and new
                    and context.state.runtime.changes.is_unchanged(pod.id, began)
                ):
                    self._try_take_in(seen, pod, detail, totals.get(pod.id))
            await context.ledger_writer.flush()

    def _totals(
        self, containers: list[RuntimeContainer], listing: Listing, details: Mapping[str, RuntimeDetail]
    ) -> dict[str, Request]:
        """Add up the known requests of the containers of each sandbox.

        Of the ended containers, only the one with the largest request counts. It may be a container that
        crashes again and again alongside the others, or an init container. For an init container, the
        scheduler has counted the larger of its request and the sum of the others.
        """
        known = {c.id: c.request for c in self._context.state.containers.values()}
        known.update({i: request_in(detail) for i, detail in details.items()})
        live: dict[str, list[Request]] = {c.sandbox_id: [] for c in containers}
        ended: dict[str, list[Request]] = {}
        for seen in listing.containers.values():
            if seen.sandbox_id in live and (request := known.get(seen.id)) is not None:
                over = seen.phase is Phase.EXITED
                (ended.setdefault(seen.sandbox_id, []) if over else live[seen.sandbox_id]).append(request)
        return {
            sandbox_id: sum_requests([*requests, *sorted(ended.get(sandbox_id, ()), key=_shares)[-1:]])
            for sandbox_id, requests in live.items()
        }

    def _ended_siblings(self, adopted: list[RuntimeContainer], listing: Listing) -> list[str]:
        """Return the ids of the ended containers in sandboxes with an annotation that names CPUs."""
        here = {c.sandbox_id for c in adopted}
        named = {i for i in here if (pod := listing.pods.get(i)) and RESOURCE_STATUS in pod.annotations}
        containers = listing.containers.values() if named else ()
        return [c.id for c in containers if c.sandbox_id in named and c.phase is Phase.EXITED]

    def _details(self, ids: list[str], needed: str = "") -> dict[str, RuntimeDetail]:
        """Return the verbose status of containers by id; runs in the worker.

        A container that has just gone, or whose status call hangs, is left for the next reconcile. A hanging
        call for the needed container raises ``UnavailableError``, and so do ``SILENT_LIMIT`` hanging calls in
        a row.
        """
        found: dict[str, RuntimeDetail] = {}
        silent = 0
        for container_id in ids:
            try:
                found[container_id] = self._context.runtime.detail(container_id)
                silent = 0
            except RuntimeCallError:
                continue
            except UnavailableError as error:
                silent += 1
                if silent >= SILENT_LIMIT or container_id == needed:
                    raise
                self._context.telemetry.problem("cannot read a container from the runtime", err=error)
        return found

    def _pod(self, listed: RuntimePod, detail: RuntimeDetail) -> Pod:
        known = self._context.state.pods.get(listed.id)
        if known is not None and known.cgroup_parent:
            return known
        return listed_pod(listed, detail.cgroups_path, self._context.state.node.machine.bounds)

    def _try_take_in(
        self, seen: RuntimeContainer, pod: RuntimePod, detail: RuntimeDetail, total: Request | None
    ) -> None:
        """Adopt a container; a fault that one container causes must not affect the others."""
        try:
            known = self._pod(pod, detail)
            if known.cpuset is not None and known.total is None:
                known = structs.replace(known, total=total)
            self._take_in(seen, known, detail)
        except Exception as error:  # noqa: BLE001  see above
            self._context.report_internal_error(error)
            self._context.telemetry.problem(
                "cannot adopt a container", containerID=seen.id, err=type(error).__name__
            )

    def _take_in(self, seen: RuntimeContainer, pod: Pod, detail: RuntimeDetail) -> None:
        context = self._context
        if pod.sandbox_id not in context.state.pods:
            context.store.handle(PodLearned(pod))
        request = request_in(detail)
        phase = seen.phase or Phase.RUNNING
        saved = saved_cpus(detail.cpuset_cpus)
        found = ContainerFound(seen.id, pod, seen.name, seen.attempt, request, phase, saved)
        decided = context.store.decide(found)
        assert decided is not None
        plan = decided.plan
        assert plan.container is not None
        context.telemetry.count(metrics.CONTAINERS_ADOPTED)
        if not context.history.exists_despite_refusal(plan.container):  # if it does, it is reported already
            self._report(plan, plan.container)

    def _report(self, plan: Plan, container: Container) -> None:
        """Record and log the plan for a container."""
        context, pod = self._context, container.pod
        applied = applies_to(context.state, pod)
        self._creates.remember(plan, applied=applied, event=FOUND)
        context.bad_input.report_decision(pod, plan)
        context.bad_input.report_admission_limit(
            pod, plan.limit, plan.problem, admitted=True, applied=applied
        )
        if plan.problem and not isinstance(plan.problem, InputDefect):
            context.telemetry.problem(NOT_AS_REQUESTED, **subject(container), reason=plan.problem)
        placement, telemetry = container.placement, context.telemetry
        log = telemetry.event if placement.pool is Pool.OWN else telemetry.debug
        cpus, reason = context.state.desired_cpus(container), placement.reasons[0]
        if applied:
            log("adopted a container", **subject(container), cpus=cpus, reason=reason)
        else:
            log("would place a running container", **subject(container), cpus=cpus, reason=reason)
