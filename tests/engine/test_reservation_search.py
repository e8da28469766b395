"""Every order of events of a reservation, on a node of three CPUs, with a crash after every effect.

The node is a value: the plan, the durable and the queued records of the ledger, the cpusets in the kernel,
and the calls in flight. An action performs the effect that is waited for, in one of the ways in which it can
end, or is an independent event: the kernel follows the plan, a call completes, a record becomes durable, a
container exits, a client disconnects, an effect fails, the daemon is killed. From each state each action is
tried.

CPU 0 is the owner's old one, CPU 1 the reserved one, and CPU 2 is always shared.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from proxy.engine import reservation_effects as to_do
from proxy.engine import reservation_events as seen
from proxy.engine.reservation import step
from proxy.engine.reservation_state import Reservation, ReservationKind, ReservationPhase, restoration
from proxy.model.idset import CpuSet
from tests.testkit.changed_copy import changed_copy

OLD, NEW, SHARED, NONE = (CpuSet.from_bits(bits) for bits in (1, 2, 4, 0))
ALL = OLD | NEW | SHARED
KIND = ReservationKind
LIMIT = 400_000
"""More states than there are."""
Record = tuple[str, CpuSet | None]
"""What a write to the ledger changes: ``own`` (the placement), ``move`` (its record, None to delete it)."""


@dataclass(frozen=True, slots=True)
class SmallNode:
    """The node.

    Attributes:
        reservation: The reservation in progress.
        waits: The effect that has an outstanding result.
        own, hold: The owner's CPUs by the plan, and the CPUs that are held for it.
        ledger_own, ledger_move: The durable records.
        queue: The records that the ledger is to write, in order.
        owner, sharer: The cpusets in the kernel; None for an owner that does not run.
        owner_call, sharer_call: The cpusets that calls in flight carry to them.
        faults, independent, crashes: How many more may happen.
        done: Whether it committed; None if it has not ended.
        stopped: The daemon stops.
        odd: Records of the container cannot be stored, because of what they hold.
        boots: The daemon has not written every cpuset yet.
    """

    reservation: Reservation
    waits: to_do.Effect | None
    own: CpuSet
    hold: CpuSet
    ledger_own: CpuSet | None
    ledger_move: CpuSet | None
    queue: tuple[tuple[Record, ...], ...]
    owner: CpuSet | None
    sharer: CpuSet
    owner_call: CpuSet | None
    sharer_call: CpuSet | None
    faults: int = 2
    independent: int = 2
    crashes: int = 1
    done: bool | None = None
    stopped: bool = False
    odd: bool = False
    boots: bool = False

    @property
    def wanted(self) -> CpuSet:
        """Return the CPUs that are shared by the plan."""
        return ALL - self.own - self.hold


def begun(kind: ReservationKind) -> SmallNode:
    """A node on which a reservation is about to begin."""
    moves = kind is KIND.MOVE
    before = OLD if moves else NONE
    one = Reservation(kind, ("own",), NEW, ref="ns/p/c", previous=before)
    runs = kind in (KIND.MOVE, KIND.REPLACEMENT)
    if kind is KIND.NARROW:
        own = NONE
    elif kind is KIND.REPLACEMENT:
        own = OLD
    else:
        own = OLD if moves else NEW
    node = SmallNode(
        reservation=one,
        waits=None,
        own=own,
        hold=NONE,
        ledger_own=own if runs or kind is KIND.START else None,
        ledger_move=None,
        queue=(),
        owner=OLD if runs else None,
        sharer=ALL - OLD if runs else ALL,
        owner_call=OLD if moves else None,
        sharer_call=ALL - OLD if runs else ALL,
    )
    return handled(node, seen.ReservationRequested())


def handled(node: SmallNode, event: seen.Event) -> SmallNode:
    """Let an event happen, with the effects that are not waited for."""
    over = node.reservation.is_over
    reservation, effects = step(node.reservation, event)
    assert not (over and effects), "there is an effect after the end"
    waits = node.waits if not effects and not reservation.is_over else None
    node = changed_copy(node, reservation=reservation, waits=waits)
    for effect in effects:
        node = performed(node, effect)
    return node


def performed(node: SmallNode, effect: to_do.Effect) -> SmallNode:
    """Perform an effect, or begin to wait for it."""
    recorded = node.ledger_own is not None if node.reservation.kind is KIND.CREATE else True
    if isinstance(effect, to_do.WriteSharers):
        assert recorded, "other containers are moved for a placement that is not durable"
    if isinstance(effect, to_do.WriteSharers | to_do.WriteOwners) and node.reservation.kind is KIND.MOVE:
        assert node.ledger_move == NEW, "a cpuset is written for a move that is not recorded"
    if isinstance(effect, to_do.WAITED):
        node = changed_copy(node, waits=effect)
    match effect:
        case to_do.WithdrawPlacement():
            return queued(changed_copy(node, own=NONE), ("own", None))
        case to_do.RecordSoon():
            return queued(node, ("own", node.own), ("move", None))
        case to_do.AppendLedger(may_run_on):
            own = node.own | node.hold if node.reservation.kind is KIND.REPLACEMENT else node.own
            return queued(node, ("own", own), ("move", may_run_on or None))
        case to_do.Commit():
            runs = node.reservation.kind in (KIND.CREATE, KIND.START)
            assert node.sharer.isdisjoint(node.reservation.cpus) or node.reservation.kind is KIND.NARROW
            owner = node.own if runs else node.owner
            return changed_copy(node, done=True, owner=owner)
        case to_do.Abort():
            return changed_copy(node, done=False)
    return placed(node, effect)


def placed(node: SmallNode, effect: to_do.Effect) -> SmallNode:
    """Perform an effect on the plan, if it is one."""
    match effect:
        case to_do.ReserveCpus(cpus):
            return changed_copy(node, hold=cpus)
        case to_do.UnreserveCpus():
            return changed_copy(node, hold=NONE)
        case to_do.AssignReplacement():
            return changed_copy(node, own=node.own | node.hold, hold=NONE)
        case to_do.AssignOwn(cpus, hold):
            return changed_copy(node, own=cpus, hold=hold)
    return node


def queued(node: SmallNode, *records: Record) -> SmallNode:
    """Queue records that the ledger writes in one step."""
    return changed_copy(node, queue=(*node.queue, records))


def flushed(node: SmallNode, count: int | None = None) -> SmallNode:
    """Make all or some of the queued records durable.

    A record that cannot be stored is dropped alone; other deletions are written.
    """
    own, move = node.ledger_own, node.ledger_move
    batches = node.queue if count is None else node.queue[:count]
    for what, value in (record for batch in batches for record in batch):
        if what == "move":
            move = value
        elif value is None or not node.odd:
            own = value
    return changed_copy(node, ledger_own=own, ledger_move=move, queue=node.queue[len(batches) :])


def completed(node: SmallNode, *, owner: bool) -> SmallNode:
    """Complete a call in flight: the runtime writes its cpuset."""
    if owner:
        runs = node.owner is not None
        return changed_copy(node, owner=node.owner_call if runs else None, owner_call=None)
    assert node.sharer_call is not None
    return changed_copy(node, sharer=node.sharer_call, sharer_call=None)


def results(node: SmallNode) -> Iterator[SmallNode]:
    """Yield the node after each result that the effect can have which is waited for."""
    bad = changed_copy(node, faults=node.faults - 1) if node.faults else None
    if isinstance(node.waits, to_do.AppendLedger):
        yield handled(flushed(node), seen.LedgerRejected("odd") if node.odd else seen.LedgerWritten())
        if bad:
            yield handled(bad, seen.LedgerLate("late"))
    elif isinstance(node.waits, to_do.Pause):
        yield handled(node, seen.PauseOver())
    elif isinstance(node.waits, to_do.PlaceElsewhere):
        yield handled(changed_copy(node, own=SHARED), seen.PlacedElsewhere("t-2", SHARED))
        yield handled(node, seen.NoOtherPlacement())
        yield handled(queued(changed_copy(node, own=NONE), ("own", None)), seen.PlacementWithdrawn())
    elif isinstance(node.waits, to_do.AwaitInflight | to_do.AwaitOwnInflight):
        yield from calls(node, bad, node.waits)
    else:
        yield from kernel(node, bad)


def calls(
    node: SmallNode, bad: SmallNode | None, waits: to_do.AwaitInflight | to_do.AwaitOwnInflight
) -> Iterator[SmallNode]:
    """Yield the node after each result of a wait for calls in flight."""
    if isinstance(waits, to_do.AwaitInflight):
        call, owner = node.sharer_call, False
        in_the_way = call is not None and bool(call & waits.cpus)
    else:
        call, owner = node.owner_call, True
        in_the_way = call is not None and not call <= waits.cpus
    yield handled(completed(node, owner=owner) if in_the_way else node, seen.InflightCompleted())
    if bad and in_the_way and call is not None:
        yield handled(bad, seen.InflightLate("busy", "", call))


def kernel(node: SmallNode, bad: SmallNode | None) -> Iterator[SmallNode]:
    """Yield the node after each result of a write or a read."""
    owner = None if node.owner is None else node.own
    if isinstance(node.waits, to_do.WriteSharers):
        yield handled(changed_copy(node, sharer=node.wanted), seen.CpusetsWritten())
    elif isinstance(node.waits, to_do.WriteOwners):
        yield handled(changed_copy(node, owner=owner), seen.CpusetsWritten())
    else:
        assert isinstance(node.waits, to_do.ReadCpusets)
        found = seen.CpusInEffect("ls", node.sharer, node.wanted)
        if not node.waits.container_ids:
            found = seen.CpusInEffect("own", node.owner or NONE, node.own)
        yield handled(node, seen.CpusetsRead((found,)))
    if bad is None:
        return
    if not isinstance(node.waits, to_do.ReadCpusets):
        for number in (errno.EBUSY, errno.EACCES, errno.EROFS):
            refused = seen.RefusedWrite("ls", number, "refused")
            yield handled(bad, seen.CpusetsWritten((refused,), ("refused",)))
    if node.reservation.phase is not ReservationPhase.HANDING_OVER:
        yield handled(bad, seen.TimedOut())


def independent_events(node: SmallNode) -> Iterator[SmallNode]:
    """Yield the node after each independent event."""
    if node.sharer != node.wanted and not node.stopped:
        yield changed_copy(node, sharer=node.wanted)
    if node.boots:
        first = changed_copy(node, sharer=node.wanted)
        check(first)
        owner = None if node.owner is None else node.own
        yield changed_copy(first, owner=owner, boots=False)
    elif node.owner is not None and node.owner != node.own and not node.stopped:
        yield changed_copy(node, owner=node.own)
    if node.owner_call is not None:
        yield completed(node, owner=True)
    if node.queue and not isinstance(node.waits, to_do.AppendLedger):
        yield flushed(node, 1)
    if not node.independent:
        return
    less = changed_copy(node, independent=node.independent - 1)
    if node.owner is not None and node.owner_call is None and not (node.stopped or node.boots):
        yield changed_copy(less, owner_call=node.own)  # an update of kubelet's, rewritten
    if node.reservation.kind is KIND.MOVE and not node.stopped:
        yield queued(less, ("own", node.own))  # for example, its phase has changed
    if node.reservation.is_over:
        return
    yield handled(less, seen.ClientDisconnected())
    if not (node.reservation.is_assigned and node.reservation.kind is KIND.REPLACEMENT):
        yield handled(less, seen.Interrupted())
    if node.reservation.kind in (KIND.MOVE, KIND.REPLACEMENT):
        yield handled(changed_copy(less, owner=None), seen.ContainersExited())
    yield changed_copy(handled(less, seen.Cancelled()), stopped=True)


def crashed(node: SmallNode) -> SmallNode:
    """Return the node with the next daemon on it, which knows the ledger and the runtime only."""
    node = changed_copy(node, crashes=node.crashes - 1, queue=(), done=None, waits=None, stopped=False)
    node = changed_copy(node, boots=True)
    own = node.ledger_own or NONE
    if node.ledger_move is None:
        over = changed_copy(node.reservation, phase=ReservationPhase.ABORTED)
        return changed_copy(node, own=own, hold=NONE, reservation=over)
    back = restoration(node.reservation.containers, OLD, node.ledger_move, "ns/p/c")
    node = changed_copy(node, own=OLD, hold=node.ledger_move, reservation=back)
    return handled(node, seen.ReservationRequested())


def check(node: SmallNode) -> None:
    """Check the invariants of any moment."""
    assert node.own.isdisjoint(node.hold) or node.reservation.kind is KIND.MOVE
    if node.owner is not None and node.reservation.kind is not KIND.NARROW:
        assert node.sharer.isdisjoint(node.owner), "a container runs on exclusive CPUs"
    assert node.sharer, "a container has no CPU"
    kind = node.reservation.kind
    if node.done is True:
        assert not node.hold
        if kind is KIND.MOVE:
            assert (node.own, node.ledger_move) == (NEW, None)
            assert node.owner is None or node.owner == NEW
    if node.done is False:
        assert not node.hold
        if kind is KIND.MOVE:
            assert node.own == OLD
            assert node.owner is None or node.owner == OLD
            assert flushed(node).ledger_move is None
            assert flushed(node).ledger_own == OLD
        if kind is KIND.REPLACEMENT:
            assert (node.own, flushed(node).ledger_own) == (OLD, OLD)
        if kind is KIND.CREATE:
            assert not node.own
            assert not flushed(node).ledger_own
    elif node.reservation.is_over and kind is KIND.MOVE and not node.crashes and not node.queue:
        assert node.owner is None or node.owner in (OLD, NEW)


@pytest.mark.parametrize("kind", list(ReservationKind))
def test_every_order_of_events_with_a_crash_after_every_effect(kind: ReservationKind) -> None:
    ahead, found = [begun(kind), changed_copy(begun(kind), odd=True)], set[SmallNode]()
    ends = set[bool]()
    while ahead:
        node = ahead.pop()
        if node in found:
            continue
        found.add(node)
        assert len(found) < LIMIT
        check(node)
        if node.done is not None:
            ends.add(node.done)
        if not node.reservation.is_over and not node.stopped:
            assert node.waits is not None, "no effect is outstanding and the reservation has not ended"
            ahead += results(node)
        ahead += independent_events(node)
        if node.crashes:
            ahead.append(crashed(node))
    assert True in ends
    assert False in ends or kind is KIND.NARROW
