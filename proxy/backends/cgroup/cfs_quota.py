"""The CFS quota of cgroups, v1 and v2: how long the tasks of a group may run in each period.

The kernel's rules (Linux scheduler/sched-bwc.rst, cgroup-v2.rst "CPU Interface Files"; each refusal was seen
on kernel 6.18):

* v1 has ``cpu.cfs_quota_us`` (-1: no quota) and ``cpu.cfs_period_us`` in the cpu controller's hierarchy,
  which is often mounted together with cpuacct. The kernel compares ratios of quota to period: the ratio of a
  group must not be above that of its nearest ancestor with a quota, nor below that of a group below it;
  otherwise the write fails with EINVAL. The root cannot be written. Removing a quota always succeeds, because
  a group without a quota is limited only by its ancestors. Quotas are removed from the top, because a group
  below an ancestor with a quota would still be limited; they are restored from the bottom, the greatest quota
  last.
* v2 has ``cpu.max``, "quota period" or "max period"; a write of a single word keeps the period. Any value is
  accepted; the smallest value among the group and its ancestors applies. A group has the file if its parent's
  ``cgroup.subtree_control`` contains ``cpu``.
* The period is never changed here.

Groups have the same paths as in the cpuset hierarchy, but not always the same root.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from proxy.backends.cgroup.files import CgroupFiles, OsCgroupFiles, cause_of_errno
from proxy.backends.cgroup.group_names import CgroupDriver, parent_path, pod_uid
from proxy.backends.cgroup.hierarchies import (
    controller_mounts,
    has_controller,
    is_fake_tree,
    mounts_elsewhere,
)
from proxy.backends.cgroup.search import GroupFinder
from proxy.backends.cgroup.v2_values import UNLIMITED, parse_quota, quota_text
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError

_V1_NAMES = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
_V1_FILE = "cpu.cfs_quota_us"
_V2_FILE = "cpu.max"


class KernelCpuGroups:
    """The cpu controller's hierarchy; implements ``proxy.executor.kernel_ports.CpuGroups``.

    Safe to use from several threads: it holds no state except the names of groups that were found.
    """

    def __init__(self, root: Path, version: int, files: CgroupFiles | None = None) -> None:
        """Use the hierarchy at a known path; ``open_cpu_groups`` finds it.

        Args:
            root: Where the hierarchy with the cpu controller is mounted.
            version: 1 or 2.
            files: Access to its files; the kernel's files below ``root`` if None.
        """
        self.root = root
        self.version = version
        self._files: CgroupFiles = files if files is not None else OsCgroupFiles(root)
        self._file = _V1_FILE if version == 1 else _V2_FILE
        self._finder = GroupFinder(self._files)

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's group; see ``proxy.executor.kernel_ports.CpuGroups.find``."""
        return self._finder.find(parent, container_id)

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Remember where a container's group is; see ``proxy.backends.cgroup.locator``."""
        self._finder.remember(container_id, path, parent)

    def pod_group(self, parent: str) -> str | None:
        """Find a pod's own group; see ``proxy.executor.kernel_ports.CpuGroups.pod_group``."""
        path = parent_path(parent)
        if not path or not _is_name_of_pod(path.rpartition("/")[2]):
            return None
        return self._finder.find_path(path)

    def quota(self, path: str) -> int:
        """Read a group's quota; see ``proxy.executor.kernel_ports.CpuGroups.quota``."""
        try:
            text = self._files.read(path, self._file)
        except OSError as error:
            raise self._error("read the CFS quota of", path, error) from None
        if self.version == 2:
            return parse_quota(text)
        try:
            return max(UNLIMITED, int(text))
        except ValueError:
            raise CgroupError(
                f"cannot read the CFS quota of cgroup /{path}: {text!r} is not a number"
            ) from None

    def set_quota(self, path: str, quota: int) -> bool:
        """Set a group's quota and read it back; see ``proxy.executor.kernel_ports.CpuGroups.set_quota``."""
        if not path.strip("/"):
            raise CgroupError("cannot set the CFS quota of the root cgroup: it has none", errno.EACCES)
        if quota != UNLIMITED and quota <= 0:
            raise CgroupError(f"cannot set the CFS quota of cgroup /{path} to {quota}: it is not a time")
        if self.quota(path) == quota:
            return False
        try:
            self._files.write(path, self._file, str(quota) if self.version == 1 else quota_text(quota))
        except OSError as error:
            raise self._error(f"set the CFS quota to {quota} in", path, error) from None
        seen = self.quota(path)
        if seen != quota:
            raise CgroupError(
                f"cannot set the CFS quota to {quota} in cgroup /{path}: it reads {seen} afterwards "
                "(another writer)"
            )
        return True

    def _error(self, action: str, path: str, error: OSError) -> CgroupError:
        number = error.errno or 0
        if number == errno.ENOENT and self._files.is_group(path):
            number, message = (
                errno.EOPNOTSUPP,
                "the cpu controller is not enabled here, or the kernel has no CFS bandwidth",
            )
        elif number == errno.EINVAL:
            message = "an ancestor allows less, a group below has more, or it is less than a millisecond"
        else:
            message = ""
        cause = f"{message} ({errno.errorcode[number]})" if message else cause_of_errno(number)
        return CgroupError(
            f"cannot {action} cgroup /{path}: {cause}", errno.ENOENT if number in GONE else number
        )


def _is_name_of_pod(name: str) -> bool:
    """Return whether a group's name is that of a single pod, and not of all pods or of a QoS class."""
    try:
        pod_uid(CgroupDriver.SYSTEMD if name.endswith(".slice") else CgroupDriver.CGROUPFS, name)
    except CgroupError:
        return False
    return True


def open_cpu_groups(root: Path, procfs: Path = Path("/proc")) -> KernelCpuGroups:
    """Find the hierarchy of the cpu controller.

    Args:
        root: The root that ``proxy.backends.cgroup.cpuset.open_cgroups`` takes: usually ``/sys/fs/cgroup``;
            or a v1 mount of the cpuset controller that has the mount of the cpu controller next to it; or a
            directory that imitates a cgroup tree. If the cpu controller is at none of its usual places, the
            mount table is used.
        procfs: The /proc with this process's mount table.

    Raises:
        CgroupError: There is no such hierarchy, or it cannot be written.
    """
    if is_fake_tree(root):
        from proxy.backends.cgroup.fake.cpuset import FakeCgroups  # not in memory on a real node

        tree = FakeCgroups.open(root)
        return KernelCpuGroups(root, tree.version, tree.files)
    found = _at_usual_place(root) or next(
        (KernelCpuGroups(*at) for at in controller_mounts(mounts_elsewhere(root, procfs), "cpu", _V1_FILE)),
        None,
    )
    if found is None:
        raise CgroupError(
            f"cannot find the cpu controller below {root}: neither a v1 mount {root / 'cpu'} with {_V1_FILE} "
            "nor a v2 hierarchy whose cgroup.controllers lists cpu"
        )
    if not os.access(found.root, os.W_OK):
        raise CgroupError(f"cannot write to {found.root}: it is mounted read-only, or this is not root")
    return found


def _at_usual_place(root: Path) -> KernelCpuGroups | None:
    siblings = [root.parent / name for name in _V1_NAMES] if (root / "cpuset.cpus").is_file() else []
    for mount in (*(root / name for name in _V1_NAMES), root, *siblings):
        if (mount / _V1_FILE).is_file() and not (mount / "cgroup.controllers").exists():
            return KernelCpuGroups(mount, 1)
    for mount in (root, root / "unified"):
        if has_controller(mount, "cpu"):
            return KernelCpuGroups(mount, 2)
    return None
