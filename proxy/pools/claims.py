"""Decide what a container may claim: exclusive CPUs, or a pool.

Koordinator's decision table (``row_of``) says which. This is the effect of its rows on a node whose pools
topoproxy manages, with Kubernetes' own classes added:

1. Row 1 gives a pod the CPUs that its resource-status annotation names, whatever its label says. Of the QoS
   classes (``proxy.pools``) only LSE (latency-sensitive exclusive) takes them out of the BE (best effort)
   pool too; BE may borrow the CPUs of an LSR (latency-sensitive reserved) pod. A BE pod owns nothing by its
   annotation: it runs on those of the named CPUs that are in the BE pool.
2. Rows 3 and 4 narrow the BE pool or the shared pool to the NUMA nodes of the annotation. If only Volcano's
   scheduler has chosen nodes, a pod that shares CPUs is narrowed to those.
3. Row 5 is for every SYSTEM pod: if the node keeps no CPUs for the class, its pool is the shared one. Rows 6
   and 9 are the shared pool; row 7, and label BE in any cgroup, the BE pool. Row 8 is not used, because the
   shared set of a static CPU manager of kubelet still holds CPUs that we gave to owners.
4. A Guaranteed container that requests a whole number of CPUs owns that many if the policy is ``static``. If
   it is not, and kubelet's own CPU manager pinned the container (the request names exactly that many CPUs),
   kubelet's choice stays. All other containers share CPUs.

LSE and LSR pods for which nothing was decided elsewhere are given CPUs as a whole when their sandbox is made
(``engine.owners``); if that was not possible, their containers are treated as rule 4 says.

The decision table is that of Koordinator v1.8.0 pkg/koordlet/runtimehooks/hooks/cpuset/rule.go,
getContainerCPUSet. The first row that fits decides; ``proxy.pools`` spells out the QoS classes.

    1  resource-status names CPUs, whatever the class        those
    2  the pools are not known                               leave what the request says
    3  the pod is bound to NUMA nodes; class BE; BE is ours  BE pools of these nodes
    4  the pod is bound to NUMA nodes; not class BE          shared pools of these nodes
    5  class SYSTEM, and it has CPUs                         those
    6  class LS                                              all shared pools
    7  Kubernetes' class BestEffort                          erase what the request says
    8  kubelet's policy is static                            leave what the request says
    9  all others                                            all shared pools

The pools of this node are ours, BE's too, and known from the start: rows 2 and 8 never decide here. ``claim``
says what each row entitles a container to.

The CFS quota of pods that own CPUs follows from the claim (Koordinator v1.8.0
pkg/koordlet/runtimehooks/hooks/cpuset/cpuset.go, UnsetContainerCPUQuota). A container whose CPUs are its own
can use no more than those, so a quota only throttles it, for work that comes in bursts: it is switched off,
for the container and for its pod. Containers of one pod share the pod's CPUs, though, and without quotas one
can starve the others; so a setting keeps them, for all pods or for pods of several containers. A container
that no longer owns CPUs gets the quota of its request back.

Whether a pod of class LSE or LSR may own CPUs also depends on what it requests. Koordinator's document
requires more than its code checks (https://koordinator.sh/docs/user-manuals/fine-grained-cpu-orchestration):
LSE and LSR pods request whole CPUs, and exactly what their limits allow. The containers that run together are
counted: app containers and sidecars; init containers end before them. If the pod itself states a request
(``spec.resources``), only that counts.
"""

from __future__ import annotations

import enum
import functools

from msgspec import Struct

from proxy.model.defects import DefectKind, InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import KeepQuota
from proxy.model.phrases import counted, cpus_are, numa_nodes_text
from proxy.model.phrases import cpus as named_cpus
from proxy.model.requests import ContainerKind, PodRequests
from proxy.model.workload import MOST_CPU_SHARES, KubeQos, Pod, Pool, QosClass, Request
from proxy.pools.pod_fields import CPU


class DecisionRow(enum.IntEnum):
    """The rows of the decision table in the module's docstring."""

    NAMED = 1
    BE_ON_NODES = 3
    SHARED_ON_NODES = 4
    SYSTEM = 5
    LS = 6
    BEST_EFFORT = 7
    SHARED = 9


def row_of(
    qos: QosClass,
    kube_qos: KubeQos,
    *,
    named: bool = False,
    bound: bool = False,
) -> DecisionRow:
    """Find the row that decides about a container.

    Args:
        qos: Its pod's class.
        kube_qos: Kubernetes' class.
        named: Whether its annotation names CPUs.
        bound: Whether its annotation binds it to NUMA nodes.
    """
    is_be = qos is QosClass.BE
    rows = (
        (DecisionRow.NAMED, named),
        (DecisionRow.BE_ON_NODES, bound and is_be),
        (DecisionRow.SHARED_ON_NODES, bound),
        (DecisionRow.SYSTEM, qos is QosClass.SYSTEM),
        (DecisionRow.LS, qos is QosClass.LS),
        (DecisionRow.BEST_EFFORT, kube_qos is KubeQos.BEST_EFFORT),
    )
    return next((row for row, fits in rows if fits), DecisionRow.SHARED)


STRICT = (QosClass.LSE, QosClass.LSR)
"""Classes whose pods are rejected rather than run on CPUs of others."""


class Claim(Struct, frozen=True):
    """The claim of a container: exclusive CPUs, or a pool.

    Attributes:
        pool: OWN, SHARED, BE or SYSTEM.
        cpus: The CPUs that were named for it (by annotation or kubelet); None if topoproxy picks them.
        count: How many CPUs to pick when ``cpus`` is None and the pool is OWN.
        per_pod: True when all containers of the pod own the same CPUs.
        excludes_be: True when owned CPUs leave the BE pool too.
        reason: Why this is the claim, in one sentence.
        problem: What is wrong with the request, as text; the claim is then the part that remains.
        fatal: True when the container is rejected because of the problem.
        within: CPUs that a pool is narrowed to.
        nodes: NUMA nodes that a pool is narrowed to.
    """

    pool: Pool
    reason: str
    cpus: CpuSet | None = None
    count: int = 0
    per_pod: bool = False
    excludes_be: bool = False
    problem: str = ""
    fatal: bool = False
    within: CpuSet | None = None
    nodes: Mask | None = None


def whole_cpus(request: Request) -> int:
    """Return the number of CPUs that a Guaranteed container requests if it is whole, otherwise 0.

    The limit is quota/period, and the request is shares * 1000 / 1024 (kubernetes v1.36
    pkg/kubelet/cm/helpers_linux.go, MilliCPUToShares). A container that kubelet pinned has no quota since
    1.33 (quota -1 or 0): then only the shares are left.
    """
    if request.cpu_shares == MOST_CPU_SHARES:
        # The kernel accepts no more shares, so from 256 CPUs on only the limit counts.
        count, remainder = divmod(request.cpu_quota, request.period_us)
        return count if count >= MOST_CPU_SHARES // 1024 and not remainder else 0
    if request.cpu_shares < 1024 or request.cpu_shares % 1024:
        return 0
    count = request.cpu_shares // 1024
    if request.cpu_quota > 0 and request.cpu_quota != count * request.period_us:
        return 0
    return count


def claim(
    pod: Pod, request: Request, online: CpuSet, *, static: bool, kubelet_reported_count: int | None = None
) -> Claim:
    """Return the claim of a container.

    Args:
        pod: Its pod.
        request: Its request.
        online: The machine's online CPUs; a named CPU outside them is a problem.
        static: Whether we give whole-CPU Guaranteed containers CPUs of their own.
        kubelet_reported_count: How many CPUs of its own the container is entitled to according to kubelet;
            None if only the CRI request is known.
    """
    problem, fault = pod.problem, bool(pod.problem)
    is_be = pod.qos is QosClass.BE
    if pod.cpuset and not fault and not is_be:
        offline = pod.cpuset - online
        if not offline:
            return _named(pod, pod.cpuset)
        problem = InputDefect(
            f"resource-status names {named_cpus(pod.cpuset)}, but {cpus_are(offline)} not online here",
            DefectKind.CPU_LIST,
        )
    if problem and pod.qos in STRICT:
        return Claim(Pool.SHARED, f"{pod.qos} pod rejected", problem=problem, fatal=True)
    named = bool(pod.cpuset) and not problem  # only BE pods get here: any other pod owns the named CPUs
    row = row_of(pod.qos, pod.kube_qos, named=named, bound=bool(pod.nodes) and not problem)
    pool, reason = _pool(DecisionRow.BEST_EFFORT if is_be else row, pod.qos, pod.kube_qos)
    if row is DecisionRow.NAMED and pod.cpuset:
        reason = (
            f"BE pod: its resource-status annotation names {named_cpus(pod.cpuset)}, which the BE pool limits"
        )
        return Claim(Pool.BE, reason, within=pod.cpuset)
    if row in (DecisionRow.BE_ON_NODES, DecisionRow.SHARED_ON_NODES) and pod.nodes:
        source = "its resource-status annotation" if not pod.aligned else "it was aligned, which"
        return Claim(
            pool, f"{_class(pod)} pod: {source} binds it to {numa_nodes_text(pod.nodes)}", nodes=pod.nodes
        )
    if may_own(pod) and not problem:
        count = whole_cpus(request) if kubelet_reported_count is None else kubelet_reported_count
        own = _own(request, online, count, static=static, excludes_be=pod.qos is not QosClass.LSR)
        if own is not None:
            return own
    if pod.volcano_nodes and pool is Pool.SHARED and not problem:
        reason = f"{reason}, of {numa_nodes_text(pod.volcano_nodes)}, which Volcano's scheduler chose"
        return Claim(pool, reason, nodes=pod.volcano_nodes)
    return Claim(pool, reason, problem=problem)


def _named(pod: Pod, cpus: CpuSet) -> Claim:
    """Return the claim of a pod whose CPUs an annotation names, or were chosen with its sandbox."""
    reason = f"{_class(pod)} pod: its resource-status annotation names {named_cpus(cpus)}"
    if pod.cpuset_chosen_locally:
        chosen = f"{named_cpus(cpus)} {'was' if len(cpus) == 1 else 'were'} chosen for it"
        reason = f"{_class(pod)} pod: {chosen} as a whole"
    return Claim(Pool.OWN, reason, cpus=cpus, per_pod=True, excludes_be=pod.qos is QosClass.LSE)


def pool_of(pod: Pod) -> tuple[Pool, str]:
    """Return the pool of a pod without exclusive CPUs and without bound NUMA nodes, and the reason."""
    row = DecisionRow.BEST_EFFORT if pod.qos is QosClass.BE else row_of(pod.qos, pod.kube_qos)
    return _pool(row, pod.qos, pod.kube_qos)


def may_own(pod: Pod) -> bool:
    """Return whether containers of a pod may get CPUs of their own that were not named for them."""
    return pod.kube_qos is KubeQos.GUARANTEED and pod.qos in (QosClass.NONE, *STRICT) and not pod.problem


def _own(request: Request, online: CpuSet, count: int, *, static: bool, excludes_be: bool) -> Claim | None:
    if not count:
        return None
    if static:
        return Claim(
            Pool.OWN,
            f"Guaranteed container with {counted(count, 'whole CPU')}, policy static",
            count=count,
            excludes_be=excludes_be,
        )
    try:
        pinned = CpuSet.parse(request.cpuset_cpus)
    except ValueError:
        return None
    if len(pinned) == count and pinned <= online:
        return Claim(
            Pool.OWN,
            f"kubelet's CPU manager pinned the container to {named_cpus(pinned)}",
            cpus=pinned,
            excludes_be=excludes_be,
        )
    return None


_POOLS = {DecisionRow.SYSTEM: Pool.SYSTEM, DecisionRow.BEST_EFFORT: Pool.BE, DecisionRow.BE_ON_NODES: Pool.BE}


@functools.cache
def _pool(row: DecisionRow, qos: QosClass, kube_qos: KubeQos) -> tuple[Pool, str]:
    name = qos.value or kube_qos.value
    pool = _POOLS.get(row, Pool.SHARED)
    if pool is Pool.SYSTEM:
        return pool, "SYSTEM pod runs on the CPUs that the node keeps for its class, else on the shared pool"
    return pool, f"{name} pod runs on the {'BE' if pool is Pool.BE else 'shared'} pool"


def _class(pod: Pod) -> str:
    return pod.qos.value or pod.kube_qos.value


UNLIMITED = -1


def quota_of_owner(*, containers: int, keep: KeepQuota) -> int | None:
    """Decide whether the CFS quota of a pod that owns CPUs, or of a container of it, is switched off.

    Args:
        containers: How many containers of the pod run at the same time.
        keep: The setting.

    Returns:
        -1 to switch it off, None to leave it.
    """
    several = containers > 1 and keep is KeepQuota.SEVERAL_CONTAINERS
    return None if several or keep is KeepQuota.ALWAYS else UNLIMITED


def ownership_problem(qos: QosClass, requests: PodRequests) -> str:
    """Return why a pod of class LSE or LSR may not own CPUs; empty if it may, and for other classes."""
    if qos not in STRICT:
        return ""
    if requests.pod_level_requests is not None and CPU in requests.pod_level_requests:
        return _own_request_problem(qos, requests, requests.pod_level_requests[CPU])
    for container in requests.containers:
        request, limit = container.requests.get("cpu", 0), container.limits.get("cpu", 0)
        if request != limit:
            return (
                f"{qos} pod: container {container.name} requests {request}m CPU and is limited to {limit}m; "
                "the two must be equal"
            )
    total = sum(
        container.requests.get("cpu", 0)
        for container in requests.of_kinds(ContainerKind.APP, ContainerKind.SIDECAR)
    )
    if total == 0 or total % 1000:
        return f"{qos} pod: its containers request {total}m CPU together; it must be whole CPUs"
    return ""


def _own_request_problem(qos: QosClass, requests: PodRequests, request: int) -> str:
    """Return why a pod with a CPU request of its own (``spec.resources``) may not own CPUs."""
    limit = requests.pod_level_limits.get(CPU, 0)
    if not requests.guaranteed and request != limit:
        return f"{qos} pod: it requests {request}m CPU and is limited to {limit}m; the two must be equal"
    if request == 0 or request % 1000:
        return f"{qos} pod: it requests {request}m CPU; it must be whole CPUs"
    return ""
