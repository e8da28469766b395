"""Koordinator's rules, pools and pods as the files write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proxy.model.idset import CpuSet
from proxy.pools.published_pools import NodePool
from tests.conformance.cases import BadCaseError, Case
from tests.oracles.koordinator_hook import HookedPod
from tests.oracles.koordinator_rule import NodeRule


def pools(raw: Iterable[Mapping[str, Any]] | None) -> tuple[NodePool, ...]:
    return tuple(NodePool(p["socket"], p["node"], CpuSet.parse(p.get("cpuset") or "")) for p in raw or ())


def shown_pools(each: Iterable[NodePool]) -> list[dict[str, object]]:
    """Write pools down; an empty one has no list."""
    rows: list[dict[str, object]] = []
    for pool in each:
        row: dict[str, object] = {"socket": pool.socket, "node": pool.node}
        rows.append(row | {"cpuset": str(pool.cpus)} if pool.cpus else row)
    return rows


def rule(case: Case, name: str = "rule") -> NodeRule | None:
    raw = case.optional(name, dict)
    if raw is None:
        return None
    try:
        policy, system = raw.get("kubelet_policy") or "", raw.get("system_qos_cpuset") or ""
        return NodeRule(policy, pools(raw.get("ls_pools")), pools(raw.get("be_pools")), system)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadCaseError(f"it has an unusable {name!r}: {error!r}") from None


def shown_rule(of: NodeRule | None) -> dict[str, object] | None:
    if of is None:
        return None
    return {
        "kubelet_policy": of.kubelet_policy,
        "ls_pools": shown_pools(of.shared),
        "be_pools": shown_pools(of.be),
        "system_qos_cpuset": of.system,
    }


def hooked_pod(raw: Mapping[str, Any], parent: str | None = None) -> HookedPod:
    """Read a request, or a pod.

    Args:
        parent: The cgroup above it, if the request names none.
    """
    labels = raw.get("pod_labels") or raw.get("labels") or {}
    annotations = raw.get("pod_annotations") or raw.get("annotations") or {}
    return HookedPod.of(labels, annotations, raw.get("cgroup_parent") or parent or "")


def pods(case: Case, name: str = "pods") -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = case.optional(name, list, [])
    return found
