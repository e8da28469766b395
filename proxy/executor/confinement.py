"""Confines the containers of starts that hang, so that owners of CPUs can still be created.

Theory. A start that has been forwarded to the runtime carries the cpuset that was right at that time. The
runtime may write this set at any moment, so a create that gives some of these CPUs away waits for the start
(``engine.inflight``). An ordinary start ends within ``CONFINE_AFTER_S``. A start that does not end by then
may hang for minutes, for example in a mount from a server that does not answer, and must not delay every
owner of the node. What can be done about it follows from when runc writes a cpuset (opencontainers/runc,
libcontainer/process_linux.go, ``initProcess.start``):

* ``manager.Apply`` creates the container's cgroup, on cgroup v1 with the set of the spec
  (``CpusetGroup.ApplyDir``), and moves ``runc init`` into it. Only after that does ``runc init`` mount.
* ``manager.Set`` writes the set of the spec at ``procHooks``: after the mounts, before ``pivot_root``.
* The container's own program is executed by ``runc start``, a process that the runtime starts after
  ``runc create`` has ended.

So a cgroup that exists is narrowed at once. If runc writes again, the kernel reports the write
(``drift.watch``) and the cgroup is narrowed again before the program is executed: until then only ``runc
init`` is in the cgroup, and it waits. The call stays registered as in flight. When it ends, the cgroup is
compared as after any start.

* On cgroup v2 the limit of a parent bounds the set that takes effect. There the pod's cgroup gets such a
  limit (``systemd.fencing``) until the call has ended. This does not need the container's cgroup to exist,
  and there is no moment in which runc's write is in effect, so it works for updates too.
* On cgroup v1 the kernel refuses a set that the parent does not have: with such a limit the start would fail.
  So there only the container's cgroup is narrowed.
* If the cgroup does not exist yet, the create waits and looks again. A start that is not past
  ``manager.Apply`` will create the cgroup with the old set, and nothing reports that.
* On cgroup v1 a create waits for an update: the container's program is running, and would run on owned CPUs
  between the runtime's write and ours.

After a restart of the daemon, the start of a created container that has a cgroup may hang: the earlier daemon
may have admitted an owner in spite of it. Such a container is confined, too, until the runtime's list shows
how the start ended, or its cgroup is gone (``confine_orphaned_calls``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.engine.call_events import CallConfined
from proxy.engine.enforcement import applies_to
from proxy.engine.write_conflicts import PAUSE_S, TRIES
from proxy.executor.context import NodeContext
from proxy.executor.drift.detection import Drift
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.systemd.fencing import Fencing
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase

if TYPE_CHECKING:
    from proxy.engine.inflight import InflightCall

CONFINE_AFTER_S = 0.5
"""Seconds in flight after which a create no longer waits for a call, if the container can be confined."""
POLL_S = 0.1
"""Seconds until the cgroup of a start is looked for again."""
WATCHED_S, UNWATCHED_S = 1.0, 0.02
"""Seconds between two checks of confined containers; the second if the kernel does not report writes."""
BEFORE_IT_RUNS = (Phase.CREATED, Phase.STARTING)
MAX_NAMED = 3
"""More calls than this are not named one by one."""


class WaitResult(Struct, frozen=True):
    """How a wait for calls in flight ended.

    Attributes:
        late: Calls that still prevent the create.
        seconds: How long the wait took; None if no call prevented the create.
        passed: The number of calls that are still in flight but do not prevent the create, because their
            containers are confined.
    """

    late: tuple[InflightCall, ...] = ()
    seconds: float | None = None
    passed: int = 0

    @property
    def cpus(self) -> CpuSet:
        """All CPUs that the late calls carry."""
        return CpuSet.union_of(call.carries for call in self.late)


NO_WAIT = WaitResult()


class Confinement:
    """Confines containers of calls in flight."""

    def __init__(self, context: NodeContext, writes: KernelWrites, drift: Drift, fencing: Fencing) -> None:
        self._context = context
        self._writes = writes
        self._drift = drift
        self._fencing = fencing
        drift.watch.report_first(self.narrow_written)
        self._is_watching = False
        self._absent = set[str]()
        """Confined containers that have no cgroup yet: a limit on their pod's cgroup confines them."""

    # -- while a create is held ---------------------------------------------------------------------------

    async def wait(self, owned: CpuSet) -> WaitResult:
        """Wait until no call in flight can give some CPUs to a container that must not have them.

        Args:
            owned: These CPUs.
        """
        context, calls = self._context, self._obstructing_calls(owned)
        seconds = context.options.call_timeout
        if not calls:
            return NO_WAIT
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            due = [c for c in calls if clock() - c.sent_at >= CONFINE_AFTER_S and self._can_confine(c)]
            confined = await self.confine(due, owned)
            late = [c for c in calls if not context.inflight_calls.has_completed(c) and c not in confined]
            if not late or clock() - began >= seconds:
                unfinished = sum(not context.inflight_calls.has_completed(call) for call in confined)
                return WaitResult(tuple(late), clock() - began, unfinished)
            await context.inflight_calls.wait(late, self._seconds_to_next_check(late, began + seconds))

    def _obstructing_calls(self, owned: CpuSet) -> list[InflightCall]:
        """Return the calls in flight that may give some CPUs to a container that must not have them.

        If the limit of a pod includes some of the CPUs, each call for the pod may give them to its container,
        whatever the call carries: if the cpuset has no CPU of the limit, all CPUs of the limit are in effect
        (cgroup v2).
        """
        state = self._context.state
        inflight = state.inflight
        if not len(inflight.calls):
            return []
        placed = [c for c in state.containers.values() if inflight.is_busy(c.id) and applies_to(state, c.pod)]
        limits = ((c.id, state.desired_cpus(c)) for c in placed if self._may_exceed(c))
        carrying = inflight.exceeding(limits, owned)
        limited = [c for c in placed if (self._fencing.carried_beside(c) - state.desired_cpus(c)) & owned]
        within = (call for c in limited for call in inflight.of(c.id))
        return [*carrying, *(call for call in within if call not in carrying)]

    def _may_exceed(self, container: Container) -> bool:
        """Return whether a call in flight may give a container CPUs that it must not have.

        A call for an owner counts too, because the owner shares CPUs while all of its own are offline; it
        does not count if it is only suspected.
        """
        state = self._context.state
        return state.uses_shared_cpus(container) or any(
            not f.suspected for f in state.inflight.of(container.id)
        )

    def _seconds_to_next_check(self, calls: list[InflightCall], deadline: float) -> float:
        """Return the seconds until the next check of calls, rounded up to whole milliseconds."""
        now = asyncio.get_running_loop().time()
        ages = [now - call.sent_at for call in calls if self._can_confine(call)]
        due = [CONFINE_AFTER_S - age if age < CONFINE_AFTER_S else POLL_S for age in ages]
        return math.ceil(max(0.0, min([*due, deadline - now])) * 1000) / 1000

    def _can_confine(self, inflight_call: InflightCall) -> bool:
        """Return whether the container of a call can be confined."""
        call = self._context.state.inflight.current(inflight_call)
        if call is None or (call.suspected and not call.confined):
            return False  # most suspected calls do not exist: they are over soon
        return inflight_call.is_start or (
            self._shares(inflight_call.container_id) and self._has_fence(inflight_call.container_id)
        )

    def _shares(self, container_id: str) -> bool:
        """Return whether a container shares: within its pod's limit, an owner may run on CPUs of another.

        A cpuset that has no CPU of the limit has no effect (cgroup v2): all CPUs of the limit are in effect.
        """
        container = self._context.state.containers.get(container_id)
        return container is not None and self._context.state.uses_shared_cpus(container)

    def _has_fence(self, container_id: str) -> bool:
        context = self._context
        container = context.state.containers.get(container_id)
        v2 = context.cpuset_writer.cgroups.version == 2
        return v2 and container is not None and self._fencing.can_confine(container)

    async def confine(self, calls: Collection[InflightCall], owned: CpuSet) -> set[InflightCall]:
        """Confine the containers of some calls in flight to the CPUs that they should have now.

        A container that is confined already is confined again: it may be entitled to fewer CPUs by now.

        Args:
            calls: The calls.
            owned: The CPUs for an owner.

        Returns:
            The calls that no longer prevent an owner from having these CPUs.
        """
        if not calls or self._context.store.mode.in_release:
            return set()
        confined = {call for call in calls if await self._fence(call, owned)}
        confined |= await self._narrow([call for call in calls if call.is_start])
        for call in calls:
            self._context.store.handle(CallConfined(call, call in confined))
        if confined and not self._is_watching:
            self._is_watching = True
            self._context.spawn(self._watch_confined())
        return confined

    async def _fence(self, call: InflightCall, owned: CpuSet) -> bool:
        """Limit the cgroup of a container's pod while a call is in flight; returns whether that succeeded."""
        context = self._context
        container = context.state.containers.get(call.container_id)
        if container is None or not self._has_fence(container.id):
            return False
        return await self._fencing.confine(call, container, owned)

    async def _narrow(self, calls: list[InflightCall]) -> set[InflightCall]:
        """Narrow the cgroups of containers with a start in flight; returns the starts with a cgroup."""
        context, ids = self._context, [call.container_id for call in calls]
        located = await context.kernel.run(self._with_group, ids) if ids else set[str]()
        for call in calls:
            if call.container_id in located:
                context.store.handle(CallConfined(call, confined=True))  # otherwise, it would not be written
        located -= await self._write_confined(located)
        self._absent.difference_update(located)
        self._absent.update(container_id for container_id in ids if container_id not in located)
        return {call for call in calls if call.container_id in located}

    def _with_group(self, ids: Iterable[str]) -> set[str]:
        """Return the ids of those containers that have a cgroup; runs in the kernel worker."""
        state, writer = self._context.state, self._context.cpuset_writer
        candidates = ((i, state.containers.get(i)) for i in ids)
        return {i for i, container in candidates if container is not None and writer.path_of(container)}

    async def _write_confined(self, ids: Collection[str]) -> set[str]:
        """Write the cpusets of confined containers; returns the ids of those that have no cgroup.

        A write that the kernel refuses is repeated a few times, whatever the reason: until one succeeds, the
        set that runc has written stays in effect.
        """
        context, absent = self._context, set[str]()
        for tried in range(1, TRIES + 1):
            if not ids:
                break
            done = await self._writes.run(self._drift.write, list(ids))
            absent.update(done.absent)
            ids = list(done.refused)
            if ids and tried < TRIES:
                await asyncio.sleep(PAUSE_S)
                continue
            context.report_errors(done)
        return absent

    # -- while they are in flight -------------------------------------------------------------------------

    def narrow_written(self, ids: Iterable[str]) -> bool:
        """Narrow confined containers again, after the kernel has reported writes to some cpusets.

        Returns:
            Whether any container is confined: then further reports must not be delayed.
        """
        inflight = self._context.state.inflight
        confined = [i for i in ids if inflight.is_confined(i)]
        if confined:
            self._context.spawn(self._narrow_again(confined))
        return bool(inflight.confined)

    async def _narrow_again(self, ids: list[str]) -> None:
        await self._fencing.restore(ids)
        await self._write_confined(ids)

    async def _watch_confined(self) -> None:
        """Check confined containers until there are none: a cgroup may be gone, a report may be missing."""
        context = self._context
        try:
            while ids := context.state.inflight.confined:
                watched = self._drift.watch.covers(i for i in ids if i not in self._absent)
                await asyncio.sleep(WATCHED_S if watched else UNWATCHED_S)
                await self._fencing.restore(ids)
                starts = (f for i in ids for f in context.state.inflight.of(i) if f.is_start and f.confined)
                await self._narrow_starts([call for call in starts if call.container_id not in self._absent])
            self._absent.clear()
        finally:
            self._is_watching = False

    async def _narrow_starts(self, starts: list[InflightCall]) -> None:
        """Narrow confined containers again; a start without a cgroup stays confined only if it is fenced."""
        context = self._context
        located = await self._narrow(starts)
        for call in starts:
            if call not in located:
                self._drift.watch.drop(call.container_id)
                fenced = self._fencing.is_fenced(call)
                context.store.handle(CallConfined(call, fenced))

    # -- calls without a waiting client --------------------------------------------------------------------

    async def confine_orphaned_calls(self) -> None:
        """Confine created containers that have a cgroup and may have a start without a waiting client.

        When the node is taken over again (a release is undone), owners get their CPUs back without waiting
        for calls in flight. Containers are then confined even if the client of their start still waits. A
        container whose start was relayed during the release may get its cgroup later, and is checked again. A
        replaced daemon may have admitted owners in spite of updates that it still relays: the containers of
        these updates are confined, too.
        """
        context = self._context
        containers, inflight = context.state.containers, context.state.inflight
        known = (
            inflight.unattended()
            if context.reconciled.is_set()
            else [call for i in containers for call in inflight.of(i)]
        )
        starts = [call for call in known if call.is_start and not call.confined]
        starts = [
            call for call in starts if (c := containers.get(call.container_id)) and c.phase in BEFORE_IT_RUNS
        ]
        starts = [call for call in starts if applies_to(context.state, containers[call.container_id].pod)]
        if not context.reconciled.is_set():
            updates = [
                call for call in known if not (call.is_start or call.suspected) and self._can_confine(call)
            ]
            await self.confine(updates, self._owned())
        if starts:
            with_cgroup = await context.kernel.run(self._with_group, [call.container_id for call in starts])
            starts = [call for call in starts if call.container_id in with_cgroup or self._is_fenceable(call)]
            await self.confine(starts, self._owned())

    def _owned(self) -> CpuSet:
        return CpuSet.union_of(owner.cpus for owner in self._context.state.owners.values())

    def _is_fenceable(self, call: InflightCall) -> bool:
        """Return whether a known start can be confined before its container has a cgroup."""
        return not call.suspected and self._has_fence(call.container_id)

    def may_still_run(self, inflight_call: InflightCall) -> bool:
        """Return whether a start without a waiting client must not be ended by the passing of time alone.

        As long as the container's cgroup exists, the runtime may continue with the start. If the create makes
        the cgroup, the cgroup does not show that there is a start. A start that is only suspected is then
        ended by time, since no part of it takes long (the mounts belong to the create).
        """
        context = self._context
        call = context.state.inflight.current(inflight_call)
        if (
            call is None
            or not (call.is_start and call.confined)
            or inflight_call.container_id in self._absent
        ):
            return False
        container = context.state.containers.get(inflight_call.container_id)
        path = (
            context.cpuset_writer.known_path(container) if call.suspected and container is not None else None
        )
        return path is None or not context.options.quirks.is_made_by_create(path)

    # -- messages --------------------------------------------------------------------------------------------

    def text(self, wait: WaitResult) -> str:
        """Return a message for the operator that names the late calls."""
        now = asyncio.get_running_loop().time()
        named = [self._named(call, now) for call in wait.late[:MAX_NAMED]]
        more = f", and {len(wait.late) - MAX_NAMED} more" if len(wait.late) > MAX_NAMED else ""
        return f"the runtime is still busy with {', '.join(named)}{more}"

    def _named(self, call: InflightCall, now: float) -> str:
        container = self._context.state.containers.get(call.container_id)
        ref = container.ref if container is not None else f"container {call.container_id}"
        if call.suspected:
            return f"a call for {ref} that may have been made before a restart or during a release"
        action = "start" if call.is_start else "update"
        return f"the {action} of {ref}, not answered for {now - call.sent_at:.1f} s"

    @staticmethod
    def public_message(wait: WaitResult) -> str:
        """Return the message without names of containers, for the client of the refused call."""
        starts = any(call.is_start for call in wait.late)
        action = "started" if starts else "updated"
        return f"the runtime is still busy with calls for containers that must move: one is being {action}"
