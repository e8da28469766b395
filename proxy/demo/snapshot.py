"""The state of the node according to the kernel's files, and its invariants.

Nothing here queries the proxy: a claim of the demonstration is compared only with the cgroup files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.demo.client import StartedPod
from proxy.executor.kernel_ports import Cgroups
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import cpus as named


class DemoError(Exception):
    """The node is not in the state that the demonstration claims."""


@dataclass(frozen=True, slots=True)
class ContainerCpuset:
    """One container's cpuset, as read from its files.

    Attributes:
        name: Name of its pod.
        label: Its class, as the picture shows it.
        owns: Whether it should own its CPUs.
        excludes_be: Whether BE (best effort) containers must not be on them either.
        uses_be_pool: Whether it is a container of the BE pool.
    """

    name: str
    label: str
    cpus: CpuSet
    mems: Mask
    owns: bool
    excludes_be: bool
    uses_be_pool: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All containers that have a cgroup, in the order in which they were started."""

    containers: tuple[ContainerCpuset, ...] = ()

    def get(self, name: str) -> ContainerCpuset:
        """Find a container by its pod's name.

        Raises:
            DemoError: It has no cgroup.
        """
        for container in self.containers:
            if container.name == name:
                return container
        raise DemoError(f"{name} has no cgroup")

    @property
    def names(self) -> tuple[str, ...]:
        """The pods whose containers have a cgroup."""
        return tuple(container.name for container in self.containers)

    def owner_of(self, cpu: int) -> ContainerCpuset | None:
        """Return the container that owns a CPU."""
        return next(
            (container for container in self.containers if container.owns and cpu in container.cpus), None
        )

    def check(self) -> None:
        """Check the invariants that must hold at any moment.

        Raises:
            DemoError: An empty set, a CPU with two owners, or a shared container on an owned CPU.
        """
        for container in self.containers:
            if not container.cpus or not container.mems:
                raise DemoError(f"{container.name} has an empty cpuset")
        for owner in (container for container in self.containers if container.owns):
            for other in self.containers:
                clash = owner.cpus & other.cpus
                if other is owner or not clash or (other.uses_be_pool and not owner.excludes_be):
                    continue
                raise DemoError(f"{other.name} may run on {named(clash)}, which {owner.name} owns")


def read_snapshot(cgroups: Cgroups, pods: Iterable[StartedPod]) -> Snapshot:
    """Read the cgroup files of the pods' containers."""
    seen: list[ContainerCpuset] = []
    for pod in pods:
        path = cgroups.find(pod.config.linux.cgroup_parent, pod.container_id) if pod.container_id else None
        if path is None:
            continue
        try:
            value = cgroups.read(path)
        except CgroupError:
            continue  # it ended in the meantime
        spec = pod.spec
        seen.append(
            ContainerCpuset(
                spec.name,
                spec.label,
                value.cpus or value.effective_cpus,
                value.mems or value.effective_mems,
                spec.owns,
                spec.owns and spec.qos != "LSR",
                spec.uses_be_pool,
            )
        )
    return Snapshot(tuple(seen))
