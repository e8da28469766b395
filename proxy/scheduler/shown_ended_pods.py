"""Pods that the object of a node still shows although they have ended.

Their CPUs may become free at any moment, because the agent of the node writes the object again. If the object
shows a pod for longer than ``GRACE_S`` after its end, nothing suggests that this will change soon.
"""

from __future__ import annotations

from collections.abc import Set

from msgspec import Struct, field

from proxy.model.idset import CpuSet
from proxy.scheduler.assumed_pods import GRACE_S
from proxy.scheduler.node_facts import SchedulableNode


class ShownEndedPods(Struct):
    """The pods of one node that have ended and that its object, ``node``, shows."""

    _since: dict[str, float] = field(default_factory=dict)
    """The pods, and when their end was detected."""
    _stale: set[str] = field(default_factory=set)
    """Those that the object still showed after ``GRACE_S``."""
    _compared: SchedulableNode | None = None
    """The facts whose pods were last compared with the bound pods."""

    def add(self, pod: str, node: SchedulableNode | None, now: float) -> None:
        """Record that a pod has ended, if the object shows it."""
        if node is not None and pod in node.shown:
            self._since[pod] = now

    def discard(self, pod: str) -> bool:
        """Record that a pod has not ended; return whether it was recorded as ended."""
        return self._since.pop(pod, None) is not None

    def compare(self, node: SchedulableNode | None, bound: Set[str], now: float) -> bool:
        """Record the pods that the object shows and that are not bound; return whether there are new ones."""
        if node is None or self._compared is node:
            return False  # later ends of pods are recorded when they are released
        self._compared = node
        self._stale.intersection_update(node.shown)
        found = node.shown.keys() - bound - self._since.keys() - self._stale
        self._since.update(dict.fromkeys(found, now))
        return bool(found)

    def expire(self, node: SchedulableNode | None, now: float) -> bool:
        """Forget the pods whose end is longer ago than ``GRACE_S``; return whether there were any."""
        over = [pod for pod, since in self._since.items() if now - since > GRACE_S]
        for pod in over:
            del self._since[pod]
        if node is not None:
            self._stale.update(pod for pod in over if pod in node.shown)
        return bool(over)

    def may_vanish(self, node: SchedulableNode | None, now: float) -> bool:
        """Return whether the object shows a pod that has ended a short while ago."""
        return node is not None and any(
            now - since <= GRACE_S and pod in node.shown for pod, since in self._since.items()
        )

    def cpus(self, node: SchedulableNode | None) -> tuple[CpuSet, ...]:
        """Return the CPUs that the object still shows for pods that have ended."""
        shown = node.shown if node else {}
        return tuple(shown[pod] for pod in self._since if pod in shown)
