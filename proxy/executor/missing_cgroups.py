"""Reports running containers without a cgroup to write (for example, in a VM), until one is found."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.executor.context import NodeContext
from proxy.executor.kernel_writes import CgroupLocator
from proxy.model.workload import Container
from proxy.telemetry.port import subject

MAX_NAMED = 5
"""More problems of one kind than this are not reported one by one."""
NO_CGROUPS = "cannot find the cgroups of many containers: their CPUs are not controlled"
NO_CGROUP = "cannot find the cgroup of a container: its CPUs are not controlled"


class MissingCgroups:
    """The containers that run without a known cgroup, and the problems about them."""

    def __init__(self, context: NodeContext, locator: CgroupLocator) -> None:
        self._context = context
        self._locator = locator
        self._missing = set[str]()

    def report(self, lost: Iterable[Container]) -> None:
        """End the problems that are over, and report containers whose cgroup a comparison did not find.

        A cgroup is found by the runtime's answer or, later, by its name: a comparison seldom searches again
        for a cgroup that it has missed twice, so that ``lost`` is mostly empty.
        """
        telemetry = self._context.telemetry
        self._end()
        lost = list(lost)
        self._missing.update(container.id for container in lost)
        if len(self._missing) <= MAX_NAMED:
            telemetry.resolved(NO_CGROUPS)
        elif lost:
            telemetry.problem(NO_CGROUPS)
            lost = [min(lost, key=lambda c: c.ref)]
        for container in lost:
            telemetry.problem(NO_CGROUP, **subject(container), err=self._locator.obstacles.get(container.id))

    def _end(self) -> None:
        """End the problems of containers that have a cgroup by now, or no longer need one."""
        context, writer = self._context, self._context.cpuset_writer
        for container_id in list(self._missing):
            container = context.state.containers.get(container_id)
            if container is None or not writer.is_live(container):
                context.telemetry.forget(NO_CGROUP, containerID=container_id)
            elif writer.known_path(container) is not None:
                context.telemetry.resolved(NO_CGROUP, containerID=container_id)
            else:
                continue
            self._missing.discard(container_id)
