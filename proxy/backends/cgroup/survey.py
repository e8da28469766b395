"""List every group of a cpuset hierarchy, for commands that look at the whole node.

A cold path. On v1 cgroupspy builds the tree, as it knows this layout; it reads nothing on v2 (every node's
controller is None there) and needs the mount to be called ``cpuset``, so what it cannot do is walked with our
own reader.
"""

from __future__ import annotations

from collections.abc import Iterator

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.controller.kernel_ports import CpusetValue
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask

_TRIES = 3
_LIMIT = 10_000


def survey(groups: KernelCgroups) -> dict[str, CpusetValue]:
    """Read all groups.

    Args:
        groups: The hierarchy.

    Returns:
        Path to value, in order of path, without the root. Groups that vanish meanwhile are left out; at most
        10,000. On v1 the effective sets are the configured ones.

    Raises:
        CgroupError: The hierarchy cannot be read.
    """
    if groups.version == 1 and groups.root.name == "cpuset" and type(groups) is KernelCgroups:
        for _ in range(_TRIES):
            try:
                return dict(sorted(_by_cgroupspy(groups)))
            except FileNotFoundError:
                continue  # a group went away while the tree was built
            except (OSError, ValueError) as error:
                raise CgroupError(f"cannot list the cgroups below {groups.root}: {error}") from None
    return dict(sorted(_by_walk(groups)))


def _by_cgroupspy(groups: KernelCgroups) -> Iterator[tuple[str, CpusetValue]]:
    from cgroupspy.trees import Tree

    tree = Tree(root_path=str(groups.root.parent), groups=[groups.root.name])
    top = str(groups.root)
    for node in tree.walk():
        path = node.full_path.decode("utf-8", "surrogateescape").removeprefix(top).strip("/")
        if node.controller is not None and path:
            cpus, mems = CpuSet(node.controller.cpus), Mask(node.controller.mems)
            yield path, CpusetValue(cpus, mems, cpus, mems)


def _by_walk(groups: KernelCgroups) -> Iterator[tuple[str, CpusetValue]]:
    todo = groups.children("")
    for _ in range(_LIMIT):
        if not todo:
            return
        path = todo.pop()
        todo += [f"{path}/{name}" for name in groups.children(path)]
        try:
            yield path, groups.read(path)
        except CgroupError as error:
            if not error.errno:
                raise
            # Gone, or without the controller: nothing to report.
