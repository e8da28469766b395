"""Bad input by users: counted by kind, and told, once a pod and not once an attempt.

kubelet tries a pod that is refused again and again, and a container that crashes comes back; what its
annotation says stays as wrong as it was.
"""

from __future__ import annotations

from collections import OrderedDict

from proxy.engine.create import Plan
from proxy.model.admission import CLAIMED, AdmissionRule
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.workload import Pod
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

NOT_AS_ASKED = "cannot follow what a pod asks for"
IN_USE = "CPUsInUse"
"""Reason of a refusal because others own what an annotation names."""
VERDICTS = ("rejected", "shared")
"""What may become of such a claim."""
REMEMBERED = 4096
"""Pods whose faults have been counted; more are forgotten, the oldest first."""


class BadInput:
    """Counts and tells."""

    def __init__(self, telemetry: Telemetry) -> None:
        """Begin with every kind counted 0 times."""
        self._telemetry = telemetry
        self._seen: OrderedDict[str, set[str]] = OrderedDict()
        for kind in DefectKind:
            telemetry.count(metrics.BAD_INPUT, 0, kind=kind)
        for rule in AdmissionRule:
            for verdict in VERDICTS:
                telemetry.count(metrics.ADMISSION_LIMITS, 0, rule=rule, verdict=verdict)

    def see(self, pod: Pod) -> None:
        """Look at what is wrong with a pod's labels and annotations."""
        for defect in pod.defects:
            self._note(pod, defect)

    def judge(self, pod: Pod, plan: Plan) -> None:
        """Look at what a decision found wrong with what was asked."""
        self.see(pod)
        if isinstance(plan.problem, InputDefect):
            self._note(pod, plan.problem)
        elif plan.verdict.reason == IN_USE:
            self._note(pod, InputDefect(plan.verdict.operator_message, DefectKind.OVERLAP))

    def beyond(self, pod: Pod, words: str) -> None:
        """Look at a claim that went beyond a rule of admission."""
        self._note(pod, InputDefect(words, DefectKind.ADMISSION))

    def limited(self, pod: Pod, limit: AdmissionRule | None, words: str, *, admitted: bool) -> None:
        """Count and report a claim that went beyond a rule of admission."""
        if limit is not None:
            verdict = "shared" if admitted else "rejected"
            self._telemetry.count(metrics.ADMISSION_LIMITS, rule=limit, verdict=verdict)
            if admitted or limit in CLAIMED:
                self.beyond(pod, words)

    def _note(self, pod: Pod, fault: InputDefect) -> None:
        seen = self._seen.get(pod.key)
        if seen is None:
            seen = self._seen[pod.key] = set()
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        # What is in the way of a claim, and how much is left, changes from attempt to attempt.
        what = fault.kind if fault.kind in (DefectKind.OVERLAP, DefectKind.ADMISSION) else str(fault)
        if what in seen:
            return
        seen.add(what)
        self._telemetry.count(metrics.BAD_INPUT, kind=fault.kind)
        self._telemetry.problem(NOT_AS_ASKED, pod=pod.ref, kind=fault.kind, reason=str(fault))
