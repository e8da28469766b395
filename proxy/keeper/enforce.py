"""Making the kernel say what the state says. Everything here runs in the kernel worker's thread.

Each write asks for the newest state, not for the one that was planned when the job was queued: see
``proxy.keeper.worker``. Memory nodes of a live container are left alone, because its memory may be there.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from proxy.keeper.ports import Cgroups
from proxy.model.errors import CgroupError
from proxy.model.workload import Container, Phase, Pool
from proxy.plan.state import NodeState

LIVE = (Phase.STARTING, Phase.RUNNING)


@dataclass(slots=True)
class Enforced:
    """What an enforcement did.

    Attributes:
        written: Ids of containers whose set was changed.
        absent: Ids of containers that should have a cgroup and have none.
        errors: What could not be written, in words.
    """

    written: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Enforcer:
    """Writes wanted sets to cgroups."""

    def __init__(self, cgroups: Cgroups, state: Callable[[], NodeState]) -> None:
        self._cgroups = cgroups
        self._state = state
        self._paths: dict[str, str] = {}

    def enforce(self, ids: Iterable[str] | None = None) -> Enforced:
        """Write the sets of some containers, or of all.

        Containers that are not live are passed over; those that hold the right set are not written.
        """
        done = Enforced()
        for container_id in list(self._state().containers) if ids is None else ids:
            container = self._state().containers.get(container_id)
            if container is not None and container.phase in LIVE:
                self._one(container, done)
        if ids is None:
            there = self._state().containers
            self._paths = {k: v for k, v in self._paths.items() if k in there}
        return done

    def enforce_pools(self) -> Enforced:
        """Write the sets of all containers that own no CPUs."""
        there = self._state().containers.values()
        return self.enforce([c.id for c in there if c.placement.pool is not Pool.OWN])

    def _one(self, container: Container, done: Enforced) -> None:
        path = self._paths.get(container.id) or container.cgroup or None
        if path is None:
            path = self._cgroups.find(container.pod.cgroup_parent, container.id)
            if path is None:
                done.absent.append(container.id)
                return
            self._paths[container.id] = path
        want = self._state().wanted(container)
        try:
            if self._cgroups.write(path, want, None):
                done.written.append(container.id)
        except CgroupError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                self._paths.pop(container.id, None)
                done.absent.append(container.id)
            else:
                done.errors.append(str(error))
