"""Write conflicts: when they begin and end, how often cpusets are repaired; and the order of effects.

The tests also cover the reaction to each error of the kernel.
"""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine import write_conflicts
from proxy.engine.likely_writer import ANY_CONTAINER, WriterHint, WriterKind
from proxy.engine.node import Node
from proxy.engine.reservation_events import ContestedCpus
from proxy.engine.state import NodeState
from proxy.engine.write_conflicts import (
    FIRST_S,
    LATEST_S,
    LONGEST_S,
    PAUSE_S,
    QUIET_S,
    REPAIRS_TO_CONFLICT,
    SOONEST_S,
    TRIES,
    URGENT_S,
    WINDOW_S,
    CheckCpusets,
    ConflictsDue,
    CpusetsCompared,
    CpusetsRepaired,
    EndConflict,
    FindWriters,
    ReportDrift,
    UnattributedRepairs,
    WriteAction,
    WriteConflict,
    WriteConflicts,
    WriterDetected,
    WritersFound,
    action_for,
    retry_pause,
    step,
)
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.playbook import Playbook

WRONG = CpuSet.parse("0-3")


MACHINE = regular_machine(1, 1, 4, 2)
SHARING = Container(
    "c", "c", Pod("s", "u", "ns", "p"), Request(), Placement(Pool.SHARED, CpuSet(), Mask((0,))), Phase.RUNNING
)


def test_the_containers_on_contested_cpus_are_named_with_all_cpus_that_another_program_writes() -> None:
    state = NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), (), (SHARING,))
    outside = CpuSet.parse("0-9")  # 8 and 9 are in no pool
    known = structs.replace(
        WriteConflicts(), conflicts={key: WriteConflict(0.0, 3, 0.0, 0.0, outside) for key in ("c", "gone")}
    )
    assert write_conflicts.contested(known, state, CpuSet.parse("9")) == (ContestedCpus("ns/p/c", outside),)
    assert write_conflicts.contested(known, state, CpuSet.parse("0-7")) == ()


def repaired(known: WriteConflicts, now: float, container: str = "c") -> WriteConflicts:
    return step(known, CpusetsRepaired(now, {container: WRONG}))[0]


def after(*times: float, container: str = "c", known: WriteConflicts | None = None) -> WriteConflicts:
    """Return the known conflicts after repairs at some times."""
    known = known or WriteConflicts()
    for now in times:
        known = repaired(known, now, container)
    return known


def contested(
    period: float, seconds: float, *, urgent: bool = False
) -> tuple[list[float], list[tuple[str, float]]]:
    """Simulate a program that writes periodically; return the repairs, and the begin and end of conflicts."""
    known, repairs, turns = WriteConflicts(), list[float](), list[tuple[str, float]]()
    pause = 0.25
    wrong, now, next_write = False, 0.0, 0.0
    while now <= seconds:
        if next_write <= now:
            wrong, next_write = True, next_write + period
        conflict = known.conflicts.get("c")
        if wrong and (conflict is None or now >= conflict.due(urgent=urgent)):
            wrong = False
            repairs.append(now)
            known = repaired(known, now)
            turns += [("began", now) for _ in known.conflicts if conflict is None]
        elif wrong:
            known = step(known, CpusetsRepaired(now, {}, {"c": WRONG}))[0]
        known, effects = step(known, ConflictsDue(now))
        turns += [("over", now) for effect in effects if isinstance(effect, EndConflict)]
        now += pause
    return repairs, turns


class TestWriteConflict:
    def test_a_single_write_is_attributed_and_reported(self) -> None:
        one = UnattributedRepairs(1, WRONG)
        assert (
            Playbook(WriteConflicts(), step)
            >> CpusetsRepaired(1, {"c": WRONG}) << FindWriters({"c": WRONG})
            >> WritersFound({"c": WriterKind.RUNC}) << ReportDrift({"c": (one, WriterKind.RUNC)}, {}, ())
        )  # fmt: skip

    def test_repairs_during_a_search_for_writers_are_attributed_next(self) -> None:
        one, two = UnattributedRepairs(1, WRONG), UnattributedRepairs(2, None)
        assert (
            Playbook(WriteConflicts(), step)
            >> CpusetsRepaired(1, {"a": WRONG}) << FindWriters({"a": WRONG})
            >> CpusetsRepaired(2, {"b": WRONG})
            >> CpusetsRepaired(3, {"b": None})
            >> WritersFound({"a": WriterKind.RUNC})
            << ReportDrift({"a": (one, WriterKind.RUNC)}, {}, ()) << FindWriters({"b": None})
            >> WritersFound({"b": WriterKind.UNKNOWN})
            << ReportDrift({"b": (two, WriterKind.UNKNOWN)}, {}, ())
        )  # fmt: skip

    def test_a_failed_attribution_delays_nothing(self) -> None:
        assert (
            Playbook(WriteConflicts(), step)
            >> CpusetsRepaired(1, {"c": WRONG}) << FindWriters({"c": WRONG})
            >> WritersFound({}) << ReportDrift({}, {}, ())
            >> CpusetsRepaired(2, {"c": WRONG}) << FindWriters({"c": WRONG})
        )  # fmt: skip

    def test_a_conflict_is_reported_once_checked_and_ended(self) -> None:
        many = UnattributedRepairs(REPAIRS_TO_CONFLICT - 1, WRONG)
        playbook = Playbook(after(0), step) >> CpusetsRepaired(1, {"c": WRONG})
        playbook >> CpusetsRepaired(2, {"c": WRONG}) << CheckCpusets(("c",), FIRST_S)
        playbook >> WritersFound({"c": WriterKind.RUNC})
        one = UnattributedRepairs(1, WRONG)
        began = {"c": WriteConflict(0, REPAIRS_TO_CONFLICT, 2, 2, WRONG, WriterKind.RUNC)}
        playbook << ReportDrift({"c": (one, WriterKind.RUNC)}, began, ("c",)) << FindWriters({"c": WRONG})
        playbook >> WritersFound({"c": WriterKind.SYSTEMD})
        playbook << ReportDrift({"c": (many, WriterKind.SYSTEMD)}, {}, ("c",))
        playbook >> CpusetsRepaired(3, {}, {"c": CpuSet([7])})
        playbook >> ConflictsDue(3) << CheckCpusets(("c",), SOONEST_S)
        playbook >> ConflictsDue(3 + QUIET_S - 0.01) << CheckCpusets(("c",), SOONEST_S)
        ended = WriteConflict(0, REPAIRS_TO_CONFLICT, 2, 3, CpuSet([7]), WriterKind.SYSTEMD)
        playbook >> ConflictsDue(3 + QUIET_S) << EndConflict("c", ended) << CheckCpusets(("c",), SOONEST_S)
        assert playbook >> ConflictsDue(4 + QUIET_S)
        assert not playbook.state.is_checking
        playbook >> CpusetsRepaired(40, {"c": WRONG}) << FindWriters({"c": WRONG})
        assert playbook, "a later write begins no conflict"
        assert not playbook.state.conflicts

    def test_checks_are_never_further_apart_than_the_latest(self) -> None:
        known = after(*[0.5 * time for time in range(20)])
        _, (check,) = step(known, ConflictsDue(9.5))
        assert isinstance(check, CheckCpusets)
        assert SOONEST_S <= check.seconds <= LATEST_S


def test_two_writes_are_not_a_conflict_and_the_third_is() -> None:
    assert not after(0, 1).conflicts
    conflict = after(0, 1, 2).conflicts["c"]
    assert (conflict.began, conflict.times, conflict.kernel_cpus) == (0, REPAIRS_TO_CONFLICT, WRONG)


def test_writes_that_are_far_apart_never_make_a_conflict() -> None:
    repairs, turns = contested(WINDOW_S / 2 + 1, 600)
    assert turns == []
    assert len(repairs) == 600 // (WINDOW_S / 2 + 1) + 1, "each of them is repaired at once"


def test_repairs_after_a_busy_program_slow_down_and_never_stop() -> None:
    repairs, turns = contested(0.25, 1000)
    assert turns == [("began", 0.5)], "repairs continue"
    gaps = [b - a for a, b in itertools.pairwise(repairs)][2:]
    assert gaps[:4] == [FIRST_S, FIRST_S * 2, FIRST_S * 4, FIRST_S * 8]
    assert set(gaps[8:]) == {LONGEST_S}


def test_a_container_on_owned_cpus_is_always_repaired_quickly() -> None:
    repairs, _ = contested(0.25, 200, urgent=True)
    gaps = [b - a for a, b in itertools.pairwise(repairs)]
    assert max(gaps) == URGENT_S


def test_the_conflict_of_a_removed_container_is_dropped() -> None:
    known = WriteConflicts()
    for container in ("a", "b"):
        known = after(0, 1, 2, container=container, known=known)
        known = after(2, container=f"{container}-once", known=known)
        known, _ = step(known, WriterDetected(WriterHint(WriterKind.RUNC, 2), (container, ANY_CONTAINER)))
    conflict = known.conflicts["b"]
    known, effects = step(known, CpusetsCompared(3, {"a", "a-once"}))
    assert effects == (EndConflict("b", conflict),)
    assert list(known.conflicts) == ["a"]
    assert sorted(known.hints) == [ANY_CONTAINER, "a"]
    for container in ("a-once", "b-once"):
        known = after(3, 4, container=container, known=known)
    assert sorted(known.conflicts) == ["a", "a-once"]


@given(st.floats(0.25, 40), st.booleans())
def test_conflicts_do_not_flap_and_pauses_are_bounded(period: float, urgent: bool) -> None:
    repairs, turns = contested(period, 400, urgent=urgent)
    assert len(turns) <= 1, "a writer that is steady has no conflict or one that does not end"
    assert not turns or turns[0][0] == "began"
    bound = URGENT_S if urgent else LONGEST_S
    gaps = [b - a for a, b in itertools.pairwise(repairs)]
    assert max(gaps, default=0) <= bound + period + 0.25


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=60))
def test_a_conflict_begins_with_three_writes_within_the_window(steps: list[tuple[float, bool]]) -> None:
    known, now, times = WriteConflicts(), 0.0, list[float]()
    for pause, compares in steps:
        now += pause
        if compares:
            known, _ = step(known, CpusetsCompared(now, {"c"}))
        if "c" in known.conflicts:
            known = repaired(known, now)
            continue
        times.append(now)
        known = repaired(known, now)
        assert ("c" in known.conflicts) is (
            len(times) >= REPAIRS_TO_CONFLICT and now - times[-REPAIRS_TO_CONFLICT] <= WINDOW_S
        )


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((errno.ENOENT, errno.ENODEV), WriteAction.LOCATE),
        ((errno.EBUSY, errno.EAGAIN, errno.EINTR, 0), WriteAction.RETRY),
        ((errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EINVAL, errno.EIO, 9999), WriteAction.ELSEWHERE),
        ((errno.EROFS,), WriteAction.REFUSE),
    ],
)
def test_the_remedy_depends_on_the_error(numbers: tuple[int, ...], expected: WriteAction) -> None:
    assert {action_for(number) for number in numbers} == {expected}


def test_the_same_write_is_made_again_a_bounded_number_of_times() -> None:
    waits = [retry_pause(tried, (errno.EACCES, errno.EBUSY)) for tried in range(1, TRIES + 1)]
    assert waits == [PAUSE_S, 4 * PAUSE_S, None]
    assert retry_pause(1, (errno.EACCES, errno.ENOSPC)) is None, "it would fail every time"
    assert retry_pause(1, ()) is None
