"""What the controller needs of the kernel. Every call here may block and is made in a worker thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from proxy.controller.runtime_ports import RuntimeDetail
from proxy.engine.be_usage import UsageGroup, UsageReading
from proxy.model.idset import CpuSet, Mask


class CpusetValue(Struct, frozen=True):
    """What the kernel holds for one cgroup.

    Attributes:
        cpus, mems: As configured; empty on v2 means "as the parent".
        effective_cpus, effective_mems: What tasks really get.
    """

    cpus: CpuSet
    mems: Mask
    effective_cpus: CpuSet
    effective_mems: Mask


class Cgroups(Protocol):
    """The cpuset controller's tree. Paths are relative to the hierarchy's root, without a leading slash."""

    @property
    def version(self) -> int:
        """1 or 2."""

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's cgroup.

        Args:
            parent: ``cgroup_parent`` as the CRI gives it (cgroupfs path or systemd slice name; may be empty).
            container_id: The runtime's id.

        Returns:
            The path, or None where the container has no cgroup (not started, or gone).
        """

    def pod_group(self, parent: str) -> str | None:
        """Give the path of the group that ``cgroup_parent`` names; None where it is not there."""

    def children(self, path: str) -> Sequence[str]:
        """Give the names of the groups right below a group; none where it is gone."""

    def read(self, path: str) -> CpusetValue:
        """Read a cgroup's cpuset.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def cpus(self, path: str) -> CpuSet:
        """Read the CPUs in force in a cgroup: on v1 as configured, on v2 the effective ones. One file.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def nodes(self, path: str) -> Mask:
        """Read a cgroup's memory nodes as configured; empty on v2 for those of the parent.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, inner: bool = True) -> bool:
        """Set a cgroup's CPUs and memory nodes (None: leave) and read them back.

        Files that hold the value already are not written. Parents that are too narrow (v1: EACCES; v2: the
        value would not take effect) are widened first, from the top, never narrowed, and never the root.

        Args:
            path: Which.
            cpus: The CPUs.
            mems: The memory nodes.
            inner: Whether groups below are the cgroup's own, as they are in a container: on v1 those that
                would stick out are narrowed first, and those that had all of the set have all again after it
                has grown. Else they are others' (a pod's containers), and stay as they are.

        Returns:
            True when something was written.

        Raises:
            CgroupError: An empty set was given, the cgroup is gone (ENOENT), the kernel refused, or the value
                read back differs from the one written.
        """

    def write_all(
        self,
        paths: Sequence[str],
        cpus: CpuSet,
        known: CpuSet | None = None,
        going_on: Callable[[], bool] = ...,
    ) -> Sequence[bool | None]:
        """Set the CPUs of many cgroups to one set, in the quick way; read back as with ``write``.

        Args:
            paths: Which, in this order.
            cpus: The CPUs.
            known: What all of them hold, and it is something else: they are written without being read first.
            going_on: Asked before each; once it says no, the rest is left.

        Returns:
            For each cgroup True where it was written, False where it held the set already, and None where it
            was left or ``write`` is needed: to see to groups above or below, or to tell what is wrong.
        """


class UsageSource(Protocol):
    """Counters of CPU time."""

    def read(self, groups: Mapping[str, UsageGroup]) -> UsageReading:
        """Read the counters of the node and of some groups; those without one are left out.

        Raises:
            CgroupError: They cannot be read.
        """

    def best_effort(self, parents: Iterable[str]) -> str:
        """Find the group above all BestEffort pods.

        Args:
            parents: ``cgroup_parent`` of such pods.

        Returns:
            Its path below the hierarchy's root; empty where these parents tell none.
        """

    def close(self) -> None:
        """Close what is open."""


class GroupQuotas(Protocol):
    """CFS quotas of groups. Paths are relative to the hierarchy's root, without a leading slash."""

    def quota(self, path: str) -> int:
        """Read a CFS quota: microseconds, -1 for none.

        Raises:
            CgroupError: The group is gone (errno ENOENT) or cannot be read.
        """

    def set_quota(self, path: str, quota: int) -> bool:
        """Set a CFS quota and read it back; the period stays. One that is so already is not written.

        Returns:
            True when something was written.

        Raises:
            CgroupError: The group is gone (ENOENT), or the kernel refused: on v1 with EINVAL where the quota
                does not go with those above and below.
        """


class CpuGroups(GroupQuotas, Protocol):
    """The cpu controller's tree."""

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's cgroup, as ``Cgroups.find`` does."""

    def pod_group(self, parent: str) -> str | None:
        """Find a pod's own cgroup.

        Args:
            parent: ``cgroup_parent`` as the CRI gives it.

        Returns:
            The path; None where there is none, or where its name is not that of one pod.
        """


class MemoryUse(Struct, frozen=True):
    """Where the memory of a container is: bytes by NUMA node, without nodes that have none.

    Attributes:
        anon: Anonymous memory, locked memory with it.
        file: Page cache.
        huge: Huge pages.
    """

    anon: Mapping[int, int]
    file: Mapping[int, int]
    huge: Mapping[int, int]

    def outside(self, nodes: Mask) -> tuple[int, int]:
        """Give the bytes on other nodes: of anonymous and huge pages, and of page cache."""
        there = [{n: size for n, size in each.items() if n not in nodes} for each in (self.anon, self.huge)]
        cache = sum(size for n, size in self.file.items() if n not in nodes)
        return sum(sum(each.values()) for each in there), cache


class MemoryTree(Protocol):
    """The memory controller's tree."""

    def use(self, parent: str, container_id: str) -> MemoryUse | None:
        """Tell where a container's memory is; None where it has no group.

        Raises:
            CgroupError: It cannot be read.
        """

    def migrates(self, path: str) -> bool:
        """Tell whether a change of a group's memory nodes moves the pages that are there.

        Args:
            path: The group in the cpuset controller's tree.
        """


class Located(Struct, frozen=True):
    """Where a container's group is.

    Attributes:
        path: Below the root of the cpuset controller's hierarchy; empty where it was not found.
        why: Why not, in words.
    """

    path: str = ""
    why: str = ""


class GroupLocator(Protocol):
    """Finds the groups of containers whose names do not tell where they are."""

    def locate(self, container_id: str, told: RuntimeDetail) -> Located:
        """Find a container's group from what the runtime tells of it; what is found is remembered."""

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Take note of where a container's group is, as somebody found it before."""
