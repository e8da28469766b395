"""What the kernel has now, for the status: cpusets and CFS quotas of containers, read when requested.

Nothing is read between requests. A reading is made in a thread of its own, so that it delays no write, and
takes at most ``READ_S``; containers that are not read in that time are counted. A kernel that does not answer
delays only the reading: after ``WAIT_S``, requests get the last reading, with its age.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from proxy.engine.quotas import CONTAINER_QUOTA, QuotaPlace
from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.executor.kernel_ports import Cgroups, CpuGroups, CpusetValue
from proxy.executor.quotas import OwnerQuotas
from proxy.model.errors import CgroupError
from proxy.model.freshness import STALE_S
from proxy.model.workload import LIVE, Phase

READ_S = 0.5
"""Seconds that a reading may take. 1,000 containers take about 0.1 s (cgroup v1, 2 CPUs)."""
WAIT_S = 1.0
"""Seconds that a request waits for a reading."""


class KernelReading(Struct, frozen=True):
    """What was read.

    Attributes:
        when: When the reading began, on the monotonic clock of the node; None before the first one.
        cpusets: By container id; containers without a cgroup are left out.
        quotas: CFS quotas in microseconds by the key of the record (``proxy.engine.quotas``); -1 for none.
        omitted: How many containers were not read for lack of time.
    """

    when: float | None = None
    cpusets: Mapping[str, CpusetValue] = MappingProxyType({})
    quotas: Mapping[str, int] = MappingProxyType({})
    omitted: int = 0


class _Group(Struct, frozen=True):
    """A cgroup to read.

    Attributes:
        key: The key of the value in the reading.
        path: The path; empty if unknown.
        place: Where to find it if the path is unknown.
    """

    key: str
    path: str
    place: QuotaPlace


class KernelView:
    """Reads what the kernel has.

    Attributes:
        last: The last reading.
    """

    def __init__(self, context: NodeContext, quotas: OwnerQuotas) -> None:
        """Read nothing yet.

        Args:
            context: The node with its containers.
            quotas: Knows which CFS quotas were removed.
        """
        self._context = context
        self._quotas = quotas
        self._worker = Worker("status", context.report_internal_error)
        context.health.watch(self._worker)
        self._reading: asyncio.Future[KernelReading] | None = None
        self.last = KernelReading()

    @property
    def age(self) -> float | None:
        """Seconds since the last reading began; None before the first one."""
        return None if self.last.when is None else max(0.0, self._context.clock() - self.last.when)

    @property
    def is_complete(self) -> bool:
        """Whether every container was read, and not long ago."""
        age = self.age
        return age is not None and age <= STALE_S and not self.last.omitted

    async def refresh(self) -> None:
        """Read everything now; after ``WAIT_S`` the last reading stays."""
        if self._reading is None:
            cpuset_writer = self._context.cpuset_writer
            self._reading = self._worker.submit(
                _read,
                self._context.clock(),
                cpuset_writer.cgroups,
                list(self._containers()),
                self._quotas.groups,
                list(self._removed_quotas()),
            )
            self._reading.add_done_callback(self._done)
        await asyncio.wait((self._reading,), timeout=WAIT_S)

    def _containers(self) -> Iterator[_Group]:
        for container in self._context.state.containers.values():
            path = self._context.cpuset_writer.known_path(container) or ""
            # A container that is only created may have no cgroup, so an unknown cgroup is not searched for.
            if container.phase in LIVE or (path and container.phase is Phase.CREATED):
                yield _Group(container.id, path, (container.pod.cgroup_parent, container.id))

    def _removed_quotas(self) -> Iterator[_Group]:
        containers = self._context.state.containers
        for key, record in self._quotas.known.records.items():
            container = containers.get(key.removeprefix(CONTAINER_QUOTA))
            if record.group or container is not None:
                parent = "" if container is None else container.pod.cgroup_parent
                yield _Group(key, record.group, (parent, key.removeprefix(CONTAINER_QUOTA)))

    def _done(self, reading: asyncio.Future[KernelReading]) -> None:
        self._reading = None
        if reading.cancelled():
            return
        if (error := reading.exception()) is not None:
            self._context.report_internal_error(error)
        else:
            self.last = reading.result()

    def close(self) -> None:
        """End the worker's thread."""
        self._worker.close()


def _read(
    began: float,
    cgroups: Cgroups,
    containers: Sequence[_Group],
    cpu_groups: CpuGroups | None,
    removed: Sequence[_Group],
) -> KernelReading:
    """Read the cgroups, in the worker's thread."""
    until = time.monotonic() + READ_S
    cpusets: dict[str, CpusetValue] = {}
    quotas: dict[str, int] = {}
    for number, group in enumerate(containers):
        if time.monotonic() > until:
            return KernelReading(began, cpusets, quotas, len(containers) - number)
        with contextlib.suppress(CgroupError):  # it is gone, or cannot be read: nothing is known of it
            if path := group.path or cgroups.find(*group.place):
                cpusets[group.key] = cgroups.read(path)
    for group in removed:
        if cpu_groups is None or time.monotonic() > until:
            break
        with contextlib.suppress(CgroupError):
            if path := group.path or cpu_groups.find(*group.place):
                quotas[group.key] = cpu_groups.quota(path)
    return KernelReading(began, cpusets, quotas)
