"""What every part of the executor needs: the store, ports, clocks, tasks and reports.

The context does not depend on any part. The parts (``call_tracker``, ``reservations``, ``drift`` and so on)
take it and the other parts that they use; ``node_executor`` makes them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Set
from operator import attrgetter
from typing import cast

from msgspec import Struct, structs

from proxy.engine.call_events import RuntimeSyncDue
from proxy.engine.enforcement_state import Enforcement, canonical
from proxy.engine.node import Node
from proxy.engine.node_events import EnforcementChanged, EnforcementPaused, ModeChanged
from proxy.engine.state import NodeState
from proxy.executor.background import BackgroundTasks, Worker
from proxy.executor.bad_input import BadInput
from proxy.executor.cpuset_writer import CpusetWriter, WriteResult
from proxy.executor.decision_history import DecisionHistory
from proxy.executor.kernel_ports import Cgroups
from proxy.executor.ledger_writer import LedgerWriter
from proxy.executor.ports import Ledger
from proxy.executor.rejections import Rejections
from proxy.executor.runtime_ports import NO_QUIRKS, Runtime, RuntimeQuirks
from proxy.executor.store import NodeStore
from proxy.executor.worker_health import STUCK_S, Health
from proxy.model.mode import NodeMode
from proxy.model.pod_selection import ALL_PODS, PodSelection
from proxy.telemetry.port import Telemetry, subject_of

CANNOT_WRITE = "cannot write the cpuset of a container"
CANNOT_WRITE_GROUP = "cannot write a cgroup"


class NodeContext(BackgroundTasks):
    """The store of a node, and what works on it.

    Attributes:
        store: The state of the node. ``state``, ``inflight_calls``, ``reconciled``, ``reconcile_requested``,
            ``runtime_sync_due`` and ``ledger_writer`` are those of the store.
        enforcement_step_due: Set when running pods may have to be changed in steps.
        options: The options of the executor.
        clock: A monotonic clock, in seconds.
        wall_clock: Seconds since the epoch.
        runtime: The container runtime.
        kernel: The one thread that writes cpusets.
        cpuset_writer: Writes cpusets, in that thread.
        recorder: The one thread that writes the ledger.
        health: Watches workers.
        history: Decisions, for ``topoproxy explain``.
        bad_input: Counts and reports what is wrong with labels and annotations.
        rejections: Reports pods and containers that are rejected.
    """

    def __init__(
        self,
        node: Node,
        cgroups: Cgroups,
        runtime: Runtime,
        ledger: Ledger | None,
        options: ExecutorOptions,
        telemetry: Telemetry,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        """Start with an empty state, on the running event loop.

        Args:
            node: The machine and the rules at the start.
            cgroups: The cgroups of the kernel.
            runtime: The container runtime.
            ledger: Where placements are kept; None to keep none.
            options: The options of the executor.
            telemetry: Where to log, count and report problems.
            clock: A monotonic clock, in seconds.
            wall_clock: Seconds since the epoch, for display; ``clock`` if None.
        """
        self.wall_clock = wall_clock or clock
        super().__init__(telemetry)
        self.options = options
        self.clock = clock
        self.runtime = runtime
        self.recorder = Worker("ledger", self.report_internal_error)
        self.ledger_writer = LedgerWriter(
            ledger,
            self.recorder,
            telemetry,
            options.call_timeout,
        )
        empty = structs.replace(NodeState.empty(node), enforcement=canonical(Enforcement(options.selection)))
        self.store = store = NodeStore(empty, self.ledger_writer, self.report_internal_error, options.mode)
        self.inflight_calls = store.inflight_calls
        self.reconciled, self.reconcile_requested, self.runtime_sync_due = (
            store.reconciled,
            store.reconcile_requested,
            store.runtime_sync_due,
        )
        # When a stuck worker continues, its late writes may be outdated: so a reconcile is requested.
        self.health = Health(telemetry, self.reconcile_requested.set)
        self.enforcement_step_due = asyncio.Event()
        self.history = DecisionHistory(options.history)
        self.bad_input = BadInput(telemetry)
        self.rejections = Rejections(telemetry, clock, self.wall_clock)
        self.kernel = Worker("kernel", self.report_internal_error)
        self.cpuset_writer = CpusetWriter(cgroups, lambda: store.state, options.quirks)
        self.health.watch(self.kernel, STUCK_S, critical=True)
        self.health.watch(self.recorder, STUCK_S, critical=True)
        self._refused_writes: Set[str] = frozenset()
        self._options_changed = asyncio.Event()
        self._tokens = 0
        self._boot = f"{int(clock() * 1000):x}"

    # A property without a function in Python, as in the store.
    state = cast(
        "NodeState",
        property(attrgetter("store.state"), doc="The node as it is now; ``store.handle`` replaces it."),
    )

    def change_options(self, options: ExecutorOptions) -> None:
        """Replace the options; waits whose length an option defines use the new value."""
        self.options = options
        self.ledger_writer.limit = options.call_timeout
        self.history.resize(options.history)
        self._options_changed.set()
        self._options_changed = asyncio.Event()
        self.reconcile_requested.set()
        self.runtime_sync_due.set()

    async def pause(self, seconds: Callable[[ExecutorOptions], float]) -> None:
        """Wait for as long as the options say, even if they change during the wait."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (remaining_s := began + seconds(self.options) - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await self._options_changed.wait()

    def change_enforcement(self, mode: NodeMode, selection: PodSelection) -> None:
        """Apply the plan to other pods from now on: new ones at once, running ones in steps.

        Args:
            mode: Enforce or observe.
            selection: The pods that enforce selects.
        """
        if mode is not self.store.mode and not self.store.mode.in_release:
            self.store.handle(ModeChanged(mode))
        self.store.handle(EnforcementChanged(selection))
        self.enforcement_step_due.set()

    def pause_enforcement(self, *, paused: bool) -> None:
        """Begin no further step on running pods, or continue."""
        self.store.handle(EnforcementPaused(paused))
        self.enforcement_step_due.set()

    def token(self, kind: str) -> str:
        """Return a name for a container or sandbox that has no id at the runtime yet."""
        self._tokens += 1
        return f"{kind}-{self._boot}-{self._tokens}"

    def sync_later(self, *ids: str) -> None:
        """Send the CPUs of some containers to the runtime later."""
        self.store.handle(RuntimeSyncDue(ids))

    def report_errors(self, done: WriteResult, *, is_complete: bool = False) -> None:
        """Report cpusets that could not be written, and resolve the reports of those written since.

        Args:
            done: The result of writing cpusets.
            is_complete: Whether it wrote all containers.
        """
        containers, refused = self.state.containers, done.refused.keys()
        ended = (self._refused_writes if is_complete else self._refused_writes & {*done.written}) - refused
        for container_id in ended:
            self.telemetry.resolved(CANNOT_WRITE, containerID=container_id)
        self._refused_writes = (self._refused_writes - ended) | refused
        if is_complete and not (done.errors or done.notes):
            self.telemetry.resolved(CANNOT_WRITE_GROUP)
        for container_id, error in done.refused.items():
            which = subject_of(containers, container_id)
            self.telemetry.problem(CANNOT_WRITE, **which, err=error)
        known = {str(error) for error in done.refused.values()}
        for failure in done.errors:
            if failure not in known:
                self.telemetry.problem(CANNOT_WRITE_GROUP, reason=failure)

    def forget_errors(self) -> None:
        """Remove the problems of cpusets and groups that are no longer written: the node was released."""
        for container_id in self._refused_writes:
            self.telemetry.forget(CANNOT_WRITE, containerID=container_id)
        self._refused_writes = frozenset()
        self.telemetry.forget(CANNOT_WRITE_GROUP)


class ExecutorOptions(Struct, frozen=True):
    """The options of the executor.

    Attributes:
        mode: The mode of the node at the start: enforce, or only observe.
        refuse_on_error: Refuse a create that could not be decided, instead of forwarding it unchanged.
        call_timeout: Seconds that one wait inside a held call may take.
        settle_per_second: For how many moved containers a second the cpuset is sent to the runtime, so that
            it lasts; 0 for none.
        reconcile_period: Seconds between reconciles with the runtime and the kernel.
        history: How many decisions about removed containers and refusals are kept.
        quirks: How runtimes differ.
        selection: The pods that mode enforce selects at the start.
        pods_per_step, step_period: How many running pods are changed together when the mode or the selection
            changes, and the seconds between the beginnings of two such steps.
    """

    mode: NodeMode = NodeMode.ENFORCE
    refuse_on_error: bool = False
    call_timeout: float = 5.0
    settle_per_second: float = 10.0
    reconcile_period: float = 10.0
    history: int = 500
    quirks: RuntimeQuirks = NO_QUIRKS
    selection: PodSelection = ALL_PODS
    pods_per_step: int = 1
    step_period: float = 1.0
