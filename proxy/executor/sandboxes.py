"""Decides about pods before their sandboxes are created, and records what happens to the sandboxes.

``proxy.engine.sandboxes`` decides what is recorded and what is released when a sandbox runs, stops or is
gone; this module counts and reports it, and updates the history.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.allocation.devices.allocate import QueryPreference
from proxy.allocation.memory.accounts import inits_before
from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences
from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import PodDecided
from proxy.engine.pod_events import (
    PodChangedByHook,
    SandboxFailed,
    SandboxRemoved,
    SandboxRequested,
    SandboxRunning,
    SandboxStopped,
)
from proxy.executor.bad_input import NOT_AS_REQUESTED
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.context import NodeContext
from proxy.executor.kernel_writes import KernelWrites
from proxy.model.workload import Phase, Pod, Request, Verdict
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.runtime_ports import RuntimePod


class Sandboxes:
    """The sandboxes of an executor."""

    def __init__(self, context: NodeContext, lifecycle: ContainerLifecycle, writes: KernelWrites) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._writes = writes

    def admit(self, pod: Pod, total: Request) -> PodDecided:
        """Decide about a pod before its sandbox is created; the resources set aside for it are taken at once.

        Returns:
            The decision, with the pod under a token. ``running`` or ``failed`` must be called later.
        """
        decided = self.admit_or_query(pod, total, NO_PREFERENCES)
        assert type(decided) is PodDecided
        return decided

    def admit_or_query(
        self, pod: Pod, total: Request, preferred: Preferences
    ) -> PodDecided | QueryPreference:
        """Decide as ``admit`` does, or return the query that a device plugin has to answer first."""
        context = self._context
        token = context.token("pod")
        context.bad_input.report_defects(pod)
        requested = SandboxRequested(structs.replace(pod, sandbox_id=token), total, preferred)
        decided = context.store.handle(requested)[-1]
        if type(decided) is QueryPreference:
            return decided
        assert type(decided) is PodDecided
        admission = decided.admission
        admitted, applied = admission.verdict.admitted, applies_to(context.state, pod)
        if admission.explanation is not None:
            why = structs.replace(admission.explanation, applied=applied)
            context.history.note(context.wall_clock(), why, token if admitted or not applied else "")
        problem = admission.problem or admission.verdict.operator_message
        context.bad_input.report_admission_limit(
            pod, admission.limit, problem, admitted=admitted, applied=applied
        )
        if admission.problem and admission.limit is None and admitted:
            context.telemetry.problem(NOT_AS_REQUESTED, pod=pod.ref, reason=admission.problem)
        if not admitted:
            self._report_refusal(pod, admission.verdict, applied=applied)
        elif (aside := admission.pod.reserved_for_pod) is not None and applied:
            context.telemetry.event("reserved CPUs and memory for a pod", pod=pod.ref, cpus=aside.cpus)
        elif aside is not None:
            context.telemetry.event("would reserve CPUs and memory for a pod", pod=pod.ref, cpus=aside.cpus)
        return decided

    def _report_refusal(self, pod: Pod, verdict: Verdict, *, applied: bool) -> None:
        context = self._context
        context.telemetry.count(metrics.PODS_REFUSED if applied else metrics.PODS_WOULD_REFUSE)
        context.rejections.rejected(pod, "", verdict, applied=applied)

    def record_hook_change(self, pod: Pod) -> Pod:
        """Record a pod that hooks have changed while its sandbox is being made.

        Another process may get the answer, and kubelet's later calls show the pod as it was.

        Args:
            pod: The pod; its sandbox has a token if it was admitted.

        Returns:
            The pod under a token. ``running`` or ``failed`` must be called later.
        """
        if not pod.sandbox_id:
            pod = structs.replace(pod, sandbox_id=self._context.token("pod"))
        self._context.store.handle(PodChangedByHook(pod))
        return pod

    def failed(self, token: str) -> None:
        """Record that creating a sandbox failed, or may have: what was reserved for it is free again."""
        context = self._context
        context.history.removed(token)
        context.store.handle(SandboxFailed(token))

    def running(self, pod: Pod, token: str = "", *, is_relayed_elsewhere: bool = False) -> None:
        """Record that a sandbox was created; what an earlier sandbox of the same pod still holds is released.

        Args:
            pod: The pod with the sandbox's id.
            token: The token under which it was admitted.
            is_relayed_elsewhere: Whether another process relayed the call, so that its answer did not come
                here.
        """
        context = self._context
        context.bad_input.report_defects(pod)
        context.rejections.sandbox_runs(pod, applied=applies_to(context.state, pod))
        context.history.renamed(token, pod.sandbox_id)
        context.store.handle(SandboxRunning(pod, token, is_relayed_elsewhere))
        if context.state.owners and applies_to(context.state, None):
            context.spawn(self._writes.clear_sandboxes())

    def end_earlier_inits(self, pod: Pod, name: str) -> None:
        """Record that a container is requested: init containers before it have exited, reported or not."""
        if pod.requests is None:
            return
        ended = inits_before(pod.requests, name)
        for container in self._context.state.in_sandbox(pod.sandbox_id) if ended else ():
            if container.name in ended and container.phase is Phase.RUNNING:
                self._lifecycle.phase(container.id, Phase.EXITED)

    def stopped(self, sandbox_id: str) -> None:
        """Record that a sandbox was stopped: nothing in it runs any more."""
        self._context.history.removed(sandbox_id)
        self._context.store.handle(SandboxStopped(sandbox_id))

    def removed(self, sandbox_id: str) -> None:
        """Record that a sandbox is gone, and its containers with it."""
        context = self._context
        for container in context.state.in_sandbox(sandbox_id):
            if container.phase is not Phase.CREATING:
                context.history.removed(container.id)
        context.history.removed(sandbox_id)
        context.store.handle(SandboxRemoved(sandbox_id))

    def handle_missing(self, sandbox_id: str, listed: Iterable[RuntimePod]) -> None:
        """Handle a sandbox that is not listed: it is gone, or got its id while the daemon was down."""
        context = self._context
        pod = context.state.pods.get(sandbox_id)
        if pod is not None and (found := _listed_as(pod, listed)):
            recorded = context.state.pods.get(found)
            if recorded is None or recorded.reserved_for_pod is None:
                self.running(structs.replace(pod, sandbox_id=found))
        self.removed(sandbox_id)

    def resolve_relayed(self, token: str, listed: Iterable[RuntimePod]) -> None:
        """Find out how the creation of a sandbox has ended, if another process had the answer.

        Args:
            token: The token under which it was admitted.
            listed: The runtime's list, requested after the call was over.
        """
        pod = self._context.state.pods.get(token)
        if pod is None:
            return  # a create has named the sandbox
        if found := _listed_as(pod, listed):
            self.running(structs.replace(pod, sandbox_id=found), token, is_relayed_elsewhere=True)
        else:
            self.failed(token)

    def named_by_create(self, pod: Pod) -> Pod:
        """Record a sandbox that was unknown before a create in it: another process may have had the answer.

        Args:
            pod: The pod as the create describes it.

        Returns:
            The pod with what was set aside for it, and with what hooks have changed of it.
        """
        state = self._context.state
        admitted = (state.pods[token] for token in state.runtime.arriving_sandboxes if token in state.pods)
        recorded = next((p for p in admitted if (p.uid, p.attempt) == (pod.uid, pod.attempt)), None)
        if recorded is not None:
            pod = structs.replace(recorded, sandbox_id=pod.sandbox_id)
            self.running(pod, recorded.sandbox_id, is_relayed_elsewhere=True)
        return pod


def _listed_as(pod: Pod, listed: Iterable[RuntimePod]) -> str:
    """Return the id of a pod's sandbox in the runtime's list; empty if it is not there, or not ready."""
    identity = (pod.uid, pod.namespace, pod.name, pod.attempt)  # a client may send no uid
    same = (p.id for p in listed if p.ready and (p.uid, p.namespace, p.name, p.attempt) == identity)
    return next(same, "")
