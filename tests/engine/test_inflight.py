"""Calls in flight, as values."""

from __future__ import annotations

from proxy.engine.inflight import InflightCall, InflightCalls
from proxy.model.idset import CpuSet

WIDE, NARROW = CpuSet.parse("0-7"), CpuSet.parse("0-3")
OLD = InflightCall(1, "a", WIDE)
NEW = InflightCall(2, "a", NARROW, is_start=True)
BOTH = InflightCalls().added(OLD).added(NEW)


def test_two_calls_for_one_container_overlap() -> None:
    assert [call.overlapped for call in InflightCalls().added(OLD).of("a")] == [False]
    assert [call.overlapped for call in BOTH.of("a")] == [True, True]
    assert BOTH.removed(OLD).of("a") == (NEW,)
    assert not BOTH.removed(OLD).removed(NEW).added(OLD).of("a")[0].overlapped


def test_calls_in_flight_are_found_by_container() -> None:
    assert BOTH.of("a") == (OLD, NEW)
    assert (BOTH.is_busy("a"), BOTH.is_busy("b")) == (True, False)
    assert (BOTH.is_starting("a"), BOTH.removed(NEW).is_starting("a")) == (True, False)
    assert BOTH.conflicting_updates("a", NARROW) == [OLD]
    assert BOTH.conflicting_updates("a", WIDE) == [], "a start is no update"


def test_calls_that_bring_more_than_a_container_is_to_have() -> None:
    assert BOTH.exceeding([("b", NARROW)], WIDE) == []
    assert BOTH.exceeding([("a", WIDE)], WIDE) == [], "nothing in flight exceeds it"
    assert BOTH.exceeding([("a", NARROW)], NARROW) == [], "the call carries exactly the desired CPUs"
    assert BOTH.exceeding([("a", NARROW)], CpuSet.parse("3-5")) == [OLD]
    assert InflightCalls().exceeding([("a", NARROW)], WIDE) == []


def test_a_completed_call_stays_completed() -> None:
    left = BOTH.removed(OLD)
    assert left.removed(OLD) == left
    assert left.updated(OLD) == left
    assert left.current(OLD) is None
    assert left.removed(NEW).calls == InflightCalls().calls


def test_a_container_is_confined_as_long_as_one_of_its_calls_is_marked_confined() -> None:
    confined = BOTH.updated(confine(OLD)).updated(confine(NEW))
    assert confined.confined == {"a"}
    assert confined.removed(OLD).is_confined("a")
    assert not confined.removed(OLD).removed(NEW).is_confined("a")
    assert not confined.removed(OLD).updated(NEW).is_confined("a")


def confine(call: InflightCall) -> InflightCall:
    """The call, with its container confined."""
    return InflightCall(call.number, "a", call.carries, call.is_start, confined=True)


def test_strays_and_suspected_calls_are_not_awaited() -> None:
    orphan = InflightCall(3, "b", WIDE, orphaned_since=1.0)
    suspected = InflightCall(4, "c", WIDE, orphaned_since=1.0, resend=False, suspected=True)
    calls = BOTH.added(orphan).added(suspected)
    assert sorted(call.number for call in calls.orphans()) == [3, 4]
    assert [calls.is_awaited(i) for i in "abcd"] == [True, False, False, False]
    assert [calls.is_awaited_by_release(i) for i in "abcd"] == [True, True, False, False]


def test_relayed_calls_are_awaited_but_no_release_waits_for_them() -> None:
    relayed = InflightCall(3, "b", WIDE, is_start=True, relayed=True)
    calls = BOTH.added(relayed)
    assert (calls.is_awaited("b"), calls.is_busy("b")) == (True, True)
    assert not calls.is_awaited_by_release("b")
    assert (calls.unattended(), calls.orphans()) == ([relayed], [])
