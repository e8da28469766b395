"""Pods and containers that are rejected: each is a problem once, until it no longer applies.

kubelet tries a rejected container again and again, after up to five minutes. All tries are one problem. The
problem is logged when it, or its reason, is new. It is over when the container has been created, when the
sandbox has ended, or, for a pod whose sandbox was rejected, when no other try has come for ``FORGET_S``: such
a pod is not known at the runtime, so its deletion is not detected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from proxy.executor.observer import Observer
from proxy.model.workload import Container, Pod, Verdict
from proxy.telemetry.port import Telemetry

FORGET_S = 600.0
LIMIT = 100
"""How many rejections are remembered; the oldest are forgotten first."""
_MESSAGES = {
    ("container", True): "rejected a container",
    ("pod", True): "rejected a pod",
    ("container", False): "would reject a container",
    ("pod", False): "would reject a pod",
}
"""The messages of problems, by what is rejected and whether the plan is applied to it."""


@dataclass(slots=True)
class _Rejected:
    """A pod or container whose creation is rejected, over all tries of the client.

    Attributes:
        message: The message of the problem.
        pod: The pod; its uid is empty if the client sends none.
        sandbox_id: The sandbox; empty if there is none.
        verdict: Why.
        applied: Whether the plan was applied to the pod at the last try; otherwise it continued anyway.
        first: When the first try was rejected, in seconds since the epoch.
        at, last: When the last try was rejected: in seconds since the epoch, and by the monotonic clock.
        count: How many tries were rejected.
    """

    message: str
    pod: Pod
    sandbox_id: str
    verdict: Verdict
    applied: bool
    first: float
    at: float
    last: float
    count: int = 1


class Rejections(Observer):
    """Reports rejections, and their ends."""

    def __init__(
        self, telemetry: Telemetry, clock: Callable[[], float], wall_clock: Callable[[], float] | None = None
    ) -> None:
        """Report nothing yet.

        Args:
            telemetry: Where to report.
            clock: A monotonic clock in seconds.
            wall_clock: Seconds since the epoch, for display; ``clock`` if None.
        """
        self._telemetry = telemetry
        self._clock = clock
        self._wall_clock = wall_clock or clock
        self._open: OrderedDict[tuple[str, str], _Rejected] = OrderedDict()

    def rejected(self, pod: Pod, name: str, verdict: Verdict, *, applied: bool = True) -> None:
        """Record that a container or a pod is rejected, or would be.

        Args:
            pod: The pod.
            name: The container; empty for the pod as a whole.
            verdict: Why.
            applied: Whether the plan is applied to the pod; otherwise it continues anyway.
        """
        message = _MESSAGES["container" if name else "pod", applied]
        known, now = self._open.get((pod.ref, name)), self._wall_clock()
        if known is not None and known.message != message:
            self._end((pod.ref, name))
        again = known is not None and (known.message, known.pod.uid) == (message, pod.uid)
        first, count = (known.first, known.count + 1) if known is not None and again else (now, 1)
        self._open[pod.ref, name] = _Rejected(
            message,
            pod,
            pod.sandbox_id if name else "",
            verdict,
            applied,
            first,
            now,
            self._clock(),
            count,
        )
        self._open.move_to_end((pod.ref, name))
        if len(self._open) > LIMIT:
            oldest, displaced = self._open.popitem(last=False)
            self._telemetry.forget(displaced.message, **_keys(*oldest))
        self._telemetry.problem(message, **_keys(pod.ref, name), err=verdict.operator_message)

    def page(self, applies: Callable[[Pod], bool]) -> list[dict[str, object]]:
        """Return the rejections that are not over, the one that was tried last at the end.

        Args:
            applies: Returns whether the plan is applied to a pod now: mode and selection may have changed
                since.
        """
        return [
            {
                "pod": ref,
                "uid": known.pod.uid,
                "container": name,
                "reason": known.verdict.reason,
                "message": known.verdict.message,
                "detail": known.verdict.detail,
                "count": known.count,
                "first": round(known.first, 3),
                "last": round(known.at, 3),
                "applied": known.applied and applies(known.pod),
            }
            for (ref, name), known in self._open.items()
        ]

    def sandbox_runs(self, pod: Pod, *, applied: bool) -> None:
        """Record that a sandbox was created: the pod is not rejected, or continues although it would be.

        Args:
            pod: The pod with the sandbox's id.
            applied: Whether the plan is applied to the pod.
        """
        known = self._open.get((pod.ref, "")) if self._open else None
        if known is not None and applied:
            self._end((pod.ref, ""))
        elif known is not None:
            known.sandbox_id = pod.sandbox_id

    def created(self, token: str, container: Container) -> None:
        """See ``Observer``."""
        if self._open and (container.pod.ref, container.name) in self._open:
            self._end((container.pod.ref, container.name))

    def pod_stopped(self, pod: Pod) -> None:
        """See ``Observer``."""
        self._end_of_sandbox(pod.sandbox_id)

    def pod_removed(self, sandbox_id: str) -> None:
        """See ``Observer``."""
        self._end_of_sandbox(sandbox_id)

    def listed(self, pods: Collection[str], containers: Collection[str], since: int) -> None:
        """See ``Observer``."""
        now = self._clock()
        for key, known in list(self._open.items()):
            if not known.sandbox_id and now - known.last > FORGET_S:
                self._end(key)

    def _end_of_sandbox(self, sandbox_id: str) -> None:
        for key, known in list(self._open.items()):
            if known.sandbox_id == sandbox_id:
                self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        self._telemetry.resolved(self._open.pop(key).message, **_keys(*key))


def _keys(ref: str, name: str) -> dict[str, object]:
    return {"pod": ref, "container": name} if name else {"pod": ref}
