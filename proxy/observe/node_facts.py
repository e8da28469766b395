"""Collects from the daemon's state what the node's object for Koordinator's scheduler is built from.

What is in effect is reported in the Node object's terms, whatever its source: reservation, CPUs of class
SYSTEM, bind policy and strategy. The Node object's other settings pass unchanged: amounts of a reservation
and what a scheduler is to do with it, amplification ratios, whether NUMA nodes keep kubelet's reserve. What
kubelet's CPU manager holds for containers that are not here yet is apart from what containers own.

What is not applied is not in effect, and a scheduler must not count on it: observed pods own nothing, unless
their request names the CPUs, as kubelet's CPU manager has it.
"""

from __future__ import annotations

import json

from proxy.engine.admission import assigned_cpus, permitted_claim
from proxy.engine.adoption import parse_cpus
from proxy.engine.enforcement import applies_to
from proxy.engine.limits import kept_shared
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.options import TopologyPolicy
from proxy.model.workload import Container
from proxy.observe.koordinator import NodeFacts
from proxy.observe.koordinator_kubelet import Alloc, KubeletFacts, PodRow
from proxy.pools.annotations import ResourceStatus
from proxy.pools.go_json import amount
from proxy.pools.node_keys import (
    AMPLIFICATION,
    BIND_POLICY,
    NUMA_RESERVATION,
    NUMA_STRATEGY,
    RESERVATION,
    SYSTEM_QOS,
    raw_allocatable,
    reservation,
)


def node_facts(
    state: NodeState, name: str, manager: CpuManager | None = None, meta: NodeMeta | None = None
) -> NodeFacts:
    """Gather what is known of a node.

    Args:
        state: The node as it is.
        name: What the Node object is called.
        manager: What kubelet's CPU manager does; None where it is not watched.
        meta: What the Node object has; None where there is none.
    """
    node, declared = state.node, meta or NodeMeta()
    rows = {
        pod.key: PodRow(
            pod.namespace, pod.name, pod.uid, pod.qos, ResourceStatus(str(pod.cpuset), pod.cpuset)
        )
        for pod in state.pods.values()
        if pod.cpuset
        and not pod.cpuset_chosen_locally
        and applies_to(state, pod)
        and permitted_claim(node, pod)[0].cpuset
    }
    applied = applies_to(state, None)
    return NodeFacts(
        name,
        uid=declared.uid if declared.name == name else "",
        labels=_labels(node, declared),
        annotations=_annotations(node, declared) if applied else _declared(declared),
        capacity=declared.capacity,
        allocatable=_allocatable(declared),
        kubelet=_kubelet(node, manager or CpuManager(), ours=applied),
        pods=tuple(rows[key] for key in sorted(rows)),
        chosen=_by_pod(*_chosen(state), *_coming(state)),
        kept=kept_shared(state) | node.reserved if applied else CpuSet(),
    )


def _chosen(state: NodeState) -> list[Alloc]:
    """Return what containers own by our own choice, together for each pod."""
    found: dict[str, Alloc] = {}
    for container in sorted(state.containers.values(), key=lambda c: c.id):
        if not container.owns_cpus or not (applies_to(state, container.pod) or is_pinned(container)):
            continue
        if not container.pod.cpuset_chosen_locally and assigned_cpus(state.node, container.pod):
            continue
        pod, own = container.pod, container.placement
        before = found.get(pod.key)
        cpus = own.exclusive | before.cpus if before else own.exclusive
        hard = own.excludes_be or (before is not None and before.hard)
        found[pod.key] = Alloc(pod.uid, cpus, pod.namespace, pod.name, hard)
    return list(found.values())


def _by_pod(*allocs: Alloc) -> tuple[Alloc, ...]:
    found: dict[str, Alloc] = {}
    for each in allocs:
        before = found.get(each.uid)
        hard = each.hard or (before is not None and before.hard)
        cpus = each.cpus | before.cpus if before else each.cpus
        found[each.uid] = Alloc(each.uid, cpus, each.namespace, each.name, hard)
    return tuple(found.values())


def _coming(state: NodeState) -> list[Alloc]:
    """Return what kubelet assigned to containers that do not exist yet: they may be created at any moment."""
    known = {pod.uid: pod for pod in state.pods.values()}
    here = {container.owner for container in state.containers.values() if container.owns_cpus}
    found: list[Alloc] = []
    for uid, names in sorted(state.kubelet.items()):
        keys = [key for name in names if (key := f"{uid}/{name}") in state.owners and key not in here]
        cpus = CpuSet.from_bits(union(state.owners[key].cpus.bits for key in keys))
        if cpus:
            pod = known.get(uid)
            found.append(Alloc(uid, cpus, pod.namespace, pod.name) if pod else Alloc(uid, cpus))
    return found


def _kubelet(node: Node, manager: CpuManager, *, ours: bool) -> KubeletFacts:
    """Return the facts of kubelet; where our own topology manager decides, its policy replaces kubelet's."""
    ours = ours and node.policy is not TopologyPolicy.NONE
    return KubeletFacts(
        policy=manager.policy or None,
        options=manager.options,
        reserved_cpus=manager.reserved,
        topology_policy=node.policy.value if ours else manager.topology_policy,
        topology_scope=node.scope.value if ours else manager.topology_scope,
    )


def is_pinned(container: Container) -> bool:
    """Return whether the CPUs of an owner are those that its request names, whichever program chose them."""
    return parse_cpus(container.request.cpuset_cpus) == container.placement.exclusive


def _allocatable(declared: NodeMeta) -> dict[str, int]:
    """Return what is allocatable before amplification: the capacity without kubelet's reserve."""
    raw = raw_allocatable(declared.annotations)[0] or {}
    return {**declared.allocatable, **{name: amount(raw, name, milli=True) for name in raw}}


def _labels(node: Node, declared: NodeMeta) -> dict[str, str]:
    values = {BIND_POLICY[0]: node.bind.value, NUMA_STRATEGY[0]: node.strategy.value}
    values[NUMA_RESERVATION] = declared.labels.get(NUMA_RESERVATION, "")
    return {key: value for key, value in values.items() if value}


def _annotations(node: Node, declared: NodeMeta) -> dict[str, str]:
    values: dict[str, object] = {}
    if node.reservation:
        values[RESERVATION] = reservation(declared.annotations)[0].with_cpus(node.reservation).data()
    if node.system:
        values[SYSTEM_QOS] = {"cpuset": str(node.system), "cpusetExclusive": node.system_alone}
    return {key: json.dumps(value) for key, value in values.items()} | _declared(declared, AMPLIFICATION)


def _declared(declared: NodeMeta, *keys: str) -> dict[str, str]:
    """Return annotations of the Node object as they are: by default all that the picture is drawn from."""
    keys = keys or (RESERVATION, SYSTEM_QOS, AMPLIFICATION)
    return {key: declared.annotations[key] for key in keys if key in declared.annotations}
