"""The state of a node as plain data: what ``topoproxy status`` shows."""

from __future__ import annotations

from proxy.allocation.koordinator.resource_status import status_text
from proxy.controller.controller import NodeController
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.quotas import CONTAINER, POD
from proxy.engine.state import NodeState
from proxy.model.workload import Container, Phase, Pool

FORMER_KEYS = {"short": "shortfalls", "prescribed": "nodePolicy", "aside": "reservations"}
"""Keys that were renamed; the former ones are given for one more release."""


def node_page(controller: NodeController) -> dict[str, object]:
    """Give pools, owners, containers and problems."""
    state = controller.state
    machine = state.node.machine
    per_node = state.pools.per_node(machine)
    page: dict[str, object] = {
        "ready": controller.synced.is_set() and not controller.health.stuck(),
        "pools": {
            "shared": str(state.pools.shared),
            "be": str(state.pools.be),
            **({"system": str(state.pools.system)} if state.node.system else {}),
            "nodes": [{"node": n, "shared": str(p.shared), "be": str(p.be)} for n, p in per_node.items()],
        },
        "exclusive": [
            {
                "owner": key,
                "cpus": str(owner.cpus),
                "hard": owner.hard,
                "resource_status": status_text(owner.cpus),
                "pod": next((c.pod.ref for c in _holders(controller, key)), ""),
                "container": ",".join(sorted({c.name for c in _holders(controller, key)})),
            }
            for key, owner in sorted(state.owners.items())
        ],
        "containers": [
            _container(controller, c) for c in sorted(state.containers.values(), key=lambda c: (c.ref, c.id))
        ],
        "quotas": quotas_page(controller),
        **({"partitions": controller.partitions.page()} if controller.partitions is not None else {}),
        "workers": controller.health.page(),
        "problems": controller.telemetry.problems(),
        "violations": violations(state),
        "shortfalls": controller.hotplug.shortage.page(),
        "counters": controller.telemetry.registry.page(),
        "settings": _settings(state.node),
        "cgroups": controller.cgroup_locator.page(controller.enforcer.cgroups.version)
        | controller.unit_properties.page(),
        "drift": controller.drift.page(),
        "nodePolicy": controller.node_policy.page(),
        "kubelet": controller.kubelet_cpus.page(),
        "memory": _memory(state),
        "reservations": [
            {
                "pod": pod.ref,
                "cpus": str(pod.reserved_for_pod.cpus),
                "nodes": str(pod.reserved_for_pod.affinity or ""),
            }
            for pod in state.pods.values()
            if pod.reserved_for_pod is not None
        ],
        "remembered": controller.history.size,
    }
    return page | {former: page[key] for former, key in FORMER_KEYS.items()}


def _container(controller: NodeController, container: Container) -> dict[str, object]:
    state = controller.state
    return {
        "id": container.id,
        "ref": container.ref,
        "pod_uid": container.pod.uid,
        "qos": container.pod.qos.value or container.pod.kube_qos.value,
        "pool": container.placement.pool.value,
        "cpus": "" if container.phase is Phase.EXITED else str(state.wanted(container)),
        "mems": str(container.placement.mems),
        "cfs_quota": "off" if controller.quotas.off(container) else "",
        "phase": container.phase.value,
        "reason": "; ".join(container.placement.reasons),
    }


def quotas_page(controller: NodeController) -> list[dict[str, object]]:
    """Give the CFS quotas that are off and will be put back; ``container`` is empty for a pod's."""
    state = controller.state
    pods = {POD + pod.key: pod.ref for pod in state.pods.values()}
    rows: list[dict[str, object]] = []
    for key, record in sorted(controller.quotas.known.records.items()):
        found = state.containers.get(key.removeprefix(CONTAINER))
        name = "" if found is None else found.name
        pod = pods.get(key, "") if found is None else found.pod.ref
        rows.append({"pod": pod, "container": name, "was": record.quota, "group": record.group})
    return rows


def _settings(node: Node) -> dict[str, object]:
    return {
        "cpuManagerPolicy": "static" if node.static else "none",
        "cpuManagerPolicyOptions": [name for name, on in node.options.as_kubelet().items() if on],
        "reservedSystemCPUs": str(node.reserved),
        "topologyManagerPolicy": node.policy.value,
        "topologyManagerScope": node.scope.value,
        "reservedCPUs": str(node.reservation),
        "systemCPUs": str(node.system),
        "cpuBindPolicy": node.bind.value,
        "numaAllocateStrategy": node.strategy.value,
        "prefer-closest-numa-nodes": node.closest,
        "memoryManagerPolicy": "None" if node.memory is None else "Static",
        "memoryNodes": "follow" if node.follow_mems else "leave",
        "admission": _admission(node),
    }


def _admission(node: Node) -> dict[str, object]:
    """Give the rules of admission, with the floors in CPUs."""
    rules = node.admission
    floors = {floor.node: floor.least for floor in node.floors.each}
    return {
        "resourceStatus": rules.resource_status.value,
        "namespaces": list(rules.owners.patterns),
        "systemNamespaces": list(rules.system.patterns),
        "maxCPUsPerPod": rules.pod_limit,
        "maxCPUsPerNamespace": rules.namespace_limit,
        "maxCPUsPerNode": rules.node_limit,
        "sharedFloor": floors.pop(None, 0),
        "sharedFloorPerNUMANode": {str(number): least for number, least in floors.items()},
        "beyondLimit": rules.beyond.value,
    }


def _memory(state: NodeState) -> list[dict[str, object]]:
    """Give what is promised of each node's memory, in bytes by resource; empty where it is not counted."""
    if state.memory is None:
        return []
    return [
        {
            "node": number,
            "group": str(node.cells),
            "resources": {
                name: {"allocatable": table.allocatable, "given": table.reserved, "free": table.free}
                for name, table in node.tables.items()
                if table.total
            },
        }
        for number, node in state.memory.nodes.items()
    ]


def _holders(controller: NodeController, owner: str) -> list[Container]:
    return [
        c
        for c in controller.state.containers.values()
        if c.owner == owner and c.placement.pool is Pool.OWN and c.phase is not Phase.EXITED
    ]
