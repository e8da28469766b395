"""The effects of a reservation, as values: the output of ``proxy.engine.reservation.step``.

Effects are performed in the order in which they are given. ``WAITED`` are those whose result comes back as an
event (``proxy.engine.reservation_events``); there is at most one in what a step gives, and it is the last.
"""

from __future__ import annotations

from msgspec import Struct, field

from proxy.model.idset import CpuSet


class AbortReason(Struct, frozen=True):
    """Why CPUs are not free.

    Attributes:
        message: Why, for the operator.
        cpus: All CPUs that are held by containers that cannot be moved.
        final: Other CPUs would not help.
        public: The message for the client, where ``message`` names containers of other pods.
    """

    message: str
    cpus: CpuSet = field(default_factory=CpuSet)
    final: bool = False
    public: str = ""

    @property
    def public_message(self) -> str:
        """The message for the client whose call is rejected."""
        return self.public or self.message


# -- in the state, at once ----------------------------------------------------------------------------------


class ReserveCpus(Struct, frozen=True):
    """Reserve CPUs in the state for the owner: from here on no other plan uses them.

    Attributes:
        cpus: The CPUs.
    """

    cpus: CpuSet


class UnreserveCpus(Struct, frozen=True):
    """Give back the reserved CPUs that are not placed. The pools grow, and the kernel follows."""


class AssignReplacement(Struct, frozen=True):
    """Make the reserved CPUs part of the placements, in place of offline ones; none stay reserved."""


class AssignOwn(Struct, frozen=True):
    """Place the containers on other CPUs of their own.

    Attributes:
        cpus: The CPUs that they own from now on.
        reserved: CPUs that stay reserved besides, so that no other plan uses them.
    """

    cpus: CpuSet
    reserved: CpuSet


class WithdrawPlacement(Struct, frozen=True):
    """Take the container of a create out of state and ledger: its create failed."""


# -- at once, to others -------------------------------------------------------------------------------------


class RecordSoon(Struct, frozen=True):
    """Record the placements as they are now, and that no move is under way, without waiting for it."""


class RequestReconcile(Struct, frozen=True):
    """Compare the node with the runtime and the machine soon."""


class ReportProblem(Struct, frozen=True):
    """Report a problem that does not stop the reservation.

    Attributes:
        message: What, as a constant text.
        cause: Why.
    """

    message: str
    cause: str


class StartDeadline(Struct, frozen=True):
    """From now on writes, pauses and reads together have ``callTimeout``; then ``TimedOut``."""


class EndDeadline(Struct, frozen=True):
    """End the deadline: effects from here on have none."""


# -- waited for ---------------------------------------------------------------------------------------------


class AppendLedger(Struct, frozen=True):
    """Record the placements of the containers, and wait until that is durable.

    For a replacement, the record holds the placements with the replacement.

    Attributes:
        may_run_on: CPUs to which a move is under way; empty where none is. Where it is not empty, the record
            of the move names the CPUs that the containers had before, too: those count until it is deleted.
    """

    may_run_on: CpuSet = field(default_factory=CpuSet)


class AwaitInflight(Struct, frozen=True):
    """Wait for calls in flight that can put a container on CPUs that it must leave.

    Attributes:
        cpus: The CPUs.
    """

    cpus: CpuSet


class AwaitOwnInflight(Struct, frozen=True):
    """Wait for calls in flight for the containers themselves that carry other CPUs.

    Attributes:
        cpus: The CPUs that calls may carry.
    """

    cpus: CpuSet


class WriteSharers(Struct, frozen=True):
    """Write the cpuset of every container that shares CPUs, to what the state holds then."""


class WriteOwners(Struct, frozen=True):
    """Write the cpusets of the containers themselves, to what the state holds then."""


class ReadCpusets(Struct, frozen=True):
    """Read which CPUs containers may run on.

    Attributes:
        container_ids: The containers; those of the reservation where empty.
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
        reason: Why they cannot.
    """

    reason: AbortReason


# -- the end ------------------------------------------------------------------------------------------------


class Commit(Struct, frozen=True):
    """The CPUs are the owner's; the call continues."""


class Abort(Struct, frozen=True):
    """Everything is as it was before.

    Attributes:
        reason: Why; None where there is nothing to report, as the containers have exited.
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
