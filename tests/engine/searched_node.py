"""A node with its daemon as one value: engine state, tasks of the daemon, and cpusets of the kernel.

The state is the engine's, and every step of it is taken by ``proxy.engine``: ``handle``, the reservations,
and the steps of starts and of the sync of the runtime. Around it are plain values: calls of clients, tasks of
the daemon with the events that they wait for, jobs of the kernel worker, the queued and the durable records
of the ledger, requests of the daemon that are at the runtime, cgroups, and the cpusets that the runtime has
saved.

A node is copied before it is changed; the values in its fields are replaced, never changed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine import reservation_effects as to_do
from proxy.engine import reservation_events as seen
from proxy.engine.call_answers import Forward, ForwardStart, PrepareStart, ReserveFirst
from proxy.engine.call_events import (
    CallConfined,
    CallOrphaned,
    CallSent,
    OrphanEnded,
    ResendWanted,
    RuntimeSyncDue,
    RuntimeSyncStarted,
    SavedCpusLearned,
    StartRequested,
    UpdateEnded,
)
from proxy.engine.container_events import CpusAssigned, CpusNotFreed, CreateFailed, CreateResumed
from proxy.engine.handle import handle
from proxy.engine.inflight import InflightCall
from proxy.engine.node import Node
from proxy.engine.node_effects import (
    Change,
    CompareCpusets,
    NodeEffects,
    OrphanOver,
    PlanDecided,
    PutRecord,
    Record,
    WriteCpusets,
    WriteScope,
)
from proxy.engine.node_events import NodeEvent, ReservationCpusChanged
from proxy.engine.owners import ReservationCpus
from proxy.engine.reservation import step as reservation_step
from proxy.engine.reservation_state import Reservation, ReservationKind, restoration
from proxy.engine.runtime_sync_step import SyncStep, sync_step
from proxy.engine.start_step import StartStep, start_step
from proxy.engine.state import NodeState
from proxy.executor.reservation_records import MOVE_RECORD, MoveRecord, records_of
from proxy.model.idset import CpuSet, union
from proxy.model.workload import Container, Phase, Pool
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(1, 1, 3, 1)
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
ALL = MACHINE.online
NONE = CpuSet()
LIVE = (Phase.STARTING, Phase.RUNNING)
CONFINE_ATTEMPTS = 2
"""How often a create looks whether a start that hangs can be confined."""


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A call of a client.

    Attributes:
        pod: The pod of the call.
        method: A short name of the method.
        stage: ``daemon``: it is held; ``runtime``: it has been forwarded; ``made`` and ``set``: a start that
            hangs has made the cgroup, and has written it for the last time; ``answer``: the runtime has done
            it.
        target: The container, or its token.
        cpus: The cpuset that it carries to the runtime.
        inflight_call: The call as the engine records it, if it may write a cpuset.
        failed: Whether the runtime reports an error.
        gone: Whether its client has disconnected.
    """

    pod: str
    method: str
    stage: str
    target: str
    cpus: CpuSet | None = None
    inflight_call: InflightCall | None = None
    failed: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class DaemonTask:
    """A task of the daemon for a call, or of its own, and the event that it waits for.

    Attributes:
        name: ``create``, ``start``, ``settle`` or ``move``, and the pod.
        target: The container, or its token.
        waits_for: ``kernel``, ``ledger``, ``calls``, ``runtime``, ``pause``; ``due``: it can continue now.
        event: The event with which it continues.
        calls: The numbers of the calls that it waits for.
        cpus: The CPUs that those calls must not carry.
        reservation: The reservation that is carried out.
        effect: The effect of it that has an outstanding result.
        confine_attempts: How often it has checked a start that hangs.
        token: The name of the reservation.
    """

    name: str
    target: str
    waits_for: str = "due"
    event: seen.Event | None = None
    calls: tuple[int, ...] = ()
    cpus: CpuSet = NONE
    reservation: Reservation | None = None
    effect: to_do.Effect | None = None
    confine_attempts: int = 0
    token: str = ""


@dataclass(frozen=True, slots=True)
class KernelJob:
    """A job of the kernel worker: its containers, and the task that waits for it."""

    kind: str
    ids: tuple[str, ...] = ()
    task: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeRequest:
    """A request of the daemon to the runtime for a container: an update, or a query.

    Attributes:
        inflight_call: The update as the engine records it; None for a query.
        answered_cpus: The cpuset that the runtime has saved, once it has executed the request.
        task: The task that waits for it; empty if no task waits any more.
    """

    target: str
    task: str
    inflight_call: InflightCall | None = None
    answered_cpus: CpuSet | None = None


class SearchedNode:
    """The node."""

    __slots__ = (
        "abandoned_calls",
        "calls",
        "clock",
        "crashes",
        "durable",
        "faults",
        "groups",
        "hangs",
        "has_sharer_begun",
        "ids",
        "jobs",
        "last_number",
        "listing",
        "lists_left",
        "may_move",
        "owner_cpus",
        "phases",
        "postponed_writes",
        "queue",
        "reconciled",
        "reconciles_left",
        "remaining_calls",
        "requests",
        "saved_cpusets",
        "state",
        "syncs",
        "tasks",
        "unanswered_targets",
    )

    def __init__(self, left: Mapping[str, tuple[str, ...]], sequence: str) -> None:
        self.state = NodeState.empty(NODE)
        self.calls: Mapping[str, ClientCall] = {}
        self.tasks: Mapping[str, DaemonTask] = {}
        self.jobs: tuple[KernelJob, ...] = ()
        self.queue: tuple[tuple[str, Record | None], ...] = ()
        self.requests: tuple[RuntimeRequest, ...] = ()
        self.abandoned_calls: tuple[ClientCall | RuntimeRequest | NodeEvent, ...] = ()
        self.durable: Mapping[str, Record] = {}
        self.groups: Mapping[str, CpuSet] = {}
        self.saved_cpusets: Mapping[str, CpuSet] = {}
        self.phases: Mapping[str, Phase] = {}
        self.ids: Mapping[str, str] = {}
        self.remaining_calls = left
        self.listing: object = None
        self.postponed_writes: frozenset[str] = frozenset()
        self.unanswered_targets: frozenset[str] = frozenset()
        self.reconciled, self.has_sharer_begun = True, False
        self.hangs, self.syncs, self.may_move = sequence == "hang", sequence == "sync", sequence == "move"
        self.owner_cpus = CpuSet()
        self.faults = self.crashes = self.lists_left = self.reconciles_left = self.last_number = 0
        self.clock = 1000.0

    def copied(self) -> SearchedNode:
        new = SearchedNode.__new__(SearchedNode)
        for name in SearchedNode.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    # -- the engine and its effects -----------------------------------------------------------------------

    def handle(self, event: NodeEvent) -> NodeEffects:
        """Pass an event to the engine, and perform the immediate effects."""
        self.state, effects = handle(self.state, event)
        for effect in effects:
            kind = type(effect)
            if type(effect) is PutRecord:
                self.queue = (*self.queue, (effect.key, effect.record))
            elif type(effect) is Change:
                if effect.write_scope is WriteScope.ALL:
                    self.write_later(effect.after.containers)
                elif effect.write_scope is WriteScope.MOVED:
                    self.write_later(effect.moved)
            elif kind in (WriteCpusets, CompareCpusets):
                self.write_later(effect.ids)  # type: ignore[union-attr]
            elif type(effect) is OrphanOver:
                self.handle(OrphanEnded(effect.call, effect.phase))
        return effects

    def write_later(self, ids: Collection[str]) -> None:
        """Make the kernel worker write some containers, unless a call would undo it."""
        if not self.reconciled:
            self.postponed_writes |= frozenset(ids)
            return
        inflight = self.state.inflight
        some = tuple(i for i in ids if not inflight.is_awaited(i) or inflight.is_confined(i))
        if some:
            self.jobs = (*self.jobs, KernelJob("write", some))

    def track_call(self, target: str, carries: CpuSet, *, is_start: bool = False) -> InflightCall:
        self.last_number += 1
        call = InflightCall(self.last_number, target, carries, is_start, self.clock)
        self.handle(CallSent(call))
        return call

    def inflight_numbers(self) -> set[int]:
        return {call.number for calls in self.state.inflight.calls.values() for call in calls}

    # -- tasks --------------------------------------------------------------------------------------------

    def put_task(self, task: DaemonTask) -> None:
        self.tasks = {**self.tasks, task.name: task}

    def remove_task(self, task: DaemonTask) -> None:
        self.tasks = {name: other for name, other in self.tasks.items() if name != task.name}

    def continue_tasks(self) -> None:
        """Continue every task that can continue, and begin the sync requests that are due."""
        while True:
            there = self.inflight_numbers()
            ready = next(
                (
                    task
                    for task in self.tasks.values()
                    if task.waits_for == "due" or (task.waits_for == "calls" and there.isdisjoint(task.calls))
                ),
                None,
            )
            if ready is not None:
                self.resume(ready, ready.event if ready.waits_for == "due" else seen.InflightCompleted())
            elif not self.sync_runtime():
                return

    def resume(self, task: DaemonTask, event: seen.Event | None) -> None:
        if task.reservation is None:
            self.prepare_start(task)
        else:
            assert event is not None
            self.advance_reservation(task, event)

    def reserve(self, name: str, target: str, reservation: Reservation, token: str) -> None:
        """Begin a reservation."""
        self.advance_reservation(
            DaemonTask(name, target, reservation=reservation, token=token), seen.ReservationRequested()
        )

    def advance_reservation(self, task: DaemonTask, event: seen.Event) -> None:
        """Pass an event to a reservation, and perform its effects."""
        assert task.reservation is not None
        reservation, effects = reservation_step(task.reservation, event)
        task = replace(task, reservation=reservation, waits_for="", event=None, calls=())
        for effect in effects:
            task = self.perform_effect(task, reservation, effect)
        if reservation.is_over:
            self.remove_task(task)
            self.after_reservation(task, reservation)
        else:
            assert task.waits_for, f"{reservation.phase} waits for nothing"
            self.put_task(task)

    def perform_effect(self, task: DaemonTask, reservation: Reservation, effect: to_do.Effect) -> DaemonTask:
        """Perform an effect of a reservation, or begin to wait for it; return the waiting task."""
        match effect:
            case to_do.WithdrawPlacement():
                self.handle(CreateFailed(reservation.containers[0]))
            case to_do.RecordSoon():
                self.queue = (*self.queue, *self.records(task, reservation, CpuSet()).items())
            case to_do.ReserveCpus(cpus):
                self.handle(
                    ReservationCpusChanged(task.token, ReservationCpus(self.owner_of(reservation), cpus))
                )
            case to_do.UnreserveCpus():
                self.handle(ReservationCpusChanged(task.token, None))
            case to_do.AssignOwn(cpus, hold):
                placed = tuple(
                    changed_copy(c, placement=changed_copy(c.placement, exclusive=cpus))
                    for c in self.containers(reservation)
                )
                self.handle(
                    ReservationCpusChanged(
                        task.token, ReservationCpus(self.owner_of(reservation), hold), placed
                    )
                )
            case _ if isinstance(effect, to_do.WAITED):
                return replace(self.begin_wait(task, reservation, effect), effect=effect)
        return task

    def begin_wait(self, task: DaemonTask, reservation: Reservation, effect: to_do.Effect) -> DaemonTask:
        """Begin to wait for an effect."""
        state = self.state
        match effect:
            case to_do.AppendLedger(may_run_on):
                self.queue = (*self.queue, *self.records(task, reservation, may_run_on).items())
                return replace(task, waits_for="ledger")
            case to_do.AwaitInflight(cpus):
                limits = (
                    (c.id, state.desired_cpus(c))
                    for c in state.containers.values()
                    if state.uses_shared_cpus(c)
                )
                return self.wait_for_calls(task, state.inflight.exceeding(limits, cpus), cpus)
            case to_do.AwaitOwnInflight(cpus):
                own = (call for i in reservation.containers for call in state.inflight.of(i))
                return self.wait_for_calls(task, [call for call in own if not call.carries <= cpus], CpuSet())
            case to_do.Pause():
                return replace(task, waits_for="pause")
            case to_do.PlaceElsewhere(reason):
                return replace(task, event=self.place_elsewhere(task, reservation, reason), waits_for="due")
            case to_do.ReadCpusets(ids):
                return self.queue_kernel_job(task, "read", ids or reservation.containers)
            case to_do.WriteOwners():
                return self.queue_kernel_job(task, "owners", reservation.containers)
        assert isinstance(effect, to_do.WriteSharers)
        return self.queue_kernel_job(task, "sharers")

    def wait_for_calls(self, task: DaemonTask, calls: list[InflightCall], cpus: CpuSet) -> DaemonTask:
        """Wait for calls in flight."""
        return replace(
            task, waits_for="calls", calls=tuple(call.number for call in calls), cpus=cpus, confine_attempts=0
        )

    def queue_kernel_job(self, task: DaemonTask, kind: str, ids: tuple[str, ...] = ()) -> DaemonTask:
        self.jobs = (*self.jobs, KernelJob(kind, ids, task.name))
        return replace(task, waits_for="kernel")

    def owner_of(self, reservation: Reservation) -> str:
        return self.state.containers[reservation.containers[0]].owner

    def containers(self, reservation: Reservation) -> list[Container]:
        return [c for i in reservation.containers if (c := self.state.containers.get(i)) is not None]

    def records(
        self, task: DaemonTask, reservation: Reservation, may_run_on: CpuSet
    ) -> dict[str, Record | None]:
        containers = {c.id: c for c in self.containers(reservation)}
        return records_of(reservation, containers, task.token, may_run_on)

    def place_elsewhere(
        self, task: DaemonTask, reservation: Reservation, reason: to_do.AbortReason
    ) -> seen.Event:
        """Place a create on other CPUs."""
        self.last_number += 1
        effects = self.handle(CpusNotFreed(reservation.containers[0], reason, f"t-{self.last_number}"))
        decided = effects[-1] if effects else None
        if type(decided) is not PlanDecided or decided.plan.container is None:
            return seen.NoOtherPlacement()
        new, pod = decided.plan.container, task.name[-1]
        if pod in self.calls:
            self.calls = {**self.calls, pod: replace(self.calls[pod], target=new.id)}
        return seen.PlacedElsewhere(new.id, new.placement.exclusive)

    def after_reservation(self, task: DaemonTask, reservation: Reservation) -> None:
        """Continue after a reservation."""
        if reservation.kind is ReservationKind.MOVE:
            self.handle(RuntimeSyncDue(reservation.containers))
            self.handle(CpusAssigned(reservation.containers))
        elif reservation.kind is ReservationKind.START:
            self.continue_start(task, "" if reservation.is_committed else "its CPUs are not free")
        elif (call := self.calls.get("b")) is not None and call.method == "Create" and not call.gone:
            there = self.state.containers.get(reservation.containers[0])
            if reservation.is_committed and there is not None:
                self.follow_answer(call, self.handle(CreateResumed(there, is_reserved=True))[-1])
            else:
                self.end_call(call)

    def follow_answer(self, call: ClientCall, answer: object) -> None:
        """Act on a call as the engine has answered."""
        if type(answer) is Forward:
            call = replace(call, stage="runtime", cpus=answer.planned_cpus)
            if call.method == "Update":
                call = replace(call, inflight_call=self.track_call(call.target, answer.planned_cpus))
        elif type(answer) is ForwardStart:
            inflight_call = self.track_call(call.target, answer.carries, is_start=True)
            call = replace(call, stage="runtime", cpus=answer.carries, inflight_call=inflight_call)
        elif type(answer) is ReserveFirst:
            cpus = answer.container.placement.exclusive
            reservation = Reservation(ReservationKind.CREATE, (call.target,), cpus, ref="b")
            self.calls = {**self.calls, call.pod: call}
            self.reserve(f"create {call.pod}", call.target, reservation, call.target)
            return
        elif type(answer) is PrepareStart:
            self.put_task(DaemonTask(f"start {call.pod}", call.target))
        else:
            self.end_call(call)  # refused
            return
        self.calls = {**self.calls, call.pod: call}

    def end_call(self, call: ClientCall) -> None:
        """End a call; after an error, its client does not make its next call."""
        self.calls = {pod: other for pod, other in self.calls.items() if pod != call.pod}

    # -- starts -------------------------------------------------------------------------------------------

    def prepare_start(self, task: DaemonTask) -> None:
        """Take the next step before a start."""
        state, target = self.state, task.target
        step = start_step(state, target)
        if step is StartStep.READY:
            self.remove_task(task)
            self.continue_start(task, "")
            return
        container = state.containers[target]
        if step is StartStep.SEND:
            inflight_call = self.track_call(target, state.desired_cpus(container))
            self.requests = (*self.requests, RuntimeRequest(target, task.name, inflight_call))
            self.put_task(replace(task, waits_for="runtime"))
        elif step is StartStep.CLEAR:
            reservation = Reservation(
                ReservationKind.START, (target,), container.placement.exclusive, ref="b"
            )
            self.reserve(task.name, target, reservation, "")
        else:
            keep = state.desired_cpus(container) if step is StartStep.AWAIT_OTHERS else CpuSet()
            calls = tuple(call.number for call in state.inflight.conflicting_updates(target, keep))
            self.put_task(replace(task, waits_for="calls", calls=calls))

    def continue_start(self, task: DaemonTask, obstacle: str) -> None:
        """Continue a start that was prepared, or refuse it."""
        call = self.calls.get(task.name[-1])
        if call is not None and call.method == "Start" and call.stage == "daemon":
            event = StartRequested(task.target, is_prepared=not obstacle, obstacle=obstacle)
            self.follow_answer(call, self.handle(event)[-1])

    # -- making sets last ---------------------------------------------------------------------------------

    def sync_runtime(self) -> bool:
        """Begin to send the CPUs of a container that is due; return whether there was one."""
        if not (self.syncs and self.reconciled and "sync" not in self.tasks):
            return False
        target = next(iter(self.state.runtime.awaiting_sync), None)
        if target is None:
            return False
        self.handle(RuntimeSyncStarted(target))
        self.sync_container(target)
        return True

    def sync_container(self, target: str) -> None:
        step = sync_step(self.state, target)
        if step is SyncStep.AWAIT:
            self.handle(ResendWanted(target))
        if step in (SyncStep.AWAIT, SyncStep.NOTHING) or target in self.unanswered_targets:
            return
        call = None
        if step is SyncStep.SEND:
            call = self.track_call(target, self.state.desired_cpus(self.state.containers[target]))
        self.requests = (*self.requests, RuntimeRequest(target, "sync", call))
        self.put_task(DaemonTask("sync", target, "runtime"))

    # -- requests of the daemon to the runtime ------------------------------------------------------------

    def request_answered(self, at: int, *, ok: bool) -> None:
        """The answer to a request of the daemon arrives."""
        request = self.requests[at]
        self.requests = (*self.requests[:at], *self.requests[at + 1 :])
        task, target = self.tasks[request.task], request.target
        if request.inflight_call is not None:
            self.handle(UpdateEnded(request.inflight_call, request.inflight_call.carries if ok else None))
            if task.name == "sync":
                self.unanswered_targets = (
                    self.unanswered_targets if ok else self.unanswered_targets | {target}
                )
                self.remove_task(task)
            elif ok:
                self.put_task(replace(task, waits_for="due"))
            else:
                self.remove_task(task)
                self.continue_start(task, "the runtime refuses")
            return
        self.remove_task(task)
        is_new = target not in self.state.runtime.saved and not self.state.inflight.of(target)
        if ok and request.answered_cpus and is_new and target in self.state.containers:
            self.handle(SavedCpusLearned(target, request.answered_cpus))
            self.sync_container(target)

    def abandon_request(self, at: int) -> None:
        """The daemon does not wait for the answer to an update any more; the runtime may do it later."""
        request = self.requests[at]
        self.requests = (*self.requests[:at], *self.requests[at + 1 :])
        task = self.tasks[request.task]
        self.remove_task(task)
        assert request.inflight_call is not None
        self.handle(CallOrphaned(request.inflight_call, self.clock))
        if request.answered_cpus is None:
            self.abandoned_calls = (*self.abandoned_calls, replace(request, task=""))
        if task.name != "sync":
            self.continue_start(task, "the runtime does not answer")
        else:
            self.unanswered_targets |= {task.target}

    # -- the kernel worker and the ledger -----------------------------------------------------------------

    def do_kernel_job(self, denied: int = 0) -> None:
        """Do the next job of the kernel worker.

        Args:
            denied: The number of the error that writes get; 0 for none.
        """
        job, self.jobs = self.jobs[0], self.jobs[1:]
        there = self.state.containers
        if job.kind in ("look", "narrow"):
            self.confine(job)
            return
        if job.kind in ("sharers", "all"):
            everything = job.kind == "all"
            some = [c for c in there.values() if everything or c.placement.pool is not Pool.OWN]
            some.sort(key=lambda c: c.placement.pool is Pool.OWN)
        else:
            some = [c for i in job.ids if (c := there.get(i)) is not None]
        if job.kind == "read":
            found = [
                seen.CpusInEffect(c.id, self.groups[c.id], self.state.desired_cpus(c))
                for c in some
                if c.id in self.groups
            ]
            self.job_finished(job, seen.CpusetsRead(tuple(found)))
            return
        written, refused = self.write_cpusets(some, denied)
        if written:
            self.handle(RuntimeSyncDue(tuple(written)))
        if refused and job.kind == "report":
            self.jobs = (job, *self.jobs)  # the runtime's cpuset stays in effect until then
        self.job_finished(job, seen.CpusetsWritten(tuple(refused), tuple(each.text for each in refused)))

    def write_cpusets(self, some: list[Container], denied: int) -> tuple[list[str], list[seen.RefusedWrite]]:
        """Write the desired cpusets of containers; return the written and the refused ones."""
        written, refused = list[str](), list[seen.RefusedWrite]()
        for container in some:
            container_id, want = container.id, self.state.desired_cpus(container)
            confined = container.phase is Phase.CREATED and self.state.inflight.is_confined(container_id)
            if container_id not in self.groups or not (container.phase in LIVE or confined):
                continue
            if self.groups[container_id] != want:
                if denied:
                    refused.append(seen.RefusedWrite(container_id, denied, os.strerror(denied)))
                    continue
                self.groups = {**self.groups, container_id: want}
                written.append(container_id)
        return written, refused

    def job_finished(self, job: KernelJob, event: seen.Event) -> None:
        """Continue the task that waits for a job."""
        task = self.tasks.get(job.task)
        if task is not None and task.waits_for == "kernel":
            self.put_task(replace(task, waits_for="due", event=event))

    def confine(self, job: KernelJob) -> None:
        """Narrow the cgroups of starts that hang; starts that have a cgroup no longer block a reservation."""
        task = self.tasks.get(job.task)
        starts = [c for i in job.ids for c in self.state.inflight.of(i) if c.is_start]
        with_group = [call for call in starts if call.container_id in self.groups]
        if job.kind == "look":
            for call in starts:
                self.handle(CallConfined(call, call in with_group))
            ids = tuple(call.container_id for call in with_group)
            self.jobs = (*self.jobs, *([KernelJob("narrow", ids, job.task)] if ids else ()))
            return
        self.write_cpusets([c for i in job.ids if (c := self.state.containers.get(i)) is not None], 0)
        if task is not None and task.waits_for == "calls":
            passed = {call.number for call in with_group}
            self.put_task(replace(task, calls=tuple(n for n in task.calls if n not in passed)))

    def kernel_reports(self, target: str) -> None:
        """The kernel reports that the runtime has written a cpuset."""
        if self.state.inflight.is_confined(target):
            self.jobs = (*self.jobs, KernelJob("report", (target,)))

    def write_ledger(self) -> None:
        """Make all records durable that the ledger is to write."""
        durable = dict(self.durable)
        for key, record in self.queue:
            if record is None:
                durable.pop(key, None)
            else:
                durable[key] = record
        self.durable, self.queue = durable, ()
        for task in self.tasks.values():
            if task.waits_for == "ledger":
                self.put_task(replace(task, waits_for="due", event=seen.LedgerWritten()))

    def ledger_is_full(self) -> None:
        """The ledger cannot be written in time; its queue is kept."""
        for task in self.tasks.values():
            if task.waits_for == "ledger":
                self.put_task(replace(task, waits_for="due", event=seen.LedgerLate("no space left")))

    # -- time ---------------------------------------------------------------------------------------------

    def waiting_tasks(self) -> list[DaemonTask]:
        """Return the tasks that continue as time passes; no other task is active then."""
        if self.jobs or self.queue or any(request.task for request in self.requests):
            return []
        return [task for task in self.tasks.values() if task.waits_for in ("pause", "calls")]

    def pass_time(self, task: DaemonTask) -> None:
        """Let time pass for a task."""
        if task.waits_for == "pause":
            self.put_task(replace(task, waits_for="due", event=seen.PauseOver()))
            return
        there = [c for calls in self.state.inflight.calls.values() for c in calls if c.number in task.calls]
        if task.reservation is None:
            self.remove_task(task)
            self.continue_start(task, "the runtime is busy")
            return
        starts = tuple(call.container_id for call in there if call.is_start)
        if (
            isinstance(task.effect, to_do.AwaitInflight)
            and starts
            and task.confine_attempts < CONFINE_ATTEMPTS
        ):
            self.put_task(replace(task, confine_attempts=task.confine_attempts + 1))
            self.jobs = (*self.jobs, KernelJob("look", starts, task.name))
            return
        carried = CpuSet.from_bits(union(c.carries.bits for c in there))
        self.put_task(replace(task, waits_for="due", event=seen.InflightLate("busy", "", carried)))

    # -- a crash ------------------------------------------------------------------------------------------

    def restorations(
        self,
    ) -> tuple[dict[str, ReservationCpus], list[Container], list[tuple[str, Reservation]]]:
        """Read moves from the ledger: the held CPUs, the containers, and their restorations."""
        containers = [
            r for key, r in self.durable.items() if key.startswith(("c/", "i/")) and type(r) is Container
        ]
        holds, back = dict[str, ReservationCpus](), list[tuple[str, Reservation]]()
        for key, value in self.durable.items():
            if not key.startswith(MOVE_RECORD) or not isinstance(value, Mapping):
                continue
            record = MoveRecord.load(value, ALL)
            assert record is not None
            containers = [
                changed_copy(c, placement=changed_copy(c.placement, exclusive=record.previous))
                if c.id in record.containers
                else c
                for c in containers
            ]
            token = key.removeprefix(MOVE_RECORD)
            owner = next((c.owner for c in containers if c.id in record.containers), "")
            holds[token] = ReservationCpus(owner, record.cpus)
            back.append((token, restoration(record.containers, record.previous, record.cpus, "b")))
        return holds, containers, back
