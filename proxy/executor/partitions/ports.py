"""What the executor needs from the kernel for partitions. Every call may block, and is made in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from proxy.engine.partition import PartitionState
from proxy.model.idset import CpuSet


class Partitions(Protocol):
    """Partitions of the cpuset controller's tree, by path below its root."""

    @property
    def unsupported_reason(self) -> str:
        """Why there cannot be partitions at all, as text; empty if there can be."""

    def event_file(self, path: str) -> str:
        """Return the file that has poll events when a partition changes; empty if there is none."""

    def read(self, path: str) -> PartitionState:
        """Read the partition state of a group.

        Raises:
            CgroupError: It is gone, or the kernel has no partitions (errno ENOENT), or it cannot be read.
        """

    def exclusive_added(self, path: str, cpus: CpuSet) -> Mapping[str, CpuSet]:
        """Return what a partition with these CPUs would add to the exclusive sets of the groups above it.

        Raises:
            CgroupError: They cannot be read.
        """

    def isolated(self) -> CpuSet | None:
        """Return all CPUs of isolated partitions; None if the kernel does not report them."""

    def make(
        self, path: str, cpus: CpuSet, kind: str, exclusive_added: Mapping[str, CpuSet]
    ) -> PartitionState:
        """Make a group a partition, and read back the result.

        Args:
            path: The group; its CPU list is ``cpus`` already.
            cpus: The CPUs.
            kind: ``root`` or ``isolated``.
            exclusive_added: The result of ``exclusive_added``.

        Returns:
            Its state now. If that is not valid, the group was made a member again, and everything is as
            before.

        Raises:
            CgroupError: The group is gone (errno ENOENT), or it could not be made a member again.
        """

    def end(self, path: str, cpus: CpuSet, exclusive_added: Mapping[str, CpuSet]) -> None:
        """Make a group a member, and remove its CPUs from the exclusive sets; a no-op if that is already so.

        Raises:
            CgroupError: The kernel refused; the call can be repeated.
        """
