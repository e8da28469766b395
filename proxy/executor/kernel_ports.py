"""What the executor needs from the kernel. Every call here may block and is made in a worker thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from proxy.engine.be_usage import UsageGroup, UsageReading
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.idset import CpuSet, Mask


class CpusetValue(Struct, frozen=True):
    """The cpuset of a cgroup in the kernel.

    Attributes:
        cpus, mems: CPUs and memory nodes as configured; empty on v2 means "as the parent".
        effective_cpus, effective_mems: The CPUs and memory nodes that tasks really get.
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
            parent: ``cgroup_parent`` as in the CRI (cgroupfs path or systemd slice name; may be empty).
            container_id: The runtime's id.

        Returns:
            The path, or None if the container has no cgroup (not started, or gone).
        """

    def pod_group(self, parent: str) -> str | None:
        """Return the path of the cgroup that ``cgroup_parent`` names; None if it does not exist."""

    def children(self, path: str) -> Sequence[str]:
        """Return the names of the direct children of a cgroup; empty if it is gone."""

    def read(self, path: str) -> CpusetValue:
        """Read a cgroup's cpuset.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def cpus(self, path: str) -> CpuSet:
        """Read the CPUs in effect in a cgroup, from one file: on v1 as configured, on v2 the effective ones.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def memory_nodes(self, path: str) -> Mask:
        """Read a cgroup's memory nodes as configured; on v2, empty means those of the parent.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, adjust_below: bool = True) -> bool:
        """Set a cgroup's CPUs and memory nodes (None: leave unchanged) and read them back.

        Files that hold the value already are not written. Parents that are too narrow (v1: EACCES; v2: the
        value would not take effect) are widened first, from the top. Parents are never narrowed, and the root
        is never written.

        Args:
            path: The cgroup.
            cpus: The CPUs.
            mems: The memory nodes.
            adjust_below: Whether the cgroups below belong to the cgroup itself, as those in a container do.
                Then, on v1, children that would have more than the new set are narrowed first, and children
                that had the whole set get the whole set again after it has grown. Otherwise they belong to
                others (a pod's containers) and are not changed.

        Returns:
            True if something was written.

        Raises:
            CgroupError: An empty set was given, the cgroup is gone (ENOENT), the kernel refused, or the value
                read back differs from the one written.
        """

    def write_all(
        self,
        paths: Sequence[str],
        cpus: CpuSet,
        known: CpuSet | None = None,
        should_continue: Callable[[], bool] = ...,
    ) -> Sequence[bool | None]:
        """Set the CPUs of many cgroups to one set, faster than with ``write``; they are read back, too.

        Args:
            paths: The cgroups, in the order of the writes.
            cpus: The CPUs.
            known: The set that all these cgroups hold now, if it is known and differs from ``cpus``: they are
                written without being read first.
            should_continue: Called before each write; once it returns False, the other cgroups are left.

        Returns:
            For each cgroup: True if it was written, False if it held the set already, and None if it was left
            or needs ``write``, to write cgroups above or below it or to find out what is wrong.
        """


class UsageSource(Protocol):
    """Reads counters of CPU time."""

    def read(self, groups: Mapping[str, UsageGroup]) -> UsageReading:
        """Read the counters of the node and of some cgroups; cgroups without a counter are left out.

        Raises:
            CgroupError: They cannot be read.
        """

    def best_effort_group(self, parents: Iterable[str]) -> str:
        """Find the cgroup above all BestEffort pods.

        Args:
            parents: ``cgroup_parent`` of such pods.

        Returns:
            Its path below the hierarchy's root; empty if it cannot be derived from these parents.
        """

    def close(self) -> None:
        """Close all open files."""


class GroupQuotas(Protocol):
    """CFS quotas of cgroups. Paths are relative to the hierarchy's root, without a leading slash."""

    def quota(self, path: str) -> int:
        """Read a CFS quota, in microseconds; -1 for none.

        Raises:
            CgroupError: The cgroup is gone (errno ENOENT) or cannot be read.
        """

    def set_quota(self, path: str, quota: int) -> bool:
        """Set a CFS quota and read it back; the period is unchanged. A quota that is right is not written.

        Returns:
            True if something was written.

        Raises:
            CgroupError: The cgroup is gone (ENOENT), or the kernel refused the quota: on v1 with EINVAL if it
                conflicts with the quotas above and below.
        """


class CpuGroups(GroupQuotas, Protocol):
    """The cpu controller's tree."""

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's cgroup, as ``Cgroups.find`` does."""

    def pod_group(self, parent: str) -> str | None:
        """Find a pod's own cgroup.

        Args:
            parent: ``cgroup_parent`` as in the CRI.

        Returns:
            The path; None if there is none, or if its name is not that of a single pod.
        """


class MemoryUse(Struct, frozen=True):
    """Where the memory of a container is: bytes by NUMA node, without nodes that hold none.

    Attributes:
        anon: Anonymous memory, including locked memory.
        file: Page cache.
        huge: Huge pages.
    """

    anon: Mapping[int, int]
    file: Mapping[int, int]
    huge: Mapping[int, int]

    def outside(self, nodes: Mask) -> tuple[int, int]:
        """Return the bytes outside ``nodes``: of anonymous and huge pages together, and of page cache."""
        outside = [{n: size for n, size in each.items() if n not in nodes} for each in (self.anon, self.huge)]
        cache = sum(size for n, size in self.file.items() if n not in nodes)
        return sum(sum(each.values()) for each in outside), cache


class MemoryTree(Protocol):
    """The memory controller's tree."""

    def memory_use(self, parent: str, container_id: str) -> MemoryUse | None:
        """Return where a container's memory is; None if it has no cgroup.

        Raises:
            CgroupError: The cgroup's statistics cannot be read.
        """

    def migrates_pages(self, path: str) -> bool:
        """Return whether a change of a cgroup's memory nodes moves the pages that are already allocated.

        Args:
            path: The cgroup in the cpuset controller's tree.
        """


class CgroupLocation(Struct, frozen=True):
    """Where a container's cgroup is.

    Attributes:
        path: Its path below the root of the cpuset controller's hierarchy; empty if it was not found.
        obstacle: Why the cgroup was not found, as text.
    """

    path: str = ""
    obstacle: str = ""


class GroupLocator(Protocol):
    """Finds the cgroups of containers that cannot be found by name."""

    def locate(self, container_id: str, detail: RuntimeDetail) -> CgroupLocation:
        """Find a container's cgroup from what the runtime reports about it; the path is remembered."""

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Remember the path of a container's cgroup that was found before."""


class WriteEvents(Protocol):
    """Reports when any program, including this one, writes a group's cpuset. Paths are as in ``Cgroups``.

    ``watch`` is called in the kernel worker, the other methods on the event loop; none of them blocks.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are reports to take."""

    def watch(self, path: str) -> bool:
        """Watch a group from now on. A watched group stays watched, unless a new one has replaced it.

        Returns:
            False if the group does not exist.

        Raises:
            CgroupError: It cannot be watched, because too many groups are; the next may be refused too.
        """

    def unwatch(self, path: str) -> None:
        """Stop watching a group, even if it is gone."""

    def watched(self) -> set[str]:
        """Return the groups that are watched."""

    def read_events(self) -> set[str] | None:
        """Return the groups that were written since the last call.

        Returns:
            None if the queue of reports overflowed: any group may have been written.
        """

    def close(self) -> None:
        """Stop watching everything."""
