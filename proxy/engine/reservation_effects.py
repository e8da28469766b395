"""The effects of a reservation, as values: the output of ``proxy.engine.reservation.step``.

Effects are performed in the order in which they are given. ``WAITED`` lists the effects whose result comes
back as an event (``proxy.engine.reservation_events``). A step gives at most one of them, as its last effect.
"""

from __future__ import annotations

from msgspec import Struct, field

from proxy.model.idset import CpuSet


class AbortReason(Struct, frozen=True):
    """Why CPUs are not free.

    Attributes:
        message: The reason, for the operator.
        cpus: All CPUs that are held by containers that cannot be moved.
        final: Whether other CPUs would not help.
        public: The message for the client, if ``message`` names containers of other pods.
    """

    message: str
    cpus: CpuSet = field(default_factory=CpuSet)
    final: bool = False
    public: str = ""

    @property
    def public_message(self) -> str:
        """The message for the client whose call is refused."""
        return self.public or self.message


# -- in the state, at once ----------------------------------------------------------------------------------


class ReserveCpus(Struct, frozen=True):
    """Reserve CPUs in the state for the owner, so that no other plan uses them.

    Attributes:
        cpus: The CPUs.
    """

    cpus: CpuSet


class UnreserveCpus(Struct, frozen=True):
    """Give back the reserved CPUs that are not placed. The pools grow, and their cpusets are written."""


class AssignReplacement(Struct, frozen=True):
    """Make the reserved CPUs part of the placements, in place of offline ones; no CPUs stay reserved."""


class AssignOwn(Struct, frozen=True):
    """Place the containers on other CPUs of their own.

    Attributes:
        cpus: Their new CPUs.
        reserved: CPUs that stay reserved in addition, so that no other plan uses them.
    """

    cpus: CpuSet
    reserved: CpuSet


class WithdrawPlacement(Struct, frozen=True):
    """Remove the container of a create from the state and the ledger, because its create failed."""


# -- at once, to others -------------------------------------------------------------------------------------


class RecordSoon(Struct, frozen=True):
    """Record the current placements, and that no move is under way, without waiting for the ledger."""


class RequestReconcile(Struct, frozen=True):
    """Reconcile soon: compare the state with the runtime and the machine, and repair differences."""


class ReportProblem(Struct, frozen=True):
    """Report a problem that does not stop the reservation.

    Attributes:
        message: The problem, as a constant text.
        cause: The cause.
    """

    message: str
    cause: str


class StartDeadline(Struct, frozen=True):
    """Start the deadline, ``callTimeout`` for writes, pauses and reads together; then comes ``TimedOut``."""


class EndDeadline(Struct, frozen=True):
    """End the deadline: the following effects have none."""


# -- waited for ---------------------------------------------------------------------------------------------


class AppendLedger(Struct, frozen=True):
    """Record the placements of the containers, and wait until that is durable.

    For a replacement, the record holds the placements with the replacement CPUs.

    Attributes:
        may_run_on: CPUs to which a move is under way; empty if there is none. If it is not empty, a record of
            the move is written, which also names the CPUs that the containers had before; these count until
            that record is deleted.
    """

    may_run_on: CpuSet = field(default_factory=CpuSet)


class AwaitInflight(Struct, frozen=True):
    """Wait for calls in flight that can put a container onto CPUs that it must leave.

    Attributes:
        cpus: The CPUs.
    """

    cpus: CpuSet


class AwaitOwnInflight(Struct, frozen=True):
    """Wait for calls in flight for the containers of the reservation that carry other CPUs.

    Attributes:
        cpus: The CPUs that calls may carry.
    """

    cpus: CpuSet


class WriteSharers(Struct, frozen=True):
    """Write the cpuset of every container that shares CPUs, as the state has it at that time."""


class WriteOwners(Struct, frozen=True):
    """Write the cpusets of the containers of the reservation, as the state has them at that time."""


class ReadCpusets(Struct, frozen=True):
    """Read which CPUs containers may run on.

    Attributes:
        container_ids: The containers; if empty, those of the reservation.
    """

    container_ids: tuple[str, ...] = ()


class Pause(Struct, frozen=True):
    """Wait.

    Attributes:
        seconds: How long.
    """

    seconds: float


class PlaceElsewhere(Struct, frozen=True):
    """Decide the create again, without CPUs that cannot be freed.

    Attributes:
        reason: Why the CPUs cannot be freed.
    """

    reason: AbortReason


# -- the end ------------------------------------------------------------------------------------------------


class Commit(Struct, frozen=True):
    """The CPUs are the owner's; the call continues."""


class Abort(Struct, frozen=True):
    """Everything is as it was before.

    Attributes:
        reason: Why; None if there is nothing to report, for example because the containers have exited.
    """

    reason: AbortReason | None = None


WAITED = (
    AppendLedger,
    AwaitInflight,
    AwaitOwnInflight,
    WriteSharers,
    WriteOwners,
    ReadCpusets,
    Pause,
    PlaceElsewhere,
)
Effect = (
    ReserveCpus
    | UnreserveCpus
    | AssignReplacement
    | AssignOwn
    | WithdrawPlacement
    | RecordSoon
    | RequestReconcile
    | ReportProblem
    | StartDeadline
    | EndDeadline
    | AppendLedger
    | AwaitInflight
    | AwaitOwnInflight
    | WriteSharers
    | WriteOwners
    | ReadCpusets
    | Pause
    | PlaceElsewhere
    | Commit
    | Abort
)
