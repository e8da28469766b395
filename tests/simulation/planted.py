"""Faults of the daemon, planted on purpose: each breaks a promise, and the simulation must find it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.ledger.file_ledger import FileLedger
from proxy.calls.call_flow import CallFlow
from proxy.engine import reservation_effects as to_do
from proxy.engine.enforcement import applies_to
from proxy.engine.node_events import NodePolicyRead
from proxy.engine.reservation_events import LedgerWritten
from proxy.executor import cpuset_writer, reconciler
from proxy.executor.call_tracker import CallTracker
from proxy.executor.confinement import NO_WAIT, Confinement
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.cpuset_writer import CpusetWriter, WriteResult
from proxy.executor.create_decisions import CreateDecisions
from proxy.executor.drift import detection
from proxy.executor.drift.detection import Drift
from proxy.executor.former_calls import FormerCalls
from proxy.executor.ledger_writer import LedgerWriter
from proxy.executor.machine.hotplug import Hotplug
from proxy.executor.node_policy_sync import NodePolicySync
from proxy.executor.owner_moves import OwnerMoves
from proxy.executor.reservations import Reservations
from proxy.executor.runtime_sync import RuntimeSync
from proxy.frontends.cri.call import InterceptedCall
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyOptions
from proxy.release import service
from proxy.release.kernel import widen_cpusets
from tests.simulation.kernel import SimulatedFiles

Patches = Iterator[tuple[Any, str, Any]]
FAULT_EVERY = 40
"""One in this many is affected if a fault would be too easy to find, or would stop everything else."""


def _nothing(*_args: Any, **_more: Any) -> None:
    """Do nothing."""


async def _no_work(*_args: Any, **_more: Any) -> None:
    """Do nothing."""


def read_back_skipped() -> Patches:
    """A cpuset counts as written although the kernel holds another value."""
    write = SimulatedFiles.write_if_different

    def write_if_different(
        files: Any, paths: Any, name: str, line: bytes, known: Any = None, should_continue: Any = None
    ) -> Any:
        held = write(files, paths, name, line, known, should_continue or (lambda: True))
        both = zip(paths, held, strict=True)
        return [b"\n" if before is None and files.is_group(path) else before for path, before in both]

    yield SimulatedFiles, "write_if_different", write_if_different
    yield KernelCgroups, "_verify_written", _nothing


def shrink_skipped() -> Patches:
    """An owner is forwarded without a write of the containers that share."""
    yield CpusetWriter, "write_pools", lambda cpuset_writer: WriteResult()


def abort_forgotten() -> Patches:
    """The placement of a create that failed stays."""
    yield ContainerLifecycle, "failed", _nothing


def late_answer_ignored() -> Patches:
    """A call without an answer counts as over at once, although the runtime may carry it out."""
    yield (
        CallTracker,
        "mark_orphaned",
        lambda call_tracker, call: call_tracker._context.inflight_calls.complete(call),
    )


def calls_in_flight_ignored() -> Patches:
    """A create does not wait for calls that carry wider cpusets."""

    async def wait(*_args: Any) -> Any:
        return NO_WAIT

    yield Confinement, "wait", wait


def ledger_after_forward() -> Patches:
    """A create is forwarded before its record is in the ledger."""

    async def append(ledger_writer: Any, records: Mapping[str, Any], *, durable: bool = False) -> Any:
        for key, value in records.items():
            ledger_writer.put(key, value)
        return LedgerWritten()

    yield LedgerWriter, "append", append


def record_lost() -> Patches:
    """The ledger loses a record now and then."""
    write, written = FileLedger._write, [0]

    def lossy(ledger: Any, taken: Mapping[str, bytes | None]) -> None:
        written[0] += 1
        write(ledger, dict(list(taken.items())[1:]) if written[0] % FAULT_EVERY == 0 else taken)

    yield FileLedger, "_write", lossy


def hotplug_dropped() -> Patches:
    """The daemon does not look at the machine."""
    yield Hotplug, "reread", _no_work


def repair_skipped() -> Patches:
    """What another program writes stays."""
    yield CpusetWriter, "write_all", lambda cpuset_writer, skip=(): WriteResult()
    yield Drift, "compare_soon", _nothing


def call_forgotten() -> Patches:
    """A call is held without end now and then."""
    release, released = InterceptedCall.release, [0]

    def forgetful(call: Any, body: bytes | None = None, suffix: bytes = b"") -> None:
        released[0] += 1
        if released[0] % FAULT_EVERY:
            release(call, body, suffix)

    yield InterceptedCall, "release", forgetful


def exception_escapes() -> Patches:
    """A removal raises an exception."""

    def removed(*_args: Any) -> None:
        raise ValueError("planted")

    yield ContainerLifecycle, "removed", removed


def sync_skipped() -> Patches:
    """The runtime is not sent the cpusets of containers that have moved."""

    async def sync(*_args: Any) -> bool:
        return False

    yield RuntimeSync, "_sync", sync


def move_forgotten() -> Patches:
    """A move that a crash has interrupted is not put back."""
    yield OwnerMoves, "resume", _nothing


def moved_cpus_not_held() -> Patches:
    """The CPUs of an owner that moves are not held until it has left them."""
    perform = Reservations._perform

    def hasty(reservations: Any, effect: Any, one: Any, run: Any) -> None:
        if not isinstance(effect, to_do.ReserveCpus):
            perform(reservations, effect, one, run)

    yield Reservations, "_perform", hasty


def reload_undone() -> Patches:
    """The answer to a create undoes what a reload has changed since the last decision about one."""
    created, place = ContainerLifecycle.created, CreateDecisions.place
    nodes: dict[int, Any] = {}

    def placed(creates: Any, *args: Any) -> Any:
        nodes[id(creates._context)] = creates._context.state.node
        return place(creates, *args)

    def answered(lifecycle: Any, *args: Any) -> None:
        created(lifecycle, *args)
        context = lifecycle._context
        node = nodes.get(id(context), context.state.node)
        if node.machine is context.state.node.machine:
            context.store.handle(NodePolicyRead(node, TopologyOptions(), None, None))

    yield CreateDecisions, "place", placed
    yield ContainerLifecycle, "created", answered
    yield NodePolicySync, "refresh", _no_work


def nothing_given_back() -> Patches:
    """A release leaves the containers as they are."""

    def give(cpuset_writer: Any, state: Any, targets: Any, pods: Any, planned: Any) -> Any:
        return widen_cpusets(cpuset_writer, state, (), pods, planned)

    yield service, "widen_cpusets", give


def held_calls_kept() -> Patches:
    """A daemon that is replaced continues with the calls that it holds."""
    hand_over = CallFlow.hand_over

    def keep(flow: Any, refuse_undecided: Any, *others: Any) -> Any:
        held, flow._tasks = flow._tasks, set()
        try:
            return hand_over(flow, _nothing, *others)
        finally:
            flow._tasks = held

    yield CallFlow, "hand_over", keep


def relayed_calls_forgotten() -> Patches:
    """A daemon does not know which calls its predecessor still relays."""
    yield FormerCalls, "expect", _nothing


def relayed_sandboxes_forgotten() -> Patches:
    """A daemon does not know which sandboxes are made by calls that its predecessor still relays."""
    yield FormerCalls, "sandboxes", frozenset()


def written_while_released() -> Patches:
    """Reconciles repair cpusets also while the node is released."""

    def applies(state: Any, pod: Any) -> bool:
        return state.mode is NodeMode.RELEASED or applies_to(state, pod)

    def is_paused(cpuset_writer: Any) -> bool:
        mode = cpuset_writer._state().mode
        return mode.in_release and mode is not NodeMode.RELEASED

    yield CpusetWriter, "_is_paused", is_paused
    for module in (cpuset_writer, reconciler, detection):
        yield module, "applies_to", applies


PLANTED: dict[str, Callable[[], Patches]] = {
    fault.__name__: fault
    for fault in (
        read_back_skipped, shrink_skipped, abort_forgotten, late_answer_ignored, calls_in_flight_ignored,
        ledger_after_forward, record_lost, hotplug_dropped, repair_skipped, call_forgotten, exception_escapes,
        sync_skipped, move_forgotten, moved_cpus_not_held, reload_undone, nothing_given_back,
        held_calls_kept, relayed_calls_forgotten, relayed_sandboxes_forgotten, written_while_released,
    )
}  # fmt: skip


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault; none if the name is empty."""
    with contextlib.ExitStack() as stack:
        for where, method, instead in PLANTED[name]() if name else ():
            stack.enter_context(mock.patch.object(where, method, instead))
        yield
