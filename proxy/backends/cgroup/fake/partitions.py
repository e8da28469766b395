"""The kernel's rules of partitions (cgroup v2), on files in an ordinary directory.

The rules are those of Linux 6.12, or of 6.1 for a tree without exclusive sets (``cgroup.partitions`` explains
partitions):

* any write of ``root`` or ``isolated`` is accepted; afterwards the file contains the result, with the reason;
* a partition takes its CPUs out of the effective sets of all groups outside;
* if a sibling names one of these CPUs later, the partition becomes invalid, without a reason; its CPUs stay
  withheld, and after the next write of its list its tasks run on the same CPUs as other groups; only a write
  of ``member`` ends this state;
* an exclusive set may not overlap a sibling's exclusive set, nor contain all of a sibling's list (EINVAL);
* if a set above becomes smaller than a partition needs, the partition becomes a member, without a message.

A group can be a partition below another partition only if that one has all its CPUs; hotplug is not imitated.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import asdict, replace

from proxy.atomic_write import write_file
from proxy.model.idset import CpuSet

PARTITION, EXCLUSIVE, ISOLATED = "cpuset.cpus.partition", "cpuset.cpus.exclusive", "cpuset.cpus.isolated"
FILES = (PARTITION, EXCLUSIVE)
TABLE_FILE = ".partitions.json"
VALID, INVALID, STUCK, LOST = "valid", "invalid", "stuck", "lost"
"""The last three: invalid from the beginning; made invalid by a sibling; and its list written since then."""


class PartitionEntry(Struct, frozen=True):
    """A group that is a partition root, valid or not."""

    kind: str
    cpus: str
    state: str
    reason: str = ""

    @property
    def withheld(self) -> CpuSet:
        """The CPUs that no group outside of the partition can use."""
        return CpuSet() if self.state == INVALID else CpuSet.parse(self.cpus)

    @property
    def text(self) -> str:
        """The content of its file."""
        if self.state == VALID:
            return self.kind
        return f"{self.kind} invalid{f' ({self.reason})' if self.reason else ''}"


Table = dict[str, PartitionEntry]


class FakePartitionFiles(Protocol):
    """The file operations that this module needs."""

    def read(self, path: str, name: str) -> str:
        """Read one file of a group."""

    def is_group(self, path: str) -> bool:
        """Return whether there is such a group."""

    def children(self, path: str) -> Sequence[str]:
        """Return the names of the groups directly below."""


def load(root: Path) -> Table:
    """Return the groups that are not members."""
    try:
        return {
            path: PartitionEntry(**entry)
            for path, entry in json.loads((root / TABLE_FILE).read_text()).items()
        }
    except FileNotFoundError:
        return {}


def save(root: Path, table: Table) -> None:
    """Store the groups that are not members."""
    text = json.dumps({path: asdict(entry) for path, entry in table.items()})
    write_file(root / TABLE_FILE, text.encode(), mode=0o644, sync=False)


def new_files(path: str, *, exclusive: bool) -> dict[str, str]:
    """Return the files of a new group and their contents."""
    if not path:
        return {ISOLATED: ""} if exclusive else {}
    return {PARTITION: "member", **({EXCLUSIVE: ""} if exclusive else {})}


def effective_cpus(path: str, own: CpuSet, above: CpuSet, online: CpuSet, table: Table) -> CpuSet:
    """Return the CPUs that tasks of a group get."""
    inside = CpuSet()
    for other, each in table.items():
        if other.startswith(f"{path}/") or not path:
            inside |= each.withheld
    if not path:
        return online - inside
    entry = table.get(path)
    if entry is not None and entry.state in (VALID, STUCK):
        return (entry.withheld & online) - inside
    return own & above or above


def after_exclusive_write(tree: FakePartitionFiles, path: str, value: CpuSet, table: Table) -> Table:
    """Return the groups that are not members after an exclusive set was written.

    Raises:
        OSError: EINVAL, if the kernel would refuse the write.
    """
    for sibling in _siblings(tree, path):
        named = _list(tree, sibling, "cpuset.cpus")
        if _list(tree, sibling, EXCLUSIVE) & value or (named and named <= value):
            raise OSError(errno.EINVAL, "not exclusive")
    return {
        other: entry
        for other, entry in table.items()
        if entry.state != VALID or not other.startswith(f"{path}/") or CpuSet.parse(entry.cpus) <= value
    }


def after_list_write(tree: FakePartitionFiles, path: str, value: CpuSet, table: Table) -> Table:
    """Return the groups that are not members after a group's list was written."""
    after = dict(table)
    for sibling in _siblings(tree, path):
        entry = after.get(sibling)
        if entry is not None and entry.state == VALID and CpuSet.parse(entry.cpus) & value:
            after[sibling] = replace(entry, state=STUCK)
    own = after.get(path)
    if own is not None and own.state == STUCK:
        after[path] = replace(own, state=LOST)
    elif own is not None and own.state == VALID and not _list(tree, path, EXCLUSIVE):
        after[path] = _new_entry(tree, path, own.kind, value, {k: v for k, v in after.items() if k != path})
    return after


def after_partition_write(tree: FakePartitionFiles, path: str, kind: str, table: Table) -> Table:
    """Return the groups that are not members after a group was made a partition or a member.

    Raises:
        OSError: EINVAL: there is no such kind.
    """
    if kind not in ("member", "root", "isolated"):
        raise OSError(errno.EINVAL, "not a kind of partition")
    after, old = {k: v for k, v in table.items() if k != path}, table.get(path)
    if kind == "member":
        return after
    if old is not None and old.state == VALID:
        return {**after, path: replace(old, kind=kind)}
    if old is not None and old.state in (STUCK, LOST):
        reason = "Invalid cpu list in cpuset.cpus.exclusive"
        return {**after, path: replace(old, kind=kind, state=LOST, reason=reason)}
    cpus = _list(tree, path, EXCLUSIVE) or _list(tree, path, "cpuset.cpus")
    return {**after, path: _new_entry(tree, path, kind, cpus, after)}


def _new_entry(tree: FakePartitionFiles, path: str, kind: str, cpus: CpuSet, others: Table) -> PartitionEntry:
    reason = _invalid_reason(tree, path, cpus, others)
    return PartitionEntry(kind, str(cpus), INVALID if reason else VALID, reason)


def _invalid_reason(tree: FakePartitionFiles, path: str, cpus: CpuSet, others: Table) -> str:
    """Return why a group cannot be a partition; empty if it can."""
    parent = path.rpartition("/")[0]
    above = others.get(parent)
    if above is not None and above.state == VALID:
        free = CpuSet.parse(tree.read(parent, "cpuset.cpus.effective"))
        return "" if cpus and cpus < free else "Parent unable to distribute cpu downstream"
    if parent and not _has_exclusive(tree, path):
        return "Parent is not a partition root"
    parts = path.split("/")
    ancestors = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if not cpus or not all(cpus <= _list(tree, ancestor, EXCLUSIVE) for ancestor in ancestors):
        return "Invalid cpu list in cpuset.cpus.exclusive"
    if any(_list(tree, sibling, "cpuset.cpus") & cpus for sibling in _siblings(tree, path)):
        return "Cpu list in cpuset.cpus not exclusive"
    if CpuSet.parse(tree.read("", "cpuset.cpus.effective")) <= cpus:
        return "Parent unable to distribute cpu downstream"
    return ""


def _siblings(tree: FakePartitionFiles, path: str) -> Iterator[str]:
    above, _, name = path.rpartition("/")
    yield from (f"{above}/{other}" if above else other for other in tree.children(above) if other != name)


def _has_exclusive(tree: FakePartitionFiles, path: str) -> bool:
    try:
        tree.read(path, EXCLUSIVE)
    except FileNotFoundError:
        return False
    return True


def _list(tree: FakePartitionFiles, path: str, name: str) -> CpuSet:
    try:
        return CpuSet.parse(tree.read(path, name))
    except FileNotFoundError:
        return CpuSet()
