"""Following the machine: CPUs and memory that come and go while containers run.

It is looked at in each comparison, and as soon as the kernel tells (``proxy.topology.uevents``). Where it is
another one, the state is computed anew from it, and then, one after the other:

1. Everybody leaves what is gone. An owner has what is left of his CPUs. On cgroup v1 tasks whose group had
   run empty are brought back into it.
2. An owner who has all of his again leaves what stood in for them; only when the kernel says that he has, the
   others may use it.
3. Who lacks CPUs that were our own choice is given others in their place (``engine.replacement_cpus``), in
   the order of a create: nobody else's any more, left by the others and read back, in the ledger, then his.
4. Who has less than he was promised is told: in the log, in ``explain``, in ``status``, in numbers.

What could not be done is tried again in each comparison.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.controller.context import NodeContext
from proxy.controller.cpuset_mems import CpusetMems
from proxy.controller.kernel_writes import KernelWrites
from proxy.controller.machine.shortage import Shortage
from proxy.controller.reservations import Reservations
from proxy.engine.node_events import ContainersUpdated, CpusGiven, HardwareChanged, SavedCpusLearned
from proxy.engine.replacement_cpus import MissingCpus, choose_replacements, owners_missing_cpus
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.controller.ports import Displaced, MachineEvents
    from proxy.engine.state import NodeState

MOMENT_S = 0.05
"""Many CPUs go at once where SMT is switched off: the machine is looked at when a few have gone."""

LOOKS = 3
"""So many times tasks that the kernel has moved away are looked for: it does so after it has told."""
NO_UEVENTS = "cannot listen to the kernel's uevents: hot-plug is noticed at the next reconcile"


class Hotplug:
    """Follows the machine for a keeper.

    Attributes:
        events: What the kernel tells; None where nobody listens.
        displaced: Brings tasks back; None where the kernel moves none away.
        shortage: Who has less than he was promised.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        mems: CpusetMems,
        reservations: Reservations,
        hardware: Callable[[Machine], Machine | None],
        events: MachineEvents | None = None,
        displaced: Displaced | None = None,
    ) -> None:
        """Prepare.

        Args:
            context: Whose machine.
            writes: Has the kernel follow.
            mems: Compares memory nodes; its worker looks at the machine.
            reservations: Gives owners CPUs in place of others.
            hardware: Gives the machine if it is another than the known one now; called in a thread.
            events: What the kernel reports of CPUs and memory; None where it reports nothing.
            displaced: Brings tasks back; None where the kernel moves none away.
        """
        self._context = context
        self._writes = writes
        self._mems = mems
        self._reservations = reservations
        self._hardware = hardware
        self.events = events
        self.displaced = displaced
        self.shortage = Shortage(context)
        self._looking = asyncio.Lock()
        self._mending = asyncio.Lock()
        self._looks = 0
        self._soon: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    # -- seeing -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen to the kernel."""
        if self.events is not None:
            self._loop.add_reader(self.events.fileno(), self._hear, self.events)

    def _hear(self, events: MachineEvents) -> None:
        try:
            changed = events.heard()
        except OSError as error:
            self._deaf(events)
            self._context.telemetry.problem(NO_UEVENTS, err=error.strerror)
            return
        if changed and self._soon is None:
            self._context.telemetry.count(metrics.MACHINE_EVENTS)
            self._soon = self._loop.call_later(MOMENT_S, self._now)

    def _now(self) -> None:
        self._soon = None
        self._context.spawn(self.look())

    async def look(self) -> None:
        """Look whether the machine is another one, and follow it."""
        context = self._context
        async with self._looking:  # else an older look might overtake a newer one
            machine = await self._mems.worker.run(self._hardware, context.state.node.machine)
            if machine is not None:
                self._changed(machine)
        if self._looks or owners_missing_cpus(context.state) or self.shortage.known:
            context.spawn(self.mend())

    def _changed(self, machine: Machine) -> None:
        """CPUs or memory came or went: pools and owners are what is left of them."""
        context, before = self._context, self._context.state
        was, after = before.node.machine, before.on(machine)
        if not after.pools.shared:
            context.telemetry.problem(
                "cannot follow the machine: the shared pool would be empty", cpus=machine.online
            )
            return
        for what, old, new in (
            ("CPUs", was.online, machine.online),
            ("NUMA nodes with memory", was.memory_nodes, machine.memory_nodes),
        ):
            if old != new:
                context.telemetry.warning("the machine changed", what=what, now=new, before=old)
        context.store.handle(HardwareChanged(machine))
        context.enforcer.forget()  # what the kernel took from groups nobody wrote
        context.telemetry.count(metrics.MACHINE_CHANGES)
        self._looks = LOOKS
        if was.memory_nodes != machine.memory_nodes:
            self._memory_changed(before, after)
        context.attention.set()  # sandboxes, memory nodes and what was promised of them

    def _memory_changed(self, before: NodeState, after: NodeState) -> None:
        """Have the runtime told who has other memory nodes now: what it has saved, no kernel takes."""
        context, there = self._context, after.node.machine.memory_nodes
        self._mems.changed(there - before.node.machine.memory_nodes)
        for container in after.containers.values():
            if before.wanted_mems(container) != after.wanted_mems(container):
                context.store.handle(SavedCpusLearned(container.id, None))
                context.settle_later(container.id)

    # -- mending ------------------------------------------------------------------------------------------

    async def mend(self) -> None:
        """Give owners CPUs in place of those that are away, and take them back when those have returned."""
        context = self._context
        async with self._mending:
            if context.store.mode.enforces and not context.store.mode.is_leaving:
                if self._looks:
                    self._looks -= 1
                    await self._mems.once()
                    if self.displaced is not None:
                        await context.kernel.run(self._bring_back, self.displaced)
                for short in owners_missing_cpus(context.state):
                    await self._take_back(short)
                for short in owners_missing_cpus(context.state):
                    await self._stand_in(short)
            self.shortage.tell()

    def _bring_back(self, displaced: Displaced) -> None:
        """Bring back whom the kernel has moved away; runs in the kernel worker."""
        context = self._context
        for container in context.state.containers.values():
            path = context.enforcer.known_path(container) if container.phase is Phase.RUNNING else None
            try:
                moved = displaced.bring_back(path) if path else 0
            except CgroupError as error:
                context.telemetry.problem("cannot bring back processes", **subject(container), err=error)
                continue
            if moved:
                context.telemetry.problem(
                    "brought back processes that the kernel had moved away: their cgroup had no CPUs left",
                    **subject(container),
                    processes=moved,
                )

    async def _take_back(self, short: MissingCpus) -> None:
        """Let go of CPUs that stand in for none any more, once the kernel says that they are left."""
        context, state = self._context, self._context.state
        used = CpuSet()
        for container in short.containers:
            used |= state.offered(container) & container.placement.replacement
        if all(container.placement.replacement == used for container in short.containers):
            return
        ids = [container.id for container in short.containers]
        done = await context.kernel.run(context.enforcer.enforce, ids)
        self._writes.moved(done)
        if done.refused or any(context.flights.of(container_id) for container_id in ids):
            return
        self._put(ids, used)
        self._given_again(ids)

    async def _stand_in(self, short: MissingCpus) -> None:
        """Give an owner CPUs in place of those that are away."""
        context = self._context
        cpus = choose_replacements(context.state, short)
        if not cpus:
            return
        ended = await self._reservations.replace(short.containers, cpus, short.instead)
        if ended.is_committed:
            context.telemetry.count(metrics.REPLACEMENT_CPUS)
            self._given_again([container.id for container in short.containers])
        elif ended.reason is not None:
            context.telemetry.problem(
                "cannot replace offline CPUs",
                **subject(short.containers[0]),
                cpus=cpus,
                offline=short.away,
                err=ended.reason.message,
            )

    def _given_again(self, ids: list[str]) -> None:
        """Owners have other CPUs in effect than before."""
        living = tuple(container.id for container in self._living(ids))
        self._context.store.handle(CpusGiven(living))

    def _living(self, ids: list[str]) -> list[Container]:
        there = (self._context.state.containers.get(container_id) for container_id in ids)
        return [c for c in there if c is not None and c.phase is not Phase.EXITED]

    def _put(self, ids: list[str], instead: CpuSet) -> None:
        """Have it in the state and in the ledger what stands in for whom."""
        context = self._context
        changed = [
            dataclasses.replace(c, placement=dataclasses.replace(c.placement, replacement=instead))
            for c in self._living(ids)
        ]
        context.store.handle(ContainersUpdated(tuple(changed), "replacement CPUs given"))

    # -- the end ------------------------------------------------------------------------------------------

    def _deaf(self, events: MachineEvents) -> None:
        self._loop.remove_reader(events.fileno())
        events.close()
        self.events = None

    def close(self) -> None:
        """Listen no more."""
        if self._soon is not None:
            self._soon.cancel()
        if self.events is not None:
            self._deaf(self.events)
