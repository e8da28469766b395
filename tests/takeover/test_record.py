"""The record of a takeover: which of kubelet's allocations count, pending writes, and storage."""

from __future__ import annotations

import json

import pytest

from proxy.model.idset import CpuSet
from proxy.takeover.record import Pending, TakeoverRecord, TakeoverStage, completed, dump, load, resolution_of
from tests.testkit.changed_copy import changed_copy

OLD = {"a": {"x": CpuSet([2]), "y": CpuSet([3])}, "b": {"z": CpuSet([4])}}
STARTED = TakeoverRecord(
    TakeoverStage.STARTED,
    1.5,
    2.5,
    "static",
    CpuSet([0]),
    strict=True,
    old=OLD,
    target="none",
    written="w",
    options={"full-pcpus-only": "true"},
    forced_signs=("process 1 is kubelet",),
)
FINISH = changed_copy(STARTED, pending=Pending("finish", "before", "after", "none"))
REVERT = changed_copy(STARTED, pending=Pending("revert", None, "after", "static"))


@pytest.mark.parametrize("record", [TakeoverRecord(), STARTED, FINISH, REVERT])
def test_a_record_is_stored_and_read_back(record: TakeoverRecord) -> None:
    kept = dump(record)
    assert (kept is None) is (record == TakeoverRecord())
    assert load(None if kept is None else json.loads(json.dumps(kept))) == record


def test_records_of_former_versions_have_fewer_fields_and_a_copy_of_the_file() -> None:
    kept = dump(STARTED) or {}
    assert kept["backup"] == ""
    kept["backup"] = "a former version reads this key, and wrote kubelet's file into it"
    del kept["options"], kept["forced_signs"]
    assert load(kept) == changed_copy(STARTED, options={}, forced_signs=())


@pytest.mark.parametrize(
    "odd", [{}, {"stage": "begun"}, {"pending": {"step": "x"}}, {"old": {"a": {"x": "y"}}}, {"old": 1}]
)
def test_invalid_records_are_refused(odd: dict[str, object]) -> None:
    whole = dump(STARTED) or {}
    assert load({**whole, **odd} if odd else {}) is None


def test_the_allocations_of_kubelet_that_are_in_effect() -> None:
    new = {"new": {"x": CpuSet([5])}}
    changed = {"a": {"x": CpuSet([2]), "y": CpuSet([6])}, "b": {"z": CpuSet([7])}}
    assert TakeoverRecord().in_effect({**OLD, **new}) == {**OLD, **new}
    assert STARTED.in_effect({**OLD, **new}) == OLD
    assert STARTED.in_effect(changed) == {"a": {"x": CpuSet([2])}}
    assert changed_copy(STARTED, stage=TakeoverStage.FINISHED).in_effect(OLD) == {}
    assert [TakeoverRecord().chooses_cpus, STARTED.chooses_cpus] == [False, True]


def test_a_completed_write_is_recorded() -> None:
    record, reported, is_completed = resolution_of(FINISH, "after", 9.0)
    assert is_completed
    assert (record.stage, record.since, record.target, record.written, record.pending) == (
        TakeoverStage.FINISHED,
        9.0,
        "none",
        "after",
        None,
    )
    assert "finish was completed" in reported
    assert "Options" not in reported
    record_after, reported, _ = resolution_of(REVERT, "after", 9.0)
    assert record_after == TakeoverRecord()
    assert reported.endswith(
        "(kubelet had cpuManagerPolicyOptions:"
        ' {full-pcpus-only: "true", strict-cpu-reservation: "true"} before the takeover)'
    ), "no record is left that has them"
    assert completed(FINISH, 9.0) == record


@pytest.mark.parametrize(
    ("record", "text", "message"),
    [
        (FINISH, "before", "was interrupted before its write"),
        (REVERT, None, "was interrupted before its write"),
        (FINISH, "other", "another program wrote"),
        (FINISH, None, "another program wrote"),
    ],
)
def test_an_incomplete_write_is_undone(record: TakeoverRecord, text: str | None, message: str) -> None:
    after, reported, is_completed = resolution_of(record, text, 9.0)
    assert not is_completed
    assert after == STARTED
    assert message in reported


def test_without_a_pending_write_nothing_is_resolved() -> None:
    assert resolution_of(STARTED, "whatever", 9.0) == (STARTED, "", False)
