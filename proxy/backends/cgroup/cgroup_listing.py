"""Lists all groups of a cpuset hierarchy and the pods that they belong to, for commands.

Only commands use this module, and it reads with cgroupspy on v1 and v2. The trees and nodes of cgroupspy
support only v1 (on v2 a node has no controller), so this module walks the groups, and reads each group by a
controller of cgroupspy with the files of its version.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path

from cgroupspy.controllers import Controller
from cgroupspy.interfaces import CommaDashSetFile

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.group_names import CgroupDriver, pod_uid
from proxy.executor.kernel_ports import CpusetValue
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask

_GROUPS_LIMIT = 10_000


class ListedGroup:
    """A group for a controller of cgroupspy, used instead of a node of cgroupspy's tree."""

    def __init__(self, directory: Path) -> None:
        self.full_path = str(directory).encode("utf-8", "surrogateescape")


class CpusetV1(Controller):  # type: ignore[misc]  # cgroupspy has no types
    """The cpuset files of a group on v1, for which the configured sets are read as the sets in effect."""

    cpus = effective_cpus = CommaDashSetFile("cpuset.cpus", readonly=True)
    mems = effective_mems = CommaDashSetFile("cpuset.mems", readonly=True)


class CpusetV2(Controller):  # type: ignore[misc]  # cgroupspy has no types
    """The cpuset files of a group on v2."""

    cpus = CommaDashSetFile("cpuset.cpus", readonly=True)
    effective_cpus = CommaDashSetFile("cpuset.cpus.effective", readonly=True)
    mems = CommaDashSetFile("cpuset.mems", readonly=True)
    effective_mems = CommaDashSetFile("cpuset.mems.effective", readonly=True)


def list_cpusets(groups: KernelCgroups) -> dict[str, CpusetValue]:
    """Read all groups.

    Args:
        groups: The hierarchy.

    Returns:
        Path to value, sorted by path, without the root; at most 10,000 groups. Groups that disappear during
        the read, and groups without the controller, are left out. On v1 the effective sets are the configured
        sets.

    Raises:
        CgroupError: A group cannot be read.
    """
    files = CpusetV1 if groups.version == 1 else CpusetV2
    cpusets: dict[str, CpusetValue] = {}
    for path in _walk(groups):
        group = files(ListedGroup(groups.root / path))
        try:
            cpusets[path] = CpusetValue(
                CpuSet(group.cpus),
                Mask(group.mems),
                CpuSet(group.effective_cpus),
                Mask(group.effective_mems),
            )
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) != errno.ENODEV:
                raise CgroupError(f"cannot read the cpuset of cgroup /{path}: {error}") from None
    return dict(sorted(cpusets.items()))


def _walk(groups: KernelCgroups) -> Iterator[str]:
    todo = groups.children("")
    for _ in range(_GROUPS_LIMIT):
        if not todo:
            return
        path = todo.pop()
        todo += [f"{path}/{name}" for name in groups.children(path)]
        yield path


class PodAndContainerNames:
    """Finds the pod and the container that a group belongs to."""

    def __init__(self, containers: Mapping[str, str], pods: Mapping[str, str]) -> None:
        """Take the names.

        Args:
            containers: Names of containers by id; sandboxes can be among them.
            pods: ``namespace/name`` of pods by uid.
        """
        self._containers = containers
        self._pods = pods

    def of_group(self, path: str) -> tuple[str, str]:
        """Return the pod and the container of a group; each is empty if there is none.

        Args:
            path: The group, relative to the root of its hierarchy.
        """
        *above, name = path.split("/")
        container = next((self._containers[i] for i in _ids(name) if i in self._containers), "")
        pods = (self._pods.get(_uid(part), "") for part in reversed([*above, name]))
        return next((pod for pod in pods if pod), ""), container


def _ids(name: str) -> Iterator[str]:
    """Yield the ids that a group's name can contain: ``ID``, ``cri-containerd-ID.scope``, ``a:b:ID``."""
    stem = name.removesuffix(".scope")
    yield stem
    yield from (stem[at + 1 :] for at, sign in enumerate(stem) if sign in "-:")


def _uid(name: str) -> str:
    try:
        return pod_uid(CgroupDriver.SYSTEMD if name.endswith(".slice") else CgroupDriver.CGROUPFS, name)
    except CgroupError:
        return ""
