"""Carries out what hooks request: in the state, in the ledger, in the kernel and at the runtime.

``proxy.engine.hook_narrowing`` decides which part of a request is possible.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from proxy.engine.container_events import ContainersUpdated, CpusAssigned
from proxy.engine.explain_record import explain
from proxy.engine.hook_narrowing import Narrowing, narrowed, unmet_hook_limit, without_extra_cpus
from proxy.engine.memory_resize import with_memory_limit
from proxy.engine.node_effects import Change
from proxy.engine.pod_admission import EVENT
from proxy.executor.call_tracker import report_overcommitted_memory
from proxy.executor.context import NodeContext
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.observer import Observer
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase, Pod, Request, Verdict
from proxy.telemetry.port import subject


class HookOverrides(Observer):
    """Applies the requests of hooks to containers, and reports a request of which nothing is in effect."""

    def __init__(self, context: NodeContext, writes: KernelWrites) -> None:
        self._context = context
        self._writes = writes

    def changed(self, change: Change) -> None:
        """See ``Observer``."""
        rules_differ = change.before.node is not change.after.node
        self._report_lost(change.after.containers if rules_differ else change.shrink)

    def narrow(self, container_id: str, narrowing: Narrowing, seen: CpuSet | None = None) -> str:
        """Narrow a container as hooks request, from now on.

        Args:
            container_id: Its id, or the token of its create.
            narrowing: What hooks request.
            seen: See ``engine.hook_narrowing.narrowed``.

        Returns:
            What cannot be done, as text; empty if everything is done.
        """
        context = self._context
        container = context.state.containers.get(container_id)
        if container is None or container.phase is Phase.EXITED:
            return f"cannot narrow container {container_id} by hook {narrowing.by}: it is not there"
        new, problem = narrowed(context.state, container, narrowing, seen)
        if new is container:
            return problem
        # A container that is being created is recorded when the runtime has given it an id.
        exists = new.phase is not Phase.CREATING
        context.store.handle(ContainersUpdated((new,), exists))
        fresh = [reason for reason in new.placement.reasons if reason not in container.placement.reasons]
        context.history.amend(container_id, "; ".join(fresh) or "hooks do not narrow it any more")
        if exists:
            self._writes.write_soon([container_id])
        context.store.handle(CpusAssigned((container_id,)))
        return problem

    def limit_memory(self, token: str, limit: int) -> None:
        """Record the memory limit that hooks request for a container that is being created.

        Args:
            token: The token of its create.
            limit: Bytes; negative for no limit.
        """
        context = self._context
        container = context.state.containers.get(token)
        if container is None or container.phase is not Phase.CREATING:
            return
        new = with_memory_limit(context.state, container, limit)
        if new is container:
            return
        context.store.handle(ContainersUpdated((new,), recorded=False))
        if fresh := [reason for reason in new.placement.reasons if reason not in container.placement.reasons]:
            context.history.amend(token, "; ".join(fresh))
        if new.placement.blocks:
            report_overcommitted_memory(context)

    def set_quota(self, token: str, quota: int) -> None:
        """Record the CFS quota that hooks set for an owner that is being created: it is restored later.

        Args:
            token: The token of its create.
            quota: Microseconds; negative for none.
        """
        context = self._context
        container = context.state.containers.get(token)
        if container is None or container.phase is not Phase.CREATING or not container.owns_cpus:
            return
        new = structs.replace(container, placement=structs.replace(container.placement, hook_quota=quota))
        context.store.handle(ContainersUpdated((new,), recorded=False))

    def refused_pod(self, pod: Pod, message: str) -> None:
        """Record for ``explain`` that hooks have rejected a pod; nothing was decided for it."""
        context = self._context
        verdict = Verdict(GrpcStatus.FAILED_PRECONDITION, "RefusedByHook", message)
        context.history.note(context.wall_clock(), explain(EVENT, pod, "", pod.attempt, Request(), verdict))

    def withdraw_extra_cpus(self) -> None:
        """Withdraw owned CPUs that hooks gave to other containers while the configuration allowed it."""
        context = self._context
        containers = context.state.containers.values()
        inside = [
            without_extra_cpus(container) for container in containers if container.placement.hook_extra_cpus
        ]
        if not inside:
            return
        context.store.handle(ContainersUpdated(tuple(inside)))
        for container in inside:
            context.telemetry.event(
                "took back CPUs that a hook gave: hooks.ownedCPUs is false", **subject(container)
            )
        self._report_lost([container.id for container in inside])

    def _report_lost(self, ids: Iterable[str]) -> None:
        """Report the containers that have nothing left of the CPUs to which hooks have narrowed them."""
        context = self._context
        for container_id in ids:
            container = context.state.containers.get(container_id)
            if container is not None and (text := unmet_hook_limit(context.state, container)):
                context.telemetry.problem(
                    "cannot keep a container narrowed as hooks request: it has all that it has without hooks",
                    **subject(container),
                    reason=text,
                )
