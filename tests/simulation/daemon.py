"""One life of the daemon: the real executor, interceptors and release, on simulated ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.cgroup.cfs_quota import KernelCpuGroups
from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.engine.node import Node as NodeRules
from proxy.executor.context import ExecutorOptions, NodeContext
from proxy.executor.node_executor import NodeExecutor, Ports
from proxy.frontends.cri.call import CriCallFlow, InterceptedCall
from proxy.model.errors import ConfigError
from proxy.model.options import TopologyOptions
from proxy.release.on_demand import RELEASE_RECORD
from proxy.release.service import Release
from proxy.succession.replacement import wait_quiet
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry
from tests.simulation.kernel import SimulatedFiles
from tests.simulation.kernel_ports import (
    SimulatedDisplacedTasks,
    SimulatedFences,
    SimulatedMachineEvents,
    SimulatedWrites,
)
from tests.simulation.loop import SimulatedLoop
from tests.simulation.runtime_client import RuntimeClient, SimulatedEvents
from tests.simulation.workers import SimulatedThreads, SteppedThread
from tests.testkit.captured_log import CapturedLog

if TYPE_CHECKING:
    from proxy.executor.former_calls import RelayedCall
    from proxy.model.machine import Machine
    from tests.simulation.kernel import SimulatedGroup
    from tests.simulation.node import SimulatedNode

STUCK_IN_CODE = "an exception escaped: "
GOAWAY_S, CLOSE_S = 1.0, 1.0
"""Seconds for clients to connect again, and for the jobs of workers, when another process takes over."""
FOLLOW_UP_S = 3.0
"""Seconds in which a daemon answers the kernel's report of a write, when no fault is in its way."""


class SimulatedDaemon:
    """The process of the daemon.

    Attributes:
        alive: Whether it lives.
        thread_pools: Its worker threads.
        listeners: Threads that it has started itself.
        is_handing_over: Another process is to replace it.
        successor: The process that has replaced it.
    """

    def __init__(
        self, node: SimulatedNode, *, former_calls: bool = True, relayed: Iterable[RelayedCall] = ()
    ) -> None:
        """Start the daemon on what the node holds.

        Args:
            node: The node.
            former_calls: An earlier daemon may have left calls in flight.
            relayed: Those that it still relays.
        """
        self.node = node
        self._former_calls = former_calls, relayed
        self.is_handing_over = False
        self.successor: SimulatedDaemon | None = None
        self.alive = True
        self.started_at = node.schedule.now
        self.thread_pools: list[SimulatedThreads] = []
        self.listeners: list[SteppedThread] = []
        self.logged = CapturedLog(levels=("warning", "error"))
        self.loop = SimulatedLoop(node.schedule, node.delays.lag, self._readable)
        self._pending = dict[int, Callable[[], bool]]()
        self._woken = set[int]()
        SimulatedThreads.daemon = self
        self.ledger = node.disk.open(node.kernel.full_machine.fingerprint, self)
        self.files = SimulatedFiles(node.kernel, self)
        self.cgroups = KernelCgroups(Path("/simulated"), node.kernel.version, self.files)
        self.executor: NodeExecutor = self.loop.enter(self._start)
        self.call_flow = CriCallFlow(self.executor)

    def _start(self) -> NodeExecutor:
        node, options = self.node, self.node.options
        rules = self.configured(node.kernel.machine)
        clock = self.loop.time
        executor = NodeExecutor(
            rules,
            self.cgroups,
            RuntimeClient(node, self),
            self.ledger,
            ExecutorOptions(
                call_timeout=node.call_timeout,
                settle_per_second=options.settle_per_second,
                reconcile_period=options.reconcile_period,
            ),
            Telemetry(self.logged, clock),
            clock,
            ports=self._ports,
        )
        former = executor.call_tracker.former_calls
        former.possible, relayed = self._former_calls
        former.expect(relayed)
        entries = dict(self.ledger.entries)
        executor.recovery.recover(entries)
        for begin in (executor.reconciler.run, executor.runtime_sync.run, executor.unit_properties.run):
            executor.run_always(begin)
        self.release = Release(executor)
        record = entries.get(RELEASE_RECORD)
        if record is not None:
            self.release.recover(record)
        return executor

    def configured(self, machine: Machine) -> NodeRules:
        """Return the node as the configuration has it, on a machine."""
        return NodeRules(machine, CpuTopology.of(machine), self.node.options.static, **self.node.rules)

    def reload(self) -> str:
        """Reload the configuration, as ``proxy.reload.steps`` does; returns why the node cannot follow it."""
        policy = self.executor.node_policy
        try:
            policy.reconfigured(self.configured(policy.configured.machine), TopologyOptions())()
        except ConfigError as error:
            return str(error)
        return ""

    def _ports(self, context: NodeContext) -> Ports:
        kernel, options = self.node.kernel, self.node.options
        writes = SimulatedWrites(kernel, self.wake, options.watch_limit) if options.watch_limit else None
        self.writes = writes
        kernel.on_write = writes.written if writes is not None else lambda path: None
        self.machine_events = SimulatedMachineEvents(self.wake)
        self._pending = {
            SimulatedWrites.FD: lambda: writes is not None and writes.pending,
            SimulatedMachineEvents.FD: lambda: self.machine_events.pending,
        }
        events = self.node.runtime.events = SimulatedEvents(self.node)

        def hardware(known: Machine) -> Machine | None:
            return None if known == kernel.machine else kernel.machine

        return Ports(
            hardware=hardware,
            cpu_groups=KernelCpuGroups(Path("/simulated"), kernel.version, self.files),
            machine_events=self.machine_events if options.uevents else None,
            displaced=SimulatedDisplacedTasks(kernel) if kernel.version == 1 else None,
            fences=SimulatedFences(self.files) if kernel.version == 2 else None,
            runtime_events=events,
            write_events=writes,
        )

    # -- what is readable ---------------------------------------------------------------------------------

    def wake(self, number: int) -> None:
        """A descriptor is readable."""
        if self.alive and number not in self._woken and number in self.loop.readers:
            self._woken.add(number)
            self.node.schedule.after(self.node.delays.report(), self._read, number)

    def _readable(self, number: int) -> None:
        """A descriptor is watched from now on."""
        if number in self._pending and self._pending[number]():
            self.wake(number)

    def _read(self, number: int) -> None:
        self._woken.discard(number)
        if not self.alive or number not in self.loop.readers or not self._pending[number]():
            return
        event = "cpuset written" if number == SimulatedWrites.FD else "uevent"
        self.node.schedule.count_event("notification", event)
        callback, args = self.loop.readers[number]
        self.loop.enter(callback, *args)
        self._readable(number)

    # -- calls of clients ---------------------------------------------------------------------------------

    def answered(self, call: InterceptedCall, status: int | None, message: bytes) -> None:
        """The answer of the runtime passes, or the call ends without one."""

        def both() -> None:
            if status == 0 and message:
                self.call_flow.response(call, message)
            call.decided = call.done = True
            self.call_flow.finished(call, status)

        self.loop.enter(both)

    # -- how it is ----------------------------------------------------------------------------------------

    @property
    def internal_errors(self) -> list[str]:
        """What went wrong within the daemon itself."""
        found = [STUCK_IN_CODE + message for message in self.loop.broken]
        if self.executor.telemetry.value(metrics.INTERNAL_ERRORS):
            found += [
                str(problem) for problem in self.executor.telemetry.problems() if "internal" in str(problem)
            ]
            found += found or [STUCK_IN_CODE + "an internal error was counted"]
        return found

    @property
    def busy(self) -> bool:
        """Whether some worker has something to do."""
        return any(pool.busy for pool in self.thread_pools)

    @property
    def is_enforcing(self) -> bool:
        """Whether it knows the node, and places containers."""
        executor = self.executor
        decides = self.alive and not self.call_flow.replaced
        return decides and executor.reconciled.is_set() and executor.store.mode.enforces

    def has_followed(self, group: SimulatedGroup, since: float) -> bool:
        """Return whether it has had the time to answer the report of a write, and nothing was in its way."""
        now, idle = self.node.schedule.now, not any(p.busy for p in self.thread_pools if p.name == "kernel")
        at_ease = now - max(since, self.started_at, group.refused_at) >= FOLLOW_UP_S
        return self.is_enforcing and idle and at_ease and SimulatedWrites.FD not in self._woken

    # -- its end ------------------------------------------------------------------------------------------

    async def hand_over(self, patience: float) -> None:
        """Let another process continue, as ``proxy.daemon`` does; calls that were forwarded end here.

        Args:
            patience: Seconds for which calls that place containers are waited for.
        """
        kubelet, executor = self.node.kubelet, self.executor

        def is_placing() -> bool:
            return kubelet.is_placing(self)

        def is_busy() -> bool:
            return is_placing() or bool(executor.state.inflight.calls)

        await wait_quiet(is_busy, patience)
        kubelet.awaits_successor = True
        await wait_quiet(is_placing, patience)
        quiet = await wait_quiet(is_busy, GOAWAY_S)
        former = executor.call_tracker.former_calls
        former.report_ends_to(self._report_call_end)
        relayed = self.call_flow.hand_over(
            lambda code, message: kubelet.refuse_undecided(self, code, message),
            lambda: [kubelet_call.call for kubelet_call in kubelet.open_at(self)],
            self._report_call_end,
        )
        await self.release.stop()
        await executor.close(handing_over=True)
        for part in (self.release, executor.reconciler, executor.runtime_sync, executor.call_tracker):
            part.close()
        await wait_quiet(lambda: self.busy, CLOSE_S)
        self.ledger.close()
        self.node.schedule.after(0.0, self.node.succeed, self, quiet, [*relayed, *former.relayed])

    def _report_call_end(self, name: str) -> None:
        """Report to the successor that a call is over."""
        self.node.schedule.after(self.node.delays.wire(), self._deliver_call_end, name)

    def _deliver_call_end(self, name: str) -> None:
        successor = self.successor
        if successor is None and self.alive:
            self._report_call_end(name)
        elif successor is not None and successor.alive:
            self.node.schedule.count_event("notification", f"{name} is over")
            successor.loop.enter(successor.executor.call_tracker.former_calls.over, name)

    def report_process_end(self) -> None:
        """The successor finds that this process has ended."""
        successor = self.successor
        if successor is not None and successor.alive:
            self.node.schedule.count_event("notification", "the former process has ended")
            successor.loop.enter(successor.executor.call_tracker.former_calls.all_over)

    def kill(self) -> None:
        """End the process at once."""
        self.alive = False
        self.loop.kill()
        self.ledger.close()
        if self.node.daemon in (None, self):
            self.node.kernel.on_write = lambda path: None
            self.node.runtime.events = None
        listeners, self.listeners = self.listeners, []
        for listener in listeners:
            listener.resume()

    def call(self, link: Any, serial: int, method: str, body: bytes) -> InterceptedCall:
        """Make an intercepted call."""
        return InterceptedCall(link, serial, f"/runtime.v1.RuntimeService/{method}", body)
