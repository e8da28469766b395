"""Find the hierarchy of a controller: at its usual place, else where the kernel reports that it is mounted.

The usual places are directories below ``cgroupRoot``; they need no reading of mounts, and they also make a
plain directory usable as a tree for trials. Only where nothing is there, and ``cgroupRoot`` is the machine's
own (its usual path, or one with a cgroup mount in it), the mount table is read: a v1 cpuset mounted elsewhere
next to v2 at ``/sys/fs/cgroup``, other names of joined controllers, a v2 side under another name than
``unified``.

Theory of the kernel's tables (cgroups(7), cgroup_namespaces(7), proc_pid_mountinfo(5)).
``/proc/self/mountinfo`` has a line for each mount: a v1 hierarchy is of type ``cgroup`` and names its
controllers among its super options, v2 is of type ``cgroup2`` and has its controllers in a file. Its fourth
field is the group that is seen at the mount point: ``/``, or a deeper one in a container.
``/proc/PID/cgroup`` has a line for each hierarchy, ``NUMBER:CONTROLLERS:PATH``; that of v2 is ``0::PATH``.
Where both versions are mounted ("hybrid"), a controller is on one side only, so the line has to be that of
the hierarchy in use.

Both paths are relative to the group that is the root of the reader's cgroup namespace; what lies outside
has ``/..`` in front, once for each level. So a group's place below a mount point is what is left of its path
after the mount's. Where the mount shows more levels than the path goes up, the names of the levels between
are not listed: such a place is only known by its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from proxy.model.errnos import UNREADABLE_PROC

USUAL = Path("/sys/fs/cgroup")
MARKER = "folder-tree.json"
"""The file in the root of an imitated tree that describes its machine; its lock orders the writes."""

_ESCAPE = re.compile(r"\\([0-7]{3})")
_DELETED = " (deleted)"


class HierarchyMount(Struct, frozen=True):
    """A mounted hierarchy.

    Attributes:
        point: Where it is mounted.
        version: 1 or 2.
        controllers: v1: its controllers; v2: empty, ``cgroup.controllers`` has them.
        root: The group that is seen at the mount point, relative to the reader's cgroup namespace.
    """

    point: Path
    version: int
    controllers: frozenset[str] = frozenset()
    root: str = "/"


def parse_mounts(text: str) -> list[HierarchyMount]:
    """Read the cgroup hierarchies out of mountinfo, in order of mounting; other lines are left out."""
    return [mount for line in text.splitlines() if (mount := _mount(line)) is not None]


def _mount(line: str) -> HierarchyMount | None:
    before, dash, after = line.partition(" - ")
    fields, source = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(source) < 3:
        return None
    root, point = _plain(fields[3]), Path(_plain(fields[4]))
    if source[0] == "cgroup2":
        return HierarchyMount(point, 2, root=root)
    if source[0] == "cgroup":
        return HierarchyMount(point, 1, frozenset(source[2].split(",")), root)
    return None


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def mounted_v1(mounts: Iterable[HierarchyMount], controller: str) -> Iterator[Path]:
    """Return the mount points of the v1 hierarchy of a controller; one that shows all of it comes first."""
    candidates = [m for m in mounts if m.version == 1 and controller in m.controllers]
    return (m.point for m in sorted(candidates, key=lambda m: m.root.strip("/") != ""))


def mounted_v2(mounts: Iterable[HierarchyMount]) -> Iterator[Path]:
    """Return the mount points of v2; one that shows all of it comes first."""
    candidates = [m for m in mounts if m.version == 2]
    return (m.point for m in sorted(candidates, key=lambda m: m.root.strip("/") != ""))


def group_line(text: str, version: int) -> str | None:
    """Read a process's group out of ``/proc/PID/cgroup``.

    Args:
        text: The file.
        version: Of the hierarchy in use; of v1 it is that of the controller cpuset.

    Returns:
        The path as it is listed; None where the process is in none, or its group has been removed.
    """
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/"):
            continue
        is_wanted = number == "0" and not controllers if version == 2 else "cpuset" in controllers.split(",")
        if is_wanted:
            return None if path.endswith(_DELETED) else path
    return None


class MountedPath(Struct, frozen=True):
    """A place below a mount point.

    Attributes:
        path: Without a leading slash.
        hidden: The number of levels between mount point and path whose names are unknown.
    """

    path: str
    hidden: int = 0


def below(path: str, root: str) -> MountedPath | None:
    """Return the place of a group below a mount point.

    Args:
        path: The group, as ``group_line`` gives it.
        root: ``HierarchyMount.root``.

    Returns:
        The place; None where it is not seen at the mount point.
    """
    ups, names = _split(path)
    root_ups, root_names = _split(root)
    if ups == root_ups and names[: len(root_names)] == root_names:
        return MountedPath("/".join(names[len(root_names) :]))
    if root_ups > ups and not root_names:
        return MountedPath("/".join(names), root_ups - ups)
    return None


def _split(path: str) -> tuple[int, list[str]]:
    parts = [part for part in path.split("/") if part]
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return ups, parts[ups:]


def is_fake_tree(root: Path) -> bool:
    """Return whether a directory holds an imitated tree."""
    return (root / MARKER).is_file()


def read_mounts(procfs: Path) -> list[HierarchyMount]:
    """Read the hierarchies that are mounted; none where the mount table cannot be read."""
    try:
        return parse_mounts((procfs / "self/mountinfo").read_text(errors="surrogateescape"))
    except OSError as error:
        if error.errno in UNREADABLE_PROC:
            return []
        raise


def mounts_elsewhere(root: Path, procfs: Path) -> list[HierarchyMount]:
    """Return the mounts that may be used in place of what is missing below ``cgroupRoot``."""
    mounts = read_mounts(procfs)
    is_of_machine = root == USUAL or any(m.point == root or root in m.point.parents for m in mounts)
    return mounts if is_of_machine else []


def has_controller(point: Path, controller: str) -> bool:
    """Return whether a v2 hierarchy has a controller."""
    try:
        return controller in (point / "cgroup.controllers").read_text().split()
    except OSError:
        return False


def mounted(
    mounts: list[HierarchyMount], controller: str, file: str, *, always: str = ""
) -> Iterator[tuple[Path, int]]:
    """Return the hierarchies of a controller, v1 before v2: where both are mounted, v1 has it or v2 does.

    Args:
        mounts: What is mounted.
        controller: As the kernel calls it.
        file: A file that its v1 groups have; a mount without (``noprefix``) is of no use.
        always: A file that v2's groups have without the controller, where that is enough.
    """
    v2: Callable[[Path], bool] = (
        (lambda p: (p / always).is_file()) if always else (lambda p: has_controller(p, controller))
    )
    yield from ((point, 1) for point in mounted_v1(mounts, controller) if (point / file).is_file())
    yield from ((point, 2) for point in mounted_v2(mounts) if v2(point))


def root_of(mounts: list[HierarchyMount], point: Path) -> str:
    """Return the group that is seen at a mount point; ``/`` where that is not a mount point."""
    roots = [m.root for m in mounts if m.point == point]
    return roots[-1] if roots else "/"  # the last mount hides those before it
