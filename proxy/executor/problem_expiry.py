"""The end of problems whose pod or container is gone."""

from __future__ import annotations

from collections.abc import Collection

from proxy.executor.context import NodeContext
from proxy.executor.observer import Observer
from proxy.executor.rejections import FORGET_S
from proxy.telemetry.port import HOOK, HOOK_FAILED, POD, Problem

CONTAINER_ID = "containerID"


class ProblemExpiry(Observer):
    """Removes problems of containers that are gone, and those of pods some minutes after the last report.

    A rejected pod has no sandbox, and kubelet tries again for minutes: the pod is not gone yet. A hook can
    name a container that does not exist: this problem stays for the same time, and so does each failure of a
    hook, because no later event shows that it is over.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def listed(self, pods: Collection[str], containers: Collection[str], since: int) -> None:
        """See ``Observer``."""
        state, now = self._context.state, self._context.wall_clock()
        refs = {pod.ref for pod in state.pods.values()}

        def is_current(problem: Problem) -> bool:
            container_id, ref = problem.keys.get(CONTAINER_ID), problem.keys.get(POD)
            recent = now - problem.last <= FORGET_S
            if container_id is not None:
                return container_id in state.containers or (HOOK in problem.keys and recent)
            return (ref is None and problem.message != HOOK_FAILED) or ref in refs or recent

        self._context.telemetry.forget_unless(is_current)
