"""Write conflicts: another program writes a container's cpuset again and again.

Theory of operation. ``step`` takes the known conflicts and an event; it returns the conflicts after the event
and the effects, in order. Times are seconds of a monotonic clock. A cpuset that another program has written
is repaired at once, because most programs (a reload of systemd, an update at the runtime's own socket) write
it once. If a program writes it again and again, repairs must become slower: each write, the program's and the
repair, takes a lock that the whole kernel shares, and moves every thread of the container.

    no conflict   repaired at once; the REPAIRS_TO_CONFLICT-th time within WINDOW_S begins a conflict
    conflict      repaired when it is due: after FIRST_S, then twice as long each time, up to LONGEST_S;
                  if exclusive CPUs are at stake, never later than URGENT_S; repairs never stop
    over          the cpuset was right for QUIET_S

A program that writes often enough to begin a conflict (every WINDOW_S / 2) is seen again long before QUIET_S
have passed. A program that writes rarely enough to end a conflict does not begin the next one. So conflicts
do not flap.

The results of two effects come back as events; at most one of each is outstanding:

    CpusetsRepaired -> FindWriters  -> WritersFound   reported: each repair, or the conflict when it begins
    CpusetsRepaired -> CheckCpusets -> ConflictsDue   until no conflict is left: its writes are not watched

This module also decides what to do about a write of topoproxy that the kernel refuses (``retry_pause``). An
owner starts only on CPUs on which no other container is, so there are three ways to continue after a refused
write: repeat the write, choose other CPUs, or reject the container. The error number shows which of them can
help:

* ENOENT, ENODEV: the cgroup is gone. Its container has just exited, or has another cgroup now. The cgroup is
  looked up again; a container without a cgroup prevents nothing.
* EBUSY, EAGAIN, EINTR, and a value that reads back as another one (0): another program was writing. For
  example, a cgroup was made inside a container between two reads, another program wrote the cpuset, or a
  cpuset partition is just being made. The same write may succeed a moment later.
* EINVAL: a CPU of the plan went offline; the machine is read again. ENOSPC: the container would be left
  without CPUs. EACCES, EPERM: topoproxy may not write its cgroup. The same write always fails, but other CPUs
  may not have this obstacle.
* EROFS: no cgroup can be written any more, neither now nor later, when the owner must be kept apart.

``proxy.backends.cgroup.files`` explains the error numbers.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct, field, structs

from proxy.engine.likely_writer import ANY_CONTAINER, WriterHint, WriterKind
from proxy.engine.reservation_events import ContestedCpus
from proxy.model.backoff import Backoff
from proxy.model.idset import CpuSet, union
from proxy.model.persistent_map import PersistentMap
from proxy.model.workload import Pool

if TYPE_CHECKING:
    from proxy.engine.state import NodeState


REPAIRS_TO_CONFLICT = 3
WINDOW_S = QUIET_S = 30.0
FIRST_S, LONGEST_S, URGENT_S = 0.5, 60.0, 1.0
GAPS = Backoff(FIRST_S, LONGEST_S, tolerated=REPAIRS_TO_CONFLICT - 1)
SOONEST_S, LATEST_S = 0.25, 1.0
"""Seconds between two checks of contested cpusets."""


class WriteConflict(Struct, frozen=True):
    """A conflict about one container's cpuset.

    Attributes:
        began: When the first write of the conflict was repaired.
        times: How often the cpuset was repaired since.
        repaired: When it was repaired last.
        wrong: When the cpuset last differed from the plan.
        kernel_cpus: The cpuset in the kernel at that time; empty if it was not read.
        writer: The likely writer; None until it has been determined.
    """

    began: float
    times: int
    repaired: float
    wrong: float
    kernel_cpus: CpuSet
    writer: WriterKind | None = None

    def due(self, *, urgent: bool) -> float:
        """Return the time from which the cpuset may be repaired."""
        gap = GAPS.delay(self.times)
        return self.repaired + (min(gap, URGENT_S) if urgent else gap)


class UnattributedRepairs(Struct, frozen=True):
    """Repairs of one container's cpuset whose writer has not been determined.

    Attributes:
        times: How many repairs.
        kernel_cpus: The cpuset in the kernel before the last repair; None if it was not read.
    """

    times: int
    kernel_cpus: CpuSet | None


class WriteConflicts(Struct, frozen=True):
    """The known facts about writes of other programs, by container id. May be read from any thread.

    Attributes:
        conflicts: The conflicts.
        recent: When cpusets without a conflict were repaired lately.
        repairs: Repairs whose writer still has to be determined.
        finding: Repairs whose writer is being determined.
        is_checking: Whether contested cpusets are being checked.
        hints: The programs that were active lately and may have written cpusets.
    """

    conflicts: Mapping[str, WriteConflict] = field(default_factory=dict)
    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    repairs: Mapping[str, UnattributedRepairs] = field(default_factory=dict)
    finding: Mapping[str, UnattributedRepairs] = field(default_factory=dict)
    is_checking: bool = False
    hints: PersistentMap[WriterHint] = field(default_factory=PersistentMap)


# -- events and effects -------------------------------------------------------------------------------------


class CpusetsRepaired(Struct, frozen=True):
    """Cpusets that other programs had written were repaired, or were not because a repair was not due yet.

    Attributes:
        at: When.
        repaired: The cpusets in the kernel before the repair, by container id; None if one was not read.
        unrepaired: The cpusets in the kernel that were not repaired, by container id.
    """

    at: float
    repaired: Mapping[str, CpuSet | None]
    unrepaired: Mapping[str, CpuSet] = field(default_factory=dict)


class WritersFound(Struct, frozen=True):
    """The result of ``FindWriters``; a container without an entry could not be examined."""

    writers: Mapping[str, WriterKind]


class ConflictsDue(Struct, frozen=True):
    """The seconds of ``CheckCpusets`` have passed."""

    at: float


class WriterDetected(Struct, frozen=True):
    """A program runs that may write cpusets of some containers; see ``likely_writer.ANY_CONTAINER``."""

    hint: WriterHint
    ids: tuple[str, ...]


class CpusetsCompared(Struct, frozen=True):
    """All cpusets will be compared with the kernel next; only these containers are running.

    Attributes:
        at: When.
        live: Their ids.
    """

    at: float
    live: Collection[str]


class FindWriters(Struct, frozen=True):
    """Find the likely writers of cpusets in the kernel; answered by ``WritersFound``.

    Attributes:
        kernel_cpus: The cpusets before they were repaired, by container id; None if one was not read.
    """

    kernel_cpus: Mapping[str, CpuSet | None]


class CheckCpusets(Struct, frozen=True):
    """Compare cpusets with the plan; after some seconds, ``ConflictsDue`` follows."""

    ids: tuple[str, ...]
    seconds: float


class ReportDrift(Struct, frozen=True):
    """Count repairs by their writer, and report repairs without a conflict, and conflicts that began.

    Attributes:
        repairs: The repairs and their writers, by container id.
        began: Conflicts that have begun.
        contested: The containers whose cpusets are in conflict.
    """

    repairs: Mapping[str, tuple[UnattributedRepairs, WriterKind]]
    began: Mapping[str, WriteConflict]
    contested: Collection[str]


class EndConflict(Struct, frozen=True):
    """Watch the writes to a cpuset again, and report that a conflict is over."""

    container_id: str
    conflict: WriteConflict


DriftEvent = CpusetsRepaired | WritersFound | ConflictsDue | WriterDetected | CpusetsCompared
DriftEffect = FindWriters | CheckCpusets | ReportDrift | EndConflict
DriftStep = tuple[WriteConflicts, tuple[DriftEffect, ...]]


# -- transitions --------------------------------------------------------------------------------------------


def step(known: WriteConflicts, event: DriftEvent) -> DriftStep:
    """Return the known conflicts after an event, and the effects to perform."""
    match event:
        case CpusetsRepaired():
            return _repaired(known, event)
        case WritersFound(writers):
            return _writers_found(known, writers)
        case ConflictsDue(at):
            return _check(known, at)
        case WriterDetected(hint, ids):
            return _with_hint(known, hint, ids), ()
        case CpusetsCompared(at, live):
            ended = {i: each for i, each in known.conflicts.items() if i not in live}
            effects = (EndConflict(i, conflict) for i, conflict in ended.items())
            return _without_ended(known, live, at), tuple(effects)


def _repaired(known: WriteConflicts, event: CpusetsRepaired) -> DriftStep:
    conflicts, recent, repairs, at = {**known.conflicts}, {**known.recent}, {**known.repairs}, event.at
    for container_id, cpus in event.unrepaired.items():
        if container_id in conflicts:
            conflicts[container_id] = structs.replace(conflicts[container_id], wrong=at, kernel_cpus=cpus)
    for container_id, cpus_before in event.repaired.items():
        before = repairs.get(container_id)
        repairs[container_id] = UnattributedRepairs(before.times + 1 if before else 1, cpus_before)
        conflict = conflicts.get(container_id)
        if conflict is not None:
            kernel_cpus = cpus_before or conflict.kernel_cpus
            conflicts[container_id] = structs.replace(
                conflict, times=conflict.times + 1, repaired=at, wrong=at, kernel_cpus=kernel_cpus
            )
            continue
        times = (*(time for time in recent.pop(container_id, ()) if at - time <= WINDOW_S), at)
        if len(times) < REPAIRS_TO_CONFLICT:
            recent[container_id] = times
        else:
            kernel_cpus = cpus_before or CpuSet()
            conflicts[container_id] = WriteConflict(times[0], REPAIRS_TO_CONFLICT, at, at, kernel_cpus)
    known = structs.replace(known, conflicts=conflicts, recent=recent, repairs=repairs)
    known, find = _find_writers(known)
    known, check = (known, ()) if known.is_checking else _check(known, at)
    return known, (*find, *check)


def _find_writers(known: WriteConflicts) -> DriftStep:
    if known.finding or not known.repairs:
        return known, ()
    find = FindWriters({i: repairs.kernel_cpus for i, repairs in known.repairs.items()})
    return structs.replace(known, repairs={}, finding=known.repairs), (find,)


def _writers_found(known: WriteConflicts, writers: Mapping[str, WriterKind]) -> DriftStep:
    writers = {i: writer for i, writer in writers.items() if i in known.finding}
    before = {i: known.conflicts[i] for i in writers if i in known.conflicts}
    named = {i: structs.replace(conflict, writer=writers[i]) for i, conflict in before.items()}
    began = {i: conflict for i, conflict in named.items() if before[i].writer is None}
    report = ReportDrift({i: (known.finding[i], writers[i]) for i in writers}, began, tuple(named))
    known, more = _find_writers(structs.replace(known, conflicts={**known.conflicts, **named}, finding={}))
    return known, (report, *more)


def _check(known: WriteConflicts, at: float) -> DriftStep:
    over = {i: conflict for i, conflict in known.conflicts.items() if at - conflict.wrong >= QUIET_S}
    ongoing = {i: conflict for i, conflict in known.conflicts.items() if i not in over}
    known = structs.replace(known, conflicts=ongoing, is_checking=bool(ongoing or over))
    if not known.is_checking:
        return known, ()
    soon = min((conflict.due(urgent=True) - at for conflict in ongoing.values()), default=0.0)
    check = CheckCpusets(
        (*ongoing, *over), min(LATEST_S, max(SOONEST_S, soon))
    )  # writes to the cpusets of ended conflicts are watched
    return known, (*(EndConflict(i, conflict) for i, conflict in over.items()), check)


def _with_hint(known: WriteConflicts, hint: WriterHint, ids: Collection[str]) -> WriteConflicts:
    hints = known.hints
    for container_id in ids:
        hints = hints.put(container_id, hint)
    return structs.replace(known, hints=hints)


def _without_ended(known: WriteConflicts, live: Collection[str], at: float) -> WriteConflicts:
    """Drop the facts about all containers that do not live."""
    return structs.replace(
        known,
        conflicts={i: conflict for i, conflict in known.conflicts.items() if i in live},
        recent={i: times for i, times in known.recent.items() if i in live and at - times[-1] <= WINDOW_S},
        hints=PersistentMap({i: hint for i, hint in known.hints.items() if i in live or i == ANY_CONTAINER}),
    )


# -- questions ----------------------------------------------------------------------------------------------


def not_due(
    known: WriteConflicts, state: NodeState, kernel_cpus: Mapping[str, CpuSet], now: float
) -> dict[str, CpuSet]:
    """Return the wrong cpusets whose repair is not due yet, by container id.

    Args:
        known: The conflicts.
        state: The node.
        kernel_cpus: Cpusets in the kernel that differ from the plan, by container id.
        now: The time, by the clock of the conflicts, in seconds.
    """
    conflicts = ((i, cpus, known.conflicts.get(i)) for i, cpus in kernel_cpus.items())
    return {
        i: cpus
        for i, cpus, conflict in conflicts
        if conflict is not None and now < conflict.due(urgent=is_urgent(state, i, cpus))
    }


def is_urgent(state: NodeState, container_id: str, kernel_cpus: CpuSet) -> bool:
    """Return whether exclusive CPUs are at stake while the kernel holds this cpuset for a container."""
    container = state.containers.get(container_id)
    if container is None or container.placement.pool is Pool.OWN:
        return container is not None
    owned = union(owner.cpus.bits for owner in state.owners.values())
    return bool((kernel_cpus - state.desired_cpus(container)).bits & owned)


def contested(known: WriteConflicts, state: NodeState, cpus: CpuSet) -> tuple[ContestedCpus, ...]:
    """Return the containers that another program puts onto some of these CPUs, with all CPUs of each."""
    conflicting = ((state.containers.get(i), conflict.kernel_cpus) for i, conflict in known.conflicts.items())
    return tuple(
        ContestedCpus(container.ref, kernel_cpus)
        for container, kernel_cpus in conflicting
        if container is not None and (kernel_cpus - state.desired_cpus(container)) & cpus
    )


TRIES = 3
"""How often a write is tried that may succeed a moment later."""
PAUSE_S = 0.01
"""Seconds before the second try; each further try waits four times as long."""
MAX_OTHER_PLACEMENTS = 2
"""How many other placements are tried for one create."""


class WriteAction(Enum):
    """What to do about a refused write, the most promising action first."""

    LOCATE = "look for the cgroup again"
    RETRY = "write again"
    ELSEWHERE = "take other CPUs"
    REFUSE = "refuse the create"


_ACTIONS = {
    errno.ENOENT: WriteAction.LOCATE,
    errno.ENODEV: WriteAction.LOCATE,
    0: WriteAction.RETRY,
    errno.EBUSY: WriteAction.RETRY,
    errno.EAGAIN: WriteAction.RETRY,
    errno.EINTR: WriteAction.RETRY,
    errno.EROFS: WriteAction.REFUSE,
}


def action_for(number: int) -> WriteAction:
    """Return what to do about an error number; 0 if a value read back differs from the one written."""
    return _ACTIONS.get(number, WriteAction.ELSEWHERE)


def retry_pause(tried: int, errnos: Iterable[int]) -> float | None:
    """Return how long to wait before the same writes are tried again.

    Args:
        tried: How often they have been tried already.
        errnos: The error numbers with which they were refused.

    Returns:
        Seconds; None if they must not be tried again.
    """
    if tried >= TRIES or not any(action_for(error_number) is WriteAction.RETRY for error_number in errnos):
        return None
    return PAUSE_S * 4.0 ** (tried - 1)
