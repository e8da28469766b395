"""Whether the CFS quota of a container is off: Koordinator's rule for owners of CPUs (``pools.quota``).

How many containers a pod runs at the same time is known where kubelet reported the pod; else those count that
exist when a container comes.
"""

from __future__ import annotations

import dataclasses

from proxy.engine.state import NodeState
from proxy.model.requests import ContainerKind
from proxy.model.workload import Phase, Placement, Pod, Pool, Request
from proxy.pools.quota import quota_of_owner


def concurrent_containers(state: NodeState, pod: Pod, name: str) -> int:
    """Return how many containers of a pod run at the same time, one of this name among them."""
    if pod.asks is not None:
        return len(pod.asks.of(ContainerKind.APP, ContainerKind.SIDECAR))
    there = state.in_sandbox(pod.sandbox_id)
    return len({name, *(c.name for c in there if c.phase is not Phase.EXITED)})


def quota_is_off(state: NodeState, pod: Pod, name: str, pool: Pool) -> bool:
    """Return whether a container's CFS quota has to be off."""
    if pool is not Pool.OWN:
        return False
    keep = state.node.keep_quota
    return (
        quota_of_owner(owns=True, containers=concurrent_containers(state, pod, name), keep=keep) is not None
    )


def without_quota(placement: Placement, request: Request) -> Placement:
    """Return the placement of a container whose quota is off; where it asked for one, the reasons say so."""
    said = ("its CFS quota is off",) if request.cpu_quota > 0 else ()
    return dataclasses.replace(placement, cfs_quota_off=True, reasons=(*placement.reasons, *said))
