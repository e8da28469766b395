"""Which pods are aligned by themselves (``alignment``, which is loaded when the first of them comes)."""

from __future__ import annotations

import dataclasses

from proxy.model.asks import Kind
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.koordinator import NumaPolicy
from proxy.model.workload import Pod, Request
from proxy.place.cpu_request import CPU, MILLI, NO_SHARES


def wants(pod: Pod) -> bool:
    """Tell whether the node is to align a pod by what the pod itself says."""
    undecided = (pod.cpuset is None or pod.chosen) and pod.nodes is None and not pod.problem
    return pod.aligned is not NumaPolicy.NONE and undecided


def shared_milli(pod: Pod, total: Request) -> int:
    """Give what a pod that shares CPUs asks for, in thousandths; 0 where nobody tells."""
    if pod.asks is not None:
        return sum(ask.requests.get(CPU, 0) for ask in pod.asks.of(Kind.APP, Kind.SIDECAR))
    return total.cpu_shares * MILLI // 1024 if total.cpu_shares > NO_SHARES else 0


def bound(pod: Pod, hint: TopologyHint, nodes: Mask) -> Pod:
    """Give a pod that shares CPUs as it is bound to the nodes of a hint; to no part where that is all."""
    if hint.affinity is None or hint.affinity == nodes:
        return pod
    return dataclasses.replace(pod, nodes=hint.affinity)
