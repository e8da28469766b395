"""The CPU budget of BE (best effort) pods, and the CPUs for it.

See Koordinator v1.8.0 pkg/koordlet/qosmanager/plugins/cpusuppress/cpu_suppress.go, calculateBESuppressCPU.

    budget = capacity x threshold - used by pods that are not BE - used by host applications that are not BE
             - max(used by the system, reserved)

"used by the system" is the usage of the node beyond pods and host applications. "reserved" is the larger of
capacity - allocatable and the node's reservation. A lower bound, as a share of the capacity, can be set.
So BE pods use the CPUs that other pods leave idle, up to the threshold.

The budget is applied in one of two ways. As a CPU set: at least two CPUs; it shrinks at once,
because other pods wait, and grows by a tenth of the machine at a time, as idle CPUs may be needed again soon.
As a CFS quota of the group above all BE pods: it grows by a tenth of the machine's time at a time,
and changes below a hundredth are not written.

CPUs are taken from those of LSR (latency-sensitive reserved) pods and from the others in proportion. CPUs of
LSE (latency-sensitive exclusive) pods, and CPUs that are withheld from the pools, are never touched. Amounts
are milli-CPUs unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from proxy.model.idset import CpuSet
from proxy.model.workload import CFS_PERIOD_US, KubeQos, QosClass
from proxy.pools.be_cpu_choice import pick
from proxy.pools.claims import UNLIMITED
from proxy.pools.cpu_location import CpuLocation
from proxy.pools.published_pools import AnnotatedCpus, Withheld

THRESHOLD = 65
"""Percent of the capacity; the default."""
LEAST_CPUS = 2
LEAST_QUOTA = 2000
"""Microseconds."""
RAISE_PERCENT = 10
IGNORE_PERCENT = 1


class Usage(Struct, frozen=True):
    """The CPU capacity and usage of a node.

    Attributes:
        capacity, allocatable: The node's milli-CPUs.
        reservation: The milli-CPUs that the node's annotation reserves.
        node: CPUs in use on the whole node.
        pods: CPUs in use by pod uid.
        be_pods: Uids of BE pods; every other uid counts as not BE.
    """

    capacity: int
    allocatable: int
    node: float
    reservation: int = 0
    pods: Mapping[str, float] = field(default_factory=dict)
    be_pods: frozenset[str] = frozenset()


def is_be(qos: QosClass, kube_qos: KubeQos) -> bool:
    """Return whether the budget covers a pod: by its label, or by Kubernetes' class."""
    return qos is QosClass.BE or kube_qos is KubeQos.BEST_EFFORT


def budget(usage: Usage, threshold: int = THRESHOLD, least: int | None = None) -> int:
    """Compute the CPU budget of BE pods.

    Args:
        usage: Capacity and usage of the node.
        threshold: Percent of the capacity that all may use together.
        least: Percent of the capacity that BE pods may use in any case; None for nothing.

    Returns:
        Milli-CPUs; negative if others use more than the threshold.
    """
    other_pods = sum(used for uid, used in usage.pods.items() if uid not in usage.be_pods)
    system = usage.node - sum(usage.pods.values())
    withheld = max(usage.capacity - usage.allocatable, usage.reservation, 0)
    milli = usage.capacity * threshold // 100
    milli -= int(other_pods * 1000) + int(max(system, 0.0, withheld / 1000) * 1000)
    return milli if least is None else max(milli, usage.capacity * least // 100)


def cpu_count_for(milli: int, now: int, machine: int) -> int:
    """Return the number of CPUs for a budget.

    Args:
        milli: The budget.
        now: How many CPUs BE pods have.
        machine: How many CPUs there are.
    """
    target = max(LEAST_CPUS, -(-milli // 1000))
    return min(target, now - -machine * RAISE_PERCENT // 100)


def be_cpus(online: CpuSet, held: Iterable[AnnotatedCpus], withheld: Withheld) -> CpuSet:
    """Return all CPUs that BE pods may use while BE is not suppressed."""
    return online - _lse_cpus(held) - withheld.kubelet - withheld.reserved - withheld.system


def choose_cpus(
    locations: Iterable[CpuLocation],
    held: Iterable[AnnotatedCpus],
    withheld: Withheld,
    milli: int,
    now: CpuSet,
) -> CpuSet:
    """Choose the CPUs for a budget.

    Args:
        locations: The online CPUs.
        held: CPUs of live pods.
        withheld: CPUs that the pools may not use.
        milli: The budget.
        now: The CPUs that the group above all BE pods has.

    Returns:
        The CPUs; empty if too few are left; then BE pods keep the CPUs that they have.
    """
    all_locations, owners = tuple(locations), tuple(held)
    free = be_cpus(CpuSet(location.cpu for location in all_locations), owners, withheld)
    lsr = CpuSet.from_bits(_bits(pod.cpus for pod in owners if pod.qos is QosClass.LSR)) & free
    if not free:
        return CpuSet()
    count = cpu_count_for(milli, len(now), len(all_locations))
    from_lsr = count * len(lsr) // len(free)
    chosen = pick(from_lsr, (location for location in all_locations if location.cpu in lsr))
    others = free - lsr
    chosen += pick(count - from_lsr, (location for location in all_locations if location.cpu in others))
    return CpuSet(chosen)


def _lse_cpus(held: Iterable[AnnotatedCpus]) -> CpuSet:
    return CpuSet.from_bits(_bits(pod.cpus for pod in held if pod.qos is QosClass.LSE))


def _bits(sets: Iterable[CpuSet]) -> int:
    bits = 0
    for cpus in sets:
        bits |= cpus.bits
    return bits


def quota_for(milli: int, machine: int, now: int) -> int | None:
    """Return the CFS quota for a budget.

    Args:
        milli: The budget.
        machine: How many CPUs there are.
        now: The quota that BE pods have together; -1 for none.

    Returns:
        Microseconds; None if the change is too small for a write.
    """
    target = max(LEAST_QUOTA, milli * CFS_PERIOD_US // 1000)
    if now == UNLIMITED:
        return target  # no quota is set yet: the first one is written whatever its size
    if abs(target - now) * 100 < machine * CFS_PERIOD_US * IGNORE_PERCENT and target != LEAST_QUOTA:
        return None
    return min(target, now + machine * CFS_PERIOD_US * RAISE_PERCENT // 100)
