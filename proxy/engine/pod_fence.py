"""Fences: limits on the cgroups of pods while their containers may get wrong CPUs (cgroup v2).

A container's cgroup never has more CPUs than the cgroups above it. A fence limits a pod's cgroup to the CPUs
that its containers should have, so that a wrong cpuset cannot reach the CPUs of another pod. CPUs of a cpuset
that lie outside the fence have no effect. If all of them lie outside, the container has the CPUs of its pod's
cgroup.

Inside a fence, a call may put its container on any CPU of the fence: on those of another container of the
pod, so that both share them, or on all of them, if the cpuset that the call writes lies outside. So every
call for the pod counts as carrying all CPUs of the fence: an owner that needs one of these CPUs waits, or the
fence is narrowed first (``proxy.executor.confinement``).

Calls for several containers of a pod may overlap: the fence stays until the last of them has completed. If
the daemon is killed, a fence remains that is as wide as the plan for the pod's containers was. A container
that should have more CPUs later gets them with the next write, which widens the cgroups above it. Removing a
fence restores the cgroup's previous list; if it had none, the list becomes all CPUs of the machine, because a
cgroup with processes cannot be without a list again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pod

_SLICE = re.compile(r"-pod[^-/]+\.slice")
"""The end of the name of a pod's slice; other slices may contain processes of other services."""
_GROUP = re.compile(r"pod[^/]+")
"""The name of a pod's cgroup if systemd does not manage the cgroups of pods."""


class Fence(Struct, frozen=True):
    """The fence that a call needs.

    Attributes:
        path: The cgroup of the pod.
        cpus: The CPUs that it lets the pod's containers have.
    """

    path: str
    cpus: CpuSet


class ActiveFence(Struct, frozen=True):
    """A fence in the kernel.

    Attributes:
        parent: The cgroup parent of the containers in the cgroup.
        cpus: The CPUs that the cgroup has now.
        before: The CPUs that it had before.
        calls: How many calls need the fence.
    """

    parent: str
    cpus: CpuSet
    before: CpuSet
    calls: int = 1


ActiveFences = Mapping[str, ActiveFence]
"""The fences in effect, by the path of their cgroup."""


def raised(fences: ActiveFences, path: str, fence: ActiveFence) -> ActiveFences:
    """Return the fences after one more call needs one.

    Args:
        fences: The fences before.
        path: The group.
        fence: Its fence, for this call alone; ``before`` matters only if the cgroup has no fence yet.
    """
    existing = fences.get(path)
    if existing is not None:
        fence = replace(fence, before=existing.before, calls=existing.calls + 1)
    return {**fences, path: fence}


def lowered(fences: ActiveFences, path: str) -> ActiveFences:
    """Return the fences after a call no longer needs one; the last such call removes the fence."""
    existing = fences.get(path)
    if existing is not None and existing.calls > 1:
        return {**fences, path: replace(existing, calls=existing.calls - 1)}
    return {at: fence for at, fence in fences.items() if at != path}


def fence_around(fences: ActiveFences, container: Container) -> CpuSet:
    """Return the CPUs of the fence around a container's pod; empty if there is none."""
    parent = container.pod.cgroup_parent
    return next((fence.cpus for fence in fences.values() if fence.parent == parent), CpuSet())


def has_slice(pod: Pod) -> bool:
    """Return whether a pod has a slice of its own."""
    return _SLICE.search(_parent_name(pod)) is not None


def has_group(pod: Pod) -> bool:
    """Return whether a pod has a cgroup of its own, with or without systemd."""
    return has_slice(pod) or _GROUP.fullmatch(_parent_name(pod)) is not None


def _parent_name(pod: Pod) -> str:
    return pod.cgroup_parent.rstrip("/").rpartition("/")[2]


def fence_cpus(state: NodeState, container: Container) -> CpuSet:
    """Return the CPUs planned for all containers in the cgroup of a container's pod, of any sandbox."""
    parent = container.pod.cgroup_parent
    members = (c for c in state.containers.values() if c.pod.cgroup_parent == parent)
    return CpuSet.union_of(state.desired_cpus(c) for c in members if c.phase is not Phase.EXITED)


def planned_cpus(state: NodeState) -> Mapping[str, CpuSet]:
    """Return ``fence_cpus`` of all pods with containers that have not exited, by cgroup parent."""
    planned = defaultdict[str, CpuSet](CpuSet)
    for container in state.containers.values():
        if container.phase is not Phase.EXITED:
            planned[container.pod.cgroup_parent] |= state.desired_cpus(container)
    return dict(planned)
