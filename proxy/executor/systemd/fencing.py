"""Fences around pods while a call may put their containers on wrong CPUs; see ``proxy.engine.pod_fence``.

If the runtime's runc sends wrong cpusets to systemd (see ``unit_properties``), a wrong cpuset may be in
effect from the runtime's call until the unit is repaired, and nothing can prevent that. So the slice of the
pod is narrowed before such a call is sent, and widened when the unit is right again. That takes two writes to
one file. In between, systemd writes the file of the scope, not that of the slice.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from msgspec.structs import replace

from proxy.engine.inflight import InflightCall
from proxy.engine.pod_fence import (
    ActiveFence,
    ActiveFences,
    Fence,
    fence_around,
    fence_cpus,
    has_group,
    has_slice,
    lowered,
    raised,
)
from proxy.executor.context import NodeContext
from proxy.executor.cpuset_writer import WriteResult
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.systemd.ports import Fences
from proxy.model.errors import CgroupError, UnavailableError
from proxy.model.idset import CpuSet, union
from proxy.model.workload import Container
from proxy.telemetry import metrics

ROUNDS = 5


class UnitRepairs(Protocol):
    """What fences need from the part that keeps units right (``unit_properties``).

    Attributes:
        connected: Whether systemd can be queried now.
    """

    connected: bool

    def begin(self) -> None:
        """Connect, once there is a unit."""

    def is_unit(self, container: Container) -> bool:
        """Return whether a container is a systemd scope, or will be one."""

    def is_trusted(self, cpus: CpuSet) -> bool:
        """Return whether a cpuset that the runtime sends to systemd is known to arrive unchanged."""

    def sent(self, container_id: str, carried: CpuSet, *, alone: bool) -> None:
        """Record that the runtime has sent a cpuset to systemd, outside of a fence."""

    def completed(self, container_id: str) -> None:
        """Record that a call for a container has completed, with or without success."""

    def changed(self, ids: Iterable[str]) -> None:
        """Request a comparison of the units of some containers soon."""

    def failed(self, container_id: str, error: CgroupError | UnavailableError) -> None:
        """Handle that a unit could not be read or set."""

    async def repair(
        self,
        container_id: str,
        path: str,
        inflight_call: InflightCall | None = None,
        carried: CpuSet | None = None,
    ) -> bool:
        """Correct a unit's properties to what its container should have; returns whether they were set."""


class Fencing:
    """Sets up fences and removes them."""

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        unit_properties: UnitRepairs,
        fences: Fences | None = None,
    ) -> None:
        """Start without fences.

        Args:
            context: Has the containers.
            writes: Processes the results of writes.
            unit_properties: Knows what the runtime sends to systemd, and repairs it.
            fences: Writes the CPU lists of groups; None if nothing does.
        """
        self._context = context
        self._writes = writes
        self._unit_properties = unit_properties
        self._fenced: dict[InflightCall, Fence] = {}
        self.fences = fences
        self._active: ActiveFences = {}
        """Changed in the kernel worker only."""
        self._left: dict[str, CpuSet] = {}
        """Groups that are still narrow, and the list that each had before. For the kernel worker."""

    def can_fence_slice(self, container: Container) -> bool:
        """Return whether a container's pod has a slice of its own that can be narrowed."""
        return self.fences is not None and has_slice(container.pod)

    def can_confine(self, container: Container) -> bool:
        """Return whether a container's pod has a group of its own that can be narrowed."""
        return self.fences is not None and has_group(container.pod)

    async def confine(self, call: InflightCall, container: Container, owned: CpuSet) -> bool:
        """Set up a fence around the pod of a container while a call for the container is in flight.

        An existing fence of the call is replaced. The fence is removed when the call has completed.

        Args:
            call: The call.
            container: Its container.
            owned: CPUs that the call must not give to the container.

        Returns:
            Whether the fence keeps the container off these CPUs, whatever the runtime writes.
        """
        if not self.can_confine(container):
            return False
        fence = await self.set_up(container)
        if fence is None:
            return False
        calls = self._context.inflight_calls
        is_outdated = fence.cpus != fence_cpus(self._context.state, container)
        # If the fence has the CPUs, another container of the pod owns them.
        if is_outdated or fence.cpus & owned or calls.has_completed(call):
            await self.remove(fence)
            return False
        before = self._fenced.get(call)
        self._fenced[call] = fence
        if before is not None:
            await self.remove(before)  # one of two: the list stays as it is now
        else:
            calls.on_completion(call, functools.partial(self._remove_left_behind, call))
        return True

    def _remove_left_behind(self, call: InflightCall) -> None:
        """Remove the fence of a call that is over without a call of ``completed``."""
        fence = self._fenced.pop(call, None)
        if fence is not None:
            self._context.spawn(self.remove(fence))

    def carried_beside(self, container: Container) -> CpuSet:
        """Return the CPUs that any call in flight for a container may give to it, within a fence."""
        return fence_around(self._active, container)

    def is_fenced(self, call: InflightCall) -> bool:
        """Return whether a call has a fence."""
        return call in self._fenced

    async def set_up(self, container: Container) -> Fence | None:
        """Set up a fence; None if there is nothing to fence."""
        cpus = fence_cpus(self._context.state, container)
        if not cpus or self.fences is None:
            return None
        try:
            path = await self._context.kernel.run(self._set_up, container.pod.cgroup_parent, cpus)
        except CgroupError as error:
            self._context.telemetry.problem(
                "cannot narrow the cgroup of a pod", pod=container.pod.ref, err=error
            )
            return None
        if path is None:
            return None
        self._context.telemetry.count(metrics.POD_CGROUPS_NARROWED)
        return Fence(path, cpus)

    async def remove(self, fence: Fence | None) -> None:
        """Remove a fence; do nothing if a call has none.

        The fence stays while a container within it cannot be kept off the CPUs outside of the fence by its
        own group. Then the fence is removed with a later one, and a container that should have more CPUs
        widens it.
        """
        if fence is None:
            return
        try:
            await self._writes.run(self._remove, fence.path)
        except CgroupError as error:
            self._context.telemetry.problem("cannot widen the cgroup of a pod", path=fence.path, err=error)

    async def restore(self, ids: Iterable[str]) -> None:
        """Restore the fences around some containers' pods, if another program has changed them."""
        state = self._context.state
        limits = {one.pod.cgroup_parent: fence_cpus(state, one) for one in state.existing(ids)}
        if self._fenced and limits:
            await self._context.kernel.run(self._restore, limits)

    async def remove_all(self) -> None:
        """Remove all fences, because the daemon ends."""
        await self._context.kernel.run(self._remove_all)

    # -- around the runtime's calls -----------------------------------------------------------------------

    def needs_fence(self, container: Container) -> bool:
        """Return whether a call that carries a container's cpuset to the runtime must wait for a fence.

        A fence that is around its pod for another call, and lacks CPUs of the container, is widened first.
        Otherwise a container whose cpuset has no CPU of the fence would run on all CPUs of the fence.
        """
        want, around = self._context.state.desired_cpus(container), self.carried_beside(container)
        if around and not want <= around:
            return True
        if not self._unit_properties.is_unit(container):
            return False
        self._unit_properties.begin()
        is_unclear = self._unit_properties.connected and not self._unit_properties.is_trusted(want)
        return is_unclear and self.can_fence_slice(container)

    async def guard(self, container_id: str, fence: Fence | None = None) -> Fence | None:
        """Set up the fence that a call for a container needs now.

        Args:
            container_id: The container that the call is for.
            fence: The fence set up for the call before; it is removed if it no longer fits.
        """
        container = self._context.state.containers.get(container_id)
        if fence is not None and container is not None and self.fits(container, fence):
            return fence
        new = await self.set_up(container) if container and self.needs_fence(container) else None
        await self.remove(fence)
        return new

    async def fitting(self, container_id: str) -> Fence | None:
        """If a call for a container needs a fence, set up one that fits when this returns."""
        fence = None
        for _ in range(ROUNDS):
            fence = await self.guard(container_id, fence)
            container = self._context.state.containers.get(container_id)
            if container is None or self.fits(container, fence):
                break
        return fence

    def fits(self, container: Container, fence: Fence | None) -> bool:
        """Return whether a call for a container may be sent with the fence set up for it, or without one."""
        if fence is None:
            return not self.needs_fence(container)
        return fence.cpus == fence_cpus(self._context.state, container)

    def bind(self, call: InflightCall, fence: Fence | None) -> None:
        """Record that a call is sent within a fence."""
        if fence is not None:
            self._fenced[call] = fence

    def completed(
        self, inflight_call: InflightCall, carried: CpuSet | None, then: Callable[[], object]
    ) -> None:
        """Record that a call has been answered, or is lost.

        Args:
            inflight_call: The call.
            carried: The cpuset that the runtime has sent to systemd, if any.
            then: Called when the call no longer counts as in flight: at once if it had no fence.
        """
        fence = self._fenced.pop(inflight_call, None)
        if fence is not None:
            self._context.spawn(self._correct(inflight_call, carried, fence, then))
            return
        call = self._context.state.inflight.current(inflight_call) or inflight_call
        then()
        if carried is not None:
            self._unit_properties.sent(inflight_call.container_id, carried, alone=not call.overlapped)
        self._unit_properties.completed(inflight_call.container_id)

    async def _correct(
        self, call: InflightCall, carried: CpuSet | None, fence: Fence, then: Callable[[], object]
    ) -> None:
        """Correct a unit, then its cgroup file, then remove the fence."""
        context, container_id, again = self._context, call.container_id, list[str]()
        try:
            container = context.state.containers.get(container_id)
            path = (
                None
                if container is None
                else await context.kernel.run(context.cpuset_writer.path_of, container)
            )
            if path is not None and path.endswith(".scope"):
                await self._unit_properties.repair(container_id, path, call, carried)
        except (CgroupError, UnavailableError) as error:
            self._unit_properties.failed(container_id, error)
            again.append(container_id)
        except Exception as error:  # noqa: BLE001  the fence must not stay, nor the call in flight
            context.report_internal_error(error)
        try:
            # Setting the property has written the file; if that failed, the file is written here.
            await self._writes.run(context.cpuset_writer.write, [container_id])
        except Exception as error:  # noqa: BLE001  as above
            context.report_internal_error(error)
        try:
            await self.remove(fence)
        finally:
            then()
            self._unit_properties.changed(again)
            self._unit_properties.completed(container_id)

    # -- in the kernel worker -----------------------------------------------------------------------------

    def _set_up(self, parent: str, cpus: CpuSet) -> str | None:
        path = self._context.cpuset_writer.cgroups.pod_group(parent)
        if path is None or self.fences is None:
            return None
        before = self.fences.replace_cpus(path, cpus)
        fence = ActiveFence(parent, cpus, self._left.pop(path, before))
        self._active = raised(self._active, path, fence)
        return path

    def _restore(self, limits: Mapping[str, CpuSet]) -> None:
        for path, fence in self._active.items():
            cpus = limits.get(fence.parent)
            try:
                if cpus and self.fences is not None:
                    self.fences.replace_cpus(path, cpus)
                    self._active = {**self._active, path: replace(fence, cpus=cpus)}
            except CgroupError as error:
                if error.errno != errno.ENOENT:  # otherwise, the pod has ended
                    self._context.telemetry.problem("cannot narrow the cgroup of a pod", path=path, err=error)

    def _remove(self, path: str) -> WriteResult:
        fence, self._active = self._active.get(path), lowered(self._active, path)
        if fence is None or path in self._active:
            return WriteResult()
        there = self._context.state.containers.values()
        within = [container.id for container in there if container.pod.cgroup_parent == fence.parent]
        done = self._context.cpuset_writer.write(within)
        if done.refused:
            self._left[path] = fence.before
            return done
        try:
            assert self.fences is not None
            self.fences.replace_cpus(path, self._widened(fence.before, within))
        except CgroupError as error:
            if error.errno != errno.ENOENT:  # otherwise, the pod has ended
                raise
        return done

    def _widened(self, before: CpuSet, within: Iterable[str]) -> CpuSet:
        """Return the list of a group without its fence.

        An earlier run of the daemon may have left the list narrow. A container whose CPUs are all outside of
        the list would have all CPUs of the list instead, which other containers may own by now.

        Args:
            before: The list that the group had before; empty if it had none.
            within: The containers in the group.
        """
        state = self._context.state
        if not before:
            return state.node.machine.present
        wanted = (state.desired_cpus(container).bits for container in state.existing(within))
        return before | CpuSet.from_bits(union(wanted))

    def _remove_all(self) -> None:
        while self._active:
            path = next(iter(self._active))
            try:
                self._remove(path)
            except CgroupError as error:
                self._context.telemetry.problem("cannot widen the cgroup of a pod", path=path, err=error)
