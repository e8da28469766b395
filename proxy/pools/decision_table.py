"""Koordinator's decision table: which row decides where a container runs.

See Koordinator v1.8.0 pkg/koordlet/runtimehooks/hooks/cpuset/rule.go, getContainerCPUSet.

The first row that fits decides; ``proxy.pools`` spells out the QoS classes.

    1  resource-status names CPUs, whatever the class        those
    2  the pools are not known                               leave what the request says
    3  the pod is bound to NUMA nodes; class BE; BE is ours  BE pools of these nodes
    4  the pod is bound to NUMA nodes; not class BE          shared pools of these nodes
    5  class SYSTEM, and it has CPUs                         those
    6  class LS                                              all shared pools
    7  Kubernetes' class BestEffort                          erase what the request says
    8  kubelet's policy is static                            leave what the request says
    9  all others                                            all shared pools

The pools of this node are ours, BE's too, and known from the start: rows 2 and 8 never decide here.
``claims`` says what each row entitles a container to.
"""

from __future__ import annotations

import enum

from proxy.model.workload import KubeQos, QosClass


class DecisionRow(enum.IntEnum):
    """The rows of the table."""

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
        (DecisionRow.SHARED_ON_NODES, bound and not is_be),
        (DecisionRow.SYSTEM, qos is QosClass.SYSTEM),
        (DecisionRow.LS, qos is QosClass.LS),
        (DecisionRow.BEST_EFFORT, kube_qos is KubeQos.BEST_EFFORT),
    )
    return next((row for row, fits in rows if fits), DecisionRow.SHARED)
