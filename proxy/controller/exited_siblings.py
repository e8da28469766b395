"""Containers that have ended without a word, looked for when the next one of their pod is made.

Where the runtime tells no events, only a comparison finds that a container has ended, seconds later; and an
event may come after what it tells matters. Kubelet makes the next container as soon as an init container has
ended (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, updateCPUsToReuse), and where kubelet does
not tell which containers those are, the runtime is all there is to ask. So whoever of the pod still holds
something is asked about before a decision.
"""

from __future__ import annotations

import asyncio

from proxy.controller.context import NodeContext
from proxy.controller.lifecycle import Lifecycle
from proxy.controller.worker import Worker
from proxy.engine.state import NodeState
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.workload import KubeQos, Phase, Pod

EXITED = "EXITED"


def holders(state: NodeState, pod: Pod) -> list[str]:
    """Give the pod's containers that run, as far as we know, and own CPUs or are promised memory.

    Only Guaranteed pods have such whose place another container of the pod could take; and where kubelet told
    of the pod's containers, it is known without asking who has ended (``Sandboxes.moved_on``).
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
    """Ask the runtime which of the pod's holders have ended, and take note of it.

    Where it does not answer, what is known stands.
    """
    await asyncio.gather(*(_look(context, lifecycle, worker, one) for one in holders(context.state, pod)))


async def _look(context: NodeContext, lifecycle: Lifecycle, worker: Worker, container_id: str) -> None:
    since = context.state.runtime.changes.number
    try:
        listed = await worker.run(context.runtime.list_containers, container_id)
    except (UnavailableError, RuntimeCallError):
        return
    ended = any(c.id == container_id and c.state == EXITED for c in listed)
    if ended and context.state.runtime.changes.is_unchanged(container_id, since):
        lifecycle.phase(container_id, Phase.EXITED)
