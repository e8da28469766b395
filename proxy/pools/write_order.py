"""The order in which the cgroups of BE (best effort) pods are written: parents, pods, containers.

Theory (Koordinator v1.8.0 pkg/koordlet/resourceexecutor/executor.go, LeveledUpdateBatch). On cgroup v1 a
group must lie within its parent at every moment. So groups that hold others are first widened, from the top,
to the union of their current and their target CPUs; then all get their targets, from the bottom up. On v2 the
same order does no harm. A group that has its value already is not written.

The target of each level depends on kubelet. If its CPU manager is static, kubelet sometimes sends wider sets
for containers, which fail under a narrowed parent. So only containers are narrowed in that case, and the
levels above keep all that BE pods may ever use. Otherwise all levels are narrowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from proxy.model.idset import CpuSet

ROOT, POD, CONTAINER = range(3)


class BeGroup(Struct, frozen=True):
    """A cgroup of BE pods.

    Attributes:
        path: Below the hierarchy's root.
        depth: ROOT, POD or CONTAINER.
        cpus: The CPUs that it has now.
    """

    path: str
    depth: int
    cpus: CpuSet


class SetCpus(Struct, frozen=True):
    """One write of a cpuset."""

    path: str
    cpus: CpuSet


def ordered_writes(groups: Iterable[BeGroup], targets: Mapping[str, CpuSet]) -> tuple[SetCpus, ...]:
    """Return the writes that bring groups to their targets, in an order that the kernel accepts.

    Args:
        groups: All groups, in any order.
        targets: The target of each group by its path; none of them is empty.
    """
    existing = sorted((g for g in groups if targets.get(g.path)), key=lambda g: (g.depth, g.path))
    above = {path for group in existing for path in _ancestors(group.path)}
    writes: list[SetCpus] = []
    current = {group.path: group.cpus for group in existing}
    for group in existing:
        widened = group.cpus | targets[group.path]
        if group.path in above and widened != group.cpus:
            writes.append(SetCpus(group.path, widened))
            current[group.path] = widened
    writes += [
        SetCpus(group.path, targets[group.path])
        for group in reversed(existing)
        if current[group.path] != targets[group.path]
    ]
    return tuple(writes)


def _ancestors(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:i]) for i in range(1, len(parts)))
