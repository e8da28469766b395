"""Reservations: the one way in which a container gets exclusive CPUs, as a pure state machine.

Theory of operation. ``step`` takes a reservation and an event, and returns the next reservation and the
effects to perform, in order. It uses no clock, no kernel and no node: the executor performs the effects
(``proxy.executor.reservations``), and their results come back as events. An effect whose result is awaited is
always the last one, so at most one result is outstanding.

    kind         used by                        taken in the state     recorded before the barrier
    CREATE       CreateContainer of an owner    by its decision        yes; a failure aborts
    START        StartContainer of an owner     by its create          -
    REPLACEMENT  CPUs in place of offline ones  by ``ReserveCpus``        -
    NARROW       CreateContainer that hooks     by its decision        yes; a failure is reported
                 narrow, and that owns nothing
    MOVE         a running owner                by ``ReserveCpus``        yes; a failure aborts

    REQUESTED -> RECORDING -> WAITING -> SHRINKING --free-->  see below
                     ^                    |  ^   |
                     |                    v  |   v
                     |               PAUSING   READING --free-->  see below
                     |                           |
                     +-------- PLACING <---------+ not free, CREATE: at most ``MAX_OTHER_PLACEMENTS`` times

    free: CREATE, START   COMMITTED
          REPLACEMENT     SECURING -> HANDING_OVER -> COMMITTED
          MOVE            DRAINING -> MOVING -> CHECKING -> CONFIRMING -> COMMITTED

The barrier is WAITING to READING. It waits for calls in flight that could put another container onto the CPUs
(WAITING). Then the cpuset of every container that shares CPUs is written, even if no plan moves that
container: another create for the same owner may still be under way, and another program may have written a
cgroup (SHRINKING). Writes that may succeed a moment later are repeated (PAUSING, ``retry_pause``). If the
kernel refused writes, the cpusets in the kernel are read (READING): only a container that still runs on the
reserved CPUs prevents the reservation. A reservation can abort from any state of the barrier: a CREATE
withdraws its placement, a REPLACEMENT and a MOVE release the CPUs that they hold, and the containers that had
left these CPUs get them back.

After the barrier, a REPLACEMENT is written to the ledger (SECURING), and after that assigned to the owner in
the state and in the kernel (HANDING_OVER). The order matters: the next daemon, if it found no record, would
give the CPUs to the pools while the owner runs on them.

After the barrier of a MOVE, the containers are placed on the new CPUs in the state, and their old CPUs are
held (``AssignOwn``). The move waits for calls in flight for the containers that carry other CPUs (DRAINING).
Then the cpusets of the containers are written (MOVING) and read back (CHECKING), and the ledger records the
new placement (CONFIRMING). The hold on the old CPUs is released last, so other containers never run on CPUs
that the owner may still be on. The runtime and systemd are updated afterwards, off the critical path, as
after every write of a cpuset.

From DRAINING on, a move aborts through a restoration, which takes the same steps back to the old CPUs. The
restoration is repeated, with growing pauses, until it succeeds or the containers have exited. It first writes
the record of the move again, because the record of the new placement may still become durable late:

    RERECORDING -> RESTORING -> REWRITING -> RECHECKING -> UNRECORDING -> ABORTED
      ^  |             |            |             |             |
      |  v             v            v             v             |
      +--+-------- BACKING_OFF <----+-------------+-------------+

After a crash. The write-ahead record of a move names the old and the new CPUs, and is deleted in the step
that makes the new placement durable. If the next daemon finds this record, the old placement counts, whatever
else the ledger contains: both sets of CPUs are kept free, and ``restoration`` returns the reservation that
moves the containers back. If it finds none, the placement in the ledger counts, and the containers run on it.

``ClientDisconnected`` only prevents a create from being placed elsewhere. ``ContainersExited`` ends a
REPLACEMENT or a MOVE, because no container runs on the CPUs any more. ``PlanNoLongerApplied`` ends them, too:
nothing is written for the containers until the plan is applied again, and then they get their old CPUs.
``Interrupted`` (an effect failed unexpectedly) and ``Cancelled`` (the daemon is stopping) release the CPUs of
a REPLACEMENT. The CPUs of CREATE and START are released by the caller, which handles every failure of a call
alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from proxy.engine import reservation_effects as effects
from proxy.engine import reservation_events as events
from proxy.engine.reservation_effects import AbortReason, Effect
from proxy.engine.reservation_state import FOR_OWNERS, Reservation, ReservationKind, ReservationPhase
from proxy.engine.write_conflicts import MAX_OTHER_PLACEMENTS, WriteAction, action_for, retry_pause
from proxy.model.backoff import Backoff
from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet

RESTORE = Backoff(0.1, 30.0)
"""Seconds until a restoration is tried again."""
NOT_WRITTEN = "cannot write a cgroup"
NOT_BACK = "cannot move an owner back"
REFUSED = "the kernel refuses to move another container off them"
CONTESTED = "the cpuset of another container is written by another program"
"""Messages for a client: they name no container of another pod."""
_INTERNAL = "internal error"


class UnexpectedEventError(TopoproxyError):
    """A reservation received an event that it does not wait for: a bug in the executor."""


_Phase, _Kind = ReservationPhase, ReservationKind
RECORDED = (_Kind.CREATE, _Kind.NARROW, _Kind.MOVE)
"""The kinds that are recorded in the ledger first."""
_TOWARDS = (_Phase.DRAINING, _Phase.MOVING, _Phase.CHECKING, _Phase.CONFIRMING)
Step = tuple[Reservation, tuple[Effect, ...]]


def step(reservation: Reservation, event: events.Event) -> Step:
    """Return the reservation after an event, and the effects to perform.

    Once a reservation is over, events have no effect.

    Raises:
        UnexpectedEventError: The reservation does not wait for such an event.
    """
    if reservation.is_over:
        return reservation, ()
    if isinstance(event, events.ClientDisconnected):
        return structs.replace(reservation, client_disconnected=True), ()
    at_any_time = _AT_ANY_TIME.get(type(event))
    if at_any_time is not None:
        return at_any_time(reservation)
    handle = _TRANSITIONS.get((reservation.phase, type(event)))
    if handle is None:
        raise UnexpectedEventError(
            f"a reservation of kind {reservation.kind} does not expect {type(event).__name__}"
            f" while it is {reservation.phase}"
        )
    return handle(reservation, event)


def _to(reservation: Reservation, phase: ReservationPhase, *performed: Effect, **changes: Any) -> Step:
    return structs.replace(reservation, phase=phase, **changes), performed


# -- the barrier --------------------------------------------------------------------------------------------


def _requested(reservation: Reservation, event: events.ReservationRequested) -> Step:
    reserve = (effects.ReserveCpus(reservation.cpus),) if reservation.kind in FOR_OWNERS else ()
    if reservation.kind not in RECORDED:
        return _to(reservation, _Phase.WAITING, *reserve, effects.AwaitInflight(reservation.cpus))
    may_run_on = reservation.cpus if reservation.kind is _Kind.MOVE else CpuSet()
    return _to(reservation, _Phase.RECORDING, *reserve, effects.AppendLedger(may_run_on))


def _recorded(reservation: Reservation, event: events.LedgerWritten) -> Step:
    if reservation.kind is _Kind.NARROW:
        return _to(reservation, _Phase.COMMITTED, effects.Commit())
    return _to(reservation, _Phase.WAITING, effects.AwaitInflight(reservation.cpus))


def _unrecorded(reservation: Reservation, event: events.LedgerLate | events.LedgerRejected) -> Step:
    if reservation.kind is _Kind.NARROW:
        report = effects.ReportProblem("cannot record what hooks request", event.cause)
        return _to(reservation, _Phase.COMMITTED, report, effects.Commit())
    return _not_free(
        reservation, AbortReason(f"cannot record the placement: {event.cause}", reservation.cpus, final=True)
    )


def _completed(reservation: Reservation, event: events.InflightCompleted) -> Step:
    return _to(reservation, _Phase.SHRINKING, effects.StartDeadline(), effects.WriteSharers(), tries=0)


def _inflight_late(reservation: Reservation, event: events.InflightLate) -> Step:
    return _not_free(reservation, AbortReason(event.message, event.cpus, public=event.public))


def _shrunk(reservation: Reservation, event: events.CpusetsWritten) -> Step:
    reservation = structs.replace(
        reservation, tries=reservation.tries + 1, refused=event.refused, errors=event.errors
    )
    seconds = retry_pause(reservation.tries, [refused.errno for refused in event.refused])
    if seconds is not None:
        return _to(reservation, _Phase.PAUSING, effects.Pause(seconds))
    if not event.errors:
        return _free_unless_contested(reservation, event.contested)
    reconcile = effects.RequestReconcile()  # the machine may have changed, or the container has exited
    if event.group_errors:
        # It is unknown which containers in these cgroups are on which CPUs.
        reason = AbortReason(event.group_errors[0], reservation.cpus, final=True, public=REFUSED)
        return _with((reconcile,), _not_free(reservation, reason))
    ids = tuple(refused.container_id for refused in event.refused)
    return _to(reservation, _Phase.READING, reconcile, effects.ReadCpusets(ids))


def _with(first: tuple[Effect, ...], later: Step) -> Step:
    return later[0], (*first, *later[1])


def _paused(reservation: Reservation, event: events.PauseOver) -> Step:
    return _to(reservation, _Phase.SHRINKING, effects.WriteSharers())


def _read(reservation: Reservation, event: events.CpusetsRead) -> Step:
    in_the_way = {
        cpuset.container_id for cpuset in event.cpusets if (cpuset.cpus - cpuset.planned) & reservation.cpus
    }
    if not in_the_way:
        reports = tuple(effects.ReportProblem(NOT_WRITTEN, text) for text in reservation.errors)
        return _with(reports, _free_unless_contested(reservation, event.contested))
    refused = [refused for refused in reservation.refused if refused.container_id in in_the_way]
    final = any(action_for(each.errno) is WriteAction.REFUSE for each in refused)
    held = CpuSet.union_of(cpuset.cpus for cpuset in event.cpusets)
    return _not_free(reservation, AbortReason(refused[0].text, held, final, public=REFUSED))


def _free_unless_contested(reservation: Reservation, contested: tuple[events.ContestedCpus, ...]) -> Step:
    if not contested:
        return _free(reservation)
    cpus = CpuSet.union_of(each.cpus for each in contested)
    message = f"another program keeps writing the cpuset of {contested[0].ref}: see drift in status"
    return _not_free(reservation, AbortReason(message, cpus, public=CONTESTED))


def _timed_out(reservation: Reservation, event: events.TimedOut) -> Step:
    message = "the kernel does not take the CPUs of other containers in time"
    return _not_free(reservation, AbortReason(message, reservation.cpus, final=True))


def _free(reservation: Reservation) -> Step:
    """Continue once no other container runs on the CPUs."""
    end = effects.EndDeadline()
    if reservation.kind is _Kind.REPLACEMENT:
        return _to(reservation, _Phase.SECURING, end, effects.AppendLedger())
    if reservation.kind is _Kind.MOVE:
        assign = effects.AssignOwn(reservation.cpus, reserved=reservation.previous)
        return _to(reservation, _Phase.DRAINING, end, assign, effects.AwaitOwnInflight(reservation.cpus))
    return _to(reservation, _Phase.COMMITTED, effects.Commit())


def _not_free(reservation: Reservation, reason: AbortReason) -> Step:
    """If the CPUs cannot be freed, place a create elsewhere (a limited number of times), or abort."""
    can_place_again = reservation.kind is _Kind.CREATE and not (
        reason.final or reservation.client_disconnected
    )
    if can_place_again and reservation.alternatives < MAX_OTHER_PLACEMENTS:
        performed = effects.EndDeadline(), effects.PlaceElsewhere(reason)
        return _to(reservation, _Phase.PLACING, *performed, reason=reason)
    return _abort(structs.replace(reservation, reason=reason))


def _placed(reservation: Reservation, event: events.PlacedElsewhere) -> Step:
    changed = structs.replace(
        reservation,
        containers=(event.container_id,),
        cpus=event.cpus,
        alternatives=reservation.alternatives + 1,
        refused=(),
        errors=(),
        reason=None,
    )
    return _to(changed, _Phase.RECORDING, effects.AppendLedger())


def _nowhere_else(reservation: Reservation, event: events.NoOtherPlacement) -> Step:
    return _abort(reservation)


def _withdrawn(reservation: Reservation, event: events.PlacementWithdrawn) -> Step:
    return _to(reservation, _Phase.ABORTED, effects.Abort(), reason=None)


def _abort(reservation: Reservation) -> Step:
    """Abort a reservation whose containers have not been placed on the CPUs."""
    undo: tuple[Effect, ...] = ()
    if reservation.kind is _Kind.CREATE:
        undo = (effects.WithdrawPlacement(),)
    elif reservation.kind is _Kind.REPLACEMENT:
        undo = (effects.UnreserveCpus(),)
        if reservation.phase is _Phase.SECURING:
            undo = effects.RecordSoon(), effects.UnreserveCpus()
    elif reservation.kind is _Kind.MOVE:
        undo = effects.RecordSoon(), effects.UnreserveCpus()
    return _to(reservation, _Phase.ABORTED, *undo, effects.Abort(reservation.reason))


# -- a replacement, once it is free -------------------------------------------------------------------------


def _secured(reservation: Reservation, event: events.LedgerWritten) -> Step:
    return _to(reservation, _Phase.HANDING_OVER, effects.AssignReplacement(), effects.WriteOwners())


def _handed_over(reservation: Reservation, event: events.CpusetsWritten) -> Step:
    # A refused write leaves drift, which is repaired later.
    reports = tuple(effects.ReportProblem(NOT_WRITTEN, text) for text in event.errors)
    return _to(reservation, _Phase.COMMITTED, *reports, effects.Commit())


# -- a move, once its target is free ------------------------------------------------------------------------


def _drained(reservation: Reservation, event: events.InflightCompleted) -> Step:
    return _to(reservation, _Phase.MOVING, effects.StartDeadline(), effects.WriteOwners())


def _own_inflight_late(reservation: Reservation, event: events.InflightLate) -> Step:
    return _restore(reservation, event.message)


def _moved(reservation: Reservation, event: events.CpusetsWritten) -> Step:
    if event.refused:
        return _restore(reservation, event.refused[0].text)
    return _to(reservation, _Phase.CHECKING, effects.ReadCpusets())


def _checked(reservation: Reservation, event: events.CpusetsRead) -> Step:
    if not _are_on_target(reservation, event):
        return _restore(reservation, f"the kernel does not keep it on CPUs {reservation.cpus}")
    return _to(reservation, _Phase.CONFIRMING, effects.EndDeadline(), effects.AppendLedger())


def _are_on_target(reservation: Reservation, event: events.CpusetsRead) -> bool:
    """Return whether all containers of a move run only on its target CPUs, or nowhere.

    A container whose cpuset could not be read may run anywhere. So may one whose own CPUs went offline.
    """
    on = {cpuset.container_id for cpuset in event.cpusets if cpuset.cpus <= reservation.cpus}
    return on.issuperset(reservation.containers)


def _are_as_planned(reservation: Reservation, event: events.CpusetsRead) -> bool:
    """Return whether all containers of a restoration run only on their planned CPUs, or nowhere.

    These are the old CPUs that are online. A container whose old CPUs are all offline shares CPUs
    (``NodeState.desired_cpus``), but none of the target's, which are held until the restoration ends.
    """
    planned = {cpuset.container_id for cpuset in event.cpusets if cpuset.cpus <= cpuset.planned}
    return planned.issuperset(reservation.containers)


def _confirmed(reservation: Reservation, event: events.LedgerWritten) -> Step:
    return _to(reservation, _Phase.COMMITTED, effects.UnreserveCpus(), effects.Commit())


def _unconfirmed(reservation: Reservation, event: events.LedgerLate | events.LedgerRejected) -> Step:
    return _restore(reservation, f"cannot record the placement: {event.cause}")


def _move_timed_out(reservation: Reservation, event: events.TimedOut) -> Step:
    return _restore(reservation, "the kernel does not take its CPUs in time")


def _restore(reservation: Reservation, message: str) -> Step:
    """Place the containers on their old CPUs again, and verify that they run there."""
    performed = effects.EndDeadline(), effects.AppendLedger(may_run_on=reservation.cpus)
    return _to(
        reservation, _Phase.RERECORDING, *performed, reason=AbortReason(message, reservation.cpus), tries=0
    )


def _rerecorded(reservation: Reservation, event: events.LedgerWritten | events.LedgerRejected) -> Step:
    assign = effects.AssignOwn(reservation.previous, reserved=reservation.cpus)
    return _to(reservation, _Phase.RESTORING, assign, effects.AwaitOwnInflight(reservation.previous))


def _restoring(reservation: Reservation, event: events.InflightCompleted) -> Step:
    return _to(reservation, _Phase.REWRITING, effects.StartDeadline(), effects.WriteOwners())


def _rewritten(reservation: Reservation, event: events.CpusetsWritten) -> Step:
    if event.refused:
        return _back_off(reservation, event.refused[0].text)
    return _to(reservation, _Phase.RECHECKING, effects.ReadCpusets())


def _rechecked(reservation: Reservation, event: events.CpusetsRead) -> Step:
    if not _are_as_planned(reservation, event):
        return _back_off(reservation, f"the kernel does not keep it on CPUs {reservation.previous}")
    return _to(reservation, _Phase.UNRECORDING, effects.EndDeadline(), effects.AppendLedger())


def _restored(reservation: Reservation, event: events.LedgerWritten | events.LedgerRejected) -> Step:
    # A record that the ledger cannot hold fails at every try.
    return _to(reservation, _Phase.ABORTED, effects.UnreserveCpus(), effects.Abort(reservation.reason))


def _restoration_unrecorded(reservation: Reservation, event: events.LedgerLate) -> Step:
    return _back_off(reservation, event.cause)


def _restoration_late(reservation: Reservation, event: events.InflightLate) -> Step:
    return _back_off(reservation, event.message)


def _restoration_timed_out(reservation: Reservation, event: events.TimedOut) -> Step:
    return _back_off(reservation, "the kernel does not take its CPUs in time")


def _back_off(reservation: Reservation, message: str) -> Step:
    seconds = RESTORE.delay(reservation.tries + 1)
    report = effects.ReportProblem(NOT_BACK, message)
    performed = effects.EndDeadline(), report, effects.Pause(seconds)
    # Once the pauses stop growing, the count stops too, so that a recurring state is the same value.
    return _to(
        reservation, _Phase.BACKING_OFF, *performed, tries=reservation.tries + (seconds < RESTORE.longest)
    )


def _restore_again(reservation: Reservation, event: events.PauseOver | events.ReservationRequested) -> Step:
    return _to(reservation, _Phase.RERECORDING, effects.AppendLedger(may_run_on=reservation.cpus))


# -- at any time --------------------------------------------------------------------------------------------


def _exited(reservation: Reservation) -> Step:
    """End a replacement or a move whose containers have exited, or are no longer under the plan."""
    if reservation.kind not in FOR_OWNERS:
        return reservation, ()
    if not reservation.is_assigned:
        return _abort(structs.replace(reservation, reason=None))
    if reservation.kind is _Kind.REPLACEMENT:
        return _to(reservation, _Phase.COMMITTED, effects.Commit())
    back = effects.AssignOwn(reservation.previous, reserved=CpuSet())
    return _to(reservation, _Phase.ABORTED, back, effects.RecordSoon(), effects.Abort(), reason=None)


def _interrupted(reservation: Reservation) -> Step:
    if reservation.kind is not _Kind.MOVE:
        return _cancelled(reservation)
    if not reservation.is_assigned:
        return _abort(structs.replace(reservation, reason=AbortReason(_INTERNAL, reservation.cpus)))
    return (
        _restore(reservation, _INTERNAL)
        if reservation.phase in _TOWARDS
        else _back_off(reservation, _INTERNAL)
    )


def _cancelled(reservation: Reservation) -> Step:
    """End at once. An unfinished move stays recorded, and the next daemon reverts it."""
    if reservation.is_assigned or reservation.kind not in FOR_OWNERS:
        return _to(reservation, _Phase.ABORTED)
    return _abort(structs.replace(reservation, reason=None))


_AT_ANY_TIME: dict[type, Callable[[Reservation], Step]] = {
    events.ContainersExited: _exited,
    events.PlanNoLongerApplied: _exited,
    events.Interrupted: _interrupted,
    events.Cancelled: _cancelled,
}
_TRANSITIONS: dict[tuple[ReservationPhase, type], Callable[[Reservation, Any], Step]] = {
    (_Phase.REQUESTED, events.ReservationRequested): _requested,
    (_Phase.RECORDING, events.LedgerWritten): _recorded,
    (_Phase.RECORDING, events.LedgerLate): _unrecorded,
    (_Phase.RECORDING, events.LedgerRejected): _unrecorded,
    (_Phase.WAITING, events.InflightCompleted): _completed,
    (_Phase.WAITING, events.InflightLate): _inflight_late,
    (_Phase.SHRINKING, events.CpusetsWritten): _shrunk,
    (_Phase.SHRINKING, events.TimedOut): _timed_out,
    (_Phase.PAUSING, events.PauseOver): _paused,
    (_Phase.PAUSING, events.TimedOut): _timed_out,
    (_Phase.READING, events.CpusetsRead): _read,
    (_Phase.READING, events.TimedOut): _timed_out,
    (_Phase.PLACING, events.PlacedElsewhere): _placed,
    (_Phase.PLACING, events.NoOtherPlacement): _nowhere_else,
    (_Phase.PLACING, events.PlacementWithdrawn): _withdrawn,
    (_Phase.SECURING, events.LedgerWritten): _secured,
    (_Phase.SECURING, events.LedgerLate): _unrecorded,
    (_Phase.SECURING, events.LedgerRejected): _unrecorded,
    (_Phase.DRAINING, events.InflightCompleted): _drained,
    (_Phase.DRAINING, events.InflightLate): _own_inflight_late,
    (_Phase.MOVING, events.CpusetsWritten): _moved,
    (_Phase.MOVING, events.TimedOut): _move_timed_out,
    (_Phase.CHECKING, events.CpusetsRead): _checked,
    (_Phase.CHECKING, events.TimedOut): _move_timed_out,
    (_Phase.CONFIRMING, events.LedgerWritten): _confirmed,
    (_Phase.CONFIRMING, events.LedgerLate): _unconfirmed,
    (_Phase.CONFIRMING, events.LedgerRejected): _unconfirmed,
    (_Phase.HANDING_OVER, events.CpusetsWritten): _handed_over,
    (_Phase.RERECORDING, events.LedgerWritten): _rerecorded,
    (_Phase.RERECORDING, events.LedgerRejected): _rerecorded,
    (_Phase.RERECORDING, events.LedgerLate): _restoration_unrecorded,
    (_Phase.RESTORING, events.InflightCompleted): _restoring,
    (_Phase.RESTORING, events.InflightLate): _restoration_late,
    (_Phase.REWRITING, events.CpusetsWritten): _rewritten,
    (_Phase.REWRITING, events.TimedOut): _restoration_timed_out,
    (_Phase.RECHECKING, events.CpusetsRead): _rechecked,
    (_Phase.RECHECKING, events.TimedOut): _restoration_timed_out,
    (_Phase.UNRECORDING, events.LedgerWritten): _restored,
    (_Phase.UNRECORDING, events.LedgerRejected): _restored,
    (_Phase.UNRECORDING, events.LedgerLate): _restoration_unrecorded,
    (_Phase.BACKING_OFF, events.PauseOver): _restore_again,
    (_Phase.BACKING_OFF, events.ReservationRequested): _restore_again,
}
