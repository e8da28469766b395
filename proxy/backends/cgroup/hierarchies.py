"""Find the hierarchy of a controller: at its usual place, or else from the kernel's mount table.

The usual places are directories below ``cgroupRoot``. They can be checked without reading the mounts, and
they allow a plain directory to serve as a tree for trials. If the hierarchy is at none of them, and
``cgroupRoot`` is the machine's own (its usual path, or a path with a cgroup mount in it), the mount table is
read. This finds a v1 cpuset that is mounted elsewhere next to v2 at ``/sys/fs/cgroup``, other names of joined
controllers, and a v2 side under another name than ``unified``.

The kernel's tables (cgroups(7), cgroup_namespaces(7), proc_pid_mountinfo(5)): ``/proc/self/mountinfo`` has a
line for each mount. A v1 hierarchy is of type ``cgroup`` and names its controllers among its super options;
v2 is of type ``cgroup2`` and has its controllers in a file. The fourth field of the line is the group that is
visible at the mount point: ``/``, or a deeper group in a container. ``/proc/PID/cgroup`` has a line for each
hierarchy, ``NUMBER:CONTROLLERS:PATH``; the line of v2 is ``0::PATH``. If both versions are mounted
("hybrid"), a controller is on one side only, so the line of the hierarchy in use must be read.

Both paths are relative to the group that is the root of the reader's cgroup namespace; the path of a group
outside of it begins with ``/..``, once for each level. So the place of a group below a mount point is its
path without the path of the mount. If the mount shows more levels above than the path goes up, the names of
the levels between are not listed; only the end of such a place is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from proxy.model.errnos import UNREADABLE_PROC

USUAL_ROOT = Path("/sys/fs/cgroup")
FAKE_TREE_FILE = "folder-tree.json"
"""The file in the root of an imitated tree that describes its machine; its lock orders the writes."""

_ESCAPE = re.compile(r"\\([0-7]{3})")
_DELETED = " (deleted)"


class HierarchyMount(Struct, frozen=True):
    """A mounted hierarchy.

    Attributes:
        point: Where it is mounted.
        version: 1 or 2.
        controllers: v1: its controllers; v2: empty, because the file ``cgroup.controllers`` lists them.
        root: The group that is visible at the mount point, relative to the reader's cgroup namespace.
    """

    point: Path
    version: int
    controllers: frozenset[str] = frozenset()
    root: str = "/"


def parse_mounts(text: str) -> list[HierarchyMount]:
    """Read the cgroup hierarchies from mountinfo, in the order of mounting; other lines are left out."""
    return [mount for line in text.splitlines() if (mount := _mount(line)) is not None]


def _mount(line: str) -> HierarchyMount | None:
    before, dash, after = line.partition(" - ")
    fields, source = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(source) < 3:
        return None
    root, point = _unescaped(fields[3]), Path(_unescaped(fields[4]))
    if source[0] == "cgroup2":
        return HierarchyMount(point, 2, root=root)
    if source[0] == "cgroup":
        return HierarchyMount(point, 1, frozenset(source[2].split(",")), root)
    return None


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def v1_mounts(mounts: Iterable[HierarchyMount], controller: str) -> Iterator[Path]:
    """Return the mount points of a controller's v1 hierarchy; mounts of the whole hierarchy come first."""
    candidates = [m for m in mounts if m.version == 1 and controller in m.controllers]
    return (m.point for m in sorted(candidates, key=lambda m: m.root.strip("/") != ""))


def v2_mounts(mounts: Iterable[HierarchyMount]) -> Iterator[Path]:
    """Return the mount points of v2; mounts of the whole hierarchy come first."""
    candidates = [m for m in mounts if m.version == 2]
    return (m.point for m in sorted(candidates, key=lambda m: m.root.strip("/") != ""))


def cgroup_of_process(text: str, version: int) -> str | None:
    """Read a process's group from the text of ``/proc/PID/cgroup``.

    Args:
        text: The text of the file.
        version: Version of the hierarchy in use; for v1, the hierarchy of the cpuset controller is read.

    Returns:
        The path as listed; None if the process is in no group, or its group has been removed.
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
        hidden_levels: The number of levels between the mount point and ``path`` whose names are unknown.
    """

    path: str
    hidden_levels: int = 0


def path_below_mount(path: str, root: str) -> MountedPath | None:
    """Return the place of a group below a mount point.

    Args:
        path: The group, as ``cgroup_of_process`` returns it.
        root: ``HierarchyMount.root``.

    Returns:
        The place; None if the group is not visible at the mount point.
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
    """Return whether a directory contains an imitated tree."""
    return (root / FAKE_TREE_FILE).is_file()


def read_mounts(procfs: Path) -> list[HierarchyMount]:
    """Read the hierarchies that are mounted; none if the mount table cannot be read."""
    try:
        return parse_mounts((procfs / "self/mountinfo").read_text(errors="surrogateescape"))
    except OSError as error:
        if error.errno in UNREADABLE_PROC:
            return []
        raise


def mounts_elsewhere(root: Path, procfs: Path) -> list[HierarchyMount]:
    """Return the mounts that may be used if a hierarchy is missing below ``cgroupRoot``."""
    mounts = read_mounts(procfs)
    is_of_machine = root == USUAL_ROOT or any(m.point == root or root in m.point.parents for m in mounts)
    return mounts if is_of_machine else []


def has_controller(point: Path, controller: str) -> bool:
    """Return whether a v2 hierarchy has a controller."""
    try:
        return controller in (point / "cgroup.controllers").read_text().split()
    except OSError:
        return False


def controller_mounts(
    mounts: list[HierarchyMount], controller: str, file: str, *, always: str = ""
) -> Iterator[tuple[Path, int]]:
    """Return the hierarchies of a controller, v1 before v2; if both are mounted, only one has the controller.

    Args:
        mounts: The mounted hierarchies.
        controller: The kernel's name of the controller.
        file: A file that its v1 groups have; a mount without this file (``noprefix``) cannot be used.
        always: A file that v2's groups have without the controller; if given, a v2 mount needs only this
            file.
    """
    v2: Callable[[Path], bool] = (
        (lambda p: (p / always).is_file()) if always else (lambda p: has_controller(p, controller))
    )
    yield from ((point, 1) for point in v1_mounts(mounts, controller) if (point / file).is_file())
    yield from ((point, 2) for point in v2_mounts(mounts) if v2(point))


def visible_root(mounts: list[HierarchyMount], point: Path) -> str:
    """Return the group that is visible at a mount point; ``/`` if the path is not a mount point."""
    roots = [m.root for m in mounts if m.point == point]
    return roots[-1] if roots else "/"  # the last mount hides the earlier ones
