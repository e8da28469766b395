"""Cgroup v2 partitions: CPUs from which the kernel itself excludes all other tasks.

A group whose ``cpuset.cpus.partition`` is ``root`` or ``isolated`` is a separate scheduling domain: its CPUs
leave the effective sets of all groups outside, including those of the system, and ``isolated`` takes them out
of load balancing as well. The kernel gives CPUs to a partition in one of two ways
(Documentation/admin-guide/cgroup-v2.rst, "Cpuset Interface Files"; tried on 6.1 and 6.12):

* *remote* (Linux 6.7): all groups above, except the root, name the CPUs in ``cpuset.cpus.exclusive``. They
  may stay members, and their other CPUs are not affected. We use this way.
* *local*: all groups above are partition roots themselves and keep a CPU for their own tasks. On older
  kernels it is the only way. For a container it would take nearly all CPUs away from the tasks outside of
  ``kubepods``, so we never turn a group above into a partition. If the operator has done so, it works.

The kernel's behaviour:

* Every write of ``root`` is accepted; afterwards the file contains the result: ``root invalid (Parent is not
  a partition root)``. An invalid partition is harmful (6.12): the CPUs stay withheld from the groups above,
  and the next write of its list puts the group on the CPUs of all other groups. A write of ``member`` repairs
  all of this, so an invalid partition is made a member at once, after the reason has been read.
* If the ``cpuset.cpus`` of a sibling has one of the CPUs, the partition becomes invalid, without a reason. If
  the list of a sibling lies within an exclusive set, the write of that set is refused (EINVAL). Groups
  further away do not matter: they only get fewer CPUs than their lists name.
* If a list above is made smaller while a partition depends on it, the partition ends silently, or the kernel
  is left with CPUs that no group has. So lists above only grow while the partition exists; they are narrowed
  from the bottom after it is a member again.
* If a partition has its own exclusive set, that set decides its CPUs: a write of ``cpuset.cpus`` by another
  program changes neither the partition nor the CPUs of its tasks. So the exclusive set is written too.
* The file signals changes by poll (``EPOLLPRI``); see ``proxy.executor.partitions.sync``.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.files import CgroupFiles, OsCgroupFiles, cause_of_errno
from proxy.engine.partition import MEMBER, PartitionState
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet

PARTITION, EXCLUSIVE = "cpuset.cpus.partition", "cpuset.cpus.exclusive"
EFFECTIVE = "cpuset.cpus.effective"
_STATE = re.compile(r"(?P<kind>member|root|isolated)(?P<bad> invalid)?(?: \((?P<reason>.*)\))?")
KERNEL_TOO_OLD = (
    "this kernel has no cpuset.cpus.exclusive (Linux 6.7), so all groups above would have to be partitions"
)
NO_REASON_GIVEN = (
    "a sibling's cpuset overlaps, or an ancestor's cpuset.cpus.exclusive no longer has these CPUs"
)


class KernelPartitions:
    """Partitions of a cpuset hierarchy; implements ``proxy.executor.partitions.ports.Partitions``."""

    def __init__(self, files: CgroupFiles, version: int, root: str = "") -> None:
        """Set the hierarchy.

        Args:
            files: Access to its files.
            version: 1 or 2.
            root: The directory of its files, which are opened for notifications; empty if it has none.
        """
        self._files = files
        self._version = version
        self._root = root

    @property
    def unsupported_reason(self) -> str:
        """Why partitions are impossible here, as text; empty if they may be possible."""
        return "" if self._version == 2 else "cgroup v1 has none"

    def event_file(self, path: str) -> str:
        """Return the file that signals changes of a partition; empty if there is none."""
        return f"{self._root}/{path}/{PARTITION}" if self._root else ""

    # Reading

    def read(self, path: str) -> PartitionState:
        """Read a group's partition state; see ``Partitions.read``."""
        try:
            text = self._files.read(path, PARTITION).strip()
        except OSError as error:
            if error.errno == errno.ENOENT and self._files.is_group(path):
                error = OSError(errno.EOPNOTSUPP, "")  # a kernel before 5.0, or no cpuset controller here
            raise self._error("read the partition of", path, error) from None
        match = _STATE.fullmatch(text)
        if match is None:
            return PartitionState(text, valid=False, reason=f"the kernel calls it {text!r}")
        kind, reason = match["kind"], match["reason"] or ""
        return PartitionState(kind, valid=kind != MEMBER and not match["bad"], reason=reason)

    def exclusive_added(self, path: str, cpus: CpuSet) -> Mapping[str, CpuSet]:
        """Return the CPUs that a partition adds to exclusive sets; see ``Partitions.exclusive_added``."""
        if self._read_list(path, EXCLUSIVE) is None:
            return {}
        added = {above: cpus - (self._read_list(above, EXCLUSIVE) or CpuSet()) for above in _ancestors(path)}
        return {above: missing for above, missing in added.items() if missing}

    def isolated(self) -> CpuSet | None:
        """Return all CPUs of isolated partitions (Linux 6.7); None if the kernel does not report them."""
        return self._read_list("", "cpuset.cpus.isolated")

    def _read_list(self, path: str, file: str) -> CpuSet | None:
        """Read a list; None if there is no such file."""
        try:
            return CpuSet.parse(self._files.read(path, file))
        except OSError as error:
            if error.errno in GONE:
                return None
            raise self._error(f"read {file} of", path, error) from None
        except ValueError as error:
            raise CgroupError(f"cannot read {file} of cgroup /{path}: {error}") from None

    # Writing

    def make(
        self, path: str, cpus: CpuSet, kind: str, exclusive_added: Mapping[str, CpuSet]
    ) -> PartitionState:
        """Make a group a partition; see ``Partitions.make``."""
        has_exclusive_file = self._read_list(path, EXCLUSIVE) is not None
        try:
            for above in sorted(exclusive_added, key=len):
                self._write(
                    above, EXCLUSIVE, (self._read_list(above, EXCLUSIVE) or CpuSet()) | exclusive_added[above]
                )
            if has_exclusive_file:
                self._write(path, EXCLUSIVE, cpus)
            self._write(path, PARTITION, kind)
            state = self.read(path)
            if state.valid and self._read_list(path, EFFECTIVE) != cpus:
                state = PartitionState(state.kind, valid=False, reason="it does not have all of its CPUs")
        except CgroupError as error:
            if error.errno == errno.ENOENT:
                raise
            state = PartitionState(kind, valid=False, reason=str(error))
        if state.valid and state.kind == kind:
            return state
        self.end(path, cpus, exclusive_added)
        reason = state.reason or NO_REASON_GIVEN
        return PartitionState(
            kind, valid=False, reason=reason if has_exclusive_file else f"{reason}; {KERNEL_TOO_OLD}"
        )

    def end(self, path: str, cpus: CpuSet, exclusive_added: Mapping[str, CpuSet]) -> None:
        """Make a group a member; see ``Partitions.end``."""
        with self._unless_gone():
            if self.read(path).kind != MEMBER:
                self._write(path, PARTITION, MEMBER)
            if self._read_list(path, EXCLUSIVE):
                self._write(path, EXCLUSIVE, CpuSet())
        for above in sorted(exclusive_added, key=len, reverse=True):
            with self._unless_gone():
                has = self._read_list(above, EXCLUSIVE) or CpuSet()
                if has & exclusive_added[above] & cpus:
                    self._write(above, EXCLUSIVE, has - (exclusive_added[above] & cpus))

    @staticmethod
    @contextlib.contextmanager
    def _unless_gone() -> Iterator[None]:
        try:
            yield
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                raise

    def _write(self, path: str, file: str, value: CpuSet | str) -> None:
        try:
            # An empty list is written as a line feed, because a write of no bytes never reaches the kernel.
            self._files.write(path, file, str(value) or "\n")
        except OSError as error:
            raise self._error(f"set {file} to {str(value) or 'nothing'} in", path, error) from None

    @staticmethod
    def _error(action: str, path: str, error: OSError) -> CgroupError:
        number = error.errno or 0
        if number == errno.EINVAL:
            cause = "a sibling of it or of a group above names some of these CPUs (EINVAL)"
        else:
            cause = cause_of_errno(number)
        number = errno.ENOENT if number in GONE else number
        return CgroupError(f"cannot {action} cgroup /{path}: {cause}", number)


def open_partitions(cgroups: object) -> KernelPartitions | None:
    """Return the partitions of a cpuset tree; None if it is neither the kernel's nor an imitated tree."""
    if not isinstance(cgroups, KernelCgroups):
        return None
    files = getattr(cgroups, "files", None)  # an imitated tree has its own file access
    if files is not None:
        return KernelPartitions(files, cgroups.version)
    return KernelPartitions(OsCgroupFiles(cgroups.root), cgroups.version, str(cgroups.root))


def _ancestors(path: str) -> list[str]:
    """Return the ancestors of a group, from the top, without the root."""
    parts = path.strip("/").split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
