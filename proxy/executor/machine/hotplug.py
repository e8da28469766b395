"""CPUs and memory that come and go while containers run: the state follows; owners get replacements.

The machine is read at each reconcile, and as soon as the kernel reports a change
(``proxy.topology.uevents``). If it has changed, the state is computed again from it (``engine.hotplug``).
Then, in this order:

1. All containers leave the CPUs and memory that are gone. An owner keeps what is left of its CPUs. On
   cgroup v1, tasks that the kernel moved out of a cgroup without CPUs are brought back into it.
2. An owner that has all of its own CPUs again leaves the replacements. Other containers may use these only
   when the kernel reports that the owner has left them.
3. An owner that lost CPUs which topoproxy had chosen is given others in their place
   (``engine.replacement_cpus``), by a reservation.
4. A container that has less than promised is reported: in the log, ``explain``, ``status`` and metrics.

A step that failed is tried again at each reconcile; a step that waits for a call in flight, when the call
ends.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.engine.call_events import SavedCpusLearned
from proxy.engine.container_events import ContainersUpdated, CpusAssigned
from proxy.engine.enforcement import applies_to
from proxy.engine.hotplug import (
    containers_with_other_mems,
    differences,
    loss_of,
    losses,
    replacements_in_use,
    with_replacement,
)
from proxy.engine.node_effects import LossesChanged
from proxy.engine.node_events import HardwareChanged, LossesDue
from proxy.engine.replacement_cpus import MissingCpus, choose_replacements, owners_missing_cpus
from proxy.executor.context import NodeContext
from proxy.executor.cpuset_mems import CpusetMems
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.reservations import Reservations
from proxy.model.errors import CgroupError
from proxy.model.machine import Machine
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.engine.inflight import InflightCall
    from proxy.engine.state import NodeState
    from proxy.executor.ports import DisplacedTasks, MachineEvents


MOMENT_S = 0.05
"""Seconds between a report and reading the machine: many CPUs go at once when SMT is switched off."""

DISPLACED_TASK_CHECKS = 3
"""How many times to look for tasks that the kernel has moved away: it moves them after its report.

The same after a start of the daemon, because the first time the cgroups of containers are not known yet."""
NOT_BROUGHT_BACK = "cannot bring back processes"
NO_UEVENTS = "cannot listen to the kernel's uevents: hot-plug is detected at the next reconcile"


class Hotplug:
    """Makes the state follow the machine.

    Attributes:
        events: What the kernel reports; None if nothing listens.
        displaced: Brings tasks back; None if the kernel moves none away.
        hardware_losses: Reports containers that have less than promised.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        mems: CpusetMems,
        reservations: Reservations,
        hardware: Callable[[Machine], Machine | None],
        events: MachineEvents | None = None,
        displaced: DisplacedTasks | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            context: Has the machine.
            writes: Makes the kernel follow the state.
            mems: Compares memory nodes; its worker reads the machine.
            reservations: Gives owners CPUs in place of offline ones.
            hardware: Returns the machine if it differs from the known one, otherwise None; called in a
                thread.
            events: What the kernel reports of CPUs and memory; None if it reports nothing.
            displaced: Brings tasks back; None if the kernel moves none away.
        """
        self._context = context
        self._writes = writes
        self._mems = mems
        self._reservations = reservations
        self._hardware = hardware
        self.events = events
        self.displaced = displaced
        self.hardware_losses = HardwareLossReporter(context)
        self._looking = asyncio.Lock()
        self._replacing = asyncio.Lock()
        # CPUs may have gone while no daemon ran.
        self._checks_left = DISPLACED_TASK_CHECKS if displaced is not None else 0
        self._awaited: set[int] = set()
        self._soon: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    # -- seeing -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start listening to the kernel."""
        if self.events is not None:
            self._loop.add_reader(self.events.fileno(), self._read_uevents, self.events)

    def _read_uevents(self, events: MachineEvents) -> None:
        try:
            changed = events.read_changes()
        except OSError as error:
            self._uevents_failed(events)
            self._context.telemetry.problem(NO_UEVENTS, err=error.strerror)
            return
        if changed and self._soon is None:
            self._context.telemetry.count(metrics.MACHINE_EVENTS)
            self._soon = self._loop.call_later(MOMENT_S, self._now)

    def _now(self) -> None:
        self._soon = None
        self._context.spawn(self.reread())

    async def reread(self) -> None:
        """Read the machine, and update the state if it has changed."""
        context = self._context
        async with self._looking:  # otherwise, an older reading might overtake a newer one
            machine = await self._mems.worker.run(self._hardware, context.state.node.machine)
            if machine is not None:
                self._changed(machine)
        if self._checks_left or owners_missing_cpus(context.state) or context.state.facts.losses:
            context.spawn(self.update_replacements())

    def _changed(self, machine: Machine) -> None:
        """Apply a change of CPUs or memory: pools and owners keep what is left of theirs."""
        context, before = self._context, self._context.state
        was, after = before.node.machine, before.with_machine(machine)
        if not after.pools.shared:
            context.telemetry.problem(
                "cannot follow the machine: the shared pool would be empty", cpus=machine.online
            )
            return
        for changed_part, old, new in differences(was, machine):
            context.telemetry.warning("the machine changed", what=changed_part, now=new, before=old)
        context.store.handle(HardwareChanged(machine))
        context.cpuset_writer.forget()  # what the kernel removed from cgroups, no program wrote
        context.telemetry.count(metrics.MACHINE_CHANGES)
        self._checks_left = DISPLACED_TASK_CHECKS
        if was.memory_nodes != machine.memory_nodes:
            self._memory_changed(before, after)
        for container in after.containers.values():
            if before.desired_cpus(container) != after.desired_cpus(container):
                context.sync_later(container.id)  # the v1 kernel itself removes CPUs: nothing is written
        context.reconcile_requested.set()  # compares sandboxes, memory nodes and promised memory

    def _memory_changed(self, before: NodeState, after: NodeState) -> None:
        """Send changed memory nodes of containers to the runtime."""
        context = self._context
        for container_id in containers_with_other_mems(before, after):
            context.store.handle(SavedCpusLearned(container_id, None))
            context.sync_later(container_id)

    # -- replacing ----------------------------------------------------------------------------------------

    async def update_replacements(self) -> None:
        """Give owners CPUs in place of offline ones, and take them back when those are online again."""
        context = self._context
        async with self._replacing:
            if applies_to(context.state, None):
                if self._checks_left:
                    self._checks_left -= 1
                    await self._mems.once()
                    if self.displaced is not None and not await context.kernel.run(
                        self._bring_back, self.displaced
                    ):
                        self._checks_left = max(self._checks_left, 1)
                for short in owners_missing_cpus(context.state):
                    await self._release_replacements(short)
                for short in owners_missing_cpus(context.state):
                    await self._assign_replacements(short)
            self.hardware_losses.report()

    def _bring_back(self, displaced: DisplacedTasks) -> bool:
        """Bring back processes that the kernel has moved away; runs in the kernel worker.

        Returns:
            Whether the kernel refused no move.
        """
        context, is_complete = self._context, True
        for container in context.state.containers.values():
            is_ours = container.phase is Phase.RUNNING and applies_to(context.state, container.pod)
            path = context.cpuset_writer.known_path(container) if is_ours else None
            if not path:
                continue
            try:
                moved = displaced.move_back(path)
            except CgroupError as error:
                is_complete = False
                context.telemetry.problem(NOT_BROUGHT_BACK, **subject(container), err=error)
                continue
            context.telemetry.resolved(NOT_BROUGHT_BACK, containerID=container.id)
            if moved:
                context.telemetry.problem(
                    "brought back processes that the kernel had moved away: their cgroup had no CPUs left",
                    **subject(container),
                    processes=moved,
                )
        return is_complete

    async def _release_replacements(self, short: MissingCpus) -> None:
        """Release replacements that are no longer needed, once the kernel shows that the owner left them."""
        context, used = self._context, replacements_in_use(self._context.state, short)
        if all(container.placement.replacement == used for container in short.containers):
            return
        ids = [container.id for container in short.containers]
        done = await self._writes.run(context.cpuset_writer.write, ids)
        calls = [call for container_id in ids for call in context.state.inflight.of(container_id)]
        for call in calls:
            self._update_replacements_after(call)
        if done.refused or calls or replacements_in_use(context.state, short) != used:
            return  # CPUs may have gone offline again
        changed = with_replacement(self._living(ids), used)
        context.store.handle(ContainersUpdated(tuple(changed)))
        self._notify_assigned(ids)

    def _update_replacements_after(self, call: InflightCall) -> None:
        """Update the replacements again once a call has ended.

        It may have put the owner back on its replacements.
        """
        if call.number not in self._awaited:
            self._awaited.add(call.number)
            self._context.inflight_calls.on_completion(call, functools.partial(self._over, call.number))

    def _over(self, number: int) -> None:
        self._awaited.discard(number)
        self._context.spawn(self.update_replacements())

    async def _assign_replacements(self, short: MissingCpus) -> None:
        """Give an owner CPUs in place of offline ones."""
        context = self._context
        cpus = choose_replacements(context.state, short)
        if not cpus:
            return
        ended = await self._reservations.replace(short.containers, cpus, short.replacement)
        if ended.is_committed:
            context.telemetry.count(metrics.REPLACEMENT_CPUS)
            self._notify_assigned([container.id for container in short.containers])
        elif ended.reason is not None:
            context.telemetry.problem(
                "cannot replace offline CPUs",
                **subject(short.containers[0]),
                cpus=cpus,
                offline=short.offline,
                err=ended.reason.message,
            )

    def _notify_assigned(self, ids: list[str]) -> None:
        """Record that other CPUs than before are in effect for owners."""
        living = tuple(container.id for container in self._living(ids))
        self._context.store.handle(CpusAssigned(living))

    def _living(self, ids: list[str]) -> list[Container]:
        return [c for c in self._context.state.existing(ids) if c.phase is not Phase.EXITED]

    # -- the end ------------------------------------------------------------------------------------------

    def _uevents_failed(self, events: MachineEvents) -> None:
        self._loop.remove_reader(events.fileno())
        events.close()
        self.events = None

    def close(self) -> None:
        """Stop listening to the kernel."""
        if self._soon is not None:
            self._soon.cancel()
        if self.events is not None:
            self._uevents_failed(self.events)


SHOWN = 5


class HardwareLossReporter:
    """Reports containers that have less than they were promised, because hardware went offline.

    A loss is logged when it begins, changes and ends. As long as it lasts, it is shown in
    ``topoproxy status``, in the metrics, and with the decision about the container in ``topoproxy explain``.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def report(self) -> None:
        """Report what has changed since the last time."""
        context, before = self._context, self._context.state.facts.losses
        effects = context.store.handle(LossesDue())
        changes = next(effect.changes for effect in effects if type(effect) is LossesChanged)
        for container, text in changes:
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(context.wall_clock()))
            back = f"at {at} all that it was promised was there again"
            context.history.amend(container.id, f"since {at} {text}" if text else back)
            context.telemetry.count(metrics.EXCLUSIVE_CPU_SHORTFALLS, container.id not in before)
        for container, text in changes[:SHOWN]:
            if text:
                context.telemetry.warning(
                    "a container has less than promised", **subject(container), reason=text
                )
            else:
                context.telemetry.warning("a container has all that was promised again", **subject(container))
        if len(changes) > SHOWN:
            more = len(changes) - SHOWN
            context.telemetry.warning("more containers have less than promised: see the status", count=more)

    def explained(self, container_id: str) -> str:
        """Return as text what a container lacks now; empty if it lacks nothing."""
        container = self._context.state.containers.get(container_id)
        loss = None if container is None else loss_of(self._context.state, container)
        return "" if loss is None else loss.text()

    def page(self) -> list[dict[str, object]]:
        """Return what ``topoproxy status`` shows, one entry for each container."""
        containers = self._context.state.containers
        return [
            {
                "id": container_id,
                "container": containers[container_id].ref,
                "away": str(loss.offline),
                "instead": str(loss.replacement),
                "cpus": str(loss.cpus),
                "missing": loss.missing,
                "nodes": str(loss.nodes),
                "what": loss.text(),
            }
            for container_id, loss in sorted(losses(self._context.state).items())
        ]
