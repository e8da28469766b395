"""Pod sandboxes as they are created and removed, and the decisions about a pod as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.allocation.memory.accounts import inits_before
from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences
from proxy.engine.admit import with_earlier_decision
from proxy.engine.call_answers import AskPreference
from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import PodDecided
from proxy.engine.pod_events import (
    SandboxFailed,
    SandboxRemoved,
    SandboxRequested,
    SandboxRunning,
    SandboxStopped,
)
from proxy.executor.bad_input import NOT_AS_ASKED
from proxy.executor.context import NodeContext
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.lifecycle import Lifecycle
from proxy.model.workload import Phase, Pod, Request, Verdict
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.runtime_ports import RuntimePod


class Sandboxes:
    """The sandboxes of an executor."""

    def __init__(self, context: NodeContext, lifecycle: Lifecycle, writes: KernelWrites) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._writes = writes

    def admit(self, pod: Pod, total: Request) -> PodDecided:
        """Decide about a pod before its sandbox is created; what is reserved for it is taken at once.

        Returns:
            The decision, with the pod under a token. ``running`` or ``failed`` must be called later.
        """
        decided = self.admit_or_ask(pod, total, NO_PREFERENCES)
        assert type(decided) is PodDecided
        return decided

    def admit_or_ask(self, pod: Pod, total: Request, preferred: Preferences) -> PodDecided | AskPreference:
        """Decide as ``admit`` does, or give the question that a device plug-in has to answer first."""
        context = self._context
        token = context.token("pod")
        context.bad_input.see(pod)
        requested = SandboxRequested(structs.replace(pod, sandbox_id=token), total, preferred)
        decided = context.store.handle(requested)[-1]
        if type(decided) is AskPreference:
            return decided
        assert type(decided) is PodDecided
        admission = decided.admission
        admitted, applied = admission.verdict.admitted, applies_to(context.state, pod)
        if admission.explanation is not None:
            why = structs.replace(admission.explanation, applied=applied)
            context.history.note(context.wall(), why, token if admitted or not applied else "")
        words = admission.problem or admission.verdict.operator_message
        context.bad_input.limited(pod, admission.limit, words, admitted=admitted, applied=applied)
        if admission.problem and admission.limit is None and admitted:
            context.telemetry.problem(NOT_AS_ASKED, pod=pod.ref, reason=admission.problem)
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

    def failed(self, token: str) -> None:
        """Note that creating a sandbox failed, or may have: what was reserved for it is free again."""
        context = self._context
        context.history.gone(token)
        context.store.handle(SandboxFailed(token))

    def running(self, pod: Pod, token: str = "") -> None:
        """Note that a sandbox was created; what an earlier sandbox of the same pod still holds is released.

        Args:
            pod: The pod with the sandbox's id.
            token: The token under which it was admitted.
        """
        context = self._context
        context.bad_input.see(pod)
        context.rejections.sandbox_runs(pod, applied=applies_to(context.state, pod))
        context.history.renamed(token, pod.sandbox_id)
        context.store.handle(SandboxRunning(pod, token))
        if context.state.owners and applies_to(context.state, None):
            context.spawn(self._writes.clear_sandboxes())

    def moved_on(self, pod: Pod, name: str) -> None:
        """Note that a container is requested: the init containers before it have exited, reported or not."""
        if pod.asks is None:
            return
        ended = inits_before(pod.asks, name)
        for container in self._context.state.in_sandbox(pod.sandbox_id) if ended else ():
            if container.name in ended and container.phase is Phase.RUNNING:
                self._lifecycle.phase(container.id, Phase.EXITED)

    def stopped(self, sandbox_id: str) -> None:
        """Note that a sandbox was stopped: nothing in it runs any more."""
        self._context.history.gone(sandbox_id)
        self._context.store.handle(SandboxStopped(sandbox_id))

    def removed(self, sandbox_id: str) -> None:
        """Note that a sandbox is gone, and its containers with it."""
        context = self._context
        for container in context.state.in_sandbox(sandbox_id):
            if container.phase is not Phase.CREATING:
                context.history.gone(container.id)
        context.history.gone(sandbox_id)
        context.store.handle(SandboxRemoved(sandbox_id))

    def missing(self, sandbox_id: str, listed: Iterable[RuntimePod]) -> None:
        """Handle a sandbox that is not listed: it is gone, or got its id while the daemon was down."""
        context = self._context
        pod = context.state.pods.get(sandbox_id)
        if pod is not None and pod.reserved_for_pod is not None:
            found = _listed_as(pod, listed)
            ours = context.state.pods.get(found) if found else None
            if found and (ours is None or ours.reserved_for_pod is None):
                self.running(structs.replace(pod, sandbox_id=found))
        self.removed(sandbox_id)

    def relayed(self, token: str, listed: Iterable[RuntimePod]) -> None:
        """Find out how the making of a sandbox has ended, if another process had the answer.

        Args:
            token: What it was admitted under.
            listed: The runtime's list, requested after the call was over.
        """
        pod = self._context.state.pods.get(token)
        if pod is None:
            return  # a create has named the sandbox
        if found := _listed_as(pod, listed):
            self.running(structs.replace(pod, sandbox_id=found), token)
        else:
            self.failed(token)

    def named_by_create(self, pod: Pod) -> Pod:
        """Take in a sandbox that is not known before a create in it: another process may have had the answer.

        Args:
            pod: The pod as the create describes it.

        Returns:
            The pod with what was set aside for it.
        """
        state = self._context.state
        admitted = (state.pods[token] for token in state.runtime.arriving if token in state.pods)
        ours = next((p for p in admitted if (p.uid, p.attempt) == (pod.uid, pod.attempt)), None)
        if ours is not None:
            pod = with_earlier_decision(pod, ours)
            self.running(pod, ours.sandbox_id)
        return pod


def _listed_as(pod: Pod, listed: Iterable[RuntimePod]) -> str:
    """Return the id of a pod's sandbox in the runtime's list; empty where it is not there, or not ready."""
    same = (p.id for p in listed if (p.uid, p.attempt, p.ready) == (pod.uid, pod.attempt, True))
    return next(same, "")
