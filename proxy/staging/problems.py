"""Reports actions that fail for running pods: one problem for each pod, open until the action succeeds."""

from __future__ import annotations

from collections.abc import Container

from proxy.telemetry.port import Telemetry


class PodProblems:
    """Problems of one kind, at most one for each pod.

    Attributes:
        reasons: Why the action fails, by the pod's key.
    """

    def __init__(self, message: str, telemetry: Telemetry) -> None:
        """Prepare; nothing is reported yet.

        Args:
            message: The action that fails.
            telemetry: Where to report.
        """
        self.reasons: dict[str, str] = {}
        self._refs: dict[str, str] = {}
        self._message = message
        self._telemetry = telemetry

    def report(self, key: str, ref: str, why: str) -> None:
        """Report the problem of a pod.

        Args:
            key: The pod's key.
            ref: Its namespace and name.
            why: The reason.
        """
        self.reasons[key], self._refs[key] = why, ref
        self._telemetry.problem(self._message, pod=ref, err=why)

    def end_others(self, keys: Container[str]) -> None:
        """End the problems of all other pods."""
        for key in [key for key in self.reasons if key not in keys]:
            del self.reasons[key]
            self._telemetry.resolved(self._message, pod=self._refs.pop(key))
