"""The cpuset controller, v1 and v2: finding, reading and writing a container's group.

The rules of writing:

* A value is read before it is written, for two reasons. A write of an unchanged value still costs the kernel
  8 microseconds and takes its global cpuset lock; a write of a changed value costs 40 (measured). And a
  remembered value would hide the writes of others (runc, systemd, kubelet). If many groups are written that,
  by our own record, have another value, the first read is skipped; the read after the write is decisive.
* v1: the set of a child must lie within that of its parent. Ancestors that are too narrow (EACCES), and
  groups below that would no longer fit (EBUSY), are adjusted by ``proxy.backends.cgroup.nesting``. The root
  is never written.
* v1: when a CPU or memory node goes offline, the kernel removes its id from every group, does not add it
  again later, and refuses a list with an offline id (EINVAL). In that case only the online ids are written;
  the next comparison writes the others when they are online again.
* v2: the kernel accepts every list, but ids that the ancestors do not have are without effect, and if no id
  is left, the group gets its parent's CPUs. So the effective file is decisive, and ancestors that have their
  own list are widened: before the write if the group would have no id left, otherwise after it.
* A written value is read back. On v2 the effective value may lack offline CPUs, but no others.

Linux Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst ("Cpuset Interface Files").
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from proxy.backends.cgroup import nesting
from proxy.backends.cgroup.files import QUICK_WRITE_LIMIT_BYTES, CgroupFiles, OsCgroupFiles, cause_of_errno
from proxy.backends.cgroup.group_names import parent_path
from proxy.backends.cgroup.hierarchies import (
    controller_mounts,
    has_controller,
    is_fake_tree,
    mounts_elsewhere,
)
from proxy.backends.cgroup.search import GroupFinder
from proxy.executor.kernel_ports import CpusetValue
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, IdSet, Mask


class KernelCgroups:
    """A cpuset hierarchy; implements ``proxy.executor.kernel_ports.Cgroups``.

    Safe to use from several threads: it holds no lock, and no state except the names of groups that were
        found.
    """

    def __init__(self, root: Path, version: int, files: CgroupFiles | None = None) -> None:
        """Use the hierarchy at a known path; ``open_cgroups`` finds it.

        Args:
            root: Where the hierarchy with the cpuset controller is mounted.
            version: 1 or 2.
            files: Access to its files; the kernel's files below ``root`` if None.
        """
        self.root = root
        self._version = version
        self._files: CgroupFiles = files if files is not None else OsCgroupFiles(root)
        self._cpus, self._mems = cpuset_lists(version)
        self._finder = GroupFinder(self._files)

    @property
    def version(self) -> int:
        """The cgroup version, 1 or 2."""
        return self._version

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's group.

        See ``Cgroups.find`` of the ports and ``proxy.backends.cgroup.search``.
        """
        return self._finder.find(parent, container_id)

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Remember where a container's group is; see ``proxy.backends.cgroup.locator``."""
        self._finder.remember(container_id, path, parent)

    def is_group(self, path: str) -> bool:
        """Return whether there is such a group."""
        return self._files.is_group(path)

    def pod_group(self, parent: str) -> str | None:
        """Find the group that a pod's ``cgroup_parent`` names.

        See ``proxy.executor.kernel_ports.Cgroups``.
        """
        path = parent_path(parent)
        return self._finder.find_path(path) if path else None

    # Reading

    def children(self, path: str) -> list[str]:
        """Return the names of the groups directly below a group; none if the group is gone."""
        return list(self._files.children(path))

    def read(self, path: str) -> CpusetValue:
        """Read a group's cpuset; see ``proxy.executor.kernel_ports.Cgroups.read``."""
        values: list[IdSet] = []
        for kind in (self._cpus, self._mems):
            own = self._read_list(path, kind, kind.file)
            values += [own, self._read_list(path, kind, kind.effective, own)]
        cpus, effective_cpus, mems, effective_mems = values
        return CpusetValue(
            CpuSet.from_bits(cpus.bits),
            Mask.from_bits(mems.bits),
            CpuSet.from_bits(effective_cpus.bits),
            Mask.from_bits(effective_mems.bits),
        )

    def cpus(self, path: str) -> CpuSet:
        """Read the CPUs in effect; see ``proxy.executor.kernel_ports.Cgroups.cpus``."""
        kind = self._cpus
        return CpuSet.from_bits(
            self._read_list(path, kind, kind.file if self._version == 1 else kind.effective).bits
        )

    def memory_nodes(self, path: str) -> Mask:
        """Read a group's memory nodes as configured.

        See ``proxy.executor.kernel_ports.Cgroups.memory_nodes``.
        """
        return Mask.from_bits(self._read_list(path, self._mems, self._mems.file).bits)

    def _read_list(self, path: str, kind: CpusetList, file: str, missing: IdSet | None = None) -> IdSet:
        """Read one list; if its file does not exist, return ``missing``."""
        try:
            return kind.type.parse(self._files.read(path, file))
        except OSError as error:
            if error.errno == errno.ENOENT and self._files.is_group(path):
                if missing is not None:
                    return missing
                if self._version == 2 and not path:
                    return kind.type()  # v2 has no cpuset.cpus in the root: nothing is configured there
                error = OSError(errno.EOPNOTSUPP, "")
            raise self._error(f"read {kind.description} of", path, error) from None
        except ValueError as error:
            raise CgroupError(f"cannot read {kind.description} of cgroup /{path}: {error}") from None

    # Writing

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, adjust_below: bool = True) -> bool:
        """Set a group's CPUs and memory nodes; see ``proxy.executor.kernel_ports.Cgroups.write``."""
        if not path.strip("/"):
            raise CgroupError("cannot write to the root cgroup: it belongs to the kernel", errno.EACCES)
        pairs = [
            (kind, value) for kind, value in ((self._cpus, cpus), (self._mems, mems)) if value is not None
        ]
        for kind, value in pairs:
            if not value:
                raise CgroupError(
                    f"cannot set {kind.description} of cgroup /{path}: the set is empty", errno.EINVAL
                )
        written = False
        for kind, value in pairs:
            if self._version == 1:
                changed = self._set_v1(path, kind, value, adjust_below=adjust_below)
            else:
                changed = self._set_v2(path, kind, value)
            written = written or changed
        return written

    def write_all(
        self,
        paths: Sequence[str],
        cpus: CpuSet,
        known: CpuSet | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[bool | None]:
        """Set the CPUs of many groups; see ``proxy.executor.kernel_ports.Cgroups.write_all``."""
        if not cpus or not all(paths):
            return [None] * len(paths)
        line, kind = kernel_line(cpus), self._cpus
        if self._version == 2 and (narrow := self._parents_left_narrow(paths, cpus)):
            others = [path for path in paths if _parent(path) not in narrow]
            written = iter(self.write_all(others, cpus, known, should_continue))
            return [None if _parent(path) in narrow else next(written) for path in paths]
        held = self._write_all_if_different(
            paths, kind, cpus, kernel_line(known) if known else None, should_continue
        )
        done = [None if before is None else before != line for before in held]
        if self._version == 1:
            self._widen_all_below(paths, held, kind, cpus)
            return done
        for at, path in enumerate(paths):
            if held[at] is not None:
                try:
                    done[at] = self._make_effective(path, kind, cpus) or done[at]
                except CgroupError:
                    done[at] = None
        return done

    def _parents_left_narrow(self, paths: Sequence[str], cpus: CpuSet) -> set[str]:
        """Widen the groups above some groups where needed (v2).

        Returns:
            The parents with none of the CPUs that could not be widened: nothing may be written below them.
        """
        narrow = set[str]()
        for parent, path in {_parent(path): path for path in paths}.items():
            try:
                self._widen_above_if_needed(path, self._cpus, cpus)
            except CgroupError:
                narrow.add(parent)
        return narrow

    def _widen_all_below(
        self, paths: Sequence[str], held: Sequence[bytes | None], kind: CpusetList, value: IdSet
    ) -> None:
        """Widen the groups below those groups that have grown (v1)."""
        for line in {*held} - {None}:
            before = parsed_list(kind.type.parse, line)
            if before and before < value:
                for path in (path for path, was in zip(paths, held, strict=True) if was == line):
                    nesting.widen_below(self._lists(kind), path, before, value)

    def _set_v1(self, path: str, kind: CpusetList, value: IdSet, *, adjust_below: bool) -> bool:
        held = self._write_if_different(path, kind, value)
        if held is None:
            return self._set_online_v1(path, kind, value, adjust_below=adjust_below)
        if adjust_below and held and held < value:
            nesting.widen_below(self._lists(kind), path, held, value)
        return held != value

    def _write_if_different(self, path: str, kind: CpusetList, value: IdSet) -> IdSet | None:
        """Write a list with one file open; return the previous list, or None if ``write`` is needed."""
        held = self._write_all_if_different((path,), kind, value)[0]
        return parsed_list(kind.type.parse, held)

    def _write_all_if_different(
        self,
        paths: Sequence[str],
        kind: CpusetList,
        value: IdSet,
        known: bytes | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[bytes | None]:
        """Write many groups by ``OsCgroupFiles.write_if_different``; None for all if that cannot be used."""
        line = kernel_line(value)
        if not isinstance(self._files, OsCgroupFiles) or len(line) >= QUICK_WRITE_LIMIT_BYTES:
            return [None] * len(paths)
        return self._files.write_if_different(paths, kind.file, line, known, should_continue)

    def _set_online_v1(self, path: str, kind: CpusetList, value: IdSet, *, adjust_below: bool) -> bool:
        held = self._read_list(path, kind, kind.file)
        if held == value:
            return False
        try:
            self._write_and_adjust_v1(path, kind, value, adjust_below=adjust_below)
        except CgroupError as error:
            if error.errno != errno.EINVAL:
                raise
            online = value & self._read_list("", kind, kind.file)
            if not online or online == value:
                raise
            if held == online:
                return False
            value = online
            self._write_and_adjust_v1(path, kind, value, adjust_below=adjust_below)
        if adjust_below and held and held <= value:
            nesting.widen_below(self._lists(kind), path, held, value)
        return True

    def _write_and_adjust_v1(self, path: str, kind: CpusetList, value: IdSet, *, adjust_below: bool) -> None:
        """Write, adjust the groups above and below if the kernel refuses, and read back."""
        try:
            self._write_list(path, kind, value)
        except CgroupError as error:
            if error.errno == errno.EBUSY and adjust_below:
                nesting.write_narrowing_below(self._lists(kind), path, value, error)
            elif error.errno == errno.EACCES and nesting.widen_above(self._lists(kind), path, value):
                self._write_list(path, kind, value)
            else:
                raise
        self._verify_written(path, kind, kind.file, value, value)

    def _set_v2(self, path: str, kind: CpusetList, value: IdSet) -> bool:
        widened = self._widen_above_if_needed(path, kind, value)
        held = self._write_if_different(path, kind, value)
        if held is None:
            held = self._read_list(path, kind, kind.file)
            if held != value:
                self._write_list(path, kind, value)
                self._verify_written(path, kind, kind.file, value, value)
        return self._make_effective(path, kind, value) or widened or held != value

    def _widen_above_if_needed(self, path: str, kind: CpusetList, value: IdSet) -> bool:
        """Widen the groups above before a list is written that has none of their ids (v2).

        Otherwise all ids of the parent, which other groups use too, would be in effect between the two
        writes.

        Returns:
            Whether a group above was written.
        """
        if not value.isdisjoint(self._read_list(_parent(path), kind, kind.effective, value)):
            return False
        return nesting.widen_above(self._lists(kind), path, value)

    def _make_effective(self, path: str, kind: CpusetList, value: IdSet) -> bool:
        """Make a group's list take effect (v2); return True if a group above was written for this."""
        if self._read_list(path, kind, kind.effective) == value:
            return False
        widened = nesting.widen_above(self._lists(kind), path, value)
        online = self._read_list("", kind, kind.effective, value)
        self._verify_written(path, kind, kind.effective, value, value & online or value)
        return widened

    def _lists(self, kind: CpusetList) -> nesting.NestedLists:
        return nesting.NestedLists(
            lambda path: self._read_list(path, kind, kind.file),
            lambda path, value: self._write_list(path, kind, value),
            lambda path: [f"{path}/{name}" for name in self._files.children(path)],
            self._version,
        )

    def _write_list(self, path: str, kind: CpusetList, value: IdSet) -> None:
        try:
            self._files.write(path, kind.file, str(value))
        except OSError as error:
            if error.errno == errno.ENOENT and self._files.is_group(path):
                error = OSError(errno.EOPNOTSUPP, "")
            raise self._error(f"set {kind.description} to {value} in", path, error) from None

    def _verify_written(self, path: str, kind: CpusetList, file: str, wanted: IdSet, expected: IdSet) -> None:
        seen = self._read_list(path, kind, file)
        if seen != expected:
            raise CgroupError(
                f"cannot set {kind.description} to {wanted} in cgroup /{path}: {file} reads "
                f"{str(seen) or 'empty'} afterwards (another writer, or a sibling cpuset partition)"
            )

    @staticmethod
    def _error(action: str, path: str, error: OSError) -> CgroupError:
        number = error.errno or 0
        return CgroupError(
            f"cannot {action} cgroup /{path}: {cause_of_errno(number)}",
            errno.ENOENT if number in GONE else number,
        )


def open_cgroups(root: Path, procfs: Path = Path("/proc")) -> KernelCgroups:
    """Find the hierarchy with the cpuset controller.

    Args:
        root: Usually ``/sys/fs/cgroup``; can also be a v1 cpuset mount itself or a directory made by
            ``FakeCgroups``. On a hybrid system the v1 cpuset mount is used, unless the controller is on the
            v2 side. If neither is at its usual place, the mount table is used.
        procfs: The /proc with this process's mount table.

    Raises:
        CgroupError: There is no such hierarchy; the message says what to do.
    """
    if is_fake_tree(root):
        from proxy.backends.cgroup.fake.cpuset import FakeCgroups  # not in memory on a real node

        return FakeCgroups.open(root)
    for mount in (root / "cpuset", root):
        if (mount / "cpuset.cpus").is_file() and not (mount / "cgroup.controllers").exists():
            return KernelCgroups(mount, 1)
    for mount in (root, root / "unified"):
        if has_controller(mount, "cpuset"):
            return KernelCgroups(mount, 2)
    for mount, version in controller_mounts(mounts_elsewhere(root, procfs), "cpuset", "cpuset.cpus"):
        return KernelCgroups(mount, version)
    raise CgroupError(
        f"cannot find the cpuset controller below {root}: neither a v1 mount {root / 'cpuset'} nor a v2 "
        "hierarchy whose cgroup.controllers lists cpuset; mount one, or name its directory with --cgroup-root"
    )


class CpusetList(Struct, frozen=True):
    """One of the two lists of a cpuset group: CPUs or memory nodes.

    Attributes:
        file: The file with the configured list.
        effective: The file with the list in effect for tasks.
        description: The name of the list in errors.
        type: The type of its values.
    """

    file: str
    effective: str
    description: str
    type: type[IdSet]


def cpuset_lists(version: int) -> tuple[CpusetList, CpusetList]:
    """Return the two lists, CPUs and memory nodes, with the file names of cgroup v1 or v2."""
    names_of = ("cpuset.cpus.effective", "cpuset.mems.effective")
    if version == 1:
        names_of = ("cpuset.effective_cpus", "cpuset.effective_mems")
    return (
        CpusetList("cpuset.cpus", names_of[0], "CPUs", CpuSet),
        CpusetList("cpuset.mems", names_of[1], "memory nodes", Mask),
    )


@functools.lru_cache(maxsize=64)
def parsed_list(parse: Callable[[str], IdSet], line: bytes | None) -> IdSet | None:
    """Parse a list; None if the text is not a list. Cached, because most groups have one of a few lists."""
    try:
        return None if line is None else parse(line.decode("ascii", "replace"))
    except ValueError:
        return None


def _parent(path: str) -> str:
    """Return the parent of a group; empty for the root."""
    return path.strip("/").rpartition("/")[0]


@functools.lru_cache(maxsize=64)
def kernel_line(value: IdSet) -> bytes:
    """Return a list in the kernel's format, with its line end."""
    return f"{value}\n".encode()
