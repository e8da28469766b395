"""Every branch of a reservation, as playbooks."""

from __future__ import annotations

import errno
import itertools

import pytest

from proxy.engine.reservation import (
    CONTESTED,
    NOT_BACK,
    NOT_WRITTEN,
    REFUSED,
    RESTORE,
    UnexpectedEventError,
    step,
)
from proxy.engine.reservation_effects import (
    Abort,
    AbortReason,
    AppendLedger,
    AssignOwn,
    AssignReplacement,
    AwaitInflight,
    AwaitOwnInflight,
    Commit,
    EndDeadline,
    Pause,
    PlaceElsewhere,
    ReadCpusets,
    RecordSoon,
    ReportProblem,
    RequestReconcile,
    ReserveCpus,
    StartDeadline,
    UnreserveCpus,
    WithdrawPlacement,
    WriteOwners,
    WriteSharers,
)
from proxy.engine.reservation_events import (
    Cancelled,
    ClientDisconnected,
    ContainersExited,
    ContestedCpus,
    CpusetsRead,
    CpusetsWritten,
    CpusInEffect,
    Event,
    InflightCompleted,
    InflightLate,
    Interrupted,
    LedgerLate,
    LedgerRejected,
    LedgerWritten,
    NoOtherPlacement,
    PauseOver,
    PlacedElsewhere,
    PlacementWithdrawn,
    PlanNoLongerApplied,
    RefusedWrite,
    ReservationRequested,
    TimedOut,
)
from proxy.engine.reservation_state import Reservation, ReservationKind, ReservationPhase, restoration
from proxy.engine.write_conflicts import MAX_OTHER_PLACEMENTS, PAUSE_S, TRIES
from proxy.model.idset import CpuSet
from tests.testkit.playbook import Playbook

OLD, NEW, REST, NONE = (CpuSet.parse(cpus) for cpus in ("0-1", "2-3", "4-7", ""))
TIME = AbortReason("the kernel does not take the CPUs of other containers in time", NEW, final=True)


def reserved(kind: ReservationKind) -> Reservation:
    previous = OLD if kind is ReservationKind.MOVE else NONE
    return Reservation(kind, ("own",), NEW, ref="ns/p/c", previous=previous)


def at_barrier(kind: ReservationKind) -> Playbook:
    """A reservation: its calls in flight have completed, and its sharers are being written."""
    playbook = Playbook(reserved(kind)) >> ReservationRequested()
    if kind in (ReservationKind.REPLACEMENT, ReservationKind.MOVE):
        playbook << ReserveCpus(NEW)
    if kind is ReservationKind.CREATE:
        playbook << AppendLedger() >> LedgerWritten()
    elif kind is ReservationKind.MOVE:
        playbook << AppendLedger(may_run_on=NEW) >> LedgerWritten()
    return playbook << AwaitInflight(NEW) >> InflightCompleted() << StartDeadline() << WriteSharers()


def refused(number: int) -> CpusetsWritten:
    error = RefusedWrite("ls", number, f"refused {number}")
    return CpusetsWritten((error,), (error.text,))


def several_refused(**numbers: int) -> CpusetsWritten:
    errors = tuple(RefusedWrite(key, number, f"refused {key}") for key, number in numbers.items())
    return CpusetsWritten(errors, tuple(error.text for error in errors))


def found(cpus: CpuSet, wanted: CpuSet = REST, container_id: str = "ls") -> CpusetsRead:
    return CpusetsRead((CpusInEffect(container_id, cpus, wanted),))


class TestCreate:
    def test_a_reservation_without_faults_commits(self) -> None:
        assert (
            Playbook(reserved(ReservationKind.CREATE))
            >> ReservationRequested() << AppendLedger()
            >> LedgerWritten() << AwaitInflight(NEW)
            >> InflightCompleted() << StartDeadline() << WriteSharers()
            >> CpusetsWritten() << Commit()
        )  # fmt: skip

    @pytest.mark.parametrize("event", [LedgerLate("slow"), LedgerRejected("slow")])
    def test_a_placement_that_is_not_recorded_is_withdrawn(self, event: LedgerLate) -> None:
        reason = AbortReason("cannot record the placement: slow", NEW, final=True)
        assert (
            Playbook(reserved(ReservationKind.CREATE))
            >> ReservationRequested() << AppendLedger()
            >> event << WithdrawPlacement() << Abort(reason)
        )  # fmt: skip

    def test_a_retryable_write_is_repeated_a_limited_number_of_times(self) -> None:
        playbook = at_barrier(ReservationKind.CREATE)
        for tried in range(TRIES - 1):
            playbook >> refused(errno.EBUSY) << Pause(PAUSE_S * 4**tried)
            playbook >> PauseOver() << WriteSharers()
        playbook >> refused(errno.EBUSY) << RequestReconcile() << ReadCpusets(("ls",))
        assert playbook

    def test_a_refused_container_that_is_elsewhere_is_reported_only(self) -> None:
        assert (
            at_barrier(ReservationKind.CREATE)
            >> refused(errno.EACCES) << RequestReconcile() << ReadCpusets(("ls",))
            >> found(REST) << ReportProblem(NOT_WRITTEN, "refused 13") << Commit()
        )  # fmt: skip

    def test_a_refused_container_that_may_use_the_cpus_does_not_block_the_create(self) -> None:
        """The container is meant to be there: a hook was allowed to give it CPUs that have an owner."""
        assert (
            at_barrier(ReservationKind.CREATE)
            >> refused(errno.EACCES) << RequestReconcile() << ReadCpusets(("ls",))
            >> found(NEW, wanted=NEW) << ReportProblem(NOT_WRITTEN, "refused 13") << Commit()
        )  # fmt: skip

    def test_cpus_that_cannot_be_freed_are_replaced_by_others(self) -> None:
        reason = AbortReason("refused 13", NEW | REST, public=REFUSED)
        assert (
            at_barrier(ReservationKind.CREATE)
            >> refused(errno.EACCES) << RequestReconcile() << ReadCpusets(("ls",))
            >> found(NEW | REST) << EndDeadline() << PlaceElsewhere(reason)
            >> PlacedElsewhere("call-2", REST) << AppendLedger()
            >> LedgerWritten() << AwaitInflight(REST)
            >> InflightCompleted() << StartDeadline() << WriteSharers()
            >> CpusetsWritten() << Commit()
        )  # fmt: skip

    def test_other_cpus_are_chosen_a_bounded_number_of_times(self) -> None:
        playbook = at_barrier(ReservationKind.CREATE)
        late = InflightLate("busy", "busy with one", NEW)
        reason = AbortReason("refused 13", NEW, public=REFUSED)
        for turn in range(MAX_OTHER_PLACEMENTS):
            playbook >> refused(errno.EACCES) << RequestReconcile() << ReadCpusets(("ls",))
            playbook >> found(NEW) << EndDeadline() << PlaceElsewhere(reason)
            playbook >> PlacedElsewhere(f"call-{turn}", NEW) << AppendLedger()
            playbook >> LedgerWritten() << AwaitInflight(NEW)
            if turn == MAX_OTHER_PLACEMENTS - 1:
                break
            playbook >> InflightCompleted() << StartDeadline() << WriteSharers()
        reason = AbortReason("busy", NEW, public="busy with one")
        assert playbook >> late << WithdrawPlacement() << Abort(reason)
        assert playbook.state.containers == (f"call-{MAX_OTHER_PLACEMENTS - 1}",)

    def test_the_reason_is_kept_if_no_other_cpus_are_free(self) -> None:
        reason = AbortReason("busy", REST, public="busy with one")
        assert (
            Playbook(reserved(ReservationKind.CREATE))
            >> ReservationRequested() << AppendLedger()
            >> LedgerWritten() << AwaitInflight(NEW)
            >> InflightLate("busy", "busy with one", REST) << EndDeadline() << PlaceElsewhere(reason)
            >> NoOtherPlacement() << WithdrawPlacement() << Abort(reason)
        )  # fmt: skip

    def test_a_create_that_was_answered_meanwhile_is_over(self) -> None:
        reason = AbortReason("busy", REST, public="")
        assert (
            Playbook(reserved(ReservationKind.CREATE))
            >> ReservationRequested() << AppendLedger()
            >> LedgerWritten() << AwaitInflight(NEW)
            >> InflightLate("busy", "", REST) << EndDeadline() << PlaceElsewhere(reason)
            >> PlacementWithdrawn() << Abort()
        )  # fmt: skip

    @pytest.mark.parametrize("moment", range(3))
    def test_a_client_that_is_gone_gets_no_second_placement(self, moment: int) -> None:
        playbook = Playbook(reserved(ReservationKind.CREATE))
        late = InflightLate("busy", "", REST)
        events = [
            (ReservationRequested(), AppendLedger()),
            (LedgerWritten(), AwaitInflight(NEW)),
            (late, WithdrawPlacement()),
        ]
        for number, (event, effect) in enumerate(events):
            if number == moment:
                playbook >> ClientDisconnected()
            playbook >> event << effect
        assert playbook << Abort(AbortReason("busy", REST))

    def test_a_read_only_tree_does_not_lead_to_other_cpus(self) -> None:
        reason = AbortReason("refused 30", NEW, final=True, public=REFUSED)
        assert (
            at_barrier(ReservationKind.CREATE)
            >> refused(errno.EROFS) << RequestReconcile() << ReadCpusets(("ls",))
            >> found(NEW) << WithdrawPlacement() << Abort(reason)
        )  # fmt: skip

    def test_the_reason_is_the_write_of_a_container_that_is_still_on_the_cpus(self) -> None:
        errors = several_refused(ls=errno.EACCES, be=errno.EACCES)
        reason = AbortReason("refused be", NEW | REST, public=REFUSED)
        assert (
            at_barrier(ReservationKind.CREATE)
            >> errors << RequestReconcile() << ReadCpusets(("ls", "be"))
            >> CpusetsRead((CpusInEffect("ls", REST, REST), CpusInEffect("be", NEW, REST)))
            << EndDeadline() << PlaceElsewhere(reason)
        )  # fmt: skip

    def test_one_write_of_several_that_no_other_cpus_would_allow_ends_it(self) -> None:
        errors = several_refused(ls=errno.EACCES, be=errno.EROFS)
        reason = AbortReason("refused ls", NEW, final=True, public=REFUSED)
        assert (
            at_barrier(ReservationKind.CREATE)
            >> errors << RequestReconcile() << ReadCpusets(("ls", "be"))
            >> CpusetsRead((CpusInEffect("ls", NEW, REST), CpusInEffect("be", NEW, REST)))
            << WithdrawPlacement() << Abort(reason)
        )  # fmt: skip

    @pytest.mark.parametrize("others", [(), (RefusedWrite("ls", errno.EACCES, "cannot write ls"),)])
    def test_groups_above_pods_that_cannot_be_written_end_it(self, others: tuple[RefusedWrite, ...]) -> None:
        group = "cannot write besteffort"
        errors = (*(each.text for each in others), group)
        reason = AbortReason(group, NEW, final=True, public=REFUSED)
        assert (
            at_barrier(ReservationKind.CREATE)
            >> CpusetsWritten(others, errors, group_errors=(group,))
            << RequestReconcile() << WithdrawPlacement() << Abort(reason)
            >> TimedOut()
        )  # fmt: skip

    @pytest.mark.parametrize("read", [False, True])
    def test_cpus_that_another_program_writes_are_not_free(self, *, read: bool) -> None:
        contested = (ContestedCpus("ns/ls/c", NEW), ContestedCpus("ns/be/c", REST))
        message = "another program keeps writing the cpuset of ns/ls/c: see drift in status"
        reason = AbortReason(message, NEW | REST, public=CONTESTED)
        playbook = at_barrier(ReservationKind.CREATE)
        if read:
            playbook >> refused(errno.EACCES) << RequestReconcile() << ReadCpusets(("ls",))
            playbook >> CpusetsRead((), contested) << ReportProblem(NOT_WRITTEN, "refused 13")
        else:
            playbook >> CpusetsWritten(contested=contested)
        assert playbook << EndDeadline() << PlaceElsewhere(reason)

    @pytest.mark.parametrize("where", ["writing", "pausing", "reading"])
    def test_a_kernel_that_does_not_answer_in_time_ends_it(self, where: str) -> None:
        playbook = at_barrier(ReservationKind.CREATE)
        if where == "pausing":
            playbook >> refused(errno.EBUSY) << Pause(PAUSE_S)
        elif where == "reading":
            playbook >> refused(errno.EACCES) << RequestReconcile() << ReadCpusets(("ls",))
        assert playbook >> TimedOut() << WithdrawPlacement() << Abort(TIME)

    @pytest.mark.parametrize("event", [Interrupted(), Cancelled()])
    def test_a_fault_leaves_the_placement_to_the_caller(self, event: Interrupted) -> None:
        playbook = at_barrier(ReservationKind.CREATE) >> event
        assert playbook
        assert playbook.state.phase is ReservationPhase.ABORTED

    def test_an_exit_does_not_end_a_create(self) -> None:
        assert at_barrier(ReservationKind.CREATE) >> ContainersExited() >> CpusetsWritten() << Commit()


class TestStart:
    def test_a_reservation_without_faults_commits(self) -> None:
        assert (
            Playbook(reserved(ReservationKind.START))
            >> ReservationRequested() << AwaitInflight(NEW)
            >> InflightCompleted() << StartDeadline() << WriteSharers()
            >> CpusetsWritten() << Commit()
        )  # fmt: skip

    def test_a_start_is_not_placed_elsewhere(self) -> None:
        reason = AbortReason("busy", REST, public="one")
        assert (
            Playbook(reserved(ReservationKind.START))
            >> ReservationRequested() << AwaitInflight(NEW)
            >> InflightLate("busy", "one", REST) << Abort(reason)
        )  # fmt: skip


class TestNarrow:
    def test_cpus_named_by_hooks_are_recorded_first(self) -> None:
        playbook = Playbook(reserved(ReservationKind.NARROW))
        assert playbook >> ReservationRequested() << AppendLedger() >> LedgerWritten() << Commit()

    @pytest.mark.parametrize("event", [LedgerLate("slow"), LedgerRejected("slow")])
    def test_a_sharing_container_does_not_wait_for_a_failing_ledger(self, event: LedgerLate) -> None:
        assert (
            Playbook(reserved(ReservationKind.NARROW))
            >> ReservationRequested() << AppendLedger()
            >> event << ReportProblem("cannot record what hooks request", "slow") << Commit()
        )  # fmt: skip


class TestReplacement:
    def test_a_reservation_without_faults_commits(self) -> None:
        assert (
            at_barrier(ReservationKind.REPLACEMENT)
            >> CpusetsWritten() << EndDeadline() << AppendLedger()
            >> LedgerWritten() << AssignReplacement() << WriteOwners()
            >> CpusetsWritten() << Commit()
        )  # fmt: skip

    def test_cpus_that_cannot_be_freed_are_released(self) -> None:
        reason = AbortReason("refused 13", NEW, public=REFUSED)
        assert (
            at_barrier(ReservationKind.REPLACEMENT)
            >> refused(errno.EACCES) << RequestReconcile() << ReadCpusets(("ls",))
            >> found(NEW) << UnreserveCpus() << Abort(reason)
        )  # fmt: skip

    @pytest.mark.parametrize("event", [ContainersExited(), Interrupted(), Cancelled()])
    def test_held_cpus_are_released_when_a_replacement_ends_early(self, event: Interrupted) -> None:
        assert at_barrier(ReservationKind.REPLACEMENT) >> event << UnreserveCpus() << Abort()

    @pytest.mark.parametrize("event", [LedgerLate("slow"), LedgerRejected("slow")])
    def test_replacement_cpus_are_not_assigned_without_a_record(self, event: LedgerLate) -> None:
        reason = AbortReason("cannot record the placement: slow", NEW, final=True)
        assert (
            at_barrier(ReservationKind.REPLACEMENT)
            >> CpusetsWritten() << EndDeadline() << AppendLedger()
            >> event << RecordSoon() << UnreserveCpus() << Abort(reason)
        )  # fmt: skip

    def test_an_owner_that_cannot_be_written_is_reported_only(self) -> None:
        assert (
            at_barrier(ReservationKind.REPLACEMENT)
            >> CpusetsWritten() << EndDeadline() << AppendLedger()
            >> LedgerWritten() << AssignReplacement() << WriteOwners()
            >> refused(errno.EACCES) << ReportProblem(NOT_WRITTEN, "refused 13") << Commit()
        )  # fmt: skip

    def test_an_exit_after_the_cpus_were_assigned_changes_nothing(self) -> None:
        assert (
            at_barrier(ReservationKind.REPLACEMENT)
            >> CpusetsWritten() << EndDeadline() << AppendLedger()
            >> LedgerWritten() << AssignReplacement() << WriteOwners()
            >> ContainersExited() << Commit()
        )  # fmt: skip


def own_refused(number: int) -> CpusetsWritten:
    return CpusetsWritten((RefusedWrite("own", number, f"refused {number}"),), (f"refused {number}",))


def drained() -> Playbook:
    """A move: its containers are being written."""
    playbook = at_barrier(ReservationKind.MOVE) >> CpusetsWritten()
    playbook << EndDeadline() << AssignOwn(NEW, reserved=OLD) << AwaitOwnInflight(NEW)
    return playbook >> InflightCompleted() << StartDeadline() << WriteOwners()


def restoring(playbook: Playbook) -> Playbook:
    playbook << EndDeadline() << AppendLedger(may_run_on=NEW)
    return playbook >> LedgerWritten() << AssignOwn(OLD, reserved=NEW) << AwaitOwnInflight(OLD)


def back(playbook: Playbook, message: str) -> bool:
    """The rest of a restoration that has begun, without faults."""
    reason = AbortReason(message, NEW)
    playbook >> InflightCompleted() << StartDeadline() << WriteOwners()
    playbook >> CpusetsWritten() << ReadCpusets()
    playbook >> found(OLD, OLD, "own") << EndDeadline() << AppendLedger()
    return bool(playbook >> LedgerWritten() << UnreserveCpus() << Abort(reason))


class TestMove:
    def test_a_reservation_without_faults_commits(self) -> None:
        assert (
            drained()
            >> CpusetsWritten() << ReadCpusets()
            >> found(NEW, NEW, "own") << EndDeadline() << AppendLedger()
            >> LedgerWritten() << UnreserveCpus() << Commit()
        )  # fmt: skip

    @pytest.mark.parametrize("event", [LedgerLate("slow"), LedgerRejected("slow")])
    def test_without_a_record_nothing_is_moved(self, event: LedgerLate) -> None:
        reason = AbortReason("cannot record the placement: slow", NEW, final=True)
        assert (
            Playbook(reserved(ReservationKind.MOVE))
            >> ReservationRequested() << ReserveCpus(NEW) << AppendLedger(may_run_on=NEW)
            >> event << RecordSoon() << UnreserveCpus() << Abort(reason)
        )  # fmt: skip

    def test_a_target_that_cannot_be_freed_is_released(self) -> None:
        playbook = at_barrier(ReservationKind.MOVE) >> TimedOut()
        assert playbook << RecordSoon() << UnreserveCpus() << Abort(TIME)

    def test_a_move_is_restored_if_a_call_carries_the_old_cpus(self) -> None:
        playbook = at_barrier(ReservationKind.MOVE) >> CpusetsWritten()
        playbook << EndDeadline() << AssignOwn(NEW, reserved=OLD) << AwaitOwnInflight(NEW)
        assert back(restoring(playbook >> InflightLate("busy", "", OLD)), "busy")

    def test_a_move_is_restored_if_a_write_is_refused(self) -> None:
        assert back(restoring(drained() >> own_refused(errno.EINVAL)), "refused 22")

    def test_errors_of_other_containers_do_not_stop_a_move(self) -> None:
        assert drained() >> CpusetsWritten((), ("besteffort",), group_errors=("besteffort",)) << ReadCpusets()

    def test_a_move_is_restored_if_a_container_is_on_other_cpus(self) -> None:
        playbook = drained() >> CpusetsWritten() << ReadCpusets()
        message = "the kernel does not keep it on CPUs 2-3"
        assert back(restoring(playbook >> found(OLD | NEW, NEW, "own")), message)

    def test_a_move_is_restored_if_a_container_cannot_be_read(self) -> None:
        playbook = drained() >> CpusetsWritten() << ReadCpusets()
        assert back(restoring(playbook >> CpusetsRead()), "the kernel does not keep it on CPUs 2-3")

    @pytest.mark.parametrize("read", [False, True])
    def test_a_move_is_restored_if_the_kernel_does_not_answer(self, *, read: bool) -> None:
        playbook = drained()
        if read:
            playbook >> CpusetsWritten() << ReadCpusets()
        assert back(restoring(playbook >> TimedOut()), "the kernel does not take its CPUs in time")

    @pytest.mark.parametrize("event", [LedgerLate("slow"), LedgerRejected("slow")])
    def test_a_placement_that_is_not_recorded_is_restored(self, event: LedgerLate) -> None:
        playbook = drained() >> CpusetsWritten() << ReadCpusets()
        playbook >> found(NEW, NEW, "own") << EndDeadline() << AppendLedger()
        assert back(restoring(playbook >> event), "cannot record the placement: slow")

    @pytest.mark.parametrize("event", [ContainersExited(), PlanNoLongerApplied()])
    def test_an_end_before_the_containers_are_placed_releases_the_target(self, event: Event) -> None:
        playbook = at_barrier(ReservationKind.MOVE) >> event
        assert playbook << RecordSoon() << UnreserveCpus() << Abort()

    @pytest.mark.parametrize("event", [ContainersExited(), PlanNoLongerApplied()])
    def test_an_end_after_that_leaves_them_their_old_placement(self, event: Event) -> None:
        playbook = drained() >> event
        assert playbook << AssignOwn(OLD, reserved=NONE) << RecordSoon() << Abort()

    def test_a_fault_in_any_phase_undoes_a_move(self) -> None:
        reason = AbortReason("internal error", NEW)
        playbook = at_barrier(ReservationKind.MOVE) >> Interrupted()
        assert playbook << RecordSoon() << UnreserveCpus() << Abort(reason)
        assert back(restoring(drained() >> Interrupted()), "internal error")

    def test_a_cancelled_move_is_left_unfinished_for_the_next_daemon(self) -> None:
        playbook = at_barrier(ReservationKind.MOVE) >> Cancelled()
        assert playbook << RecordSoon() << UnreserveCpus() << Abort()
        playbook = drained() >> Cancelled()
        assert playbook
        assert playbook.state.is_over


class TestRestoration:
    def begun(self) -> Playbook:
        playbook = Playbook(restoration(("own",), OLD, NEW, "ns/p/c")) >> ReservationRequested()
        playbook << AppendLedger(may_run_on=NEW)
        return playbook >> LedgerWritten() << AssignOwn(OLD, reserved=NEW) << AwaitOwnInflight(OLD)

    def test_the_next_daemon_puts_a_container_back(self) -> None:
        assert back(self.begun(), "the daemon ended before it was done")

    def test_a_container_whose_old_cpus_are_offline_is_back_once_it_shares(self) -> None:
        playbook = self.begun() >> InflightCompleted() << StartDeadline() << WriteOwners()
        playbook >> CpusetsWritten() << ReadCpusets()
        playbook >> found(REST, REST, "own") << EndDeadline() << AppendLedger()
        reason = AbortReason("the daemon ended before it was done", NEW)
        assert playbook >> LedgerWritten() << UnreserveCpus() << Abort(reason)

    def test_a_restoration_is_retried_with_growing_pauses_until_it_succeeds(self) -> None:
        playbook = self.begun()
        pauses = []
        for turn in range(12):
            playbook >> InflightCompleted() << StartDeadline() << WriteOwners()
            playbook >> own_refused(errno.EBUSY) << EndDeadline() << ReportProblem(NOT_BACK, "refused 16")
            pauses.append(min(0.1 * 2**turn, RESTORE.longest))
            playbook << Pause(pauses[-1])
            playbook >> PauseOver() << AppendLedger(may_run_on=NEW)
            playbook >> LedgerWritten() << AssignOwn(OLD, reserved=NEW) << AwaitOwnInflight(OLD)
        assert pauses[0] == 0.1
        assert pauses[-1] == RESTORE.longest
        assert back(playbook, "the daemon ended before it was done")

    @pytest.mark.parametrize(
        ("where", "event", "message"),
        [
            ("calls", InflightLate("busy", "", NEW), "busy"),
            ("write", TimedOut(), "the kernel does not take its CPUs in time"),
            ("read", TimedOut(), "the kernel does not take its CPUs in time"),
            ("read", found(NEW, OLD, "own"), "the kernel does not keep it on CPUs 0-1"),
            ("read", found(NEW | REST, REST, "own"), "the kernel does not keep it on CPUs 0-1"),
            ("read", CpusetsRead(), "the kernel does not keep it on CPUs 0-1"),
            ("ledger", LedgerLate("slow"), "slow"),
            ("ledger", Interrupted(), "internal error"),
        ],
    )
    def test_a_failed_step_of_a_restoration_is_retried(
        self, where: str, event: TimedOut, message: str
    ) -> None:
        playbook = self.begun()
        if where != "calls":
            playbook >> InflightCompleted() << StartDeadline() << WriteOwners()
        if where in ("read", "ledger"):
            playbook >> CpusetsWritten() << ReadCpusets()
        if where == "ledger":
            playbook >> found(OLD, OLD, "own") << EndDeadline() << AppendLedger()
        assert playbook >> event << EndDeadline() << ReportProblem(NOT_BACK, message) << Pause(0.1)

    def test_a_record_of_the_move_that_is_late_is_written_again_first(self) -> None:
        playbook = Playbook(restoration(("own",), OLD, NEW, "ns/p/c")) >> ReservationRequested()
        playbook << AppendLedger(may_run_on=NEW)
        playbook >> LedgerLate("slow") << EndDeadline() << ReportProblem(NOT_BACK, "slow") << Pause(0.1)
        assert playbook >> PauseOver() << AppendLedger(may_run_on=NEW)

    def test_a_record_that_can_never_be_stored_ends_it(self) -> None:
        playbook = self.begun() >> InflightCompleted() << StartDeadline() << WriteOwners()
        playbook >> CpusetsWritten() << ReadCpusets()
        playbook >> found(OLD, OLD, "own") << EndDeadline() << AppendLedger()
        reason = AbortReason("the daemon ended before it was done", NEW)
        assert playbook >> LedgerRejected("odd") << UnreserveCpus() << Abort(reason)

    def test_exited_containers_need_no_restore(self) -> None:
        playbook = self.begun() >> ContainersExited()
        assert playbook << AssignOwn(OLD, reserved=NONE) << RecordSoon() << Abort()


EVENTS = (
    *(
        ReservationRequested(),
        LedgerWritten(),
        LedgerLate("late"),
        LedgerRejected("odd"),
        InflightCompleted(),
    ),
    *(InflightLate("busy", "", NEW), CpusetsWritten(), CpusetsRead(), PauseOver(), TimedOut()),
    *(PlacedElsewhere("t", REST), NoOtherPlacement(), PlacementWithdrawn(), ClientDisconnected()),
    *(ContainersExited(), PlanNoLongerApplied(), Interrupted(), Cancelled()),
)


@pytest.mark.parametrize("phase", [ReservationPhase.COMMITTED, ReservationPhase.ABORTED])
def test_events_after_the_end_have_no_effect(phase: ReservationPhase) -> None:
    for kind, event in itertools.product(ReservationKind, EVENTS):
        over = Reservation(kind, ("own",), NEW, phase)
        assert step(over, event) == (over, ())


def test_an_event_that_is_not_waited_for_is_a_fault() -> None:
    with pytest.raises(UnexpectedEventError, match="does not expect PauseOver while it is requested"):
        step(reserved(ReservationKind.CREATE), PauseOver())


def test_the_public_message_names_no_other_container() -> None:
    assert AbortReason("refused ns/other/c", public="refused").public_message == "refused"
    assert AbortReason("late").public_message == "late"
