"""Whether a pod of class LSE or LSR may own CPUs by what it requests.

Koordinator's document requires more than its code checks
(https://koordinator.sh/docs/user-manuals/fine-grained-cpu-orchestration): LSE (latency-sensitive exclusive)
and LSR (latency-sensitive reserved) pods request whole CPUs, and exactly what their limits allow. The
containers that run together are counted: app containers and sidecars; init containers end before them.
"""

from __future__ import annotations

from proxy.model.requests import ContainerKind, PodRequests
from proxy.model.workload import QosClass

OWNING = (QosClass.LSE, QosClass.LSR)


def ownership_problem(qos: QosClass, requests: PodRequests) -> str:
    """Return why a pod of class LSE or LSR may not own CPUs; empty where it may, and for other classes."""
    if qos not in OWNING:
        return ""
    for ask in requests.containers:
        wants, may = ask.requests.get("cpu", 0), ask.limits.get("cpu", 0)
        if wants != may:
            return (
                f"{qos} pod: container {ask.name} requests {wants}m CPU and is limited to {may}m; "
                "the two must be equal"
            )
    total = sum(ask.requests.get("cpu", 0) for ask in requests.of(ContainerKind.APP, ContainerKind.SIDECAR))
    if total == 0 or total % 1000:
        return f"{qos} pod: its containers request {total}m CPU together; it must be whole CPUs"
    return ""
