"""Creates that were decided here, and that another program sends to the runtime.

As a hook server, topoproxy answers with CPUs and never sees the call itself. The same create may still arrive
a second time: the caller asks again because the create failed, or the call passes through topoproxy on its
way to the runtime. Both are one container, so the first decision is withdrawn before the second is made. The
values that the first decision wrote into the request are not the client's, so the client's own values count
again.
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.controller.context import NodeContext
from proxy.controller.lifecycle import Lifecycle
from proxy.model.workload import Pod, Request

LIMIT = 512
"""How many are remembered; the oldest are forgotten first."""


class _Told(Struct, frozen=True):
    token: str
    cpus: str
    mems: str
    quota: int


class DelegatedCreates:
    """Remembers the decisions that were returned to a caller."""

    def __init__(self, context: NodeContext, lifecycle: Lifecycle) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._open: dict[tuple[str, str, int], _Told] = {}

    def give(self, token: str, cpus: str, mems: str, quota: int) -> None:
        """Note that a decision was returned to a caller.

        Args:
            token: The token of the decided container.
            cpus: The request's CPUs, as they were returned.
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
        """Withdraw an earlier decision about a container.

        Returns:
            The request with the client's own values, and whether there was an earlier decision.
        """
        opened = self._open.pop((pod.sandbox_id, name, attempt), None)
        first = None if opened is None else self._context.state.containers.get(opened.token)
        if opened is None or first is None:
            return request, False
        asked = first.request
        self._lifecycle.failed(opened.token, again=True)
        same = (
            request.cpuset_cpus == opened.cpus,
            request.cpuset_mems == opened.mems,
            request.cpu_quota == opened.quota,
        )
        meant = structs.replace(
            request,
            cpuset_cpus=asked.cpuset_cpus if same[0] else request.cpuset_cpus,
            cpuset_mems=asked.cpuset_mems if same[1] else request.cpuset_mems,
            cpu_quota=asked.cpu_quota if same[2] else request.cpu_quota,
        )
        return meant, True
