"""Bad input from users: counted by kind and reported, once for a pod and not once for each attempt.

Kubelet retries a rejected pod again and again, and a container that crashes is started again. The annotation
stays as wrong as it was.
"""

from __future__ import annotations

from collections import OrderedDict

from proxy.engine.container_create import Plan
from proxy.model.admission import CLAIMED, AdmissionRule
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.workload import Pod
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

NOT_AS_REQUESTED = "cannot follow what a pod requests"
IN_USE = "CPUsInUse"
"""The reason of a rejection because other containers own CPUs that an annotation names."""
VERDICTS = ("rejected", "shared", "would-reject", "would-share")
"""The possible verdicts on a claim that exceeds a rule of admission; the last two are for an observed pod."""
REMEMBERED = 4096
"""How many pods are remembered with the defects that were counted; the oldest are forgotten first."""


class BadInput:
    """Counts and reports bad input."""

    def __init__(self, telemetry: Telemetry) -> None:
        """Start with a count of 0 for every kind."""
        self._telemetry = telemetry
        self._reported: OrderedDict[str, set[str]] = OrderedDict()
        for kind in DefectKind:
            telemetry.count(metrics.BAD_INPUT, 0, kind=kind)
        for rule in AdmissionRule:
            for verdict in VERDICTS:
                telemetry.count(metrics.ADMISSION_LIMITS, 0, rule=rule, verdict=verdict)

    def report_defects(self, pod: Pod) -> None:
        """Count and report what is wrong with a pod's labels and annotations."""
        for defect in pod.defects:
            self._note(pod, defect)

    def report_decision(self, pod: Pod, plan: Plan) -> None:
        """Count and report what a decision found wrong with a request; ``Rejections`` reports rejections."""
        self.report_defects(pod)
        if isinstance(plan.problem, InputDefect):
            self._note(pod, plan.problem, report=plan.verdict.admitted)
        elif plan.verdict.reason == IN_USE:
            self._note(pod, InputDefect(plan.verdict.operator_message, DefectKind.OVERLAP), report=False)

    def report_admission_limit(
        self, pod: Pod, limit: AdmissionRule | None, message: str, *, admitted: bool, applied: bool
    ) -> None:
        """Count and report a claim that went beyond a rule of admission.

        Args:
            pod: The pod.
            limit: The rule; None if there is none.
            message: What was wrong.
            admitted: Whether the pod is admitted and shares CPUs; otherwise, it is rejected.
            applied: Whether the plan is applied to the pod.
        """
        if limit is not None:
            done, would = ("shared", "would-share") if admitted else ("rejected", "would-reject")
            verdict = done if applied else would
            self._telemetry.count(metrics.ADMISSION_LIMITS, rule=limit, verdict=verdict)
            if admitted or limit in CLAIMED:
                self._note(pod, InputDefect(message, DefectKind.ADMISSION), report=admitted)

    def _note(self, pod: Pod, fault: InputDefect, *, report: bool = True) -> None:
        reported = self._reported.get(pod.key)
        if reported is None:
            reported = self._reported[pod.key] = set()
            if len(self._reported) > REMEMBERED:
                self._reported.popitem(last=False)
        # The text of these kinds changes with each attempt: which containers block a claim, how much is left.
        key = fault.kind if fault.kind in (DefectKind.OVERLAP, DefectKind.ADMISSION) else str(fault)
        if key in reported:
            return
        reported.add(key)
        self._telemetry.count(metrics.BAD_INPUT, kind=fault.kind)
        if report:
            self._telemetry.problem(NOT_AS_REQUESTED, pod=pod.ref, kind=fault.kind, reason=str(fault))
