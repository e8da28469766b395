"""Compute how many exclusive CPUs a container or a pod requests.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``guaranteedCPUs``,
``podGuaranteedCPUs``. Only containers of Guaranteed pods own CPUs, and only those that request whole ones. A
pod may state requests of its own. kubelet then gives its containers no exclusive CPUs, unless kubelet manages
such pods (an alpha feature). In that case each container must itself have requests equal to its limits, for
CPU and for memory.
"""

from __future__ import annotations

from proxy.model.requests import ContainerKind, ContainerResources, PodRequests, peak_request

CPU = "cpu"
MILLI = 1000
NO_SHARES = 2
"""The smallest value that the kernel accepts; kubelet sends it if no CPU is requested (``MinShares``)."""


def container_cpus(pod: PodRequests, resources: ContainerResources) -> int:
    """Return the number of exclusive CPUs that a container requests; 0 if it shares CPUs."""
    if not pod.guaranteed or (
        pod.pod_level_requests is not None
        and not (pod.are_pod_level_requests_managed and resources.requests_equal_limits)
    ):
        return 0
    return _whole(resources.requests.get(CPU, 0))


def pod_cpus(pod: PodRequests) -> int:
    """Return the most exclusive CPUs that a pod requests at any time.

    This is the pod's own request if it makes one that kubelet manages, otherwise what its containers need
    together.
    """
    if pod.pod_level_requests is None:
        return peak_request(pod.containers, lambda resources: {CPU: container_cpus(pod, resources)}).get(
            CPU, 0
        )
    return pod_level_cpu_count(pod)


def requested_whole_cpus(pod: PodRequests) -> int:
    """Return the whole CPUs that a pod requests at any time, exclusive or not, rounded down."""
    peak = peak_request(pod.containers, lambda resources: {CPU: resources.requests.get(CPU, 0)}).get(CPU, 0)
    return (peak if pod.pod_level_requests is None else pod.pod_level_requests.get(CPU, peak)) // MILLI


def running_request_milli(pod: PodRequests) -> int:
    """Return what a pod requests once it runs, in thousandths of a CPU.

    This is the pod's own request if it makes one, otherwise what its app containers and sidecars request
    together.
    """
    if pod.pod_level_requests is not None and CPU in pod.pod_level_requests:
        return pod.pod_level_requests[CPU]
    running = pod.of_kinds(ContainerKind.APP, ContainerKind.SIDECAR)
    return sum(resources.requests.get(CPU, 0) for resources in running)


def pod_level_cpu_count(pod: PodRequests) -> int:
    """Return the CPUs that the pod itself requests, to be divided among its containers; 0 for none."""
    if pod.pod_level_requests is None or not pod.are_pod_level_requests_managed or not pod.guaranteed:
        return 0
    return _whole(pod.pod_level_requests.get(CPU, 0))


def _whole(milli: int) -> int:
    return milli // MILLI if milli % MILLI == 0 else 0
