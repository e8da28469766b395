"""Cgroup v2 partitions: CPUs that the kernel itself keeps all other tasks off.

Theory. A group whose ``cpuset.cpus.partition`` is ``root`` or ``isolated`` is a scheduling domain of its own:
its CPUs leave the effective sets of all groups outside, those of the system among them, and ``isolated`` also
takes them out of load balancing. The kernel gives CPUs to a partition in one of two ways
(Documentation/admin-guide/cgroup-v2.rst, "Cpuset Interface Files"; tried on 6.1 and 6.12):

* *remote* (Linux 6.7): all groups above, without the root, name the CPUs in ``cpuset.cpus.exclusive``. They
  may stay members, and whatever else they hold stays as it is. This is the way that is taken.
* *local*: the group above is a partition root itself, all the way up, and keeps a CPU for its own tasks. On
  older kernels it is the only way; for a container it would take nearly all CPUs away from whatever runs
  outside of ``kubepods``, so we never turn a group above into a partition. Where the operator has, it works.

What must be known of the kernel:

* Every write of ``root`` is accepted; the file then holds the result: ``root invalid (Parent is not a
  partition root)``. An invalid partition is not harmless (6.12): the CPUs stay withheld from the groups
  above, and with the next write of its list the group is put on all others' CPUs. To write ``member`` puts
  all that right, so that what is invalid is made a member at once. The reason is read before.
* A sibling whose ``cpuset.cpus`` has one of the CPUs makes a partition invalid, without a reason. One whose
  list lies within an exclusive set has the write of that set refused (EINVAL). Groups further away do not
  matter: they only get less than they name.
* A list above that is made smaller while a partition lives on it ends that silently, or leaves the kernel
  with CPUs that no group has. So lists above only grow while a partition is there; they are narrowed after it
  is a member again, from the bottom.
* A partition follows its own exclusive set where it has one: then a foreign write of ``cpuset.cpus`` changes
  neither the partition nor where its tasks run. So that is set too.
* The file signals changes by poll (``EPOLLPRI``); see ``proxy.executor.partitions.sync``.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.files import Files, OsFiles, explain
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

    def __init__(self, files: Files, version: int, root: str = "") -> None:
        """Take a hierarchy as it is.

        Args:
            files: How to reach it.
            version: 1 or 2.
            root: Where its files can be opened, for notifications; empty where there are none.
        """
        self._files = files
        self._version = version
        self._root = root

    @property
    def unsupported_reason(self) -> str:
        """Why there are no partitions at all, as text; empty where there may be."""
        return "" if self._version == 2 else "cgroup v1 has none"

    def file(self, path: str) -> str:
        """Return the file that signals changes of a partition; empty where none does."""
        return f"{self._root}/{path}/{PARTITION}" if self._root else ""

    # Reading

    def read(self, path: str) -> PartitionState:
        """Read what a group is; see ``Partitions.read``."""
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
        """Return what a partition adds to exclusive sets of groups; see ``Partitions.exclusive_added``."""
        if self._held(path, EXCLUSIVE) is None:
            return {}
        added = {above: cpus - (self._held(above, EXCLUSIVE) or CpuSet()) for above in _above(path)}
        return {above: missing for above, missing in added.items() if missing}

    def isolated(self) -> CpuSet | None:
        """Return all CPUs of isolated partitions (Linux 6.7); None where the kernel does not report them."""
        return self._held("", "cpuset.cpus.isolated")

    def _held(self, path: str, file: str) -> CpuSet | None:
        """Read a list; None where there is no such file."""
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
        has_exclusive_file = self._held(path, EXCLUSIVE) is not None
        try:
            for above in sorted(exclusive_added, key=len):
                self._put(
                    above, EXCLUSIVE, (self._held(above, EXCLUSIVE) or CpuSet()) | exclusive_added[above]
                )
            if has_exclusive_file:
                self._put(path, EXCLUSIVE, cpus)
            self._put(path, PARTITION, kind)
            state = self.read(path)
            if state.valid and self._held(path, EFFECTIVE) != cpus:
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
                self._put(path, PARTITION, MEMBER)
            if self._held(path, EXCLUSIVE):
                self._put(path, EXCLUSIVE, CpuSet())
        for above in sorted(exclusive_added, key=len, reverse=True):
            with self._unless_gone():
                has = self._held(above, EXCLUSIVE) or CpuSet()
                if has & exclusive_added[above] & cpus:
                    self._put(above, EXCLUSIVE, has - (exclusive_added[above] & cpus))

    @staticmethod
    @contextlib.contextmanager
    def _unless_gone() -> Iterator[None]:
        try:
            yield
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                raise

    def _put(self, path: str, file: str, value: CpuSet | str) -> None:
        try:
            # A line feed says "empty": a write of nothing never reaches the kernel.
            self._files.write(path, file, str(value) or "\n")
        except OSError as error:
            raise self._error(f"set {file} to {str(value) or 'nothing'} in", path, error) from None

    @staticmethod
    def _error(action: str, path: str, error: OSError) -> CgroupError:
        number = error.errno or 0
        if number == errno.EINVAL:
            cause = "a sibling of it or of a group above names some of these CPUs (EINVAL)"
        else:
            cause = explain(number)
        number = errno.ENOENT if number in GONE else number
        return CgroupError(f"cannot {action} cgroup /{path}: {cause}", number)


def open_partitions(cgroups: object) -> KernelPartitions | None:
    """Return the partitions of a cpuset tree; None where it is not one of the kernel's, or imitates it."""
    if not isinstance(cgroups, KernelCgroups):
        return None
    files = getattr(cgroups, "files", None)  # an imitated tree has rules of its own
    if files is not None:
        return KernelPartitions(files, cgroups.version)
    return KernelPartitions(OsFiles(cgroups.root), cgroups.version, str(cgroups.root))


def _above(path: str) -> list[str]:
    """The groups above one, from the top, without the root."""
    parts = path.strip("/").split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
