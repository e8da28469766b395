"""The kernel's cpuset rules, on files in an ordinary directory.

The rules, in the order in which the kernel checks them (kernel 6.18, each seen on a real v1 mount):

1. the list does not parse: EINVAL; an id beyond the possible ids: ERANGE; an id that is not online: EINVAL
   (for CPUs only on v1);
2. v1: a child would no longer fit into the group: EBUSY; the group would not fit into its parent: EACCES;
3. tasks would be left without CPUs or nodes: ENOSPC.

On v2 rule 2 does not apply. The effective files contain the ids that tasks get: the part of the list that the
parent has, or if there is none, all ids of the parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxy.atomic_write import write_file
from proxy.backends.cgroup.fake import cfs_quota, partitions
from proxy.backends.cgroup.files import OsCgroupFiles
from proxy.backends.cgroup.hierarchies import FAKE_TREE_FILE
from proxy.model.idset import CpuSet, IdSet, Mask

LISTS: tuple[tuple[str, type[IdSet]], ...] = (("cpuset.cpus", CpuSet), ("cpuset.mems", Mask))
_NODES_LIMIT = 1024  # MAX_NUMNODES of the usual distribution kernels


class FakeCgroupFiles:
    """``Files`` on a directory, with the kernel's refusals."""

    def __init__(
        self,
        root: Path,
        online: CpuSet,
        possible: CpuSet,
        nodes: Mask,
        version: int,
        *,
        exclusive: bool = True,
    ) -> None:
        self._root = root
        self._exclusive = exclusive
        self._plain = OsCgroupFiles(root)
        self._machine_ids: dict[str, IdSet] = {"cpuset.cpus": online, "cpuset.mems": nodes}
        self._possible = possible
        self.version = version
        v1 = ("cpuset.effective_cpus", "cpuset.effective_mems")
        v2 = ("cpuset.cpus.effective", "cpuset.mems.effective")
        self.effective = dict(zip(("cpuset.cpus", "cpuset.mems"), v1 if version == 1 else v2, strict=True))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the tree's lock. Each use opens the file again: so the lock excludes other threads, too."""
        with (self._root / FAKE_TREE_FILE).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    # Files

    def read(self, path: str, name: str) -> str:
        """Read one file of a group."""
        return self._plain.read(path, name)

    def is_group(self, path: str) -> bool:
        """Return whether there is such a group."""
        return self._plain.is_group(path)

    def children(self, path: str) -> Sequence[str]:
        """Return the names of the groups directly below; a leading dot marks groups made or removed now."""
        return [name for name in self._plain.children(path) if not name.startswith(".")]

    def write(self, path: str, name: str, text: str) -> None:
        """Write one file of a group, or refuse as the kernel does."""
        with self.locked():
            self._plain.read(path, name)  # ENOENT comes before all other errors
            for list_name, kind in LISTS:
                if name == list_name:
                    if text:  # a write of nothing never reaches the kernel
                        self._set_list(path, name, kind, text)
                    return
            if name in partitions.FILES:
                self._set_partition(path, name, text)
                return
            if name in cfs_quota.FILES:
                if text:
                    self._store(path, name, cfs_quota.content_after_write(self, path, name, text))
                return
            if name != "cgroup.procs":
                raise OSError(errno.EINVAL, "not a writable file")
            if not text.strip().isdecimal():
                raise OSError(errno.EINVAL, "not a process id")
            self._attach(path, int(text))

    # Rules

    def configured(self, path: str, name: str) -> IdSet:
        """Return a group's list (for the root: the ids of the machine)."""
        if not path:
            return self._machine_ids[name]
        return dict(LISTS)[name].parse(self._plain.read(path, name))

    def _set_list(self, path: str, name: str, kind: type[IdSet], text: str) -> None:
        if not path:
            raise OSError(errno.EACCES, "the root is fixed")
        try:
            value = kind.parse(text)
        except ValueError:
            raise OSError(errno.EINVAL, "not a list") from None
        if name == "cpuset.cpus" and not value <= self._possible:
            raise OSError(errno.ERANGE, "beyond possible")
        if name == "cpuset.mems" and value.bits >> _NODES_LIMIT:
            raise OSError(errno.ERANGE, "beyond possible")
        if not value <= self._machine_ids[name] and (self.version == 1 or name == "cpuset.mems"):
            raise OSError(errno.EINVAL, "not online")
        if self.version == 1:
            self._check_v1(path, name, value)
        if self.configured(path, name) and not value and self._is_populated(path):
            raise OSError(errno.ENOSPC, "tasks inside")
        self._store(path, name, str(value))
        table = self._table(name)
        if table:
            assert isinstance(value, CpuSet)
            self._apply_table(partitions.after_list_write(self, path, value, table))
        else:
            self._update_effective(path, name)

    def _set_partition(self, path: str, name: str, text: str) -> None:
        """Write one of the files of partitions."""
        table = partitions.load(self._root)
        if name == partitions.PARTITION:
            self._apply_table(partitions.after_partition_write(self, path, text.strip(), table))
            return
        try:
            value = CpuSet.parse(text)
        except ValueError:
            raise OSError(errno.EINVAL, "not a list") from None
        after = partitions.after_exclusive_write(self, path, value, table)
        self._store(path, name, str(value))
        self._apply_table(after)

    def _table(self, name: str) -> partitions.Table:
        """Return the groups that are partitions; empty for memory nodes and on v1."""
        if self.version == 1 or name != "cpuset.cpus":
            return {}
        return partitions.load(self._root)

    def _apply_table(self, after: partitions.Table) -> None:
        """Write the current partitions into all files."""
        before = partitions.load(self._root)
        if before != after:
            partitions.save(self._root, after)
        for path in before.keys() | after.keys():
            if self.is_group(path):
                kind = after[path].text if path in after else "member"
                self._store(path, partitions.PARTITION, kind)
        if self._exclusive:
            valid = (e for e in after.values() if e.kind == "isolated" and e.state == partitions.VALID)
            isolated = CpuSet(cpu for entry in valid for cpu in entry.withheld)
            self._store("", partitions.ISOLATED, str(isolated))
        self._update_effective("", "cpuset.cpus")

    def group_removed(self, path: str) -> None:
        """Drop the partition state of a removed group, if it was a partition (lock held)."""
        table = partitions.load(self._root)
        if path in table:
            self._apply_table({k: v for k, v in table.items() if k != path})

    def _check_v1(self, path: str, name: str, value: IdSet) -> None:
        for child in self.children(path):
            if not self.configured(f"{path}/{child}", name) <= value:
                raise OSError(errno.EBUSY, "a child holds more")
        if not value <= self.configured(path.rpartition("/")[0], name):
            raise OSError(errno.EACCES, "the parent holds less")

    def _update_effective(self, path: str, name: str) -> None:
        """Compute the effective lists of a group and of all groups below it."""
        self._compute_effective(path, name, self._table(name))

    def _compute_effective(self, path: str, name: str, table: partitions.Table) -> None:
        own = self.configured(path, name)
        above = self._machine_ids[name]
        if path and self.version == 2:
            above_path = path.rpartition("/")[0]
            above = type(own).parse(self._plain.read(above_path, self.effective[name]))
            effective = own & above or above
        else:
            effective = own & above
        if table:
            online, mine, room = (
                CpuSet.from_bits(each.bits) for each in (self._machine_ids[name], own, above)
            )
            effective = partitions.effective_cpus(path, mine, room, online, table)
        self._store(path, self.effective[name], str(effective))
        for child in self.children(path):
            self._compute_effective(f"{path}/{child}" if path else child, name, table)

    def _is_populated(self, path: str) -> bool:
        below = (self._is_populated(f"{path}/{child}") for child in self.children(path))
        return bool(self._plain.read(path, "cgroup.procs").strip()) or any(below)

    def _attach(self, path: str, pid: int) -> None:
        if self.version == 1 and path and not all(self.configured(path, name) for name, _ in LISTS):
            raise OSError(errno.ENOSPC, "no CPUs or nodes")
        self.remove_task(pid)
        pids = self._plain.read(path, "cgroup.procs").split()
        self._store(path, "cgroup.procs", "\n".join([*pids, str(pid)]))

    def remove_task(self, pid: int, path: str = "") -> None:
        """Remove a task from its group, as when the task ends."""
        pids = self._plain.read(path, "cgroup.procs").split()
        if str(pid) in pids:
            pids.remove(str(pid))
            self._store(path, "cgroup.procs", "\n".join(pids))
        for child in self.children(path):
            self.remove_task(pid, f"{path}/{child}" if path else child)

    def _store(self, path: str, name: str, text: str) -> None:
        """Replace a file's text in one step, so that a reader without the lock never sees a part of it."""
        whole = f"{text}\n" if text or name != "cgroup.procs" else ""
        write_file(self._root / path / name, whole.encode(), mode=0o644, sync=False)

    def create_files(self, path: str) -> None:
        """Put the files into a new group, with the kernel's defaults: empty lists, no quota (lock held)."""
        for name, _ in LISTS:
            if path or self.version == 1:
                self._store(path, name, "" if path else str(self._machine_ids[name]))
        for name, text in cfs_quota.new_files(path, self.version).items():
            self._store(path, name, text)
        self._store(path, "cgroup.procs", "")
        if self.version == 2:
            for name, text in partitions.new_files(path, exclusive=self._exclusive).items():
                self._store(path, name, text)
            self._store(path, "cgroup.controllers", "cpuset cpu")
            self._store(path, "cgroup.subtree_control", "cpuset cpu")
        for name, _ in LISTS:
            self._update_effective(path, name)
