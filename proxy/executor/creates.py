"""Decides sandboxes and creates, takes the CPUs, and records what happens to sandboxes and containers.

The order of a create that gives CPUs to an owner:

    decide (the CPUs are already taken in the state)
    -> ledger: the placement, in flight
    -> wait for calls in flight that carry wider sets (confinement)
    -> kernel: other containers leave the CPUs; this is read back
    -> the request is forwarded; the runtime's id arrives -> ledger: the final placement

The decision is pure and made at once; everything that can block (ledger, kernel, runtime) is done by workers
and awaited. When a create fails, its container is removed from the state again (``Lifecycle``), and the
containers that had moved are moved back. Because every kernel write uses the newest state, plans of
different pods need no lock between them. What is done when CPUs cannot be freed is described in
``proxy.engine.reservation``. What follows from a phase of a container is decided in
``proxy.engine.decisions``; here it is counted, and the history is updated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.allocation.devices.allocate import QueryPreference
from proxy.allocation.memory.accounts import inits_before
from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences
from proxy.engine.call_answers import Forward, ForwardUnchanged
from proxy.engine.container_create import Plan
from proxy.engine.container_events import (
    ContainerCreated,
    ContainersRemoved,
    CreateFailed,
    CreateLost,
    CreateRequested,
    PhaseChanged,
)
from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import PlanDecided, PodDecided
from proxy.engine.pod_events import (
    SandboxExpected,
    SandboxFailed,
    SandboxRemoved,
    SandboxRequested,
    SandboxRunning,
    SandboxStopped,
)
from proxy.executor.bad_input import NOT_AS_REQUESTED
from proxy.executor.context import NodeContext
from proxy.executor.kernel_writes import KernelWrites
from proxy.model.defects import InputDefect
from proxy.model.explanation import CREATE
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pod, Pool, Request, Verdict
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.executor.runtime_ports import RuntimePod


class Creates:
    """Decides creates."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def place(self, pod: Pod, name: str, attempt: int, request: Request) -> PlanDecided:
        """Decide a create and take the CPUs; a reservation must follow where the answer is one."""
        decided = self.place_or_query(pod, name, attempt, request, NO_PREFERENCES)
        assert type(decided) is PlanDecided
        return decided

    def place_or_query(
        self, pod: Pod, name: str, attempt: int, request: Request, preferred: Preferences
    ) -> PlanDecided | QueryPreference:
        """Decide as ``place`` does, or return the query that a device plug-in has to answer first."""
        began = time.perf_counter()
        token = self._context.token("call")
        requested = CreateRequested(pod, name, attempt, request, token, preferred)
        decided = self._context.store.handle(requested)[-1]
        if type(decided) is QueryPreference:
            return decided
        assert type(decided) is PlanDecided
        return self._decided(decided, pod, name, began)

    def _decided(self, decided: PlanDecided, pod: Pod, name: str, began: float) -> PlanDecided:
        """Count, record and log a decision."""
        context, plan = self._context, decided.plan
        if decided.withdrawn:
            context.history.removed(decided.withdrawn)
        context.telemetry.observe(metrics.CREATE_DECISION_SECONDS, time.perf_counter() - began)
        if plan.problem or pod.defects or plan.container is None:
            plan = self._with_problems(plan, pod, name)
        if plan.container is None:
            self._report_refusal(plan, pod, name)
            return decided
        answer = decided.answer
        applied = type(answer) is not ForwardUnchanged
        if not applied:
            context.telemetry.count(metrics.CREATES_WOULD_PLACE)
            context.telemetry.count(metrics.CONTAINERS_WOULD_MOVE, len(plan.shrink))
        elif not decided.withdrawn:  # else it was placed, and counted, before
            context.telemetry.count(metrics.CREATES_PLACED)
        self.report(plan, applied=applied, cpus=answer.sent if type(answer) is Forward else None)
        return decided

    def _report_refusal(self, plan: Plan, pod: Pod, name: str) -> None:
        """Count, record and log a refusal; for a pod to which the plan is not applied, only log it."""
        context = self._context
        applied = applies_to(context.state, pod)
        if plan.explanation is not None:
            context.history.note(context.wall_clock(), structs.replace(plan.explanation, applied=applied))
        context.telemetry.count(metrics.CREATES_REFUSED if applied else metrics.CREATES_WOULD_REFUSE)
        context.rejections.rejected(pod, name, plan.verdict, applied=applied)

    def reject(self, container: Container, verdict: Verdict) -> None:
        """Record, count and report that a container is rejected after it was placed."""
        context = self._context
        context.history.refused(container.id, verdict)
        context.history.removed(container.id)
        context.telemetry.count(metrics.CREATES_REFUSED)
        context.rejections.rejected(container.pod, container.name, verdict)

    def report(self, plan: Plan, *, applied: bool = True, cpus: CpuSet | None = None) -> None:
        """Record and log a placement; that of a container that shares CPUs is logged at debug level only.

        Args:
            plan: The decision.
            applied: Whether the plan is applied to the pod.
            cpus: As for ``remember``.
        """
        context, container = self._context, plan.container
        assert container is not None
        self.remember(plan, applied=applied, cpus=cpus)
        placement, telemetry = container.placement, context.telemetry
        if placement.pool is not Pool.OWN and not telemetry.verbose:
            return
        log = telemetry.event if placement.pool is Pool.OWN else telemetry.debug
        cpus, mems, reason = context.state.desired_cpus(container), placement.mems, placement.reasons[0]
        if applied:
            log("placed", **subject(container), cpus=cpus, mems=mems, reason=reason)
        else:
            log(
                "would place",
                **subject(container),
                cpus=cpus,
                mems=mems,
                reason=reason,
                moves=len(plan.shrink),
            )

    def _with_problems(self, plan: Plan, pod: Pod, name: str) -> Plan:
        """Report what is wrong with a request; returns the plan with that among its reasons."""
        context = self._context
        context.bad_input.report_decision(pod, plan)
        problem = plan.problem or plan.verdict.operator_message
        context.bad_input.report_admission_limit(
            pod,
            plan.limit,
            problem,
            admitted=plan.verdict.admitted,
            applied=applies_to(context.state, pod),
        )
        if not plan.problem:
            return plan
        if not isinstance(plan.problem, InputDefect) and plan.container is not None:
            context.telemetry.problem(NOT_AS_REQUESTED, pod=pod.ref, container=name, reason=plan.problem)
        explanation = plan.explanation
        if (
            explanation is None
            or plan.problem in pod.defects
            or any(plan.problem in reason for reason in explanation.reasons)
        ):
            return plan
        return structs.replace(
            plan, explanation=structs.replace(explanation, reasons=(*explanation.reasons, plan.problem))
        )

    def remember(self, plan: Plan, *, applied: bool, cpus: CpuSet | None = None, event: str = CREATE) -> None:
        """Keep the record of a decision.

        Args:
            plan: The decision.
            applied: Whether the plan is applied to the pod.
            cpus: The CPUs of the container, where they are known; None to look.
            event: Why it was placed.
        """
        context, container, explanation = self._context, plan.container, plan.explanation
        assert container is not None
        if explanation is None:
            cpus = context.store.state.desired_cpus(container) if cpus is None else cpus
            context.history.note_simple(context.wall_clock(), container, cpus, applied=applied, event=event)
        else:
            if not applied or event != explanation.event:
                explanation = structs.replace(explanation, applied=applied, event=event)
            context.history.note(context.wall_clock(), explanation, container.id)


class Lifecycle:
    """Takes containers from one phase to the next."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._store = context.store

    def created(self, token: str, container_id: str, sent: CpuSet | None = None) -> None:
        """Record that the runtime has created the container and given it an id.

        Args:
            token: The id that the container had until now.
            container_id: Its id at the runtime.
            sent: The CPUs that the request named; None where that is not known.
        """
        self._context.history.renamed(token, container_id)
        self._store.handle(ContainerCreated(token, container_id, sent))

    def failed(self, token: str) -> None:
        """Record that the create failed at the runtime: the containers that moved for it go back."""
        if token in self._context.state.containers:
            self._context.telemetry.count(metrics.CREATES_FAILED)
        self.withdrawn(token)

    def withdrawn(self, token: str) -> None:
        """Record that a create that was placed is not sent to the runtime: containers that moved go back."""
        self._context.history.removed(token)
        self._store.handle(CreateFailed(token))

    def uncertain(self, token: str) -> None:
        """Record that a create was cancelled under way: whether the container exists is to be read soon."""
        self._store.handle(CreateLost(token, self._context.clock()))

    def phase(self, container_id: str, phase: Phase) -> None:
        """Record that a container has entered a phase; one that has exited releases its CPUs."""
        self._store.handle(PhaseChanged(container_id, phase))

    def removed(self, ids: Iterable[str]) -> None:
        """Record that containers are gone."""
        ids = tuple(ids)
        self._store.handle(ContainersRemoved(ids))
        for container_id in ids:
            self._context.history.removed(container_id)


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
        decided = self.admit_or_query(pod, total, NO_PREFERENCES)
        assert type(decided) is PodDecided
        return decided

    def admit_or_query(
        self, pod: Pod, total: Request, preferred: Preferences
    ) -> PodDecided | QueryPreference:
        """Decide as ``admit`` does, or return the query that a device plug-in has to answer first."""
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

    def expect(self, pod: Pod) -> Pod:
        """Record a pod that hooks have changed while its sandbox is being made.

        Another process may have the answer, and kubelet's later calls show the pod as it was.

        Args:
            pod: The pod; its sandbox has a token where it was admitted.

        Returns:
            The pod under a token. ``running`` or ``failed`` must be called later.
        """
        if not pod.sandbox_id:
            pod = structs.replace(pod, sandbox_id=self._context.token("pod"))
        self._context.store.handle(SandboxExpected(pod))
        return pod

    def failed(self, token: str) -> None:
        """Record that creating a sandbox failed, or may have: what was reserved for it is free again."""
        context = self._context
        context.history.removed(token)
        context.store.handle(SandboxFailed(token))

    def running(self, pod: Pod, token: str = "", *, is_found: bool = False) -> None:
        """Record that a sandbox was created; what an earlier sandbox of the same pod still holds is released.

        Args:
            pod: The pod with the sandbox's id.
            token: The token under which it was admitted.
            is_found: The answer to its call did not come here.
        """
        context = self._context
        context.bad_input.report_defects(pod)
        context.rejections.sandbox_runs(pod, applied=applies_to(context.state, pod))
        context.history.renamed(token, pod.sandbox_id)
        context.store.handle(SandboxRunning(pod, token, is_found))
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

    def missing(self, sandbox_id: str, listed: Iterable[RuntimePod]) -> None:
        """Handle a sandbox that is not listed: it is gone, or got its id while the daemon was down."""
        context = self._context
        pod = context.state.pods.get(sandbox_id)
        if pod is not None and (found := _listed_as(pod, listed)):
            recorded = context.state.pods.get(found)
            if recorded is None or recorded.reserved_for_pod is None:
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
            self.running(structs.replace(pod, sandbox_id=found), token, is_found=True)
        else:
            self.failed(token)

    def named_by_create(self, pod: Pod) -> Pod:
        """Take in a sandbox that is not known before a create in it: another process may have had the answer.

        Args:
            pod: The pod as the create describes it.

        Returns:
            The pod with what was set aside for it, and with what hooks have changed of it.
        """
        state = self._context.state
        admitted = (state.pods[token] for token in state.runtime.arriving if token in state.pods)
        recorded = next((p for p in admitted if (p.uid, p.attempt) == (pod.uid, pod.attempt)), None)
        if recorded is not None:
            pod = structs.replace(recorded, sandbox_id=pod.sandbox_id)
            self.running(pod, recorded.sandbox_id, is_found=True)
        return pod


def _listed_as(pod: Pod, listed: Iterable[RuntimePod]) -> str:
    """Return the id of a pod's sandbox in the runtime's list; empty where it is not there, or not ready."""
    identity = (pod.uid, pod.namespace, pod.name, pod.attempt)  # a client may send no uid
    same = (p.id for p in listed if p.ready and (p.uid, p.namespace, p.name, p.attempt) == identity)
    return next(same, "")
