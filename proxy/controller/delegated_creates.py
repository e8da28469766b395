"""Creates that were decided here, and that somebody else makes at the runtime.

Who is asked as a hook server answers with CPUs, and never sees the call. The same call may come by all the
same: somebody asks again because it came to nothing, or it passes through us on its way to the runtime. Then
it is one container, and the first decision is taken back before the second is made. What the first one has
written into the request is not the client's wish, so the client's own values count again.
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.controller.context import NodeContext
from proxy.controller.lifecycle import Lifecycle
from proxy.model.workload import Pod, Request

LIMIT = 512
"""So many are remembered; the oldest are forgotten first."""


class _Told(Struct, frozen=True):
    token: str
    cpus: str
    mems: str
    quota: int


class DelegatedCreates:
    """Remembers what somebody was told to make."""

    def __init__(self, context: NodeContext, lifecycle: Lifecycle) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._open: dict[tuple[str, str, int], _Told] = {}

    def give(self, token: str, cpus: str, mems: str, quota: int) -> None:
        """Somebody was told a decision.

        Args:
            token: What was decided.
            cpus: The request's CPUs, as they were told.
            mems: Its memory nodes.
            quota: Its CFS quota.
        """
        container = self._context.state.containers.get(token)
        if container is None:
            return
        key = container.pod.sandbox_id, container.name, container.attempt
        self._open.pop(key, None)
        if len(self._open) >= LIMIT:
            del self._open[next(iter(self._open))]
        self._open[key] = _Told(token, cpus, mems, quota)

    def back(self, pod: Pod, name: str, attempt: int, request: Request) -> tuple[Request, bool]:
        """Take back an earlier decision about a container.

        Returns:
            The request as the client meant it, and whether there was an earlier decision.
        """
        told = self._open.pop((pod.sandbox_id, name, attempt), None)
        first = None if told is None else self._context.state.containers.get(told.token)
        if told is None or first is None:
            return request, False
        asked = first.request
        self._lifecycle.failed(told.token, again=True)
        same = (
            request.cpuset_cpus == told.cpus,
            request.cpuset_mems == told.mems,
            request.cpu_quota == told.quota,
        )
        meant = structs.replace(
            request,
            cpuset_cpus=asked.cpuset_cpus if same[0] else request.cpuset_cpus,
            cpuset_mems=asked.cpuset_mems if same[1] else request.cpuset_mems,
            cpu_quota=asked.cpu_quota if same[2] else request.cpu_quota,
        )
        return meant, True
