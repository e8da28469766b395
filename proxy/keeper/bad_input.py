"""Bad input by users: counted by kind, and told, once a pod and not once an attempt.

kubelet tries a pod that is refused again and again, and a container that crashes comes back; what its
annotation says stays as wrong as it was.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from proxy.model.admission import CLAIMED, Rule
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.workload import Pod
from proxy.plan.place import Plan

COUNTER = "bad_input_"
"""What the names of the counters begin with; the kind follows."""
LIMITED = "admission_"
"""What the names of the counters of claims beyond a rule begin with; rule and verdict follow."""
IN_USE = "CPUsInUse"
"""Reason of a refusal because others own what an annotation names."""
VERDICTS = ("rejected", "shared")
"""What may become of such a claim."""
REMEMBERED = 4096
"""Pods whose faults have been counted; more are forgotten, the oldest first."""


class BadInput:
    """Counts and tells."""

    def __init__(self, counters: Counter[str], tell: Callable[[str], None]) -> None:
        """Begin with nothing.

        Args:
            counters: Where to count.
            tell: Where to tell, one line each.
        """
        self._counters = counters
        self._tell = tell
        self._seen: OrderedDict[str, set[str]] = OrderedDict()
        counters.update({f"{COUNTER}{kind}": 0 for kind in DefectKind})
        counters.update({f"{LIMITED}{rule}_{verdict}": 0 for rule in Rule for verdict in VERDICTS})

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
            self._note(pod, InputDefect(plan.verdict.operator_message, DefectKind.OVERLAP), told=True)

    def beyond(self, pod: Pod, words: str) -> None:
        """Look at a claim that went beyond a rule of admission."""
        self._note(pod, InputDefect(words, DefectKind.ADMISSION), told=pod.ref in words)

    def limited(self, pod: Pod, limit: Rule | None, words: str, *, admitted: bool) -> None:
        """Count and report a claim that went beyond a rule of admission."""
        if limit is not None:
            self._counters[f"{LIMITED}{limit}_{'shared' if admitted else 'rejected'}"] += 1
            if admitted or limit in CLAIMED:
                self.beyond(pod, words)

    def _note(self, pod: Pod, fault: InputDefect, *, told: bool = False) -> None:
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
        self._counters[f"{COUNTER}{fault.kind}"] += 1
        self._tell(str(fault) if told else f"{pod.ref}: {fault}")
