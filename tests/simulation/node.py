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
from tests.simulation.calm_node_checks import ALL_S, KERNEL_S, kernel_differences, other_differences
from tests.simulation.clock import Schedule
from tests.simulation.daemon import Daemon
from tests.simulation.disk import SimulatedDisk
from tests.simulation.disturbances import Disturbances
from tests.simulation.faults import LATE_S, Delays, Faults, Rates
from tests.simulation.hanging import HangingStarts
from tests.simulation.kernel import Kernel
from tests.simulation.kubelet import Kubelet
from tests.simulation.promises import Promises, ViolationError
from tests.simulation.runtime import RefusedError, SimulatedRuntime
from tests.simulation.workers import SimulatedThreads, Threading

if TYPE_CHECKING:
    from proxy.executor.former_calls import RelayedCall

DEPTH = 3
"""How deeply jobs may interrupt each other; further jobs continue without a break."""
REPLACED_S = (1.0, 5.0, 30.0)
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
        watches: How many cpusets the kernel watches; 0 if it watches none.
        events: Whether the runtime sends events.
        uevents: Whether the kernel reports CPUs that go.
        kept: CPUs below this number are never named by the scheduler, and never go.
        pods: How many pods there are at most.
        foreign: Whether other programs write cpusets; the same for the other disturbances.
    """

    machine: tuple[int, int, int, int]
    version: int
    static: bool = True
    watches: int = 1000
    events: bool = True
    uevents: bool = True
    settle_per_second: float = 10.0
    reconcile_period: float = 10.0
    kept: int = 2
    pods: int = 10
    foreign: bool = True
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
            watches=dice.choice((1000, 1000, 1000, 0)),
            events=dice.random() < 0.8,
            uevents=dice.random() < 0.8,
            settle_per_second=dice.choice((10.0, 10.0, 100.0)),
            reconcile_period=dice.choice((10.0, 10.0, 3.0)),
            pods=dice.choice((6, 10, 14)),
            foreign=dice.random() < 0.6,
            hotplug=dice.random() < 0.5,
            releases=dice.random() < 0.3,
            moves=dice.random() < 0.6,
            runtime_restarts=dice.random() < 0.6,
            reloads=dice.random() < 0.5,
            handovers=dice.random() < 0.6,
        )


class Node:
    """One node, from its start to the end of the simulation.

    Attributes:
        daemon: The daemon that lives now; None between two.
        formers: Those that were replaced, and still have calls to relay.
        lives: How many daemons were started.
        rules: What the configuration says about the node, in addition to the machine.
    """

    def __init__(self, seed: int, options: NodeOptions | None = None, rates: Rates | None = None) -> None:
        """Make a node; every detail of it follows from a seed.

        Args:
            seed: The seed.
            options: How the node is; drawn from the seed if None.
            rates: How often something goes wrong; drawn from the seed if None.
        """
        dice = random.Random(f"{seed} node")
        drawn, rate = NodeOptions.drawn(dice), Rates.drawn(dice)
        self.seed = seed
        self.options = options or drawn
        self.rules = dict(self.options.rules)
        self.call_timeout = 5.0
        self.hold_limit = 10.0 + 8 * self.call_timeout
        self.schedule = Schedule()
        self.faults = Faults(str(seed), rates or rate)
        self.delays = Delays(str(seed), self.faults)
        self.kernel = Kernel(self, regular_machine(*self.options.machine), self.options.version)
        self.promises = Promises(self)
        self.kernel.written = self.promises.written
        self.runtime = SimulatedRuntime(self)
        self.disk = SimulatedDisk(self)
        self.kubelet = Kubelet(self, str(seed))
        self.hanging = HangingStarts(self)
        self.disturbances = Disturbances(self, str(seed))
        self.daemon: Daemon | None = None
        self.formers: list[Daemon] = []
        self.lives = 0
        self._depth = 0
        self._delivered_at = 0.0
        self._late = 0
        self._dice = random.Random(f"{seed} middle")
        for level in ("", "/burstable", "/besteffort"):
            self._wide(f"kubepods{level}")

    def _wide(self, path: str) -> None:
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

    def effect(self, process: Daemon, effect_name: str) -> None:
        """A daemon is about to do something outside of itself: it may crash, or others may come first.

        Raises:
            CrashError: The process ends here.
        """
        if process is self.daemon and self.faults.crashes(within=self.promises.moves_under_way):
            self.crash(f"before {effect_name}")
        if self._depth < DEPTH and self.faults.interleaves():
            self.elapse(process, self.delays.within())

    def elapse_a_moment(self, process: Daemon) -> None:
        """Time passes in the middle of a call, now and then."""
        if self._depth < DEPTH and self.faults.interleaves():
            self.elapse(process, self.delays.within())

    def elapse(self, process: Daemon, seconds: float) -> None:
        """Let everything happen that comes within some seconds, while a thread of a daemon waits.

        Raises:
            CrashError: The daemon has ended meanwhile, and with it the thread that waited.
        """
        until, schedule = self.schedule.now + seconds, self.schedule
        if self._depth >= DEPTH:
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

    def deliver(self, work: Callable[..., object], *args: Any) -> None:
        """Make something arrive that keeps its order with all else that is delivered so."""
        self._delivered_at = max(self._delivered_at, self.schedule.now + self.delays.report())
        self.schedule.after(self._delivered_at - self.schedule.now, work, *args)

    def late(self, work: Callable[[], object]) -> None:
        """Make the runtime carry out something for which its caller does not wait any more."""
        self._late += 1

        def carry_out() -> None:
            self._late -= 1
            if self.runtime.up:
                with contextlib.suppress(RefusedError):
                    work()

        self.schedule.after(self.faults.dice.random() * LATE_S, carry_out)

    # -- lives --------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start a daemon."""
        self.lives += 1
        self.kubelet.waits = False
        self.schedule.event("start", str(self.lives))
        self.daemon = Daemon(self)

    def succeed(self, former: Daemon, quiet: bool, relayed: list[RelayedCall]) -> None:
        """Start the successor of a daemon that has handed over, and later end the former process."""
        if self.daemon is not former:
            return
        self.lives += 1
        text = f"{self.lives}, behind a {'quiet' if quiet else 'busy'} one with {len(relayed)} calls"
        self.schedule.event("start", text)
        self.formers.append(former)
        former.successor = self.daemon = Daemon(self, former_calls=not quiet, relayed=relayed)
        self.kubelet.waits = False
        self.schedule.after(self._dice.choice(REPLACED_S), self._end_former, former)

    def _end_former(self, former: Daemon) -> None:
        """End a process that was replaced; its successor finds its connection closed.

        A process that reports for an older one, which still relays, waits for it (``Daemon.finish_calls``).
        """
        if former not in self.formers:
            return
        if self.formers[0] is not former:
            self.schedule.after(self._dice.choice(REPLACED_S), self._end_former, former)
            return
        self.formers.remove(former)
        former.kill()
        self.kubelet.cut(former)
        self.schedule.after(self.delays.wire(), former.tell_end)

    def crash(self, reason: str) -> None:
        """End the daemon at once, and start another one later.

        Raises:
            CrashError: Always.
        """
        daemon = self.daemon
        assert daemon is not None
        self.schedule.event("crash", reason)
        self.daemon = None
        for each in (
            daemon,
            *self.formers,
        ):  # systemd ends all processes of a service whose main process ends
            each.kill()
            self.kubelet.cut(each)
        self.formers.clear()
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
        self.promises.often()
        self.promises.now_and_then()

    def calm(self) -> None:
        """Let nothing new happen, and check that every promise is met.

        Raises:
            ViolationError: A promise is broken.
        """
        self.schedule.note("calm")
        self.faults.calm = True
        self.disturbances.calm()
        began = self.schedule.now
        self._agree(kernel_differences, began + KERNEL_S)
        self._agree(self._all, began + ALL_S)
        self.promises.now_and_then()
        self.faults.calm = False
        self.schedule.note("calm is over")
        self.disturbances.begin()
        self.kubelet.go_on()

    def _all(self, node: Node) -> Iterator[str]:
        yield from kernel_differences(node)
        yield from other_differences(node)

    def _agree(self, differences: Callable[[Node], Iterator[str]], deadline: float) -> None:
        found = ["nothing was compared"]
        while True:
            until = self.schedule.now + 1.0
            while (when := self.schedule.next_at()) is not None and when <= until:
                self.step()
            self.schedule.now = max(until, self.schedule.now)
            self.promises.often()
            daemon = self.daemon
            if daemon is not None and daemon.in_step and not self._late and not self.hanging.under_way:
                found = list(differences(self))
                if not found:
                    return
            if self.schedule.now > deadline:
                raise ViolationError(f"not as promised after a calm: {'; '.join(found[:4])}")

    def close(self) -> None:
        """End everything."""
        for each in (*self.formers, *([self.daemon] if self.daemon is not None else [])):
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

    await asyncio.sleep(SimulatedThreads.daemon.node.delays.within())


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
