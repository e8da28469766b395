"""The simulated kernel: cgroups with the rules of v1 and v2, and CPUs that go and return.

The daemon reaches it through its own ``KernelCgroups`` and ``KernelCpuGroups``, on files that are held here
in memory. It differs from the real kernel on purpose: a write may be refused, and anything else may
happen before it. Rules: ``proxy.backends.cgroup.fake.cpuset_rules``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.backends.cgroup.files import OsCgroupFiles
from proxy.model.idset import CpuSet
from tests.testkit.changed_copy import changed_copy

if TYPE_CHECKING:
    from proxy.model.machine import Machine
    from tests.simulation.daemon import SimulatedDaemon
    from tests.simulation.node import SimulatedNode

V1_QUOTA, V2_QUOTA = "cpu.cfs_quota_us", "cpu.max"
_TEXTS: dict[int, str] = {}
_BITS: dict[str, int] = {}


def text_of(bits: int) -> str:
    """Return a list of ids as the kernel prints it."""
    if bits not in _TEXTS:
        _TEXTS[bits] = str(CpuSet.from_bits(bits))
    return _TEXTS[bits]


def bits_of(text: str) -> int:
    """Return the ids of a list.

    Raises:
        ValueError: It is not a list of ids.
    """
    if text not in _BITS:
        _BITS[text] = CpuSet.parse(text.strip()).bits
    return _BITS[text]


class SimulatedGroup:
    """A cgroup, of the cpuset and the cpu controller.

    Attributes:
        path: Below the root.
        cpus, mems: As configured.
        quota: The text of the quota file.
        children: Groups right below, by name.
        container_id: The container that has its processes in it; empty for a group above containers.
        foreign: Another program, or a CPU that went, has changed the list since the daemon or the runtime
            last wrote it.
        displaced: Its processes are in a group above: it had no CPU left (v1).
        refusal_errno: The kernel refuses to write its list with this error; 0 for none.
        ignores_writes: What is written to it does not take effect.
        refused_at: When it has last refused a write.
        written_at: When it was last written.
    """

    __slots__ = (
        "children",
        "container_id",
        "cpus",
        "displaced",
        "foreign",
        "ignores_writes",
        "mems",
        "parent",
        "path",
        "quota",
        "refusal_errno",
        "refused_at",
        "written_at",
    )  # fmt: skip

    def __init__(self, path: str, parent: SimulatedGroup | None, version: int) -> None:
        self.path = path
        self.parent = parent
        self.cpus = self.mems = 0
        self.quota = "-1" if version == 1 else "max 100000"
        self.children: dict[str, SimulatedGroup] = {}
        self.container_id = ""
        self.foreign = self.displaced = False
        self.refusal_errno = 0
        self.ignores_writes = False
        self.refused_at = self.written_at = 0.0
        if parent is not None and version == 1:
            self.cpus, self.mems = parent.cpus, parent.mems


def refused(number: int) -> OSError:
    """Return an error of the kernel."""
    return OSError(number, os.strerror(number))


class SimulatedKernel:
    """The cgroups and the CPUs of the node.

    Attributes:
        machine: The hardware now.
        full_machine: The hardware with all CPUs.
        version: Of cgroups.
        on_effective_change: Called with each group that may have other effective CPUs now.
        on_write: Called with the path of each group after a write to its ``cpuset.cpus``, changed or not.
    """

    def __init__(self, node: SimulatedNode, machine: Machine, version: int) -> None:
        self.node = node
        self.machine = self.full_machine = machine
        self.version = version
        self.online = machine.online.bits
        self.nodes = machine.memory_nodes.bits
        self.root = SimulatedGroup("", None, version)
        self.groups: dict[str, SimulatedGroup] = {"": self.root}
        self.root.cpus, self.root.mems = self.online, self.nodes
        self.on_effective_change: Callable[[SimulatedGroup], None] = lambda group: None
        self.on_write: Callable[[str], None] = lambda path: None

    # -- groups -------------------------------------------------------------------------------------------

    def make(self, path: str) -> SimulatedGroup:
        """Make a group and those above it, unless they exist."""
        group = self.root
        for part in path.split("/"):
            below = group.children.get(part)
            if below is None:
                name = f"{group.path}/{part}" if group.path else part
                below = SimulatedGroup(name, group, self.version)
                group.children[part] = self.groups[name] = below
            group = below
        return group

    def remove(self, path: str) -> None:
        """Remove a group with all below it."""
        group = self.groups.get(path)
        if group is None or group.parent is None:
            return
        for child in list(group.children.values()):
            self.remove(child.path)
        del self.groups[path]
        del group.parent.children[path.rpartition("/")[2]]

    def effective(self, group: SimulatedGroup) -> int:
        """Return the CPUs that processes in a group may use."""
        if self.version == 1:
            while (group.displaced or not group.cpus) and group.parent is not None:
                group = group.parent  # the kernel has moved the processes there
            return group.cpus
        above = self.online if group.parent is None else self.effective(group.parent)
        return (group.cpus & above) or above

    def is_trusted(self, group: SimulatedGroup) -> bool:
        """Return whether nothing but the daemon and the runtime has changed what is in effect in a group."""
        if group.foreign or group.displaced:
            return False
        above = group.parent if self.effective(group) != group.cpus & self.online else None
        while above is not None:
            if above.foreign or above.refused_at > above.written_at:
                return False
            above = above.parent
        return True

    # -- writing ------------------------------------------------------------------------------------------

    def set_cpus(self, group: SimulatedGroup, text: str) -> None:
        """Write a group's list of CPUs, under the kernel's rules.

        Raises:
            OSError: As the kernel refuses.
        """
        if group.parent is None:
            raise refused(errno.EACCES)
        try:
            bits = bits_of(text)
        except ValueError:
            raise refused(errno.EINVAL) from None
        if bits & ~self.full_machine.possible.bits:
            raise refused(errno.ERANGE)
        if self.version == 1:
            if bits & ~self.online:
                raise refused(errno.EINVAL)
            if any(child.cpus & ~bits for child in group.children.values()):
                raise refused(errno.EBUSY)
            if bits & ~group.parent.cpus:
                raise refused(errno.EACCES)
        if not bits and group.container_id and group.cpus:
            raise refused(errno.ENOSPC)
        group.cpus = bits

    def write(self, group: SimulatedGroup, text: str, *, foreign: bool = False) -> None:
        """Write a group's list of CPUs, report it, and have the promises checked.

        Raises:
            OSError: As the kernel refuses.
        """
        self.set_cpus(group, text)
        group.written_at = self.node.schedule.now
        # A group above containers that another program has narrowed is widened for those in it alone.
        above = not group.container_id and bool(group.children)
        foreign = foreign or not group.cpus & self.online  # v2: CPUs that have just gone, so all above it has
        group.foreign = foreign or (group.foreign and above and bool(self.online & ~group.cpus))
        self.node.schedule.trace(f"{'foreign write' if foreign else 'write'} {group.path} {text.strip()}")
        self.on_effective_change(group)
        self.on_write(group.path)

    # -- CPUs that go and return --------------------------------------------------------------------------

    def set_online(self, online: CpuSet) -> None:
        """Change the CPUs that are online; on v1 the kernel removes CPUs that go offline from all groups."""
        gone = CpuSet.from_bits(self.full_machine.online.bits & ~online.bits)
        nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in self.full_machine.nodes)
        cpus = tuple(cpu for cpu in self.full_machine.cpus if cpu.id not in gone)
        self.machine = changed_copy(self.full_machine, cpus=cpus, nodes=nodes)
        self.online = self.root.cpus = online.bits
        if self.version == 1:
            for group in self.groups.values():
                if group.cpus & gone.bits:
                    group.cpus &= online.bits
                    group.displaced = group.displaced or (not group.cpus and bool(group.container_id))
        else:
            for group in self.groups.values():
                group.foreign = group.foreign or bool(group.cpus and not group.cpus & online.bits)
        for group in list(self.groups.values()):
            self.on_effective_change(group)


class SimulatedFiles(OsCgroupFiles):
    """The cgroup files as the daemon sees them; each access may take time, and may fail."""

    def __init__(self, kernel: SimulatedKernel, process: SimulatedDaemon) -> None:
        super().__init__(Path("/simulated"))
        self._kernel = kernel
        self._process = process

    def _group(self, path: str) -> SimulatedGroup:
        group = self._kernel.groups.get(path)
        if group is None:
            raise refused(errno.ENOENT)
        return group

    def read(self, path: str, name: str) -> str:
        kernel = self._kernel
        group = self._group(path)
        if name == "cpuset.cpus":
            if kernel.version == 2 and not path:
                raise refused(errno.ENOENT)
            return f"{text_of(group.cpus)}\n"
        if name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            return f"{text_of(kernel.effective(group))}\n"
        if name == "cpuset.mems":
            if kernel.version == 2 and not path:
                raise refused(errno.ENOENT)
            return f"{text_of(group.mems)}\n"
        if name in ("cpuset.mems.effective", "cpuset.effective_mems"):
            return f"{text_of(group.mems or kernel.nodes)}\n"
        if name in (V1_QUOTA, V2_QUOTA):
            return f"{group.quota}\n"
        raise refused(errno.ENOENT)

    def write(self, path: str, name: str, text: str) -> None:
        node, kernel = self._kernel.node, self._kernel
        if not self._process.alive:
            raise refused(errno.EIO)
        node.before_effect(self._process, f"kernel {name} {path}")
        group = self._group(path)
        fault = node.faults.kernel_write_errno(group)
        if fault:
            node.schedule.trace(f"refused {path} {errno.errorcode[fault]}")
            group.refused_at = node.schedule.now
            raise refused(fault)
        if name == "cpuset.cpus":
            node.promises.daemon_writes(group, bits_of(text))
            if group.container_id and node.faults.write_has_no_effect(group):
                node.schedule.trace(f"no effect {path} {text.strip()}")
                return
            # A write that hung while the daemon was replaced is found as one of another program.
            kernel.write(group, text, foreign=node.daemon is not self._process)
        elif name == "cpuset.mems":
            bits = bits_of(text)
            if not bits or bits & ~kernel.nodes:
                raise refused(errno.EINVAL)
            group.mems = bits
        elif name == V1_QUOTA:
            _set_quota(group, int(text))
        elif name == V2_QUOTA:
            quota, _, period = text.strip().partition(" ")
            group.quota = f"{quota} {period or group.quota.split()[1]}"
        else:
            raise refused(errno.EINVAL)

    def write_if_different(
        self,
        paths: Sequence[str],
        name: str,
        line: bytes,
        known: bytes | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[bytes | None]:
        held: list[bytes | None] = [None] * len(paths)
        text = line.decode()
        for at, path in enumerate(paths):
            if not should_continue():
                break
            try:
                before = known or self.read(path, name).encode()
                if before != line:
                    self.write(path, name, text)
                    if self.read(path, name).encode() != line:
                        continue
                held[at] = before
            except OSError:
                continue
        return held

    def is_group(self, path: str) -> bool:
        return path in self._kernel.groups

    def children(self, path: str) -> list[str]:
        group = self._kernel.groups.get(path)
        return sorted(group.children) if group is not None else []


def _set_quota(group: SimulatedGroup, quota: int) -> None:
    """Write a quota on v1: within that of the nearest group above that has one, and not below one below."""
    if quota > 0:
        above = group.parent
        while above is not None and int(above.quota) <= 0:
            above = above.parent
        below = max((int(child.quota) for child in group.children.values()), default=-1)
        if (above is not None and quota > int(above.quota)) or quota < below:
            raise refused(errno.EINVAL)
    group.quota = str(quota if quota > 0 else -1)
