"""What a container may claim when it is created: its pool, and how many CPUs or which ones it may own."""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.cpu_request import container_cpus
from proxy.engine.admission import RESTRICTED_CLASSES, permitted_claim, sharing_problem, sum_requests
from proxy.engine.owners import why_pod_total_exceeded
from proxy.engine.state import NodeState
from proxy.model.admission import Breach
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase, Pod, Pool, Request
from proxy.pools.claims import Claim, claim, pool_of


def permitted_container_claim(
    state: NodeState, pod: Pod, name: str, request: Request
) -> tuple[Pod, Breach | None]:
    """Return the permitted claim of a pod, from what is known when one of its containers is created."""
    if pod.cpuset is None and pod.nodes is None and not pod.problem and pod.qos not in RESTRICTED_CLASSES:
        return pod, None
    if pod.cpuset is None or pod.total is not None or pod.requests is not None:
        return permitted_claim(state.node, pod, None, state.retained_cpus(pod.key))
    requests = {c.name: c.request for c in state.in_sandbox(pod.sandbox_id) if c.phase is not Phase.EXITED}
    known = sum_requests(list({**requests, name: request}.values()))
    return permitted_claim(state.node, pod, known, state.retained_cpus(pod.key))


def container_claim(
    state: NodeState,
    permitted: Pod,
    name: str,
    request: Request,
    allowed: CpuSet | None,
    breach: Breach | None,
) -> Claim:
    """Return the claim of a container, according to the permitted claim of its pod.

    Args:
        state: The node as it is.
        permitted: The pod with its permitted claim.
        name: Container name.
        request: The container's request.
        allowed: CPUs that may be named; the online ones if None.
        breach: The limit that the pod's own claim exceeds; None if it exceeds none.
    """
    online = state.node.machine.online
    if (
        allowed is None
        and permitted.cpuset
        and permitted.cpuset & online
        and permitted.cpuset <= state.last_cpus(permitted.key)
    ):
        allowed = permitted.cpuset | online  # its offline CPUs may come back; it continues on the others
    claimed = claim(
        permitted,
        request,
        allowed or online,
        static=state.node.static,
        kubelet_reported_count=_known_exclusive_cpus(permitted, name),
    )
    if claimed.pool is Pool.OWN and claimed.cpus is None:
        problem = why_pod_total_exceeded(state, permitted, name, claimed.count)
        if problem:
            pool, reason = pool_of(permitted)
            claimed = Claim(pool, reason, problem=problem)
    if breach is None or claimed.problem:
        return claimed
    return structs.replace(claimed, problem=sharing_problem(breach))


def _known_exclusive_cpus(pod: Pod, name: str) -> int | None:
    """Return how many CPUs a container may own according to kubelet's report of its pod; None without one.

    In a pod with resources of its own, a container that was not reported (an ephemeral one) owns no CPUs: its
    create may carry the resources of the pod.
    """
    known = (
        next((container for container in pod.requests.containers if container.name == name), None)
        if pod.requests
        else None
    )
    if pod.requests is None or (known is None and pod.requests.pod_level_requests is None):
        return None
    return 0 if known is None else container_cpus(pod.requests, known)
