"""The state of a node as plain data: what ``topoproxy status`` shows."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from proxy.allocation.koordinator.resource_status import status_text
from proxy.engine.be_usage import shares_of
from proxy.engine.enforcement import applies_to
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.quotas import CONTAINER_QUOTA, POD_QUOTA
from proxy.engine.state import NodeState
from proxy.engine.suppression import BeSuppression, SuppressionSettings, budget_reason
from proxy.executor.kernel_ports import CpusetValue
from proxy.executor.node_executor import NodeExecutor
from proxy.executor.readiness import other_checks, required_checks
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import LIVE, Container, Phase, Pool
from proxy.pools.pools import CpuPools

FORMER_KEYS = {"short": "shortfalls", "prescribed": "nodePolicy", "aside": "reservations"}
"""Keys that were renamed; the former ones are given for one more release."""


NAMED = 10
"""How many containers that use the CPUs of an owner are named."""


def node_page(executor: NodeExecutor) -> dict[str, object]:
    """Return pools, owners, containers and problems; the kernel's values are those of the last reading."""
    state = executor.state
    checks = required_checks(executor, executor.reconciler)
    containers = [
        _container(executor, c) for c in sorted(state.containers.values(), key=lambda c: (c.ref, c.id))
    ]
    exclusive, observed = _exclusive(executor)
    page: dict[str, object] = {
        "ready": not any(check.reason for check in checks),
        "pools": _pools(state, containers),
        "exclusive": exclusive,
        "observedOnExclusive": observed,
        "containers": containers,
        "kernel": _reading(executor),
        "quotas": quotas_page(executor),
        **({"partitions": executor.partitions.page()} if executor.partitions is not None else {}),
        "workers": executor.health.page(),
        "problems": executor.telemetry.problems(),
        "rejections": executor.rejections.page(lambda pod: applies_to(state, pod)),
        "violations": violations(state),
        "shortfalls": executor.hotplug.hardware_losses.page(),
        "counters": executor.telemetry.registry.page(),
        "settings": _settings(state.node),
        "cgroups": executor.cgroup_locator.page(executor.cpuset_writer.cgroups.version)
        | executor.unit_properties.page(),
        "drift": executor.drift.page(),
        "nodePolicy": executor.node_policy.page(),
        "kubelet": executor.kubelet_cpus.page(),
        "cluster": [] if executor.cluster is None else executor.cluster.page(),
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
        "remembered": executor.history.size,
    }
    page["checks"] = [check.page() for check in (*checks, *other_checks(page))]
    return page | {former: page[key] for former, key in FORMER_KEYS.items()}


def _reading(executor: NodeExecutor) -> dict[str, object]:
    """Return how old the values of the kernel are, and how many are missing."""
    view = executor.kernel_view
    age = view.age
    return {"age_s": None if age is None else round(age, 1), "not_read": view.last.omitted}


def _pools(state: NodeState, containers: list[dict[str, object]]) -> dict[str, object]:
    """Return the pools that containers are placed on, and how many containers have them in the kernel."""
    per_node = state.pools.per_node(state.node.machine)
    live = [row for row in containers if row["phase"] != Phase.EXITED.value]
    held = {
        pool: [
            row["applied"] and row["cpus"] and row["cpus"] == row["desired_cpus"]
            for row in live
            if row["pool"] == pool
        ]
        for pool in ("shared", "be", "system")
    }

    def cpus(pools: CpuPools) -> dict[str, object]:
        system = {"system": str(pools.system)} if state.node.system else {}
        return {"shared": str(pools.shared), "be": str(pools.be), **system}

    return {
        **cpus(state.pools),
        "nodes": [{"node": number, **cpus(pools)} for number, pools in per_node.items()],
        "containers": {
            pool: {"count": len(each), "in_effect": sum(map(bool, each))} for pool, each in held.items()
        },
    }


def _exclusive(executor: NodeExecutor) -> tuple[list[dict[str, object]], int]:
    """Return the owners of CPUs: what they have in the kernel, and what they should have; none if released.

    Returns:
        The owners; and how many observed containers can use some of their CPUs.
    """
    state, read = executor.state, executor.kernel_view.last.cpusets
    if executor.store.mode is NodeMode.RELEASED:
        return [], 0
    users = CpuUsers(state, read)
    rows: list[dict[str, object]] = []
    observed: set[str] = set()
    by_owner = _holders(state)
    for key, owner in sorted(state.owners.items()):
        holders = by_owner.get(key, [])
        applied = all(applies_to(state, c.pod) for c in holders) if holders else state.mode.enforces
        has = CpuSet()
        if applied:
            has = CpuSet.union_of(read[c.id].effective_cpus for c in holders if c.id in read)
        others = users.others(key, has or owner.cpus, excludes_be=owner.excludes_be) if applied else []
        no_cgroup = not any(c.phase in LIVE for c in holders)
        if applied and no_cgroup and not (has or others) and executor.kernel_view.is_complete:
            has = owner.cpus  # all others have left the CPUs
        observed.update(c.id for c in others if not applies_to(state, c.pod))
        rows.append(
            {
                "owner": key,
                "cpus": str(has),
                "desired_cpus": "" if executor.store.mode.in_release else str(owner.cpus),
                "applied": applied,
                "also_used_by": [c.ref for c in others[:NAMED]],
                "also_used": len(others),
                "hard": owner.excludes_be,
                "resource_status": status_text(owner.cpus),
                "pod": next((c.pod.ref for c in holders), ""),
                "container": ",".join(sorted({c.name for c in holders})),
            }
        )
    return rows, len(observed)


def _container(executor: NodeExecutor, container: Container) -> dict[str, object]:
    state, mode = executor.state, executor.store.mode
    has = executor.kernel_view.last.cpusets.get(container.id)
    exited = container.phase is Phase.EXITED
    has = None if exited else has
    cpus, mems = _desired(executor, container)
    applied = applies_to(state, container.pod)
    busy = container.phase not in LIVE or state.inflight.is_awaited(container.id)
    return {
        "id": container.id,
        "ref": container.ref,
        "pod_uid": container.pod.uid,
        "sandbox": container.pod.sandbox_id,
        "qos": container.pod.qos.value or container.pod.kube_qos.value,
        "pool": container.placement.pool.value,
        "cpus": "" if has is None else str(has.effective_cpus),
        "desired_cpus": cpus,
        "mems": "" if has is None else str(has.effective_mems),
        "desired_mems": mems,
        "applied": applied,
        "differs": applied
        and not busy
        and has is not None
        and bool(cpus)
        and cpus != str(has.effective_cpus),
        "cfs_quota": "off" if _has_no_quota(executor, container) else "",
        "phase": container.phase.value,
        "reason": "" if mode.in_release else "; ".join(container.placement.reasons),
    }


def _has_no_quota(executor: NodeExecutor, container: Container) -> bool:
    """Return whether a container runs without its CFS quota: it never had one, or the kernel has none now."""
    key, now = (
        CONTAINER_QUOTA + container.id,
        executor.kernel_view.last.quotas.get(CONTAINER_QUOTA + container.id),
    )
    is_off = key not in executor.quotas.known.records or (now is not None and now < 0)
    return executor.quotas.must_be_off(container) and is_off


def _desired(executor: NodeExecutor, container: Container) -> tuple[str, str]:
    """Return the CPUs and memory nodes that a container should have; empty if it exited or is released."""
    if container.phase is Phase.EXITED or executor.store.mode.in_release:
        return "", ""
    state = executor.state
    mems = str(state.desired_mems(container)) if container.placement.mems else ""
    return str(state.desired_cpus(container)), mems


def quotas_page(executor: NodeExecutor) -> list[dict[str, object]]:
    """Return the CFS quotas that are off and will be put back; ``container`` is empty for a pod's."""
    state = executor.state
    pods = {POD_QUOTA + pod.key: pod.ref for pod in state.pods.values()}
    rows: list[dict[str, object]] = []
    for key, record in sorted(executor.quotas.known.records.items()):
        found = state.containers.get(key.removeprefix(CONTAINER_QUOTA))
        name = "" if found is None else found.name
        pod = pods.get(key, "") if found is None else found.pod.ref
        now = executor.kernel_view.last.quotas.get(key)
        rows.append({"pod": pod, "container": name, "was": record.quota, "now": now, "group": record.group})
    return rows


def _settings(node: Node) -> dict[str, object]:
    return {
        "cpuManagerPolicy": "static" if node.static else "none",
        "cpuManagerPolicyOptions": [name for name, on in node.options.as_kubelet().items() if on],
        "reservedSystemCPUs": str(node.reserved),
        "topologyManagerPolicy": node.policy.value,
        "topologyManagerScope": node.scope.value,
        "reservedCPUs": str(node.node_reservation),
        "systemCPUs": str(node.system),
        "cpuBindPolicy": node.bind.value,
        "numaAllocateStrategy": node.strategy.value,
        "prefer-closest-numa-nodes": node.closest,
        "memoryManagerPolicy": "None" if node.memory is None else "Static",
        "memoryNodes": "follow" if node.follow_mems else "leave",
        "admission": _admission(node),
    }


def _admission(node: Node) -> dict[str, object]:
    """Return the rules of admission, with the floors in CPUs."""
    rules = node.admission
    floors = {floor.node: floor.least for floor in node.floors.floors}
    return {
        "resourceStatus": rules.resource_status.value,
        "namespaces": list(rules.owners.patterns),
        "namespacesByLabel": None if rules.owners.selector.all else sorted(rules.owners.selected),
        "systemNamespaces": list(rules.system.patterns),
        "maxCPUsPerPod": rules.pod_limit,
        "maxCPUsPerNamespace": rules.namespace_limit,
        "maxCPUsPerNode": rules.node_limit,
        "sharedFloor": floors.pop(None, 0),
        "sharedFloorPerNUMANode": {str(number): least for number, least in floors.items()},
        "beyondLimit": rules.beyond.value,
    }


def _memory(state: NodeState) -> list[dict[str, object]]:
    """Return what is promised of each NUMA node's memory, in bytes by resource; empty if not counted."""
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


def _holders(state: NodeState) -> dict[str, list[Container]]:
    """Return the containers that have CPUs of their own and have not exited, by owner."""
    found: dict[str, list[Container]] = {}
    for c in state.containers.values():
        if c.owns_cpus:
            found.setdefault(c.owner, []).append(c)
    return found


def suppression_page(
    known: BeSuppression, settings: SuppressionSettings, state: NodeState
) -> Mapping[str, object]:
    """Return what ``topoproxy status`` shows: CPUs as lists, budgets in milli-CPUs, usage in CPUs."""
    found: dict[str, object] = {
        "mode": settings.mode.value,
        "threshold": settings.threshold,
        "min_percent": settings.least or 0,
        "cpus": str(state.pools.cpus_of(Pool.BE)),
        "pool": str(state.pools.be),
        "quota_us": known.quota,
        "group": known.above,
        "why": budget_reason(known, settings),
    }
    if known.figures is not None:
        milli, usage = known.figures
        found["budget_milli"] = milli
        found["capacity_milli"] = usage.capacity
        found["usage"] = {name: round(used, 3) for name, used in structs.asdict(shares_of(usage)).items()}
    if (change := known.change) is not None:
        values = {"when": change.when, "before": change.before, "after": change.after}
        found["last_change"] = {**values, "why": change.reason}
    return found


class CpuUsers:
    """Which containers may run on which CPUs.

    Most owners share their CPUs with no other container. So an owner's CPUs are first compared with
    unions: the CPUs of all containers without CPUs of their own, and the CPUs that several owners have.
    """

    def __init__(self, state: NodeState, read: Mapping[str, CpusetValue]) -> None:
        """Make the unions.

        Args:
            state: The node.
            read: The cpusets in the kernel, by container id.
        """
        self._each: list[tuple[Container, int]] = []
        self._sharers = self._be = self._contested = 0
        owned: dict[str, int] = {}
        for container_id, value in read.items():
            if (container := state.containers.get(container_id)) is None:
                continue
            bits = value.effective_cpus.bits
            self._each.append((container, bits))
            if container.placement.pool is Pool.BE:
                self._be |= bits
            elif container.owner:
                owned[container.owner] = owned.get(container.owner, 0) | bits
            else:
                self._sharers |= bits
        once = 0
        for bits in owned.values():
            self._contested |= once & bits
            once |= bits

    def others(self, owner: str, cpus: CpuSet, *, excludes_be: bool) -> list[Container]:
        """Return the containers of others that may run on some of an owner's CPUs, sorted by name.

        Args:
            owner: The owner's key.
            cpus: Its CPUs.
            excludes_be: Whether BE containers may not borrow them.
        """
        bits_of_owner = cpus.bits
        if not bits_of_owner & (self._sharers | self._contested | (self._be if excludes_be else 0)):
            return []
        found = (
            container
            for container, bits in self._each
            if bits & bits_of_owner
            and container.owner != owner
            and (excludes_be or container.placement.pool is not Pool.BE)
        )
        return sorted(found, key=lambda container: container.ref)
