"""The cpuset controller, v1 and v2: finding, reading and writing a container's group.

Theory of writing.

* A value is read before it is written: an unchanged write still costs the kernel 8 microseconds and takes its
  global cpuset lock, a changed one 40 (measured), and other writers (runc, systemd, kubelet) must not be
  overlooked because we remember our last value. Where many are written that had something else by
  our own account, that first read is skipped: what counts is the one after the write.
* v1: a child must lie within its parent: ancestors that are too narrow (EACCES) and groups below that would
  stick out (EBUSY) are adjusted by ``proxy.backends.cgroup.nesting``. The root is never written.
* v1: the kernel takes an id out of every group when it goes offline, does not put it back, and refuses a list
  with such an id (EINVAL). Then what is online of it is written; the next comparison writes the rest when it
  is back.
* v2: the write is taken in any case, but what does not lie within the ancestors has no effect: with nothing
  left the group gets its parent's CPUs. So the effective file is what counts, and ancestors that hold a list
  of their own are widened: before the write where nothing would be left.
* What was written is read back. On v2 the effective value may lack CPUs that are offline, nothing else.

Linux Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst ("Cpuset Interface Files").
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from proxy.backends.cgroup import nesting
from proxy.backends.cgroup.files import QUICK_BYTES, Files, OsFiles, explain
from proxy.backends.cgroup.group_names import parent_path
from proxy.backends.cgroup.hierarchies import has_controller, is_fake_tree, mounted, mounts_elsewhere
from proxy.backends.cgroup.search import GroupFinder
from proxy.executor.kernel_ports import CpusetValue
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, IdSet, Mask


class KernelCgroups:
    """A cpuset hierarchy; implements ``proxy.executor.kernel_ports.Cgroups``.

    Thread-safe as far as the kernel is: it holds no lock, and no state but names that were found.
    """

    def __init__(self, root: Path, version: int, files: Files | None = None) -> None:
        """Take a hierarchy as it is; ``open_cgroups`` finds one.

        Args:
            root: Where the hierarchy with the cpuset controller is mounted.
            version: 1 or 2.
            files: How to reach it; the kernel's files below ``root`` if None.
        """
        self.root = root
        self._version = version
        self._files: Files = files if files is not None else OsFiles(root)
        self._cpus, self._mems = cpuset_lists(version)
        self._finder = GroupFinder(self._files)

    @property
    def version(self) -> int:
        """1 or 2."""
        return self._version

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's group.

        See ``Cgroups.find`` of the ports and ``proxy.backends.cgroup.search``.
        """
        return self._finder.find(parent, container_id)

    def learn(self, container_id: str, path: str, parent: str = "") -> None:
        """Remember where a container's group is; see ``proxy.backends.cgroup.locator``."""
        self._finder.learn(container_id, path, parent)

    def is_group(self, path: str) -> bool:
        """Return whether there is such a group."""
        return self._files.is_group(path)

    def pod_group(self, parent: str) -> str | None:
        """Find the group that a pod's ``cgroup_parent`` names.

        See ``proxy.executor.kernel_ports.Cgroups``.
        """
        path = parent_path(parent)
        return self._finder.group(path) if path else None

    # Reading

    def children(self, path: str) -> list[str]:
        """Return the names of the groups right below a group; none where it is gone."""
        return list(self._files.children(path))

    def read(self, path: str) -> CpusetValue:
        """Read a group's cpuset; see ``proxy.executor.kernel_ports.Cgroups.read``."""
        values: list[IdSet] = []
        for kind in (self._cpus, self._mems):
            own = self._get(path, kind, kind.file)
            values += [own, self._get(path, kind, kind.effective, own)]
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
            self._get(path, kind, kind.file if self._version == 1 else kind.effective).bits
        )

    def nodes(self, path: str) -> Mask:
        """Read a group's memory nodes as configured; see ``proxy.executor.kernel_ports.Cgroups.nodes``."""
        return Mask.from_bits(self._get(path, self._mems, self._mems.file).bits)

    def _get(self, path: str, kind: CpusetList, file: str, missing: IdSet | None = None) -> IdSet:
        """Read one list; ``missing`` is the content of a file that is not there."""
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

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, inner: bool = True) -> bool:
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
                changed = self._set_v1(path, kind, value, inner=inner)
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
        line, kind = line_of(cpus), self._cpus
        if self._version == 2:
            for path in {_above(path): path for path in paths}.values():
                with contextlib.suppress(CgroupError):  # the write reports what is wrong
                    self._make_room(path, kind, cpus)
        held = self._write_all_if_different(
            paths, kind, cpus, line_of(known) if known else None, should_continue
        )
        done = [None if before is None else before != line for before in held]
        if self._version == 1:
            self._follow_all(paths, held, kind, cpus)
            return done
        for at, path in enumerate(paths):
            if held[at] is not None:
                try:
                    done[at] = self._in_effect(path, kind, cpus) or done[at]
                except CgroupError:
                    done[at] = None
        return done

    def _follow_all(
        self, paths: Sequence[str], held: Sequence[bytes | None], kind: CpusetList, value: IdSet
    ) -> None:
        """See to the groups inside those that have grown (v1)."""
        for line in {*held} - {None}:
            before = list_or_none(kind.type.parse, line)
            if before and before < value:
                for path in (path for path, was in zip(paths, held, strict=True) if was == line):
                    nesting.follow(self._lists(kind), path, before, value)

    def _set_v1(self, path: str, kind: CpusetList, value: IdSet, *, inner: bool) -> bool:
        held = self._write_if_different(path, kind, value)
        if held is None:
            return self._put_whole(path, kind, value, inner=inner)
        if inner and held and held < value:
            nesting.follow(self._lists(kind), path, held, value)
        return held != value

    def _write_if_different(self, path: str, kind: CpusetList, value: IdSet) -> IdSet | None:
        """Write a list with one file open; returns what the group held, or None where ``write`` is needed."""
        held = self._write_all_if_different((path,), kind, value)[0]
        return list_or_none(kind.type.parse, held)

    def _write_all_if_different(
        self,
        paths: Sequence[str],
        kind: CpusetList,
        value: IdSet,
        known: bytes | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[bytes | None]:
        """Write many by ``OsFiles.write_if_different``; None for all where that cannot be used."""
        line = line_of(value)
        if not isinstance(self._files, OsFiles) or len(line) >= QUICK_BYTES:
            return [None] * len(paths)
        return self._files.write_if_different(paths, kind.file, line, known, should_continue)

    def _put_whole(self, path: str, kind: CpusetList, value: IdSet, *, inner: bool) -> bool:
        held = self._get(path, kind, kind.file)
        if held == value:
            return False
        try:
            self._put_v1(path, kind, value, inner=inner)
        except CgroupError as error:
            if error.errno != errno.EINVAL:
                raise
            online = value & self._get("", kind, kind.file)
            if not online or online == value:
                raise
            if held == online:
                return False
            value = online
            self._put_v1(path, kind, value, inner=inner)
        if inner and held and held <= value:
            nesting.follow(self._lists(kind), path, held, value)
        return True

    def _put_v1(self, path: str, kind: CpusetList, value: IdSet, *, inner: bool) -> None:
        """Write, seeing to the groups above and below if need be, and read back."""
        try:
            self._put(path, kind, value)
        except CgroupError as error:
            if error.errno == errno.EBUSY and inner:
                nesting.narrow(self._lists(kind), path, value, error)
            elif error.errno == errno.EACCES and nesting.widen(self._lists(kind), path, value):
                self._put(path, kind, value)
            else:
                raise
        self._check(path, kind, kind.file, value, value)

    def _set_v2(self, path: str, kind: CpusetList, value: IdSet) -> bool:
        widened = self._make_room(path, kind, value)
        held = self._write_if_different(path, kind, value)
        if held is None:
            held = self._get(path, kind, kind.file)
            if held != value:
                self._put(path, kind, value)
                self._check(path, kind, kind.file, value, value)
        return self._in_effect(path, kind, value) or widened or held != value

    def _make_room(self, path: str, kind: CpusetList, value: IdSet) -> bool:
        """Widen the groups above before a list is written that has none of their ids (v2).

        Else all ids of the parent would be in effect between the two writes, those of others too.

        Returns:
            Whether a group above was written.
        """
        if not value.isdisjoint(self._get(_above(path), kind, kind.effective, value)):
            return False
        return nesting.widen(self._lists(kind), path, value)

    def _in_effect(self, path: str, kind: CpusetList, value: IdSet) -> bool:
        """Make a list that a group holds take effect (v2); True when a group above was written for it."""
        if self._get(path, kind, kind.effective) == value:
            return False
        widened = nesting.widen(self._lists(kind), path, value)
        online = self._get("", kind, kind.effective, value)
        self._check(path, kind, kind.effective, value, value & online or value)
        return widened

    def _lists(self, kind: CpusetList) -> nesting.NestedLists:
        return nesting.NestedLists(
            lambda path: self._get(path, kind, kind.file),
            lambda path, value: self._put(path, kind, value),
            lambda path: [f"{path}/{name}" for name in self._files.children(path)],
            self._version,
        )

    def _put(self, path: str, kind: CpusetList, value: IdSet) -> None:
        try:
            self._files.write(path, kind.file, str(value))
        except OSError as error:
            if error.errno == errno.ENOENT and self._files.is_group(path):
                error = OSError(errno.EOPNOTSUPP, "")
            raise self._error(f"set {kind.description} to {value} in", path, error) from None

    def _check(self, path: str, kind: CpusetList, file: str, wanted: IdSet, expected: IdSet) -> None:
        seen = self._get(path, kind, file)
        if seen != expected:
            raise CgroupError(
                f"cannot set {kind.description} to {wanted} in cgroup /{path}: {file} reads "
                f"{str(seen) or 'empty'} afterwards (another writer, or a sibling cpuset partition)"
            )

    @staticmethod
    def _error(action: str, path: str, error: OSError) -> CgroupError:
        number = error.errno or 0
        return CgroupError(
            f"cannot {action} cgroup /{path}: {explain(number)}", errno.ENOENT if number in GONE else number
        )


def open_cgroups(root: Path, procfs: Path = Path("/proc")) -> KernelCgroups:
    """Find the hierarchy with the cpuset controller.

    Args:
        root: Usually ``/sys/fs/cgroup``. A v1 cpuset mount itself and a directory made by ``FakeCgroups``
            are taken too. On a hybrid system the v1 cpuset mount is used, unless the controller is on the v2
            side. Where neither is at its usual place, the mount table is used.
        procfs: Where our own mount table is.

    Raises:
        CgroupError: There is none; the message says what to do.
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
    for mount, version in mounted(mounts_elsewhere(root, procfs), "cpuset", "cpuset.cpus"):
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
    """Return CPUs and memory nodes as they are in cgroup v1 or v2."""
    names_of = ("cpuset.cpus.effective", "cpuset.mems.effective")
    if version == 1:
        names_of = ("cpuset.effective_cpus", "cpuset.effective_mems")
    return (
        CpusetList("cpuset.cpus", names_of[0], "CPUs", CpuSet),
        CpusetList("cpuset.mems", names_of[1], "memory nodes", Mask),
    )


@functools.lru_cache(maxsize=64)
def list_or_none(parse: Callable[[str], IdSet], line: bytes | None) -> IdSet | None:
    """Read a list; most groups hold the same few. None where it is none."""
    try:
        return None if line is None else parse(line.decode("ascii", "replace"))
    except ValueError:
        return None


def _above(path: str) -> str:
    """Return the group above one; empty for the root."""
    return path.strip("/").rpartition("/")[0]


@functools.lru_cache(maxsize=64)
def line_of(value: IdSet) -> bytes:
    """Return a list as the kernel writes it, with its line end."""
    return f"{value}\n".encode()
