"""Describes the node for the cluster agent, as plain data: the answer to ``GET /node``.

The agent makes objects for schedulers from it (``proxy.agent.objects``). It holds what is in effect, and
nothing that is only desired: the CPUs of containers to which the plan is not applied are left out, and a node
that is being left, or was, publishes nothing (``published`` is false).
"""

from __future__ import annotations

from proxy.allocation.koordinator.resource_status import status_text
from proxy.engine.enforcement import applies_to
from proxy.engine.limits import kept_shared
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model import schema_ids
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.machine import Machine, NumaNode
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyPolicy
from proxy.model.quantity import show_quantity
from proxy.model.workload import Container, Phase, Pod
from proxy.observe.device_capacity import capacity_page
from proxy.observe.json_access import as_map
from proxy.observe.koordinator import node_resource_topology
from proxy.observe.node_facts import is_pinned, node_facts
from proxy.pools.cpu_location import locations_of


def describe_node(
    state: NodeState, name: str, manager: CpuManager | None = None, meta: NodeMeta | None = None
) -> dict[str, object]:
    """Describe a node.

    Args:
        state: The node as it is.
        name: What the Node object is called.
        manager: What kubelet's CPU manager does; None where it is not watched.
        meta: What the Node object has; None where there is none.
    """
    node, devices = state.node, capacity_page(state)
    return {
        "schema": schema_ids.NODE,
        "name": name,
        "mode": state.mode.value,
        "published": state.mode in (NodeMode.ENFORCE, NodeMode.OBSERVE),
        "applied": applies_to(state, None),
        "policies": _policies(node, manager or CpuManager()),
        "reservedCPUs": str(node.reserved | node.withheld),
        "freeCPUs": str(_free(state)),
        "cpus": [
            [location.cpu, location.core, location.socket, location.node]
            for location in locations_of(node.machine)
        ],
        "numaNodes": [_numa_node(each, node.machine) for each in node.machine.nodes],
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
    """Return what Koordinator's agent writes into a NodeResourceTopology."""
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
    """Return the CPUs that a new owner may get: those without an owner that are in no reserve or floor."""
    applied = applies_to(state, None)
    owned = [state.aside(), *(owner.cpus for owner in state.owners.values())] if applied else _pinned(state)
    free = state.node.machine.online - state.node.reserved - state.node.withheld
    free -= kept_shared(state) if applied else CpuSet()
    return free - CpuSet.from_bits(union(each.bits for each in owned))


def _pinned(state: NodeState) -> list[CpuSet]:
    """Return the CPUs that containers own although the plan is not applied: other programs chose them."""
    return [
        each.placement.exclusive for each in state.containers.values() if each.owns_cpus and is_pinned(each)
    ]


def _policies(node: Node, manager: CpuManager) -> dict[str, str]:
    """Return the policies in effect, by kubelet's names: ours, and kubelet's where ours is off."""
    ours = node.policy is not TopologyPolicy.NONE
    return {
        "cpuManagerPolicy": "static" if node.static else manager.policy or "none",
        "topologyManagerPolicy": node.policy.value if ours else manager.topology_policy or "none",
        "topologyManagerScope": node.scope.value if ours else manager.topology_scope or "container",
        "memoryManagerPolicy": "None" if node.memory is None else "Static",
        "cpuManagerPolicyOptions": _cpu_options(node, manager),
    }


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
    """Return what may be promised of each NUMA node's memory, and what is left; empty where none is."""
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
        for pod in sorted(newest.values(), key=lambda each: (each.namespace, each.name, each.uid))
    ]


def _pod(state: NodeState, pod: Pod, containers: list[Container], *, decided: bool) -> dict[str, object]:
    """Describe a pod.

    Args:
        state: The node.
        pod: The pod.
        containers: Those that run.
        decided: Whether a container of it was placed; until then, only what is set aside for it counts.
    """
    applied = applies_to(state, pod)
    chosen = applied and pod.cpuset_chosen_locally and pod.cpuset
    aside = pod.reserved_for_pod.cpus if applied and pod.reserved_for_pod else CpuSet()
    aside -= CpuSet.from_bits(union(each.placement.exclusive.bits for each in containers))
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "qosClass": pod.qos.value,
        "kubernetesQOSClass": pod.kube_qos.value,
        "applied": applied,
        "resourceStatus": status_text(pod.cpuset) if chosen and pod.cpuset else "",
        "setAside": str(aside),
        "counted": decided or bool(aside),
        "containers": [
            _container(each, applied=applied or is_pinned(each))
            for each in sorted(containers, key=lambda c: (c.name, c.id))
        ],
    }


def _container(container: Container, *, applied: bool) -> dict[str, object]:
    own = container.placement
    created = container.phase is not Phase.CREATING
    return {
        "name": container.name,
        "pool": own.pool.value,
        "cpus": str(own.exclusive) if applied and created and container.owns_cpus else "",
        "mems": str(own.mems) if applied else "",
        "memory": [
            {"nodes": str(block.affinity), "resource": block.resource, "bytes": block.size}
            for block in own.blocks
            if applied
        ],
        "reasons": list(own.reasons) if applied and container.owns_cpus else [],
    }
