"""Events on a node other than calls: other writers, CPUs that go, a runtime that restarts, commands."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.model.errors import InputError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyPolicy
from tests.simulation.kernel import text_of

if TYPE_CHECKING:
    from tests.simulation.clock import ScheduledCallback
    from tests.simulation.node import SimulatedNode


class Disturbances:
    """Makes them happen, each by itself, until it is calm."""

    def __init__(self, node: SimulatedNode, seed: str) -> None:
        self.node = node
        self.dice = random.Random(f"{seed} disturbances")
        self._timers: list[ScheduledCallback] = []
        self._reload_awaits_create = False
        options = node.options
        self._all: tuple[tuple[bool, float, Callable[[], None]], ...] = (
            (True, 0.6, self._add_pod),
            (options.foreign_writes, 1.5, self._foreign_write),
            (options.hotplug, 15.0, self._hotplug),
            (options.runtime_restarts, 40.0, self._runtime_restart),
            (options.moves, 1.0, self._move),
            (options.releases, 30.0, self._release),
            (options.reloads, 6.0, self._reload),
            (options.handovers, 5.0, self._hand_over),
            (True, 20.0, self._exit),
        )

    def begin(self) -> None:
        """Begin to disturb."""
        self._timers = []
        for wanted, every, disturb in self._all:
            if wanted:
                self._schedule_next(every, disturb)

    def _schedule_next(self, every: float, disturb: Callable[[], None]) -> None:
        self._timers = [t for t in self._timers if t.callback is not None]
        self._timers.append(
            self.node.schedule.after(self.dice.expovariate(1 / every), self._happen, every, disturb)
        )

    def _happen(self, every: float, disturb: Callable[[], None]) -> None:
        self._schedule_next(every, disturb)
        disturb()

    def calm(self) -> None:
        """Stop all disturbances, and end those in progress."""
        for timer in self._timers:
            timer.cancel()
        node = self.node
        for group in node.kernel.groups.values():
            group.refusal_errno, group.ignores_writes = 0, False
        if not node.runtime.up:
            node.runtime.come_up()
        if node.daemon is not None and node.daemon.executor.store.mode.in_release:
            self._undo_release()

    # -- each ---------------------------------------------------------------------------------------------

    def _add_pod(self) -> None:
        if len(self.node.kubelet.pods) < self.node.options.max_pods:
            self.node.kubelet.add_pod()

    def _exit(self) -> None:
        """End the process of a container."""
        running = [c for c in self.node.runtime.containers.values() if c.begun]
        if running:
            self.node.runtime.end(self.dice.choice(running))

    def _foreign_write(self) -> None:
        """Write the cpuset of a container as another program; on v2 also of a group above it."""
        node, dice = self.node, self.dice
        running = [c for c in node.runtime.containers.values() if c.begun]
        if not running:
            return
        group = node.kernel.groups[dice.choice(running).path]
        if node.kernel.version == 2 and dice.random() < 0.2 and group.parent is not None:
            group = group.parent
        online = list(CpuSet.from_bits(node.kernel.online))
        some = CpuSet(dice.sample(online, dice.randint(1, len(online))))
        try:
            node.kernel.write(group, str(some), foreign=True)
        except OSError:
            return

    def _hotplug(self) -> None:
        """Some CPUs go, or all are back."""
        node, dice = self.node, self.dice
        whole = node.kernel.full_machine.online
        gone = whole.bits & ~node.kernel.online
        if gone and dice.random() < 0.7:
            online = whole
        else:
            may_go = [cpu for cpu in whole if cpu >= node.options.stable_cpu_count]
            online = whole - CpuSet(dice.sample(may_go, dice.randint(1, 2)))
        node.schedule.trace(f"online {text_of(online.bits)}")
        node.kernel.set_online(online)
        if node.daemon is not None:
            node.daemon.machine_events.change()

    def _hotplug_unless_calm(self) -> None:
        if not self.node.faults.calm:
            self._hotplug()

    def _runtime_restart(self) -> None:
        node = self.node
        if node.runtime.up:
            node.schedule.trace("runtime goes")
            node.runtime.go_down()
            node.schedule.after(0.2 + self.dice.random() * 4.0, self._runtime_returns)

    def _runtime_returns(self) -> None:
        if not self.node.runtime.up:
            self.node.schedule.trace("runtime is back")
            self.node.runtime.come_up()

    def _move(self) -> None:
        """Move an owner to free CPUs, as a defragmenter would."""
        daemon, dice = self.node.daemon, self.dice
        if daemon is None or not daemon.is_enforcing:
            return
        state, promises = daemon.executor.state, self.node.promises
        movable = [
            c
            for c in state.containers.values()
            if c.owner and c.pod.cpuset is None and c.id in promises.roles
        ]
        free = list(state.pools.shared)
        if not movable:
            return
        container = dice.choice(movable)
        count = len(container.placement.exclusive)
        if not 0 < count < len(free):
            return
        target = CpuSet(dice.sample(free, count))
        exclusive_sets = promises.roles[container.id].exclusive_sets

        async def move() -> None:
            ids = [c.id for c in daemon.executor.state.containers.values() if c.owner == container.owner]
            for container_id in ids:
                if container_id in promises.roles:
                    promises.roles[container_id].exclusive_sets.add(target.bits)
                    promises.roles[container_id].mover = daemon
            before = container.placement.exclusive
            obstacle = await daemon.executor.owner_moves.move(container.owner, target)
            self.node.schedule.trace(f"move of {container.owner} to {target}: {obstacle or 'done'}")
            for container_id in ids:
                if container_id in promises.roles:
                    promises.roles[container_id].exclusive_sets.discard(
                        before.bits if not obstacle else target.bits
                    )

        if len(exclusive_sets) == 1:
            self.node.schedule.count_event("command", f"move {container.owner} to {target}")
            daemon.loop.enter(daemon.executor.spawn, move())

    def call_hangs(self) -> None:
        """A call begins to hang at the runtime: now and then, the daemon is replaced meanwhile."""
        if self.node.options.handovers and not self.node.faults.calm and self.dice.random() < 0.5:
            self.node.schedule.after(self.dice.random(), self._hand_over)

    def _hand_over(self) -> None:
        """Another process replaces the daemon, also while calls hang."""
        daemon = self.node.daemon
        if daemon is None or daemon.is_handing_over or self.node.faults.calm:
            return
        patience = self.dice.choice((0.0, 0.1, 0.5, 5.0))
        self.node.schedule.count_event("command", "hand over")
        daemon.is_handing_over = True
        daemon.loop.enter(lambda: daemon.loop.create_task(daemon.hand_over(patience)))

    def _reload(self) -> None:
        """The configuration changes: at once, or as soon as a create has left for the runtime."""
        if self.dice.random() < 0.3:
            self._reload_now()
        else:
            self._reload_awaits_create = True

    def create_forwarded(self) -> None:
        """Handle a create sent to the runtime: events that wait for it occur before its answer."""
        if self._reload_awaits_create:
            self._reload_awaits_create = False
            self.node.schedule.after(0.0, self._reload_now)

    def _reload_now(self) -> None:
        node, dice, daemon = self.node, self.dice, self.node.daemon
        if daemon is None or node.faults.calm:
            return
        before = dict(node.rules)
        node.rules["reserved"] = dice.choice(
            (CpuSet(), CpuSet({0}), CpuSet(range(node.options.stable_cpu_count)))
        )
        node.rules["node_reservation"] = dice.choice((CpuSet(), CpuSet(), CpuSet({1})))
        node.rules["policy"] = dice.choice(tuple(TopologyPolicy))
        node.rules["follow_mems"] = dice.random() < 0.7
        node.schedule.count_event("command", f"reload {node.rules}")
        if why := daemon.loop.enter(daemon.reload):
            node.schedule.trace(f"not reloaded: {why}")
            node.rules = before

    def _release(self) -> None:
        """Release the node, and take it back some time later."""
        daemon = self.node.daemon
        if daemon is None or not daemon.is_enforcing:
            return
        self.node.promises.suspended = True
        self.node.schedule.count_event("command", "release")

        async def release() -> None:
            await daemon.release.begin()

        daemon.loop.enter(daemon.executor.spawn, release())
        if self.node.options.hotplug:
            for _ in range(2):
                self.node.schedule.after(self.dice.random() * 4.0, self._hotplug_unless_calm)
        self.node.schedule.after(
            1.0 + self.dice.random() * self.dice.choice((20.0, 60.0)), self._undo_release
        )

    def _undo_release(self) -> None:
        node, daemon = self.node, self.node.daemon
        if daemon is None:
            node.schedule.after(1.0, self._undo_release)
            return
        if daemon.executor.store.mode is NodeMode.ENFORCE:
            return
        node.schedule.count_event("command", "undo the release")

        async def undo() -> None:
            with contextlib.suppress(InputError):  # it has been undone already
                await daemon.release.undo()

        daemon.loop.enter(daemon.executor.spawn, undo())
        node.schedule.after(0.5, self._resume)

    def _resume(self) -> None:
        """Check again, once the node is placed again."""
        daemon, promises = self.node.daemon, self.node.promises
        if not promises.suspended:
            return
        if daemon is not None and daemon.executor.store.mode.in_release:
            self._undo_release()  # which looks again
        elif (
            daemon is not None
            and daemon.is_enforcing
            and not (self._kernel_differs() or self._may_start_anywhere())
        ):
            promises.resume()
        else:
            self.node.schedule.after(0.5, self._resume)

    def _may_start_anywhere(self) -> bool:
        """Return whether a start that was forwarded during the release is still in flight, on cgroup v1.

        Its container has no cgroup that could be narrowed, and may begin on CPUs of owners (docs/applying.md,
        starts that hang).
        """
        daemon = self.node.daemon
        assert daemon is not None
        calls = daemon.executor.state.inflight.calls.values()
        relayed = any(call.is_start and call.relayed for some in calls for call in some)
        return relayed and self.node.options.version == 1

    def _kernel_differs(self) -> bool:
        from tests.simulation.calm_node_checks import kernel_differences

        return any(kernel_differences(self.node))
