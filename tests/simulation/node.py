"""A simulated node: the daemon, and everything around it, on one clock and from one seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from proxy.executor import background, runtime_events
from proxy.executor.background import TimeSlices
from proxy.succession import replacement
from proxy.topology.regular_machine import regular_machine
from tests.simulation.calm_node_checks import (
    ALL_LIMIT_S,
    KERNEL_LIMIT_S,
    kernel_differences,
    other_differences,
)
from tests.simulation.clock import Schedule
from tests.simulation.daemon import SimulatedDaemon
from tests.simulation.disk import SimulatedDisk
from tests.simulation.disturbances import Disturbances
from tests.simulation.faults import LATE_LIMIT_S, Delays, FaultRates, Faults
from tests.simulation.hanging import HangingStarts
from tests.simulation.kernel import SimulatedKernel
from tests.simulation.kubelet import SimulatedKubelet
from tests.simulation.promises import Promises, ViolationError
from tests.simulation.runtime import RefusedError, SimulatedRuntime
from tests.simulation.workers import SimulatedThreads, Threading

if TYPE_CHECKING:
    from proxy.executor.former_calls import RelayedCall

MAX_DEPTH = 3
"""How deeply jobs may interrupt each other; further jobs continue without a break."""
FORMER_LIFETIMES_S = (1.0, 5.0, 30.0)
"""How long a daemon that was replaced has for its calls, if it is not killed before."""
CALM_EVERY = 2500
"""Events between two moments of calm."""
MACHINES = ((1, 1, 8, 2), (2, 1, 4, 2), (2, 2, 3, 2), (1, 1, 12, 1))


class CrashError(BaseException):
    """The process of the daemon ends now."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node is, drawn from the seed.

    Attributes:
        machine: Sockets, NUMA nodes in each, cores in each, threads of each.
        version: Of cgroups.
        watch_limit: How many cpusets the kernel watches; 0 if it watches none.
        events: Whether the runtime sends events.
        uevents: Whether the kernel reports CPUs that go.
        stable_cpu_count: CPUs below this number are never named by the scheduler, and never go.
        max_pods: How many pods there are at most.
        foreign_writes: Whether other programs write cpusets; the same for the other disturbances.
    """

    machine: tuple[int, int, int, int]
    version: int
    static: bool = True
    watch_limit: int = 1000
    events: bool = True
    uevents: bool = True
    settle_per_second: float = 10.0
    reconcile_period: float = 10.0
    stable_cpu_count: int = 2
    max_pods: int = 10
    foreign_writes: bool = True
    hotplug: bool = True
    releases: bool = True
    moves: bool = True
    runtime_restarts: bool = True
    reloads: bool = True
    handovers: bool = True
    rules: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(cls, dice: random.Random) -> NodeOptions:
        """Return the options of one node."""
        return cls(
            machine=dice.choice(MACHINES),
            version=dice.choice((1, 2)),
            watch_limit=dice.choice((1000, 1000, 1000, 0)),
            events=dice.random() < 0.8,
            uevents=dice.random() < 0.8,
            settle_per_second=dice.choice((10.0, 10.0, 100.0)),
            reconcile_period=dice.choice((10.0, 10.0, 3.0)),
            max_pods=dice.choice((6, 10, 14)),
            foreign_writes=dice.random() < 0.6,
            hotplug=dice.random() < 0.5,
            releases=dice.random() < 0.3,
            moves=dice.random() < 0.6,
            runtime_restarts=dice.random() < 0.6,
            reloads=dice.random() < 0.5,
            handovers=dice.random() < 0.6,
        )


class SimulatedNode:
    """One node, from its start to the end of the simulation.

    Attributes:
        daemon: The daemon that lives now; None between two.
        former_daemons: Those that were replaced, and still have calls to relay.
        daemon_starts: How many daemons were started.
        rules: What the configuration says about the node, in addition to the machine.
    """

    def __init__(
        self, seed: int, options: NodeOptions | None = None, rates: FaultRates | None = None
    ) -> None:
        """Make a node; every detail of it follows from a seed.

        Args:
            seed: The seed.
            options: How the node is; drawn from the seed if None.
            rates: How often something goes wrong; drawn from the seed if None.
        """
        dice = random.Random(f"{seed} node")
        drawn, rate = NodeOptions.drawn(dice), FaultRates.drawn(dice)
        self.seed = seed
        self.options = options or drawn
        self.rules = dict(self.options.rules)
        self.call_timeout = 5.0
        self.hold_limit = 10.0 + 8 * self.call_timeout
        self.schedule = Schedule()
        self.faults = Faults(str(seed), rates or rate)
        self.delays = Delays(str(seed), self.faults)
        self.kernel = SimulatedKernel(self, regular_machine(*self.options.machine), self.options.version)
        self.promises = Promises(self)
        self.kernel.on_effective_change = self.promises.written
        self.runtime = SimulatedRuntime(self)
        self.disk = SimulatedDisk(self)
        self.kubelet = SimulatedKubelet(self, str(seed))
        self.hanging = HangingStarts(self)
        self.disturbances = Disturbances(self, str(seed))
        self.daemon: SimulatedDaemon | None = None
        self.former_daemons: list[SimulatedDaemon] = []
        self.daemon_starts = 0
        self._depth = 0
        self._delivered_at = 0.0
        self._late_calls = 0
        self._dice = random.Random(f"{seed} middle")
        for level in ("", "/burstable", "/besteffort"):
            self._make_class_group(f"kubepods{level}")

    def _make_class_group(self, path: str) -> None:
        """Make a group above pods, with all CPUs."""
        group = self.kernel.make(path)
        group.cpus, group.mems = (
            (self.kernel.online, self.kernel.nodes) if self.options.version == 1 else (0, 0)
        )

    def make_pod_group(self, parent: str, quota: int) -> None:
        """Make the group of a pod, as kubelet does."""
        group = self.kernel.make(parent.strip("/"))
        if quota > 0:
            group.quota = str(quota) if self.options.version == 1 else f"{quota} 100000"

    # -- what may come in the middle of something ---------------------------------------------------------

    def before_effect(self, process: SimulatedDaemon, effect_name: str) -> None:
        """A daemon is about to do something outside of itself: it may crash, or others may come first.

        Raises:
            CrashError: The process ends here.
        """
        if process is self.daemon and self.faults.crashes(during_move=self.promises.moves_under_way):
            self.crash(f"before {effect_name}")
        if self._depth < MAX_DEPTH and self.faults.interleaves():
            self.elapse(process, self.delays.mid_job())

    def elapse_a_moment(self, process: SimulatedDaemon) -> None:
        """Time passes in the middle of a call, now and then."""
        if self._depth < MAX_DEPTH and self.faults.interleaves():
            self.elapse(process, self.delays.mid_job())

    def elapse(self, process: SimulatedDaemon, seconds: float) -> None:
        """Let everything happen that comes within some seconds, while a thread of a daemon waits.

        Raises:
            CrashError: The daemon has ended meanwhile, and with it the thread that waited.
        """
        until, schedule = self.schedule.now + seconds, self.schedule
        if self._depth >= MAX_DEPTH:
            return
        self._depth += 1
        try:
            while (when := schedule.next_at()) is not None and when <= until:
                with contextlib.suppress(CrashError):  # of this process, or of another one
                    schedule.step()
                if not process.alive or self.promises.violation:
                    raise CrashError
            schedule.now = max(schedule.now, until)
        finally:
            self._depth -= 1

    def deliver_in_order(self, work: Callable[..., object], *args: Any) -> None:
        """Make something arrive that keeps its order with all else that is delivered so."""
        self._delivered_at = max(self._delivered_at, self.schedule.now + self.delays.report())
        self.schedule.after(self._delivered_at - self.schedule.now, work, *args)

    def carry_out_late(self, work: Callable[[], object]) -> None:
        """Make the runtime carry out something for which its caller does not wait any more."""
        self._late_calls += 1

        def carry_out() -> None:
            self._late_calls -= 1
            if self.runtime.up:
                with contextlib.suppress(RefusedError):
                    work()

        self.schedule.after(self.faults.dice.random() * LATE_LIMIT_S, carry_out)

    # -- lives --------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start a daemon."""
        self.daemon_starts += 1
        self.kubelet.awaits_successor = False
        self.schedule.count_event("start", str(self.daemon_starts))
        self.daemon = SimulatedDaemon(self)

    def succeed(self, former: SimulatedDaemon, quiet: bool, relayed: list[RelayedCall]) -> None:
        """Start the successor of a daemon that has handed over, and later end the former process."""
        if self.daemon is not former:
            return
        self.daemon_starts += 1
        text = f"{self.daemon_starts}, behind a {'quiet' if quiet else 'busy'} one with {len(relayed)} calls"
        self.schedule.count_event("start", text)
        self.former_daemons.append(former)
        former.successor = self.daemon = SimulatedDaemon(self, former_calls=not quiet, relayed=relayed)
        self.kubelet.awaits_successor = False
        self.schedule.after(self._dice.choice(FORMER_LIFETIMES_S), self._end_former, former)

    def _end_former(self, former: SimulatedDaemon) -> None:
        """End a process that was replaced; its successor finds its connection closed.

        A process that reports for an older one, which still relays, waits for it (``Daemon.finish_calls``).
        """
        if former not in self.former_daemons:
            return
        if self.former_daemons[0] is not former:
            self.schedule.after(self._dice.choice(FORMER_LIFETIMES_S), self._end_former, former)
            return
        self.former_daemons.remove(former)
        former.kill()
        self.kubelet.drop_connections(former)
        self.schedule.after(self.delays.wire(), former.report_process_end)

    def crash(self, reason: str) -> None:
        """End the daemon at once, and start another one later.

        Raises:
            CrashError: Always.
        """
        daemon = self.daemon
        assert daemon is not None
        self.schedule.count_event("crash", reason)
        self.daemon = None
        for each in (
            daemon,
            *self.former_daemons,
        ):  # systemd ends all processes of a service whose main process ends
            each.kill()
            self.kubelet.drop_connections(each)
        self.former_daemons.clear()
        self.schedule.after(0.1 + self._dice.random() * 2.0, self.boot)
        raise CrashError

    def step(self) -> None:
        """Let the next thing happen."""
        try:
            self.schedule.step()
            if self.daemon is not None and self.faults.crashes():
                self.crash("between two events")
        except CrashError:
            pass
        if self.promises.violation:
            raise ViolationError(self.promises.violation)

    # -- the run ------------------------------------------------------------------------------------------

    def run(self, events: int) -> None:
        """Run until this number of events was delivered, with moments of calm, and end calm.

        Raises:
            ViolationError: A promise is broken.
        """
        with patched():
            self.boot()
            self.disturbances.begin()
            calm_at = CALM_EVERY
            while self.schedule.events < events:
                self._some_steps()
                if self.schedule.events >= calm_at:
                    self.calm()
                    calm_at = self.schedule.events + CALM_EVERY
            self.calm()

    def _some_steps(self) -> None:
        for _ in range(20):
            self.step()
        self.promises.run_cheap_checks()
        self.promises.check_invariants()

    def calm(self) -> None:
        """Let nothing new happen, and check that every promise is met.

        Raises:
            ViolationError: A promise is broken.
        """
        self.schedule.trace("calm")
        self.faults.calm = True
        self.disturbances.calm()
        began = self.schedule.now
        self._wait_until_agreed(kernel_differences, began + KERNEL_LIMIT_S)
        self._wait_until_agreed(self._all_differences, began + ALL_LIMIT_S)
        self.promises.check_invariants()
        self.faults.calm = False
        self.schedule.trace("calm is over")
        self.disturbances.begin()
        self.kubelet.resume_pods()

    def _all_differences(self, node: SimulatedNode) -> Iterator[str]:
        yield from kernel_differences(node)
        yield from other_differences(node)

    def _wait_until_agreed(
        self, differences: Callable[[SimulatedNode], Iterator[str]], deadline: float
    ) -> None:
        found = ["nothing was compared"]
        while True:
            until = self.schedule.now + 1.0
            while (when := self.schedule.next_at()) is not None and when <= until:
                self.step()
            self.schedule.now = max(until, self.schedule.now)
            self.promises.run_cheap_checks()
            daemon = self.daemon
            if (
                daemon is not None
                and daemon.is_enforcing
                and not self._late_calls
                and not self.hanging.under_way
            ):
                found = list(differences(self))
                if not found:
                    return
            if self.schedule.now > deadline:
                raise ViolationError(f"not as promised after a calm: {'; '.join(found[:4])}")

    def close(self) -> None:
        """End everything."""
        for each in (*self.former_daemons, *([self.daemon] if self.daemon is not None else [])):
            each.kill()
        self.daemon = None
        self.disk.remove()


async def _turn(self: TimeSlices) -> None:
    """Stands for ``TimeSlices.turn``: the slices of a simulated node end by the seed, not by a real clock."""
    node = SimulatedThreads.daemon.node
    if node.faults.interleaves():
        await self.now()


async def _now(self: TimeSlices) -> None:
    import asyncio

    await asyncio.sleep(SimulatedThreads.daemon.node.delays.mid_job())


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Replace the daemon's threads, and what measures real time, by simulated ones."""
    with (
        mock.patch.object(background, "Threads", SimulatedThreads),
        mock.patch.object(runtime_events, "threading", Threading),
        mock.patch.object(replacement, "POLL_S", 0.05),
        mock.patch.object(TimeSlices, "turn", _turn),
        mock.patch.object(TimeSlices, "now", _now),
    ):
        yield
