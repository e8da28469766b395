"""Fences: limits of pods' groups while their containers may get wrong CPUs (cgroup v2).

A container's group never has more than the groups above it. A fence lets a pod's group hold no more than its
containers are to have: then a wrong cpuset cannot reach the CPUs of another container. What is outside has no
effect, and where nothing is left the container has what its pod has.

Inside a fence, a call may put its container on any CPU of the list: on those of another container of the pod,
which shares, and all of the list where what is written has none of it. So the list counts as carried by every
call for the pod: an owner that is to have a CPU of it waits, or the fence is narrowed first
(``proxy.executor.confinement``).

Calls for several containers of a pod may overlap: the fence stays until the last of them has completed. What
remains of one where the daemon is killed is as wide as the pod's containers were to be; a container that is
to have more has it with the next write (groups above are widened). A fence that is removed leaves the group
as it was, or as wide as the machine: it cannot be without a list again while it has processes.
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
"""The end of the name of a pod's slice; other slices may hold processes of other services."""
_GROUP = re.compile(r"pod[^/]+")
"""The name of a pod's group where systemd does not manage the groups of pods."""


class Fence(Struct, frozen=True):
    """The fence that a call needs.

    Attributes:
        path: The group of the pod.
        cpus: The CPUs that it lets the pod's containers have.
    """

    path: str
    cpus: CpuSet


class ActiveFence(Struct, frozen=True):
    """A fence in the kernel.

    Attributes:
        parent: The cgroup parent of the containers in the group.
        cpus: The list that the group has now.
        before: The list that it had before.
        calls: How many calls need the fence.
    """

    parent: str
    cpus: CpuSet
    before: CpuSet
    calls: int = 1


ActiveFences = Mapping[str, ActiveFence]
"""The fences that are in effect, by the path of their group."""


def raised(fences: ActiveFences, path: str, fence: ActiveFence) -> ActiveFences:
    """Return the fences after one more call needs one.

    Args:
        fences: The fences before.
        path: The group.
        fence: Its fence, for this call alone; ``before`` matters where no fence stood.
    """
    existing = fences.get(path)
    if existing is not None:
        fence = replace(fence, before=existing.before, calls=existing.calls + 1)
    return {**fences, path: fence}


def lowered(fences: ActiveFences, path: str) -> ActiveFences:
    """Return the fences after one call less needs one; the last of them removes the fence."""
    existing = fences.get(path)
    if existing is not None and existing.calls > 1:
        return {**fences, path: replace(existing, calls=existing.calls - 1)}
    return {at: fence for at, fence in fences.items() if at != path}


def fence_around(fences: ActiveFences, container: Container) -> CpuSet:
    """Return the CPUs of the fence around a container's pod; empty where there is none."""
    parent = container.pod.cgroup_parent
    return next((fence.cpus for fence in fences.values() if fence.parent == parent), CpuSet())


def has_slice(pod: Pod) -> bool:
    """Return whether a pod has a slice of its own."""
    return _SLICE.search(_parent_name(pod)) is not None


def has_group(pod: Pod) -> bool:
    """Return whether a pod has a group of its own, with systemd or without."""
    return has_slice(pod) or _GROUP.fullmatch(_parent_name(pod)) is not None


def _parent_name(pod: Pod) -> str:
    return pod.cgroup_parent.rstrip("/").rpartition("/")[2]


def fence_cpus(state: NodeState, container: Container) -> CpuSet:
    """Return the CPUs planned for all containers in the group of a container's pod, of an old sandbox too."""
    parent = container.pod.cgroup_parent
    members = (c for c in state.containers.values() if c.pod.cgroup_parent == parent)
    return CpuSet.union_of(state.desired_cpus(c) for c in members if c.phase is not Phase.EXITED)


def planned_cpus(state: NodeState) -> Mapping[str, CpuSet]:
    """Return what ``fence_cpus`` is for all pods with containers that have not exited, by cgroup parent."""
    planned = defaultdict[str, CpuSet](CpuSet)
    for container in state.containers.values():
        if container.phase is not Phase.EXITED:
            planned[container.pod.cgroup_parent] |= state.desired_cpus(container)
    return dict(planned)
