"""A cpuset hierarchy in an ordinary directory, with the kernel's rules.

For the demo, for tests, and for trying the daemon without changing the node. The files are real files, so
they can be inspected. Writes that the kernel refuses are refused with the kernel's error number (the contract
test runs the same cases on both). The description of the imagined machine is in the directory
(``hierarchies.FAKE_TREE_FILE``), so several processes can open one tree; a file lock orders their writes. The
rules are in ``proxy.backends.cgroup.fake.cpuset_rules``. Groups are made and removed with ``mkdir`` and
``rmdir`` of ``FakeCgroups``.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.fake.cpuset_rules import FakeCgroupFiles
from proxy.backends.cgroup.hierarchies import FAKE_TREE_FILE, is_fake_tree
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask


class FakeCgroups(KernelCgroups):
    """A cpuset tree in a directory: ``KernelCgroups`` on ``FakeCgroupFiles``, and a runtime's operations."""

    def __init__(
        self,
        root: Path,
        online: CpuSet,
        nodes: Mask,
        version: int,
        possible: CpuSet | None = None,
        *,
        exclusive: bool = True,
    ) -> None:
        """Make the tree, or open it if the directory already contains one.

        Args:
            root: The directory; made if it is missing.
            online: CPUs of the imagined machine.
            nodes: Its memory nodes.
            version: 1 or 2.
            possible: CPUs that the kernel was built for; ``online`` if None.
            exclusive: Whether groups have ``cpuset.cpus.exclusive``, which exists since Linux 6.7.
        """
        all_possible = online if possible is None else possible
        self._tree = FakeCgroupFiles(root, online, all_possible, nodes, version, exclusive=exclusive)
        super().__init__(root, version, self._tree)
        if not is_fake_tree(root):
            root.mkdir(parents=True, exist_ok=True)
            facts = {"version": version, "online": str(online), "nodes": str(nodes)}
            facts |= {"possible": str(all_possible), "exclusive": exclusive}
            (root / FAKE_TREE_FILE).write_text(json.dumps(facts) + "\n")
            self._tree.create_files("")

    @classmethod
    def open(cls, root: Path) -> FakeCgroups:
        """Open the tree in a directory.

        Raises:
            CgroupError: The directory's description cannot be read.
        """
        try:
            facts = json.loads((root / FAKE_TREE_FILE).read_text())
            possible, nodes = CpuSet.parse(facts["possible"]), Mask.parse(facts["nodes"])
            online, newer = CpuSet.parse(facts["online"]), bool(facts.get("exclusive", True))
            return cls(root, online, nodes, int(facts["version"]), possible, exclusive=newer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CgroupError(
                f"cannot open the cgroup directory {root}: {FAKE_TREE_FILE} is damaged ({error})"
            ) from None

    @property
    def files(self) -> FakeCgroupFiles:
        """The files of the tree, with the kernel's refusals, for controllers other than cpuset."""
        return self._tree

    def mkdir(self, path: str) -> None:
        """Make a group.

        Raises:
            OSError: EEXIST, or ENOENT if the parent is missing.
        """
        above, _, name = path.rpartition("/")
        new = f"{above}/.{name}" if above else f".{name}"
        with self._tree.locked():
            if self._tree.is_group(path):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            (self.root / new).mkdir()
            self._tree.create_files(new)
            (self.root / new).rename(self.root / path)  # a group is never visible without its files

    def rmdir(self, path: str) -> None:
        """Remove a group.

        Raises:
            OSError: ENOENT, or EBUSY if it contains tasks or groups.
        """
        with self._tree.locked():
            if self._tree.children(path) or self._tree.read(path, "cgroup.procs").strip():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            gone = self.root / f".{path.replace('/', '.')}"
            (self.root / path).rename(gone)
            for file in gone.iterdir():
                file.unlink()
            gone.rmdir()
            self._tree.group_removed(path)

    def attach(self, path: str, pid: int) -> None:
        """Move a task into a group.

        Raises:
            OSError: ENOENT, or on v1 ENOSPC if the group has no CPUs or no memory nodes.
        """
        self._tree.write(path, "cgroup.procs", str(pid))

    def detach(self, pid: int) -> None:
        """Remove a task from its group, as when the task ends."""
        with self._tree.locked():
            self._tree.remove_task(pid)
