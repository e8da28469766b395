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

``claims`` says what each row entitles a container to on a node whose pools are ours.
"""

from __future__ import annotations

import enum

from proxy.model.workload import KubeQos, QosClass


class DecisionRow(enum.IntEnum):
    """The rows."""

    NAMED = 1
    UNKNOWN = 2
    BE_ON_NODES = 3
    SHARED_ON_NODES = 4
    SYSTEM = 5
    LS = 6
    BEST_EFFORT = 7
    KUBELETS = 8
    SHARED = 9


def row_of(
    qos: QosClass,
    kube_qos: KubeQos,
    *,
    named: bool = False,
    bound: bool = False,
    known: bool = True,
    be_manager: bool = True,
    system: bool = True,
    static: bool = False,
) -> DecisionRow:
    """Find the row that decides about a container.

    Args:
        qos: Its pod's class.
        kube_qos: Kubernetes' class.
        named: Whether its annotation names CPUs.
        bound: Whether its annotation binds it to NUMA nodes.
        known: Whether the pools are known.
        be_manager: Whether BE pods may be bound to NUMA nodes (Koordinator's gate BECPUManager).
        system: Whether the node keeps CPUs for class SYSTEM.
        static: Whether kubelet's CPU manager is static and decides about pods without a class.
    """
    is_be = qos is QosClass.BE
    rows = (
        (DecisionRow.NAMED, named),
        (DecisionRow.UNKNOWN, not known),
        (DecisionRow.BE_ON_NODES, bound and is_be and be_manager),
        (DecisionRow.SHARED_ON_NODES, bound and not is_be),
        (DecisionRow.SYSTEM, qos is QosClass.SYSTEM and system),
        (DecisionRow.LS, qos is QosClass.LS),
        (DecisionRow.BEST_EFFORT, kube_qos is KubeQos.BEST_EFFORT),
        (DecisionRow.KUBELETS, static),
    )
    return next((row for row, fits in rows if fits), DecisionRow.SHARED)
