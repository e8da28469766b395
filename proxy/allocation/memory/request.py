"""What a container or a pod requests from the memory manager.

Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/policy_static.go ``getPodRequestedResources``. Only
pods of QoS class Guaranteed are served, and of their requests ``memory`` and ``hugepages-*``. A pod that
makes requests of its own (``spec.resources``) is not served at all, unless that is switched on (alpha gate
``PodLevelResourceManagers``); then its own requests are those of the pod, and a container counts only if it
would be Guaranteed by itself: others share what remains of the pod's, and something has to remain for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.allocation.pod_requests import peak_request
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests, in_bytes

Amounts = dict[str, int]
"""Resource to bytes."""


def gets_memory(pod: PodRequests) -> bool:
    """Return whether the pod gets memory of its own."""
    return pod.guaranteed and (pod.own is None or pod.own_managed)


def container_amounts(pod: PodRequests, ask: ContainerResources) -> Amounts:
    """Return what a container asks for."""
    return {} if pod.own is not None and pod.own_managed and not ask.exact else _memory(ask.requests)


def pod_amounts(pod: PodRequests) -> Amounts:
    """Return what a pod asks for: only resources that an app container names, or the pod itself."""
    if pod.own is not None and pod.own_managed:
        return {name: size for name, size in _memory(pod.own).items() if size > 0}
    return peak_request(pod.containers, lambda ask: container_amounts(pod, ask), (ContainerKind.APP,))


def split_problem(pod: PodRequests) -> str:
    """Return why a pod with requests of its own cannot be split among its containers; empty if it can."""
    total, lasting = pod_amounts(pod), dict.fromkeys(pod_amounts(pod), 0)
    sharing = False
    for ask in pod.containers:
        own = container_amounts(pod, ask)
        if ask.kind is not ContainerKind.INIT:
            sharing = sharing or not own
            for name, size in own.items():
                lasting[name] = lasting.get(name, 0) + size
            continue
        for name, size in total.items():
            left = size - lasting[name]
            if own.get(name, 0) > left:
                return (
                    f"pod rejected, largest exclusive init container requests {own[name]} of {name},"
                    f" but only {left} available"
                )
            if not own and left <= 0:
                return f"pod rejected, pod has shared init containers but no {name} available for them"
    for name, size in total.items():
        if sharing and lasting[name] >= size:
            return (
                f"pod rejected, sum of exclusive container {name} requests equals pod budget,"
                " leaving no memory for shared containers"
            )
    return ""


def _memory(amounts: Mapping[str, int]) -> Amounts:
    return {name: size for name, size in amounts.items() if in_bytes(name)}
