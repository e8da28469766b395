"""Changes the cpuset tree as runc does, in the same order.

The order matters to other writers of the tree (observed with containerd 1.6 and runc 1.1):

- a container has no cgroup before it is started; the start makes it and writes the saved cpuset;
- on cgroup v1 a cpuset can hold no task before it has CPUs and memory nodes, so every empty ancestor first
  takes a copy of its parent's set, and a container without a cpuset of its own ends with a full copy of the
  pod's set;
- on v2 a container without a cpuset is left empty, which means "as the parent";
- any update of a container writes the whole saved cpuset again, whatever is in the files.
"""

from __future__ import annotations

import os

from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.runtime_records import Resources


class RuncError(Exception):
    """The message that runc writes to stderr, as containerd passes it on."""


CPUSET_FILES = (("cpuset.cpus", "cpuset_cpus"), ("cpuset.mems", "cpuset_mems"))


class Runc:
    """Makes, updates and removes the cgroups of containers in one tree."""

    def __init__(self, tree: FakeCgroups) -> None:
        self._tree = tree
        # The plain files: KernelCgroups.write would widen parents and read back, and runc does neither.
        self._files = tree._files

    def start(self, path: str, resources: Resources, pid: int) -> None:
        """Make the cgroup and its missing ancestors, write the cpuset, and put the task in.

        Raises:
            RuncError: The kernel refused; its groups are removed again.
        """
        made: list[str] = []
        try:
            self._make_cgroups(path, made)
            self._write_cpuset(path, resources)
            if self._tree.version == 1:
                self._copy_parent_if_empty(path)
            self._tree.attach(path, pid)
        except OSError as error:
            for directory in reversed(made):
                self._tree.rmdir(directory)
            raise RuncError(
                "OCI runtime create failed: runc create failed: unable to start container process: "
                f"unable to apply cgroup configuration: {_go_error_text(error)}"
            ) from error

    def update(self, path: str, saved: Resources, merged: Resources) -> None:
        """Write the merged cpuset; if that fails, write the saved one back.

        Raises:
            RuncError: The kernel refused the merged values.
        """
        try:
            self._write_cpuset(path, merged)
        except OSError as error:
            self._write_cpuset(path, saved)
            raise RuncError(_go_error_text(error)) from error

    def remove(self, path: str, pid: int) -> None:
        """Let the task end and remove its cgroup; a cgroup that is already gone is not an error."""
        try:
            self._tree.detach(pid)
            self._tree.rmdir(path)
        except FileNotFoundError:
            return

    def _make_cgroups(self, path: str, made: list[str]) -> None:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            directory = "/".join(parts[:end])
            try:
                self._tree.mkdir(directory)
            except FileExistsError:
                pass
            else:
                made.append(directory)
            if self._tree.version == 1 and end < len(parts):
                self._copy_parent_if_empty(directory)

    def _copy_parent_if_empty(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        for name, _ in CPUSET_FILES:
            if not self._files.read(path, name).strip():
                self._write_file(path, name, self._files.read(parent, name).strip())

    def _write_cpuset(self, path: str, resources: Resources) -> None:
        for name, field in CPUSET_FILES:
            if text := getattr(resources, field):
                self._write_file(path, name, text)

    def _write_file(self, path: str, name: str, text: str) -> None:
        try:
            self._files.write(path, name, text)
        except OSError as error:
            error.add_note(f'failed to write "{text}": write /{path}/{name}')
            raise


def _go_error_text(error: OSError) -> str:
    """Write an error as Go does: the value and the file, and strerror in lower case."""
    cause = os.strerror(error.errno or 0).lower()
    return ": ".join([*getattr(error, "__notes__", ()), cause])
