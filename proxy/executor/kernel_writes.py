"""Makes the kernel follow the state: which cpusets are written, when, and what follows from a write.

Writes run in the kernel worker's thread and use the newest state. Until all running containers are known
(``mark_reconciled``), writes are postponed: CPUs that seem free may belong to a container that is not yet
adopted. The cpuset of a container with a call in flight is not written, as the call would undo it; it is
written when the call has completed.

If the cgroup of a running container was not found by name, the runtime is queried for it (``CgroupLocator``).
This is a cold path, off the path of calls: a few containers at each reconcile, each query with the runtime's
own deadline. A path that is found becomes part of the container, and so of the ledger: it is not queried
again. A container without a cgroup of its own (a virtual machine) is reported once, with the reason, and its
CPUs are not controlled.

``CgroupLocator`` also holds the known facts about the cgroup hierarchy and its driver. The runtime reports
the driver since CRI 1.28; with an older runtime it is derived from the cgroup parents of the pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import ParamSpec

from msgspec import structs

from proxy.engine.container_events import ContainersUpdated
from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import Change, WriteCpusets, WriteScope
from proxy.executor.background import Worker
from proxy.executor.context import CANNOT_WRITE_GROUP, NodeContext
from proxy.executor.cpuset_writer import WriteResult
from proxy.executor.kernel_ports import CgroupLocation, GroupLocator
from proxy.executor.observer import Observer
from proxy.executor.runtime_ports import Runtime
from proxy.model.errors import RuntimeCallError, TopoproxyError, UnavailableError
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

P = ParamSpec("P")

Write = Callable[[Iterable[str]], WriteResult]
"""Writes the cpusets of some containers, in the kernel worker's thread."""


class KernelWrites(Observer):
    """Makes the kernel follow the state."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._write: Write = context.cpuset_writer.write
        self._subscribers: list[Callable[[WriteResult], None]] = []
        self._postponed = set[str]()
        context.store.perform_by(WriteCpusets, lambda effect: self.write_soon(list(effect.ids)))

    def write_with(self, write: Write) -> None:
        """Write containers by a function that does more than ``CpusetWriter.write`` (``drift``)."""
        self._write = write

    def subscribe(self, subscriber: Callable[[WriteResult], None]) -> None:
        """Notify a subscriber of the result of each pass of writes, from now on, on the event loop."""
        self._subscribers.append(subscriber)

    def changed(self, change: Change) -> None:
        """See ``Observer``."""
        if change.write_scope is WriteScope.ALL:
            self.write_soon(list(change.after.containers))
        elif change.write_scope is WriteScope.MOVED and change.moved:
            self.write_soon(change.moved)

    def write_soon(self, ids: list[str]) -> None:
        """Write the cpusets of some containers soon; at a daemon's start, once all containers are known."""
        context = self._context
        if not applies_to(context.state, None):
            return
        if context.reconciled.is_set():
            context.spawn(self.write_now(ids))
        else:
            self._postponed.update(ids)

    def mark_reconciled(self) -> None:
        """All running containers are known: write the postponed cpusets."""
        self._context.reconciled.set()
        ids, self._postponed = self._postponed, set()
        self.write_soon([i for i in ids if i in self._context.state.containers])

    async def write_now(self, ids: list[str]) -> None:
        """Write the cpusets of some containers now."""
        context, state = self._context, self._context.state
        inflight = state.inflight
        ids = [c.id for c in state.existing(ids) if applies_to(state, c.pod)]
        ids = [i for i in ids if not inflight.is_awaited(i) or inflight.is_confined(i)]
        if not ids:
            return
        context.report_errors(await self.run(self._write, ids))

    async def run(self, job: Callable[P, WriteResult], *args: P.args, **kwargs: P.kwargs) -> WriteResult:
        """Run a job that writes cpusets, and process its result even if the caller no longer waits for it."""
        return await self._context.kernel.run_with_callback(self.process_result, job, *args, **kwargs)

    async def run_comparison(self, job: Callable[[], WriteResult]) -> WriteResult:
        """Run a job that compares all containers, as ``run`` does; the caller locates missing cgroups."""
        note = partial(self.process_result, locate_again=False)
        return await self._context.kernel.run_with_callback(note, job)

    async def clear_sandboxes(self) -> None:
        """Keep all sandboxes, including new ones, off owned CPUs."""
        await self.run(self._context.cpuset_writer.write_sandboxes)

    async def widen_groups(self, container: Container) -> None:
        """Widen the cgroups above a container: on v1 no container can have CPUs that they lack.

        If they cannot be written in time, that is reported, and the container continues with what they hold.
        """
        context = self._context
        if not await self._is_done_in_time(context.cpuset_writer.write_groups):
            context.telemetry.problem(
                "cannot write the cgroups above a container in time", **subject(container)
            )

    async def make_room(self, container: Container) -> None:
        """Widen a pod's cgroup to hold the CPUs of a container that is about to start (cgroup v2).

        Not called for a start that needs no preparation: a container that shares CPUs, in a sandbox created
        during this run of the daemon. If the kernel does not answer within ``callTimeout``, that is reported,
        and the container starts on the CPUs that the cgroup has.
        """
        context = self._context
        if not await self._is_done_in_time(partial(context.cpuset_writer.make_room, container)):
            context.telemetry.problem("cannot widen the cgroup of a pod in time", **subject(container))

    async def _is_done_in_time(self, job: Callable[[], WriteResult]) -> bool:
        """Run a job that a call waits for; return whether it was done within ``callTimeout``."""
        try:
            async with asyncio.timeout(self._context.options.call_timeout):
                await self.run(job)
        except TimeoutError:
            return False
        return True

    def process_result(self, done: WriteResult, *, locate_again: bool = True) -> None:
        """Process the result of writing cpusets.

        Args:
            done: The result.
            locate_again: Whether the runtime is queried about containers without a cgroup.
        """
        context = self._context
        context.telemetry.count(metrics.CPUSETS_WRITTEN, len(done.written))
        if done.written:
            context.telemetry.observe(metrics.KERNEL_WRITE_SECONDS, done.seconds)
        known = context.telemetry.value(metrics.SANDBOXES_WRITTEN)
        context.telemetry.count(
            metrics.SANDBOXES_WRITTEN, context.cpuset_writer.sandbox_cgroups.written - known
        )
        for subscriber in self._subscribers:
            subscriber(done)
        for note in done.notes:
            context.telemetry.problem(CANNOT_WRITE_GROUP, reason=note)
        if done.written:
            context.sync_later(*done.written)
        absent = (context.state.containers.get(container_id) for container_id in done.absent)
        if locate_again and any(c is not None and c.phase is Phase.RUNNING for c in absent):
            context.reconcile_requested.set()  # a container that is only starting has no cgroup yet


AT_ONCE = 16
"""How many containers the runtime is queried about in one reconcile."""
RARE_EVERY = 32
SILENT_LIMIT = 2


class CgroupLocator:
    """Locates the cgroups of containers.

    Attributes:
        places: Finds a cgroup by the runtime's answer; None if nothing does.
        driver: ``cgroupfs`` or ``systemd`` as the runtime reports it; empty if it does not.
        absent: Ids of containers whose cgroup was looked for and not found since the last reconcile.
        obstacles: By container id, why the runtime's answer did not lead to a cgroup.
    """

    def __init__(
        self, context: NodeContext, writes: KernelWrites, places: GroupLocator | None = None
    ) -> None:
        self._context = context
        writes.subscribe(lambda done: self.absent.update(done.absent))
        self.places = places
        self.driver = ""
        self.absent: set[str] = set()
        self.obstacles: dict[str, str] = {}
        self._rounds = 0

    def remember_recorded_paths(self) -> None:
        """Pass the paths in the ledger to all cgroup trees; costs a few stat calls per such container."""
        for container in self._context.state.containers.values():
            if container.cgroup and self.places is not None:
                self.places.remember(container.id, container.cgroup, container.pod.cgroup_parent)

    async def query_cgroup_driver(self, worker: Worker) -> None:
        """Query the runtime for its cgroup driver, which is only displayed."""
        try:
            self.driver = await worker.run(self._context.runtime.cgroup_driver)
        except TopoproxyError as error:
            self._context.telemetry.debug("cannot read the cgroup driver from the runtime", err=error)

    async def find(self, running: Iterable[str], worker: Worker) -> list[str]:
        """Query the runtime about containers without a cgroup; rarely if the last query did not help.

        Args:
            running: The containers that run according to the runtime; others have no cgroup yet or no longer.
            worker: Does the blocking work.

        Returns:
            Ids of the containers that have been found now: their cpusets must be written.
        """
        context, places = self._context, self.places
        self._rounds += 1
        self.obstacles = {k: v for k, v in self.obstacles.items() if k in context.state.containers}
        existing = {i for i in running if i in context.state.containers}
        again = self._rounds % RARE_EVERY == 0
        chosen = sorted(i for i in self.absent & existing if again or i not in self.obstacles)[:AT_ONCE]
        self.absent.difference_update(chosen)
        self.absent &= existing
        if places is None or not chosen:
            return []
        found = await worker.run(_query, context.runtime, places, chosen)
        moved: list[str] = []
        for container_id, at in found.items():
            container = context.state.containers.get(container_id)
            if container is None or container.phase is Phase.EXITED:
                continue
            if not at.path:
                self.obstacles[container_id] = at.obstacle
                continue
            self.obstacles.pop(container_id, None)
            known = structs.replace(container, cgroup=at.path)
            context.store.handle(ContainersUpdated((known,)))
            context.telemetry.count(metrics.CGROUPS_LOCATED)
            context.telemetry.event(
                "found a cgroup by the container's first process", **subject(container), path=f"/{at.path}"
            )
            moved.append(container_id)
        return moved

    def page(self, version: int) -> dict[str, object]:
        """Return what ``topoproxy status`` shows."""
        parents = [pod.cgroup_parent for pod in self._context.state.pods.values() if pod.cgroup_parent]
        seen = ""
        if parents:
            seen = "systemd" if all(p.rstrip("/").endswith(".slice") for p in parents) else "cgroupfs"
        return {
            "version": version,
            "driver": self.driver or seen,
            "driver_from": "the runtime" if self.driver else "the pods' cgroup parents" if seen else "",
        }


def _query(runtime: Runtime, places: GroupLocator, ids: list[str]) -> dict[str, CgroupLocation]:
    """Query and locate, in a worker. A container that is gone or gets no answer is left for next time."""
    found: dict[str, CgroupLocation] = {}
    silent = 0
    for container_id in ids:
        try:
            found[container_id] = places.locate(container_id, runtime.detail(container_id))
        except RuntimeCallError:
            continue
        except UnavailableError:
            silent += 1
            if silent >= SILENT_LIMIT:
                break
    return found
