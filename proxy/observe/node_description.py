"""Describes the node for the cluster agent, as plain data: the answer to ``GET /node``.

The agent makes objects for schedulers from it (``proxy.agent.objects``). It holds what is in effect, and
nothing that is only desired: the CPUs of containers to which the plan is not applied are left out, and a node
that is being released, or was, publishes nothing (``published`` is false).

The node's object for Koordinator's scheduler is built from ``NodeFacts``. Settings in effect are reported in
the Node object's terms, whatever their source: reservation, CPUs of class SYSTEM, bind policy and strategy.
The Node object's other settings pass unchanged: the amounts of a reservation and how a scheduler handles it,
amplification ratios, and whether NUMA nodes keep kubelet's reserve. The CPUs that kubelet's CPU manager holds
for containers that do not exist yet are kept apart from those that containers own.

A plan that is not applied is not in effect, and a scheduler must not count on it: observed pods own nothing,
unless their request names the CPUs, as it does under kubelet's CPU manager.
"""

from __future__ import annotations

import json

from proxy.allocation.koordinator.resource_status import status_text
from proxy.engine.admission import assigned_cpus, permitted_claim
from proxy.engine.adoption import parse_cpus
from proxy.engine.enforcement import applies_to
from proxy.engine.node import Node
from proxy.engine.owners import floor_cpus
from proxy.engine.state import NodeState
from proxy.model import schema_ids
from proxy.model.admission import BeyondLimit
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.machine import Machine, NumaNode
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyPolicy
from proxy.model.quantity import show_quantity
from proxy.model.workload import Container, Phase, Pod
from proxy.observe.device_capacity import capacity_page
from proxy.observe.json_access import as_map
from proxy.observe.koordinator import NodeFacts, node_resource_topology
from proxy.observe.koordinator_kubelet import Alloc, KubeletFacts, PodRow
from proxy.pools.annotations import ResourceStatus
from proxy.pools.cpu_location import locations_of
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
from proxy.pools.topology_keys import (
    AUTO,
    BIND,
    FLOOR,
    NAMESPACE_LIMIT,
    NODE_LIMIT,
    NUMA_FLOOR,
    OWNER_NAMESPACES,
    POD_LIMIT,
    STRATEGY,
    TOPOLOGY_OPTIONS,
)


def node_facts(
    state: NodeState, name: str, manager: CpuManager | None = None, meta: NodeMeta | None = None
) -> NodeFacts:
    """Gather the known facts about a node.

    Args:
        state: The node as it is.
        name: The name of the Node object.
        manager: The state of kubelet's CPU manager; None if it is not watched.
        meta: The Node object's metadata; None if there is none.
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
        kubelet=_kubelet(node, manager or CpuManager(), own_policy=applied),
        pods=tuple(rows[key] for key in sorted(rows)),
        chosen=_by_pod(*_chosen(state), *_pending(state)),
        unavailable=floor_cpus(state) | node.reserved if applied else CpuSet(),
    )


def _chosen(state: NodeState) -> list[Alloc]:
    """Return the CPUs that containers own by topoproxy's own choice, together for each pod."""
    alloc_of: dict[str, Alloc] = {}
    for container in sorted(state.containers.values(), key=lambda c: c.id):
        if not container.owns_cpus or not (applies_to(state, container.pod) or is_pinned(container)):
            continue
        if not container.pod.cpuset_chosen_locally and assigned_cpus(state.node, container.pod):
            continue
        pod, placement = container.pod, container.placement
        before = alloc_of.get(pod.key)
        cpus = placement.exclusive | before.cpus if before else placement.exclusive
        excludes_be = placement.excludes_be or (before is not None and before.excludes_be)
        alloc_of[pod.key] = Alloc(pod.uid, cpus, pod.namespace, pod.name, excludes_be)
    return list(alloc_of.values())


def _by_pod(*allocs: Alloc) -> tuple[Alloc, ...]:
    alloc_of: dict[str, Alloc] = {}
    for alloc in allocs:
        before = alloc_of.get(alloc.uid)
        excludes_be = alloc.excludes_be or (before is not None and before.excludes_be)
        cpus = alloc.cpus | before.cpus if before else alloc.cpus
        alloc_of[alloc.uid] = Alloc(alloc.uid, cpus, alloc.namespace, alloc.name, excludes_be)
    return tuple(alloc_of.values())


def _pending(state: NodeState) -> list[Alloc]:
    """Return the CPUs that kubelet assigned to containers that do not exist yet, but may come at any time."""
    pods = {pod.uid: pod for pod in state.pods.values()}
    existing = {container.owner for container in state.containers.values() if container.owns_cpus}
    allocs: list[Alloc] = []
    for uid, names in sorted(state.kubelet_cpus.items()):
        keys = [key for name in names if (key := f"{uid}/{name}") in state.owners and key not in existing]
        cpus = CpuSet.union_of(state.owners[key].cpus for key in keys)
        if cpus:
            pod = pods.get(uid)
            allocs.append(Alloc(uid, cpus, pod.namespace, pod.name) if pod else Alloc(uid, cpus))
    return allocs


def _kubelet(node: Node, manager: CpuManager, *, own_policy: bool) -> KubeletFacts:
    """Return the facts of kubelet; if our own topology manager decides, its policy replaces kubelet's."""
    own_policy = own_policy and node.policy is not TopologyPolicy.NONE
    return KubeletFacts(
        policy=manager.policy or None,
        options=manager.options,
        reserved_cpus=manager.reserved,
        topology_policy=node.policy.value if own_policy else manager.topology_policy,
        topology_scope=node.scope.value if own_policy else manager.topology_scope,
    )


def is_pinned(container: Container) -> bool:
    """Return whether an owner's CPUs are those that its request names, whichever program chose them."""
    return parse_cpus(container.request.cpuset_cpus) == container.placement.exclusive


def _allocatable(declared: NodeMeta) -> dict[str, int]:
    """Return the allocatable amounts before amplification: the capacity without kubelet's reserve."""
    raw = raw_allocatable(declared.annotations)[0] or {}
    return {**declared.allocatable, **{name: amount(raw, name, milli=True) for name in raw}}


def _labels(node: Node, declared: NodeMeta) -> dict[str, str]:
    values = {BIND_POLICY[0]: node.bind.value, NUMA_STRATEGY[0]: node.strategy.value}
    values[NUMA_RESERVATION] = declared.labels.get(NUMA_RESERVATION, "")
    return {key: value for key, value in values.items() if value}


def _annotations(node: Node, declared: NodeMeta) -> dict[str, str]:
    values: dict[str, object] = {}
    if node.node_reservation:
        values[RESERVATION] = reservation(declared.annotations)[0].with_cpus(node.node_reservation).data()
    if node.system:
        values[SYSTEM_QOS] = {"cpuset": str(node.system), "cpusetExclusive": node.system_cpus_exclusive}
    return {key: json.dumps(value) for key, value in values.items()} | _declared(declared, AMPLIFICATION)


def _declared(declared: NodeMeta, *keys: str) -> dict[str, str]:
    """Return annotations of the Node object unchanged; by default all that the description uses."""
    keys = keys or (RESERVATION, SYSTEM_QOS, AMPLIFICATION)
    return {key: declared.annotations[key] for key in keys if key in declared.annotations}


def describe_node(
    state: NodeState, name: str, manager: CpuManager | None = None, meta: NodeMeta | None = None
) -> dict[str, object]:
    """Describe a node.

    Args:
        state: The node as it is.
        name: The name of the Node object.
        manager: The state of kubelet's CPU manager; None if it is not watched.
        meta: The Node object's metadata; None if there is none.
    """
    node, devices = state.node, capacity_page(state)
    return {
        "schema": schema_ids.NODE,
        "name": name,
        "mode": state.mode.value,
        "published": state.mode in (NodeMode.ENFORCE, NodeMode.OBSERVE),
        "applied": applies_to(state, None),
        "policies": _policies(node, manager or CpuManager())
        | (_rules(node) if applies_to(state, None) else {}),
        "reservedCPUs": str(node.reserved | node.withheld),
        "withheldCPUs": str(node.withheld),
        "freeCPUs": str(_free(state)),
        "floorCPUs": str(_floor_cpus(state)),
        "cpus": [
            [location.cpu, location.core, location.socket, location.node]
            for location in locations_of(node.machine)
        ],
        "numaNodes": [_numa_node(numa_node, node.machine) for numa_node in node.machine.nodes],
        "memory": _memory(state),
        "devices": devices["zones"],
        "deviceResources": devices["resources"],
        "pools": {"shared": str(state.pools.shared), "be": str(state.pools.be)},
        "pods": _pods(state),
        "koordinator": _koordinator(state, name, manager, meta),
    }


def _koordinator(
    state: NodeState, name: str, manager: CpuManager | None, meta: NodeMeta | None
) -> dict[str, object]:
    """Return the annotations and zones that Koordinator's agent writes into a NodeResourceTopology."""
    facts = node_facts(state, name, manager, meta)
    whole = node_resource_topology(state.node.machine, facts)
    metadata = as_map(whole["metadata"])
    return {
        "labels": metadata["labels"],
        "annotations": metadata["annotations"],
        "topologyPolicies": whole["topologyPolicies"],
        "zones": whole["zones"],
    }


def _free(state: NodeState) -> CpuSet:
    """Return the CPUs that a new owner may get: those that are not owned, reserved or kept for the floor."""
    applied = applies_to(state, None)
    owned = (
        [state.cpus_set_aside(), *(owner.cpus for owner in state.owners.values())]
        if applied
        else _pinned(state)
    )
    free = state.node.machine.online - state.node.reserved - state.node.withheld
    free -= floor_cpus(state) if applied else CpuSet()
    return free - CpuSet.union_of(owned)


def _floor_cpus(state: NodeState) -> CpuSet:
    """Return the CPUs that are not free only because the shared pool needs some: others would do as well."""
    return floor_cpus(state) - state.node.cpu.reserved if applies_to(state, None) else CpuSet()


def _pinned(state: NodeState) -> list[CpuSet]:
    """Return the CPUs that containers own although the plan is not applied: other programs chose them."""
    return [
        container.placement.exclusive
        for container in state.containers.values()
        if container.owns_cpus and is_pinned(container)
    ]


def _policies(node: Node, manager: CpuManager) -> dict[str, str]:
    """Return the policies in effect, by kubelet's names: ours, or kubelet's if ours is off."""
    own_policy = node.policy is not TopologyPolicy.NONE
    return {
        "cpuManagerPolicy": "static" if node.static else manager.policy or "none",
        "topologyManagerPolicy": node.policy.value if own_policy else manager.topology_policy or "none",
        "topologyManagerScope": node.scope.value if own_policy else manager.topology_scope or "container",
        "memoryManagerPolicy": "None" if node.memory is None else "Static",
        "cpuManagerPolicyOptions": _cpu_options(node, manager),
    }


def _rules(node: Node) -> dict[str, str]:
    """Return the rules that the Node object does not show; those on owners only if they reject pods."""
    rules = node.admission
    values: dict[str, object] = {
        BIND: node.bind.value,
        STRATEGY: node.strategy.value,
        TOPOLOGY_OPTIONS: "prefer-closest-numa-nodes=true" if node.closest else "",
        FLOOR: AUTO if rules.floor is None else rules.floor,
        NUMA_FLOOR: AUTO if rules.numa_floor is None else rules.numa_floor,
    }
    if rules.beyond is BeyondLimit.REJECT:
        values |= {
            POD_LIMIT: rules.pod_limit,
            NAMESPACE_LIMIT: rules.namespace_limit,
            NODE_LIMIT: rules.node_limit,
            OWNER_NAMESPACES: "" if "*" in rules.owners.patterns else json.dumps(rules.owners.patterns),
        }
    return {name: str(value) for name, value in values.items() if value is not None and value != ""}


def _cpu_options(node: Node, manager: CpuManager) -> str:
    """Return the options of the CPU manager that are set, as kubelet's flag takes them."""
    if not node.static:
        return ",".join(f"{name}={value}" for name, value in sorted(manager.options.items()))
    return ",".join(f"{name}=true" for name, on in sorted(node.options.as_kubelet().items()) if on)


def _numa_node(node: NumaNode, machine: Machine) -> dict[str, object]:
    """Describe a NUMA node; amounts are bytes."""
    pages = {size: pages.nr * size << 10 for size, pages in (node.hugepages or {}).items() if pages.nr}
    return {
        "id": node.id,
        "distances": {
            str(other.id): value for other, value in zip(machine.nodes, node.distance, strict=False)
        },
        "memory": max(0, (node.mem_bytes or 0) - sum(pages.values())),
        "hugepages": {
            f"hugepages-{show_quantity(size << 10)}": total for size, total in sorted(pages.items())
        },
    }


def _memory(state: NodeState) -> dict[str, object]:
    """Return the memory of each NUMA node that may be promised, and the free part; empty if not counted."""
    if state.memory is None:
        return {}
    return {
        str(number): {
            name: {"allocatable": table.allocatable, "free": table.free}
            for name, table in node.tables.items()
            if table.total
        }
        for number, node in state.memory.nodes.items()
    }


def _pods(state: NodeState) -> list[dict[str, object]]:
    """Describe the pods that run, with their containers; the newest sandbox of each."""
    by_sandbox: dict[str, list[Container]] = {}
    decided = {container.pod.sandbox_id for container in state.containers.values()}
    for container in state.containers.values():
        if container.phase is not Phase.EXITED:
            by_sandbox.setdefault(container.pod.sandbox_id, []).append(container)
    newest: dict[str, Pod] = {}
    for pod in state.pods.values():
        if pod.key not in newest or newest[pod.key].attempt <= pod.attempt:
            newest[pod.key] = pod
    return [
        _pod(state, pod, by_sandbox.get(pod.sandbox_id, []), decided=pod.sandbox_id in decided)
        for pod in sorted(newest.values(), key=lambda entry: (entry.namespace, entry.name, entry.uid))
    ]


def _pod(state: NodeState, pod: Pod, containers: list[Container], *, decided: bool) -> dict[str, object]:
    """Describe a pod.

    Args:
        state: The node.
        pod: The pod.
        containers: Its running containers.
        decided: Whether one of its containers was placed; until then, only the CPUs that are set aside for
            the pod count.
    """
    applied = applies_to(state, pod)
    chosen_locally = applied and pod.cpuset_chosen_locally and pod.cpuset
    aside = pod.reserved_for_pod.cpus if applied and pod.reserved_for_pod else CpuSet()
    aside -= CpuSet.union_of(container.placement.exclusive for container in containers)
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "qosClass": pod.qos.value,
        "kubernetesQOSClass": pod.kube_qos.value,
        "applied": applied,
        "resourceStatus": status_text(pod.cpuset) if chosen_locally and pod.cpuset else "",
        "setAside": str(aside),
        "counted": decided or bool(aside),
        "containers": [
            _container(container, applied=applied or is_pinned(container))
            for container in sorted(containers, key=lambda c: (c.name, c.id))
        ],
    }


def _container(container: Container, *, applied: bool) -> dict[str, object]:
    placement = container.placement
    created = container.phase is not Phase.CREATING
    return {
        "name": container.name,
        "pool": placement.pool.value,
        "cpus": str(placement.exclusive) if applied and created and container.owns_cpus else "",
        "mems": str(placement.mems) if applied else "",
        "memory": [
            {"nodes": str(block.affinity), "resource": block.resource, "bytes": block.size}
            for block in placement.blocks
            if applied
        ],
        "reasons": list(placement.reasons) if applied and container.owns_cpus else [],
    }
