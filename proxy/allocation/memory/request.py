"""Compute the memory and huge pages that a container or a pod requests from the memory manager.

Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/policy_static.go ``getPodRequestedResources``. Only
pods of QoS class Guaranteed are served, and of their requests ``memory`` and ``hugepages-*``. A pod that
makes requests of its own (``spec.resources``) is not served at all, unless the alpha gate
``PodLevelResourceManagers`` is on. Then these requests are those of the pod, and a container counts only if
it would be Guaranteed by itself. The other containers share the rest of the pod's memory, and some has to
remain for them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from proxy.allocation.memory.state import page_resource
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests, in_bytes, peak_request

Amounts = dict[str, int]
"""Resource to bytes."""


def gets_memory(pod: PodRequests) -> bool:
    """Return whether the pod gets memory of its own."""
    return pod.guaranteed and (pod.pod_level_requests is None or pod.are_pod_level_requests_managed)


def container_amounts(pod: PodRequests, container: ContainerResources) -> Amounts:
    """Return the memory and huge pages that a container requests."""
    return (
        {}
        if pod.pod_level_requests is not None
        and pod.are_pod_level_requests_managed
        and not container.requests_equal_limits
        else _memory(container.requests)
    )


def pod_amounts(pod: PodRequests) -> Amounts:
    """Return the amounts that a pod requests: only resources that an app container or the pod itself has."""
    if pod.pod_level_requests is not None and pod.are_pod_level_requests_managed:
        return {name: size for name, size in _memory(pod.pod_level_requests).items() if size > 0}
    return peak_request(
        pod.containers, lambda container: container_amounts(pod, container), (ContainerKind.APP,)
    )


def split_problem(pod: PodRequests) -> str:
    """Return why a pod with requests of its own cannot be split among its containers; empty if it can."""
    total, lasting = pod_amounts(pod), dict.fromkeys(pod_amounts(pod), 0)
    sharing = False
    for container in pod.containers:
        own = container_amounts(pod, container)
        if container.kind is not ContainerKind.INIT:
            sharing = sharing or not own
            for name, size in own.items():
                lasting[name] = lasting.get(name, 0) + size
            continue
        for name, size in total.items():
            available = size - lasting[name]
            if own.get(name, 0) > available:
                return (
                    f"pod rejected, largest exclusive init container requests {own[name]} of {name},"
                    f" but only {available} available"
                )
            if not own and available <= 0:
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


SIZES_LIMIT = 64
"""The most page sizes that are read; no architecture has more than a dozen."""
SIZE_LENGTH_LIMIT = 16
"""The most characters of a page size; real sizes are shorter."""
_PAGE_SIZE = re.compile(r"([1-9][0-9]{0,8})([KMGT])i?B", re.ASCII)
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}


def huge_pages(limits: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return resources and bytes for limits on huge pages; invalid page sizes are left out.

    Args:
        limits: Page size and bytes; kubelet sends 0 bytes for each size that is not requested.
    """
    bytes_of: dict[str, int] = {}
    for size, limit in limits:
        if limit and (name := _resource(size[:SIZE_LENGTH_LIMIT])):
            bytes_of[name] = limit
    return tuple(sorted(bytes_of.items()))


@functools.lru_cache(maxsize=64)
def _resource(page_size: str) -> str:
    match = _PAGE_SIZE.fullmatch(page_size)
    return page_resource(int(match[1]) * _KIB[match[2]]) if match else ""
