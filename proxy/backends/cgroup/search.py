"""Find a container's group in a cpuset tree.

The expected paths (``proxy.backends.cgroup.group_names``) are tried first: a few stat calls of a microsecond
each. If the pod's own group is not at the path of its name (a node inside a container), the tree is searched
for the id, breadth first and with a bound. The found path is remembered for as long as the group exists. The
part of the path above the expected name is remembered too: all other names are also tried below it, so that a
node is searched only once. A container that has not been started has no group, but its pod's group exists, so
no search is made for it.
"""

from __future__ import annotations

from collections import deque

from proxy.backends.cgroup import group_names
from proxy.backends.cgroup.files import CgroupFiles

GROUPS_LIMIT = 4096
"""A search ends after this many groups (about 15 ms)."""

_PATHS_LIMIT = 1024
_PREFIXES_LIMIT = 4


class GroupFinder:
    """Finds groups by parent and container id; safe to use from several threads."""

    def __init__(self, files: CgroupFiles, limit: int = GROUPS_LIMIT) -> None:
        self._files = files
        self._limit = limit
        self._found: dict[str, str] = {}
        self._prefixes: list[str] = [""]

    def find(self, parent: str, container_id: str) -> str | None:
        """Return a container's group, or None if it has none; see ``Cgroups.find`` of the ports."""
        if not _is_id(container_id):
            return None
        for path in group_names.candidates(parent, container_id):
            existing = self.find_path(path)
            if existing is not None:
                return existing
        known = self._found.get(container_id)
        if known is not None:
            if self._files.is_group(known):
                return known
            self._found.pop(container_id, None)
        group = self._search(parent, container_id)
        if group is not None:
            self.remember(container_id, group, parent)
        return group

    def find_path(self, path: str) -> str | None:
        """Return a group by its name: at that path, or below a path where other names were found."""
        for top in self._prefixes:
            candidate = f"{top}/{path}" if top else path
            if self._files.is_group(candidate):
                return candidate
        return None

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Remember a group that was found, unless it is not in this tree.

        Args:
            container_id: The container.
            path: Its group.
            parent: ``cgroup_parent`` or ``cgroupsPath``, if it is known: it shows at which part of the path
                the expected name begins.
        """
        if not _is_id(container_id) or not self._files.is_group(path):
            return
        if len(self._found) >= _PATHS_LIMIT:
            self._found.clear()
        self._found[container_id] = path
        if parent:
            ends = (f"/{name}" for name in group_names.candidates(parent, container_id))
            top = next((path.removesuffix(end) for end in ends if path.endswith(end)), "")
            if top not in self._prefixes:
                self._prefixes = [*self._prefixes[:_PREFIXES_LIMIT], top]

    def _search(self, parent: str, container_id: str) -> str | None:
        expected_parent = group_names.parent_of_container(parent, container_id)
        at = self.find_path(expected_parent) if expected_parent else None
        if at is not None:
            # The pod's group is at its expected path: the container's group is directly below it, or nowhere.
            below = self._files.children(at)
            return next(
                (f"{at}/{name}" for name in below if group_names.is_name_of_container(name, container_id)),
                None,
            )
        todo = deque([""])
        for _ in range(self._limit):
            if not todo:
                break
            at = todo.popleft()
            for name in self._files.children(at):
                path = f"{at}/{name}" if at else name
                if group_names.is_name_of_container(name, container_id):
                    return path
                todo.append(path)
        return None


def _is_id(container_id: str) -> bool:
    return bool(container_id) and "/" not in container_id and group_names.is_safe_path(container_id)
