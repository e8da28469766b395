"""What ``topoproxy observe report`` shows: what applying the plan to all pods would change, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.engine.plan_differences import (
    ContainerDifference,
    PlanChange,
    live_containers,
    plan_differences,
    removable_quotas,
)
from proxy.executor.decision_records import RememberedDecision
from proxy.executor.node_executor import NodeExecutor
from proxy.executor.quotas import read_quotas
from proxy.model import schema_ids
from proxy.pools.claims import UNLIMITED


async def plan_report(executor: NodeExecutor) -> dict[str, object]:
    """Compare the plan with the kernel, which is read now, in threads that write nothing."""
    view, groups = executor.kernel_view, executor.quotas.groups
    await view.refresh()
    state, read = executor.state, view.last
    containers, quotas = live_containers(state), dict[str, int]()
    if groups is not None and (places := removable_quotas(state, containers)):
        found, _ = await executor.mems.worker.run(read_quotas, groups, places)
        quotas = {key: record.quota for key, record in found.items()}
    cpusets = {i: (value.effective_cpus, value.effective_mems) for i, value in read.cpusets.items()}
    rows = plan_differences(state, containers, cpusets, quotas)
    refused = executor.history.would_be_refused()
    return {
        "schema": schema_ids.OBSERVE_REPORT,
        "mode": executor.store.mode.value,
        "compared": executor.reconciled.is_set(),
        "kernel": {
            "age_s": None if view.age is None else round(view.age, 1),
            "not_read": sum(row.cpus is None for row in rows),
        },
        "sums": _sums(rows, refused),
        "pods": list(_pods(rows)),
        "rejections": [_rejection(record) for record in refused],
    }


def _sums(rows: Sequence[ContainerDifference], refused: Sequence[RememberedDecision]) -> dict[str, int]:
    limited = {row.container.pod.key for row in rows if row.pod_quota is not None}
    return {
        "containers": len(rows),
        "applied": sum(row.applied for row in rows),
        "unchanged": sum(not row.is_changed and row.cpus is not None for row in rows),
        "pins": sum(row.change is PlanChange.PIN for row in rows),
        "moves": sum(row.change is PlanChange.JOIN_POOL for row in rows),
        "drift": sum(row.change is PlanChange.DRIFT for row in rows),
        "cfs_quotas": len(limited) + sum(row.quota is not None for row in rows),
        "memory_nodes": sum(row.rebinds_memory for row in rows),
        "rejections": len(refused),
    }


def _pods(rows: Iterable[ContainerDifference]) -> Iterable[dict[str, object]]:
    pods: dict[str, list[ContainerDifference]] = {}
    for row in rows:
        pods.setdefault(row.container.pod.key, []).append(row)
    for each in pods.values():
        pod, quota = each[0].container.pod, next((r.pod_quota for r in each if r.pod_quota is not None), None)
        yield {
            "pod": pod.ref,
            "uid": pod.uid,
            "applied": each[0].applied,
            "removes_cfs_quota": quota is not None,
            "cfs_quota_us": UNLIMITED if quota is None else quota,
            "containers": [_container(row) for row in each],
        }


def _container(row: ContainerDifference) -> dict[str, object]:
    container = row.container
    return {
        "container": container.name,
        "id": container.id,
        "qos": container.pod.qos.value or container.pod.kube_qos.value,
        "pool": container.placement.pool.value,
        "change": row.change.value,
        "cpus": "" if row.cpus is None else str(row.cpus),
        "desired_cpus": str(row.desired_cpus),
        "mems": "" if row.mems is None else str(row.mems),
        "desired_mems": str(row.desired_mems),
        "rebinds_memory": row.rebinds_memory,
        "removes_cfs_quota": row.quota is not None,
        "cfs_quota_us": UNLIMITED if row.quota is None else row.quota,
        "reason": "; ".join(container.placement.reasons),
    }


def _rejection(record: RememberedDecision) -> dict[str, object]:
    explanation = record.explanation
    return {
        "pod": explanation.pod,
        "uid": explanation.uid,
        "container": explanation.container,
        "id": record.container_id,
        "exists": record.exists,
        "when": record.when,
        "code": explanation.verdict.code,
        "reason": explanation.verdict.reason,
        "message": explanation.verdict.operator_message,
    }
