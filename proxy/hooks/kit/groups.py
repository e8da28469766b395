"""Cgroups of a pod and its containers: lift the pod's CFS quota, take a container out of load balancing.

Theory. A quota applies to a group and everything below it, so a container without a quota is still throttled
by its pod's, which kubelet sets to the sum of its containers' limits. Lifting it does not affect the other
containers: they have their own quotas. The pod's group disappears with the pod, so nothing is restored.

On cgroup v1 ``cpuset.sched_load_balance`` of a group controls whether the scheduler balances among its CPUs,
and a CPU is balanced as long as any group with that CPU enables it (cpusets(7)). Disabling it for a container
alone has no effect while its ancestors are balanced, and a hook must not change those: if the root group were
disabled, everything that is in no other group would be without balancing. On v2 the equivalent is a
partition, which the engine makes (``apply.partitions: isolated``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.backends.cgroup.group_names import candidates, parent_path
from proxy.hooks.facts import PodFacts
from proxy.hooks.kit.kernel_settings import Put, put
from proxy.model.errnos import GONE
from proxy.model.errors import HookError

_PLAIN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_HIERARCHIES = {"cpu": ("cpu", "cpu,cpuacct", "cpuacct,cpu"), "cpuset": ("cpuset",)}


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where a controller's groups are; version 1 or 2."""

    root: Path
    version: int


def hierarchy(cgroup_root: Path, controller: str) -> Hierarchy:
    """Find the hierarchy of ``cpu`` or ``cpuset`` below the directory where cgroups are mounted.

    Raises:
        HookError: There is none at the usual places.
    """
    if (cgroup_root / "cgroup.controllers").exists():
        return Hierarchy(cgroup_root, 2)
    for name in _HIERARCHIES[controller]:
        if (cgroup_root / name).is_dir():
            return Hierarchy(cgroup_root / name, 1)
    raise HookError(f"cannot find the controller {controller}: it is not below {cgroup_root}")


def open_quota(cgroup_root: Path, pod: PodFacts, put: Put = put) -> bool:
    """Remove the CFS quota of a pod's group; False if it has no quota or the pod has no group of its own.

    Raises:
        HookError: The group cannot be read or written.
    """
    tree = hierarchy(cgroup_root, "cpu")
    group = _pod_group(tree, pod)
    if group is None:
        return False
    file, none = (group / "cpu.cfs_quota_us", "-1") if tree.version == 1 else (group / "cpu.max", "max")
    try:
        if file.read_text().split()[:1] == [none]:
            return False
        put(file, none)
    except OSError as error:
        if error.errno in GONE:
            return False  # the pod is gone
        raise HookError(f"cannot take the quota off {file}: {error.strerror}") from error
    return True


def disable_load_balancing(
    cgroup_root: Path, pod: PodFacts, container_id: str, put: Put = put
) -> tuple[str, ...]:
    """Turn load balancing off for a container's group on cgroup v1.

    Returns:
        Groups above it that are balanced: while there are any, this has no effect.

    Raises:
        HookError: It is cgroup v2, the container's group is not found, or it cannot be written.
    """
    tree = hierarchy(cgroup_root, "cpuset")
    if tree.version == 2:
        raise HookError(
            "cannot take a container's CPUs out of load balancing on cgroup v2: that needs a partition; "
            "set apply.partitions: isolated in the configuration of topoproxy"
        )
    for group in _container_groups(tree, pod, container_id):
        file = group / "cpuset.sched_load_balance"
        try:
            if file.read_text().strip() != "0":
                put(file, "0")
        except OSError as error:
            raise HookError(f"cannot turn load balancing off in {file}: {error.strerror}") from error
        return tuple(_balanced_above(tree.root, group))
    raise HookError(f"cannot turn load balancing off for container {container_id}: its cgroup was not found")


unbalance = disable_load_balancing
"""The former name, for one release: copies of a shipped hook on nodes import it."""


def _pod_group(tree: Hierarchy, pod: PodFacts) -> Path | None:
    """Return the group that is this pod's alone: one that kubelet has named by its uid."""
    path = parent_path(pod.cgroup_parent)
    if not path or not pod.uid:
        return None
    name = path.rpartition("/")[2]
    if name != f"pod{pod.uid}" and not name.endswith(f"-pod{pod.uid.replace('-', '_')}.slice"):
        return None
    group = tree.root / path
    return group if group.is_dir() else None


def _container_groups(tree: Hierarchy, pod: PodFacts, container_id: str) -> Iterator[Path]:
    if not _PLAIN_ID.fullmatch(container_id):
        return
    for path in candidates(pod.cgroup_parent, container_id):
        if (group := tree.root / path).is_dir():
            yield group


def _balanced_above(root: Path, group: Path) -> Iterator[str]:
    while group != root:
        group = group.parent
        try:
            if (group / "cpuset.sched_load_balance").read_text().strip() != "0":
                yield "/" + str(group.relative_to(root)).removeprefix(".")
        except OSError:
            continue
