"""LSE and LSR pods for which no scheduler chose CPUs: they own some as a whole.

Koordinator's principles (reference koordinator h; its document): CPUs are given to pods, not to containers;
LSE and LSR pods ask for whole CPUs, and for exactly what their limits allow. A pod that asks otherwise is
refused, because it would rather not run than share. Counted is what runs together: app containers and
sidecars; init containers come and go before them.

The node decides only where its CPU manager policy is ``static``; else such pods share, as Koordinator's own
table has it (row 9).
"""

from __future__ import annotations

from proxy.model.asks import MEMORY, Ask, Kind, PodAsk
from proxy.model.workload import KubeQos, Pod, Request
from proxy.place.cpu_request import CPU, MILLI, NO_SHARES
from proxy.plan.node import Node
from proxy.pools import standing
from proxy.pools.claims import STRICT, whole_cpus


def owns_as_a_whole(node: Node, pod: Pod) -> bool:
    """Tell whether the node is to choose CPUs for a pod as a whole."""
    undecided = (pod.cpuset is None or pod.chosen) and pod.nodes is None and not pod.problem
    return node.static and pod.qos in STRICT and undecided


def tells(pod: Pod, total: Request) -> bool:
    """Tell whether it is known what the pod asks for."""
    return pod.asks is not None or total.cpu_shares > NO_SHARES


def owning_problem(pod: Pod, total: Request) -> str:
    """Tell why a pod may not own CPUs; empty where it may."""
    if pod.asks is not None:
        return standing.owning_problem(pod.qos, pod.asks)
    limited = total.cpu_quota > 0 or pod.kube_qos is KubeQos.GUARANTEED
    if limited and whole_cpus(total):
        return ""
    wants = total.cpu_shares * MILLI // 1024
    may = f"{total.cpu_quota * MILLI // (total.cpu_period or 100_000)}m" if total.cpu_quota > 0 else "nothing"
    return (
        f"{pod.qos} pod: its containers request about {wants}m CPU together and are limited to {may}; "
        "both must be the same number of whole CPUs"
    )


def owned_cpus(pod: Pod, total: Request) -> int:
    """Give how many CPUs a pod owns."""
    if pod.asks is None:
        return whole_cpus(total)
    return sum(ask.requests.get(CPU, 0) for ask in pod.asks.of(Kind.APP, Kind.SIDECAR)) // MILLI


def owned_asks(pod: Pod, total: Request, count: int) -> PodAsk:
    """Give what a pod asks for as if it were one container; counted memory only where it is Guaranteed."""
    amounts = {CPU: count * MILLI}
    if pod.kube_qos is KubeQos.GUARANTEED:
        amounts |= {MEMORY: total.memory_limit, **dict(total.huge_pages)}
    amounts = {resource: amount for resource, amount in amounts.items() if amount > 0}
    return PodAsk(pod.key, (Ask("", Kind.APP, amounts, amounts),))
