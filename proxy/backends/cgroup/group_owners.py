"""Names of pods and containers for cgroups, by the ids in the groups' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proxy.backends.cgroup.kubepods import Driver, pod_uid
from proxy.model.errors import CgroupError


class GroupOwners:
    """Knows the pods and containers of a node by their ids."""

    def __init__(self, containers: Mapping[str, str], pods: Mapping[str, str]) -> None:
        """Take the names.

        Args:
            containers: Names of containers by id; sandboxes may be among them.
            pods: ``namespace/name`` of pods by uid.
        """
        self._containers = containers
        self._pods = pods

    def owner(self, path: str) -> tuple[str, str]:
        """Return the pod and the container of a group; empty where it is of neither.

        Args:
            path: The group, relative to the root of its hierarchy.
        """
        *above, name = path.split("/")
        container = next((self._containers[i] for i in _ids(name) if i in self._containers), "")
        pods = (self._pods.get(_uid(part), "") for part in reversed([*above, name]))
        return next((pod for pod in pods if pod), ""), container


def _ids(name: str) -> Iterator[str]:
    """Yield the ids that a group's name may hold: ``ID``, ``cri-containerd-ID.scope``, ``a:b:ID``."""
    stem = name.removesuffix(".scope")
    yield stem
    yield from (stem[at + 1 :] for at, sign in enumerate(stem) if sign in "-:")


def _uid(name: str) -> str:
    try:
        return pod_uid(Driver.SYSTEMD if name.endswith(".slice") else Driver.CGROUPFS, name)
    except CgroupError:
        return ""
