"""What a container may claim: CPUs of its own, or a place in a pool.

The rules are Koordinator's decision table (reference koordinator c.2 and 3.4 of peers) as far as a node can
follow it without node objects, with Kubernetes' own classes beside it:

1. A resource-status annotation with CPUs gives its pod those CPUs, whatever the label says (row 1). Only LSE
   takes them out of the BE pool too; BE may borrow the CPUs of an LSR pod. A BE pod owns nothing by it: it
   runs on those of its CPUs that are in the BE pool.
2. An annotation that gives NUMA nodes and no CPUs binds its pod to the shared pool of these nodes (row 4);
   a BE pod to the BE pool of these nodes (row 3).
3. Label SYSTEM: the CPUs that the node keeps for that class (row 5), else as LS. Label LS: shared pool (row
   6). Label BE: BE pool (row 7).
4. No such label: BestEffort goes to the BE pool. A Guaranteed container that asks for a whole number of CPUs
   owns that many where the policy is ``static``; where it is not and kubelet's own CPU manager pinned the
   container (the request names exactly that many CPUs), kubelet's choice stands. All others share.

LSE and LSR pods for which nothing was decided elsewhere are given CPUs as a whole when their sandbox is made
(``plan.owning``); where that could not be done, their containers are treated as rule 4 says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from proxy.model.idset import CpuSet, Mask
from proxy.model.wording import nodes as named
from proxy.model.workload import KubeQos, Pod, Pool, QosClass, Request

STRICT = (QosClass.LSE, QosClass.LSR)
"""Classes that would rather not run than run on CPUs that are not theirs."""
MOST_SHARES = 262_144


@dataclass(frozen=True, slots=True)
class Claim:
    """What a container claims.

    Attributes:
        pool: OWN, SHARED or BE.
        cpus: The CPUs that somebody named for it (annotation or kubelet); None where we pick.
        count: How many CPUs to pick when ``cpus`` is None and the pool is OWN.
        per_pod: True when all containers of the pod own the same CPUs.
        hard: True when owned CPUs leave the BE pool too.
        why: One sentence.
        problem: What is wrong with what was asked, in words; the claim is then what remains of it.
        fatal: True when the problem refuses the container.
        within: CPUs that a pool is narrowed to.
        nodes: NUMA nodes that a pool is narrowed to.
    """

    pool: Pool
    why: str
    cpus: CpuSet | None = None
    count: int = 0
    per_pod: bool = False
    hard: bool = False
    problem: str = ""
    fatal: bool = False
    within: CpuSet | None = None
    nodes: Mask | None = None


def whole_cpus(request: Request) -> int:
    """Give the number of CPUs that a Guaranteed container asks for if it is whole, else 0.

    The limit is quota/period, and the request is shares * 1000 / 1024 (kubelet 1.36, reference F). A
    container that kubelet pinned has no quota since 1.33 (quota -1 or 0): then the shares alone tell.
    """
    if request.cpu_shares == MOST_SHARES:
        # The kernel takes no more, so from 256 CPUs on only the limit tells.
        count, rest = divmod(request.cpu_quota, request.cpu_period or 100_000)
        return count if count >= MOST_SHARES // 1024 and not rest else 0
    if request.cpu_shares < 1024 or request.cpu_shares % 1024:
        return 0
    count = request.cpu_shares // 1024
    if request.cpu_quota > 0 and request.cpu_quota != count * (request.cpu_period or 100_000):
        return 0
    return count


def claim(pod: Pod, request: Request, online: CpuSet, *, static: bool, exact: int | None = None) -> Claim:
    """Decide what a container claims.

    Args:
        pod: Its pod.
        request: Its request.
        online: The machine's online CPUs; a named CPU outside them is a problem.
        static: Whether we give whole-CPU Guaranteed containers CPUs of their own.
        exact: How many CPUs of its own the container is entitled to by what kubelet told of its pod; None
            where only the CRI request tells.
    """
    problem = pod.problem
    if pod.cpuset and pod.qos is not QosClass.BE and not problem:
        missing = pod.cpuset - online
        if not missing:
            hard = pod.qos is QosClass.LSE
            why = f"{_class(pod)} pod: its resource-status annotation names CPUs {pod.cpuset}"
            if pod.chosen:
                why = f"{_class(pod)} pod: CPUs {pod.cpuset} were chosen for it when its sandbox was made"
            return Claim(Pool.OWN, why, cpus=pod.cpuset, per_pod=True, hard=hard)
        problem = f"resource-status asks for CPUs {pod.cpuset}, but {missing} not online here"
    if problem and pod.qos in STRICT:
        return Claim(Pool.SHARED, f"{pod.qos} pod refused", problem=problem, fatal=True)
    pool, why = _pool(pod.qos, pod.kube_qos)
    if pod.cpuset and pod.qos is QosClass.BE and not problem:
        why = f"BE pod: its resource-status annotation names CPUs {pod.cpuset}, which the BE pool limits"
        return Claim(Pool.BE, why, within=pod.cpuset)
    if pod.nodes and not problem:
        why = f"{_class(pod)} pod: its resource-status annotation binds it to {named(pod.nodes)}"
        return Claim(pool, why, nodes=pod.nodes)
    if pool is Pool.SHARED and may_own(pod):
        count = whole_cpus(request) if exact is None else exact
        own = _own(request, online, count, static=static, hard=pod.qos is not QosClass.LSR)
        if own is not None:
            return own
    return Claim(pool, why, problem=problem)


def may_own(pod: Pod) -> bool:
    """Tell whether containers of a pod may be given CPUs of their own that nobody has named."""
    return pod.kube_qos is KubeQos.GUARANTEED and pod.qos in (QosClass.NONE, *STRICT) and not pod.problem


def _own(request: Request, online: CpuSet, count: int, *, static: bool, hard: bool) -> Claim | None:
    if not count:
        return None
    if static:
        return Claim(
            Pool.OWN, f"Guaranteed container with {count} whole CPUs, policy static", count=count, hard=hard
        )
    try:
        named = CpuSet.parse(request.cpuset_cpus)
    except ValueError:
        return None
    if len(named) == count and named <= online:
        return Claim(
            Pool.OWN, f"kubelet's CPU manager pinned the container to CPUs {named}", cpus=named, hard=hard
        )
    return None


@functools.cache
def _pool(qos: QosClass, kube_qos: KubeQos) -> tuple[Pool, str]:
    name = qos.value or kube_qos.value
    if qos is QosClass.SYSTEM:
        return (
            Pool.SYSTEM,
            "SYSTEM pod runs on the CPUs that the node keeps for its class, else on the shared pool",
        )
    if qos is QosClass.BE or (kube_qos is KubeQos.BEST_EFFORT and qos is QosClass.NONE):
        return Pool.BE, f"{name} pod runs on the BE pool"
    return Pool.SHARED, f"{name} pod runs on the shared pool"


def _class(pod: Pod) -> str:
    return pod.qos.value or pod.kube_qos.value
