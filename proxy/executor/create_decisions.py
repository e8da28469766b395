"""Decides creates, takes the CPUs, and reports what was decided.

The order of a create that gives CPUs to an owner:

    decide (the CPUs are already taken in the state)
    -> ledger: the placement, in flight
    -> wait for calls in flight that carry wider sets (confinement)
    -> kernel: other containers leave the CPUs; this is read back
    -> the request is forwarded; the runtime's id arrives -> ledger: the final placement

The decision is pure and made at once; everything that can block (ledger, kernel, runtime) is done by workers
and awaited. When a create fails, its container is removed from the state again (``ContainerLifecycle``), and
the containers that had moved are moved back. Because every kernel write uses the newest state, plans of
different pods need no lock between them. ``proxy.engine.reservation`` describes what happens if CPUs cannot
be freed.
"""

from __future__ import annotations

import time

from msgspec import structs

from proxy.allocation.devices.allocate import QueryPreference
from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences
from proxy.engine.call_answers import Forward, ForwardUnchanged
from proxy.engine.container_create import Plan
from proxy.engine.container_events import CreateRequested
from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import PlanDecided
from proxy.executor.bad_input import NOT_AS_REQUESTED
from proxy.executor.context import NodeContext
from proxy.model.defects import InputDefect
from proxy.model.explanation import CREATE
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Pod, Pool, Request, Verdict
from proxy.telemetry import metrics
from proxy.telemetry.port import subject


class CreateDecisions:
    """Decides creates."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def place(self, pod: Pod, name: str, attempt: int, request: Request) -> PlanDecided:
        """Decide a create and take the CPUs; a reservation must follow if the answer is one."""
        decided = self.place_or_query(pod, name, attempt, request, NO_PREFERENCES)
        assert type(decided) is PlanDecided
        return decided

    def place_or_query(
        self, pod: Pod, name: str, attempt: int, request: Request, preferred: Preferences
    ) -> PlanDecided | QueryPreference:
        """Decide as ``place`` does, or return the query that a device plugin has to answer first."""
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
        elif not decided.withdrawn:  # otherwise, it was placed and counted before
            context.telemetry.count(metrics.CREATES_PLACED)
        self.report(plan, applied=applied, cpus=answer.planned_cpus if type(answer) is Forward else None)
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
            cpus: The CPUs of the container; None to take them from the state.
            event: Why it was placed.
        """
        context, container, explanation = self._context, plan.container, plan.explanation
        assert container is not None
        if explanation is None:
            cpus = context.store.state.desired_cpus(container) if cpus is None else cpus
            context.history.note_without_explanation(
                context.wall_clock(), container, cpus, applied=applied, event=event
            )
        else:
            if not applied or event != explanation.event:
                explanation = structs.replace(explanation, applied=applied, event=event)
            context.history.note(context.wall_clock(), explanation, container.id)
