"""Find a container's group from the runtime's own answer, if it cannot be found by its name.

The runtime's verbose status contains the ``cgroupsPath`` of the OCI spec, and the pid of the container's
first process. The ``cgroupsPath`` can be used like any other name, so it is tried first. The pid leads to
``/proc/PID/cgroup``, which is always correct, even if kubelet runs in a container, the cgroup root is custom,
or the runtime has its own cgroup manager. This file has the group of a process, and the group is the
container's only if a part of its path contains the container's id:

* A process may have moved below the container's group (systemd as first process: ``ID/init.scope``; crun's
  ``ID.scope/container``), so the path is cut after the part with the id.
* The first process of a container in a virtual machine is the process of the machine, in a group of the
  sandbox, which all containers of the pod share. It is better to report no group than this group.

This code runs in a worker and only reads files: the runtime has been queried before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from proxy.backends.cgroup import group_names
from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.hierarchies import (
    MountedPath,
    cgroup_of_process,
    path_below_mount,
    read_mounts,
    visible_root,
)
from proxy.executor.kernel_ports import CgroupLocation
from proxy.executor.runtime_ports import RuntimeDetail

_GROUPS_LIMIT = 1024
"""At most this many groups are searched for a path whose beginning is unknown."""


class ControllerTree(Protocol):
    """The tree of another controller."""

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Remember where a container's group is."""


class KernelGroupLocator:
    """Implements ``proxy.executor.kernel_ports.GroupLocator``; safe to use from several threads."""

    def __init__(
        self,
        groups: KernelCgroups,
        others: Sequence[ControllerTree] = (),
        procfs: Path = Path("/proc"),
        mounts: Path = Path("/proc"),
    ) -> None:
        """Set the trees.

        Args:
            groups: The tree of the cpuset controller.
            others: Trees that are notified of a group's path too.
            procfs: The /proc of the pid namespace to which the runtime's pids belong.
            mounts: The /proc with this process's mount table.
        """
        self._groups = groups
        self._others = others
        self._procfs = procfs
        self._mounts = mounts

    def locate(self, container_id: str, detail: RuntimeDetail) -> CgroupLocation:
        """Find a container's group; see ``proxy.executor.kernel_ports.GroupLocator.locate``."""
        path, obstacle = self._by_name(container_id, detail.cgroups_path), ""
        if not path:
            path, obstacle = self._by_pid(container_id, detail.pid)
        if path:
            self.remember(container_id, path, detail.cgroups_path)
        return CgroupLocation(path, obstacle)

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Notify all trees of a group's path; see ``proxy.executor.kernel_ports.GroupLocator.remember``."""
        self._groups.remember(container_id, path, parent)
        for tree in self._others:
            tree.remember(container_id, path, parent)

    def _by_name(self, container_id: str, cgroups_path: str) -> str:
        if not cgroups_path or not group_names.is_safe_path(container_id):
            return ""
        candidates = group_names.candidates(cgroups_path, container_id)
        return next((path for path in candidates if self._groups.is_group(path)), "")

    def _by_pid(self, container_id: str, pid: int) -> tuple[str, str]:
        if pid <= 0:
            return "", "the runtime does not report its first process"
        try:
            text = (self._procfs / str(pid) / "cgroup").read_text(errors="surrogateescape")
        except OSError as error:
            return "", f"its first process {pid} cannot be read ({error.strerror})"
        group = cgroup_of_process(text, self._groups.version)
        if group is None:
            return "", f"its first process {pid} is in no group of the cpuset controller"
        parts = group.split("/")
        depth = next(
            (i for i, part in enumerate(parts) if group_names.is_name_of_container(part, container_id)), None
        )
        if depth is None:
            return "", f"its first process {pid} is in {group}, which is not its own (a virtual machine?)"
        group = "/".join(parts[: depth + 1])
        place = path_below_mount(group, visible_root(read_mounts(self._mounts), self._groups.root))
        path = self._full_path(place) if place is not None else ""
        if not path:
            return (
                "",
                f"its first process {pid} is in {group}, which is not seen below {self._groups.root}",
            )
        return path, ""

    def _full_path(self, place: MountedPath) -> str:
        """Return the whole path of a place; empty unless exactly one such group exists."""
        if not place.path or not group_names.is_safe_path(place.path):
            return ""
        if not place.hidden_levels:
            return place.path if self._groups.is_group(place.path) else ""
        paths: list[str] = []
        todo = deque([("", 0)])
        for _ in range(_GROUPS_LIMIT):
            if not todo:
                break
            at, depth = todo.popleft()
            if depth == place.hidden_levels:
                whole = f"{at}/{place.path}"
                paths += [whole] if self._groups.is_group(whole) else []
                continue
            todo += [(f"{at}/{name}" if at else name, depth + 1) for name in self._groups.children(at)]
        return paths[0] if len(paths) == 1 else ""
