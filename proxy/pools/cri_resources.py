"""Convert a Pod object to the resources and facts that kubelet sends over the CRI.

Theory (kubernetes v1.36 pkg/kubelet/kuberuntime/kuberuntime_container_linux.go, calculateLinuxResources;
pkg/kubelet/cm/helpers_linux.go, MilliCPUToShares). Requests do not go over the wire; CPU shares stand for
them, rounded. 1024 shares are one CPU; the maximum is 262144; the minimum is 2, which also means no request.
CPU limits are a quota within a period of 100 ms; the minimum is 1 ms, and 0 means no quota. A container
without limits of its own gets those of the pod itself. The sandbox carries the sum over all containers,
without overhead.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from proxy.model.requests import HUGE_PAGES, MEMORY, ContainerResources, PodRequests, peak_request
from proxy.model.workload import CFS_PERIOD_US, MOST_CPU_SHARES, KubeQos, Pod, Request
from proxy.pools.facts import pod_facts
from proxy.pools.pod_fields import CPU
from proxy.pools.pod_spec import PodSpec

LEAST_SHARES, LEAST_QUOTA_US = 2, 1000
_NONE: Mapping[str, int] = {}
_PARTS = {KubeQos.GUARANTEED: "", KubeQos.BURSTABLE: "burstable/", KubeQos.BEST_EFFORT: "besteffort/"}


def shares(milli: int) -> int:
    """Return the CPU shares for thousandths of a CPU."""
    return min(max(milli * 1024 // 1000, LEAST_SHARES), MOST_CPU_SHARES)


def quota(milli: int, period_us: int = CFS_PERIOD_US) -> int:
    """Return the CFS quota in microseconds for a limit in thousandths of a CPU; 0 (no limit) for 0."""
    return max(milli * period_us // 1000, LEAST_QUOTA_US) if milli else 0


def cri_request(container: ContainerResources, pod_level_limits: Mapping[str, int] = _NONE) -> Request:
    """Return the resources that kubelet sends with CreateContainer.

    Args:
        container: What the container requests.
        pod_level_limits: Limits of the pod itself.
    """
    limits = {n: container.limits.get(n) or pod_level_limits.get(n, 0) for n in (CPU, MEMORY)}
    return _request(container.requests, {**container.limits, **limits})


def sandbox_total(pod: PodRequests, pod_level_limits: Mapping[str, int] = _NONE) -> Request:
    """Return the resources that kubelet sends with RunPodSandbox: what all containers need together.

    Args:
        pod: What the pod requests; requests of its own replace the sums.
        pod_level_limits: Limits of the pod itself; they replace the sums too.
    """
    requests = {
        **peak_request(pod.containers, lambda container: container.requests),
        **(pod.pod_level_requests or {}),
    }
    limits = {**peak_request(pod.containers, lambda container: container.limits), **pod_level_limits}
    return _request(requests, {n: v for n, v in limits.items() if n in (CPU, MEMORY)})


def _request(requests: Mapping[str, int], limits: Mapping[str, int]) -> Request:
    limit = limits.get(CPU, 0)
    return Request(
        cpu_shares=shares(requests.get(CPU, limit)),
        cpu_quota=quota(limit),
        cpu_period=CFS_PERIOD_US,
        memory_limit=limits.get(MEMORY, 0),
        huge_pages=tuple((n, v) for n, v in sorted(limits.items()) if n.startswith(HUGE_PAGES) and v),
    )


def carries_other_amounts(pod: PodRequests, name: str, request: Request) -> bool:
    """Return whether a create carries other CPUs or memory than kubelet's report of its pod implies.

    That is so after the container was resized. A value that the create does not carry is not compared: a
    quota is missing if kubelet sets none (``cpuCFSQuota``), or has switched it off for exclusive CPUs.

    Args:
        pod: What kubelet reported of the pod.
        name: The container; one that was not reported is not compared.
        request: The resources of its create.
    """
    reported = next((each for each in pod.containers if each.name == name), None)
    return reported is not None and any(_changes(reported, pod, request))


def _changes(reported: ContainerResources, pod: PodRequests, request: Request) -> tuple[bool, bool, bool]:
    """Return whether a create carries other CPU shares, another CFS quota, another memory limit."""
    implied = cri_request(reported, pod.pod_level_limits)
    implied_quota = implied.cpu_quota
    if implied_quota and request.period_us != CFS_PERIOD_US:
        implied_quota = quota(reported.limits.get(CPU) or pod.pod_level_limits.get(CPU, 0), request.period_us)
    other_shares = request.cpu_shares not in (0, implied.cpu_shares)
    other_quota = request.cpu_quota > 0 and request.cpu_quota != implied_quota
    if pod.guaranteed and 0 < request.cpu_shares < MOST_CPU_SHARES and not other_shares:
        other_quota = False  # its limit is its request: another program has scaled the quota
    return other_shares, other_quota, request.memory_limit not in (0, implied.memory_limit)


def with_amounts_of_create(pod: PodRequests, name: str, request: Request) -> PodRequests:
    """Return a report in which one container has the CPUs and the memory that its create carries.

    Amounts that the create does not contradict stay as they were reported, because the amounts of the create
    are rounded. A pod with resources of its own stays as it is: the create may carry those.

    Args:
        pod: What kubelet reported of the pod.
        name: The container.
        request: The resources of its create.
    """
    if pod.pod_level_requests is not None:
        return pod
    containers = (_created(c, request, pod) if c.name == name else c for c in pod.containers)
    return replace(pod, containers=tuple(containers))


def _created(reported: ContainerResources, request: Request, pod: PodRequests) -> ContainerResources:
    requests, limits = dict(reported.requests), dict(reported.limits)
    other_shares, other_quota, other_memory = _changes(reported, pod, request)
    if other_shares or (other_quota and pod.guaranteed):
        requests[CPU] = _requested_milli(request)
    if pod.guaranteed:
        limits[CPU] = requests.get(CPU, 0)
    elif other_quota:
        milli = requests.get(CPU, 0)
        is_same = quota(milli, request.period_us) == request.cpu_quota
        limits[CPU] = milli if is_same else request.limit_milli
    if other_memory:
        limits[MEMORY] = request.memory_limit
        if pod.guaranteed:
            requests[MEMORY] = request.memory_limit
    return replace(reported, requests=requests, limits=limits)


def _requested_milli(request: Request) -> int:
    """Return the thousandths of a CPU for which CPU shares stand; without shares, the limit."""
    if not request.cpu_shares:
        return request.limit_milli
    # Shares are rounded down, and a thousandth of a CPU is more than one share: so this is exact.
    milli = 0 if request.cpu_shares <= LEAST_SHARES else -(-request.cpu_shares * 1000 // 1024)
    return max(request.limit_milli, milli) if request.cpu_shares == MOST_CPU_SHARES else milli


def cgroup_parent(uid: str, qos: KubeQos) -> str:
    """Return the cgroup of a pod as the cgroupfs driver of kubelet names it."""
    return f"/kubepods/{_PARTS[qos]}pod{uid}"


def pod_of(spec: PodSpec, sandbox_id: str, source: str = "") -> Pod:
    """Return the pod as it is known once its sandbox was requested.

    Args:
        spec: The Pod object.
        sandbox_id: The runtime's id of the sandbox.
        source: Where the object came from, as text.
    """
    parent = cgroup_parent(spec.uid or sandbox_id, spec.qos)
    facts = pod_facts(
        sandbox_id, spec.uid, spec.namespace, spec.name, 0, spec.labels, spec.annotations, parent
    )
    # A uid may contain the words that identify a class in a path; here the class is known.
    return replace(facts, kube_qos=spec.qos, requests=spec.requests, source=source)
