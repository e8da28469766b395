"""Finds containers that have exited unnoticed, when the next container of their pod is created.

Where the runtime sends no events, only a comparison finds that a container has exited, seconds later; and an
event may arrive too late. Kubelet creates the next container as soon as an init container has exited
(kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, updateCPUsToReuse). Where kubelet does not
report which containers are init containers, only the runtime can be queried. So before a decision the runtime
is queried about each container of the pod that still holds CPUs or memory.
"""

from __future__ import annotations

import asyncio

from proxy.engine.state import NodeState
from proxy.executor.context import NodeContext
from proxy.executor.lifecycle import Lifecycle
from proxy.executor.worker import Worker
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.workload import KubeQos, Phase, Pod

EXITED = "EXITED"


def holders(state: NodeState, pod: Pod) -> list[str]:
    """Return the pod's containers that run, as far as is known, and own CPUs or are promised memory.

    Only in Guaranteed pods can another container reuse what such a container holds. Where kubelet has
    reported the pod's containers, it is known without asking which of them have exited
    (``Sandboxes.moved_on``).
    """
    if pod.asks is not None or pod.kube_qos is not KubeQos.GUARANTEED:
        return []
    if not state.owners and state.memory is None:
        return []
    return [
        c.id
        for c in state.in_sandbox(pod.sandbox_id)
        if c.phase is Phase.RUNNING and (c.placement.exclusive or c.placement.blocks)
    ]


async def see_ended(context: NodeContext, lifecycle: Lifecycle, worker: Worker, pod: Pod) -> None:
    """Read from the runtime which of the pod's holders have exited, and record that in the state.

    Where the runtime does not answer, the state stays as it is.
    """
    await asyncio.gather(*(_check(context, lifecycle, worker, one) for one in holders(context.state, pod)))


async def _check(context: NodeContext, lifecycle: Lifecycle, worker: Worker, container_id: str) -> None:
    since = context.state.runtime.changes.number
    try:
        listed = await worker.run(context.runtime.list_containers, container_id)
    except (UnavailableError, RuntimeCallError):
        return
    ended = any(c.id == container_id and c.state == EXITED for c in listed)
    if ended and context.state.runtime.changes.is_unchanged(container_id, since):
        lifecycle.phase(container_id, Phase.EXITED)
