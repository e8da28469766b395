"""Decide what a container may claim: exclusive CPUs, or a pool.

Koordinator's decision table (``decision_table``) says which. This is the effect of its rows on a node whose
pools topoproxy manages, with Kubernetes' own classes added:

1. Row 1 gives a pod the CPUs that its resource-status annotation names, whatever its label says. Of the QoS
classes (``proxy.pools``) only LSE
   takes them out of the BE pool too; BE may borrow the CPUs of an LSR pod. A BE pod owns nothing by it: it
   runs on those of its CPUs that are in the BE pool.
2. Rows 3 and 4 narrow the BE pool or the shared pool to the NUMA nodes of the annotation. Where only
   Volcano's scheduler has chosen nodes, a pod that shares is narrowed to those.
3. Row 5 is for every SYSTEM pod: where the node keeps no CPUs for the class, its pool is the shared one.
   Row 6 and 9 are the shared pool; row 7, and label BE in any cgroup, the BE pool. Row 8 is not used: where
   kubelet's own CPU manager is static, its shared set still holds CPUs that we gave to owners.
4. A Guaranteed container that requests a whole number of CPUs owns that many where the policy is ``static``;
   where it is not and kubelet's own CPU manager pinned the container (the request names exactly that many
   CPUs), kubelet's choice stays. All others share.

LSE and LSR pods for which nothing was decided elsewhere are given CPUs as a whole when their sandbox is made
(``engine.owners``); where that could not be done, their containers are treated as rule 4 says.
"""

from __future__ import annotations

import functools

from msgspec import Struct

from proxy.model.defects import DefectKind, InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import cpus as named_cpus
from proxy.model.phrases import cpus_are, listed
from proxy.model.phrases import nodes as named_nodes
from proxy.model.workload import KubeQos, Pod, Pool, QosClass, Request
from proxy.pools.decision_table import DecisionRow, row_of

STRICT = (QosClass.LSE, QosClass.LSR)
"""Classes whose pods are refused rather than run on CPUs that are not theirs."""
MOST_SHARES = 262_144


class Claim(Struct, frozen=True):
    """What a container claims.

    Attributes:
        pool: OWN, SHARED or BE.
        cpus: The CPUs that were named for it (by annotation or kubelet); None where we pick.
        count: How many CPUs to pick when ``cpus`` is None and the pool is OWN.
        per_pod: True when all containers of the pod own the same CPUs.
        hard: True when owned CPUs leave the BE pool too.
        why: The reason, in one sentence.
        problem: What is wrong with what was requested, in words; the claim is then what remains of it.
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
    """Return the number of CPUs that a Guaranteed container requests if it is whole, else 0.

    The limit is quota/period, and the request is shares * 1000 / 1024 (kubernetes v1.36
    pkg/kubelet/cm/helpers_linux.go, MilliCPUToShares). A container that kubelet pinned has no quota since
    1.33 (quota -1 or 0): then only the shares are left.
    """
    if request.cpu_shares == MOST_SHARES:
        # The kernel accepts no more shares, so from 256 CPUs on only the limit counts.
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
        exact: How many CPUs of its own the container is entitled to according to kubelet; None where only the
            CRI request is known.
    """
    problem, fault = pod.problem, bool(pod.problem)
    is_be = pod.qos is QosClass.BE
    if pod.cpuset and not fault and not is_be:
        missing = pod.cpuset - online
        if not missing:
            return _named(pod, pod.cpuset)
        problem = InputDefect(
            f"resource-status names {named_cpus(pod.cpuset)}, but {cpus_are(missing)} not online here",
            DefectKind.CPU_LIST,
        )
    if problem and pod.qos in STRICT:
        return Claim(Pool.SHARED, f"{pod.qos} pod refused", problem=problem, fatal=True)
    named = bool(pod.cpuset) and is_be and not problem
    row = row_of(pod.qos, pod.kube_qos, named=named, bound=bool(pod.nodes) and not problem)
    pool, why = _pool(DecisionRow.BEST_EFFORT if is_be else row, pod.qos, pod.kube_qos)
    if row is DecisionRow.NAMED and pod.cpuset:
        why = (
            f"BE pod: its resource-status annotation names {named_cpus(pod.cpuset)}, which the BE pool limits"
        )
        return Claim(Pool.BE, why, within=pod.cpuset)
    if row in (DecisionRow.BE_ON_NODES, DecisionRow.SHARED_ON_NODES) and pod.nodes:
        why = "its resource-status annotation" if not pod.aligned else "it was aligned, which"
        return Claim(pool, f"{_class(pod)} pod: {why} binds it to {named_nodes(pod.nodes)}", nodes=pod.nodes)
    if pool is Pool.SHARED and may_own(pod) and not problem:
        count = whole_cpus(request) if exact is None else exact
        own = _own(request, online, count, static=static, hard=pod.qos is not QosClass.LSR)
        if own is not None:
            return own
    if pod.wish_nodes and pool is Pool.SHARED and not problem:
        why = f"{why}, of {named_nodes(pod.wish_nodes)}, which Volcano's scheduler chose"
        return Claim(pool, why, nodes=pod.wish_nodes)
    return Claim(pool, why, problem=problem)


def _named(pod: Pod, cpus: CpuSet) -> Claim:
    """Return the claim of a pod whose CPUs are decided."""
    why = f"{_class(pod)} pod: its resource-status annotation names {named_cpus(cpus)}"
    if pod.cpuset_chosen_locally:
        why = f"{_class(pod)} pod: CPUs {listed(cpus)} were chosen for it when its sandbox was made"
    return Claim(Pool.OWN, why, cpus=cpus, per_pod=True, hard=pod.qos is QosClass.LSE)


def pool_of(pod: Pod) -> tuple[Pool, str]:
    """Return the pool of a pod without exclusive CPUs and without bound NUMA nodes, and the reason."""
    row = DecisionRow.BEST_EFFORT if pod.qos is QosClass.BE else row_of(pod.qos, pod.kube_qos)
    return _pool(row, pod.qos, pod.kube_qos)


def may_own(pod: Pod) -> bool:
    """Return whether containers of a pod may get CPUs of their own that were not named for them."""
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
            Pool.OWN,
            f"kubelet's CPU manager pinned the container to {named_cpus(named)}",
            cpus=named,
            hard=hard,
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
