"""The QoS class of a pod without a label, and whether a pod may own CPUs at all.

Koordinator's document requires more than its code checks
(https://koordinator.sh/docs/user-manuals/fine-grained-cpu-orchestration):

- A pod without a class of its own gets one from its Kubernetes QoS class. A Guaranteed pod whose CPUs
  kubelet's static policy chose counts as LSR (latency-sensitive reserved): only BE (best effort) pods may
  share them. Any other Guaranteed or Burstable pod counts as LS, BestEffort as BE.
- LSE and LSR pods request whole CPUs, and exactly what their limits allow. Counted is what runs together:
  app containers and sidecars; init containers come and go before them.
"""

from __future__ import annotations

from proxy.model.requests import ContainerKind, PodRequests
from proxy.model.workload import KubeQos, QosClass

OWNING = (QosClass.LSE, QosClass.LSR)


def effective_qos(qos: QosClass, kube_qos: KubeQos, *, pinned_by_kubelet: bool = False) -> QosClass:
    """Return the QoS class that a pod is treated as.

    Args:
        qos: Its label.
        kube_qos: Kubernetes' class.
        pinned_by_kubelet: Whether kubelet's static policy chose CPUs for it.
    """
    if qos is not QosClass.NONE:
        return qos
    if kube_qos is KubeQos.BEST_EFFORT:
        return QosClass.BE
    pinned = pinned_by_kubelet and kube_qos is KubeQos.GUARANTEED
    return QosClass.LSR if pinned else QosClass.LS


def ownership_problem(qos: QosClass, asked: PodRequests) -> str:
    """Return why a pod of class LSE or LSR may not own CPUs; empty where it may, and for other classes."""
    if qos not in OWNING:
        return ""
    for ask in asked.containers:
        wants, may = ask.requests.get("cpu", 0), ask.limits.get("cpu", 0)
        if wants != may:
            return (
                f"{qos} pod: container {ask.name} requests {wants}m CPU and is limited to {may}m; "
                "the two must be equal"
            )
    total = sum(ask.requests.get("cpu", 0) for ask in asked.of(ContainerKind.APP, ContainerKind.SIDECAR))
    if total == 0 or total % 1000:
        return f"{qos} pod: its containers request {total}m CPU together; it must be whole CPUs"
    return ""
