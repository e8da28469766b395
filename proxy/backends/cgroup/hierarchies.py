"""Find the hierarchy of a controller: at its usual place, else where the kernel reports that it is mounted.

The usual places are directories below ``cgroupRoot``; they need no reading of mounts, and they also make a
plain directory usable as a tree for trials. Only where nothing is there, and ``cgroupRoot`` is the machine's
own (its usual path, or one with a cgroup mount in it), the mount table is read: a v1 cpuset mounted elsewhere
next to v2 at ``/sys/fs/cgroup``, other names of joined controllers, a v2 side under another name than
``unified``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from proxy.backends.cgroup.mounts import HierarchyMount, mounted_v1, mounted_v2, parse_mounts
from proxy.model.errnos import UNREADABLE_PROC

USUAL = Path("/sys/fs/cgroup")
MARKER = "folder-tree.json"
"""The file in the root of an imitated tree that describes its machine; its lock orders the writes."""


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


def elsewhere(root: Path, procfs: Path) -> list[HierarchyMount]:
    """Return the mounts that may be used in place of what is missing below ``cgroupRoot``."""
    mounts = read_mounts(procfs)
    own = root == USUAL or any(m.point == root or root in m.point.parents for m in mounts)
    return mounts if own else []


def has(point: Path, controller: str) -> bool:
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
        (lambda p: (p / always).is_file()) if always else (lambda p: has(p, controller))
    )
    yield from ((point, 1) for point in mounted_v1(mounts, controller) if (point / file).is_file())
    yield from ((point, 2) for point in mounted_v2(mounts) if v2(point))


def root_of(mounts: list[HierarchyMount], point: Path) -> str:
    """Return the group that is seen at a mount point; ``/`` where that is not a mount point."""
    found = [m.root for m in mounts if m.point == point]
    return found[-1] if found else "/"  # the last mount hides those before it
