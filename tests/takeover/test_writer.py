"""The writer: when the record and the file are written, and the errors if that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.kubelet.checkpoint_writer import read_cpu_state
from proxy.backends.kubelet.checkpoints import CheckpointError
from proxy.model.errors import CannotCreateError
from proxy.takeover import writer as module
from proxy.takeover.on_demand import TAKEOVER_RECORD
from proxy.takeover.record import Pending, TakeoverRecord, TakeoverStage
from proxy.takeover.rules import StepOutcome, StepRefusedError
from proxy.takeover.writer import TakeoverWriter, read_state_file
from tests.testkit.changed_copy import changed_copy

STARTED = TakeoverRecord(TakeoverStage.STARTED, 1.0, 1.0, "static")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "kubelet").mkdir()
    (tmp_path / "kubelet/cpu_manager_state").write_text("before")
    return tmp_path / "kubelet"


def writer_of(ledger: Any, directory: Path, pause: Any = lambda seconds: None) -> TakeoverWriter:
    made = TakeoverWriter(ledger, directory, directory.parent / "ours/takeover", pause, lambda: 7.0)
    made.recover()
    return made


def finishing(record: TakeoverRecord = STARTED) -> StepOutcome:
    return StepOutcome(
        changed_copy(record, pending=Pending("finish", "before", "after", "none")), ("written",)
    )


def test_a_step_that_writes(ledger: Any, directory: Path) -> None:
    writer = writer_of(ledger, directory)
    writer.carry_out(StepOutcome(STARTED, ()))
    assert ledger.entries[TAKEOVER_RECORD]["stage"] == "started"
    done = writer.carry_out(finishing())
    assert (done.reported, done.record) == (("written",), writer.record)
    assert (writer.record.stage, writer.record.since, writer.record.written) == (
        TakeoverStage.FINISHED,
        7.0,
        "after",
    )
    assert read_cpu_state(directory) == "after"
    copy = directory.parent / "ours/takeover/cpu_manager_state.before-finish"
    assert copy.read_text() == "before"
    assert oct(copy.stat().st_mode & 0o777) == "0o600"
    assert writer_of(ledger, directory).record == writer.record
    writer.carry_out(StepOutcome(TakeoverRecord(), ()))
    assert ledger.entries == {}


def test_a_file_that_kubelet_overwrites_undoes_the_step(ledger: Any, directory: Path) -> None:
    def kubelet_writes(seconds: float) -> None:
        (directory / "cpu_manager_state").write_text("from memory")

    writer = writer_of(ledger, directory, kubelet_writes)
    with pytest.raises(StepRefusedError, match="did not stay as it was written"):
        writer.carry_out(finishing())
    assert writer.record == STARTED
    assert writer_of(ledger, directory).record == STARTED


def test_a_file_that_cannot_be_written_undoes_the_step(
    ledger: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(where: Path, text: str) -> None:
        raise CannotCreateError("cannot write it: no space")

    writer = writer_of(ledger, directory)
    monkeypatch.setattr(module, "write_cpu_state", full)
    with pytest.raises(CannotCreateError, match="no space"):
        writer.carry_out(finishing())
    assert (writer.record, read_cpu_state(directory)) == (STARTED, "before")


def test_a_file_that_cannot_be_read_back_is_examined_before_the_next_step(
    ledger: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(where: Path) -> str:
        raise CheckpointError("cannot read it: Input/output error")

    writer = writer_of(ledger, directory)
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_cpu_state", broken)
        with pytest.raises(CheckpointError, match="Input/output error"):
            writer.carry_out(finishing())
    assert "was completed" in writer.resolve_pending().message
    assert (writer.record.stage, writer.record.written) == (TakeoverStage.FINISHED, "after")
    assert writer_of(ledger, directory).record == writer.record


def test_no_file_is_written_if_the_record_cannot_be_stored(ledger: Any, directory: Path) -> None:
    with pytest.raises(CannotCreateError, match="keeps no state"):
        writer_of(None, directory).carry_out(finishing())

    def full(changes: object) -> None:
        raise CannotCreateError("cannot write the ledger")

    writer = writer_of(ledger, directory)
    ledger.write = full
    with pytest.raises(CannotCreateError, match="the ledger"):
        writer.carry_out(finishing())
    assert (writer.record, read_cpu_state(directory)) == (TakeoverRecord(), "before")


def test_a_record_that_cannot_be_read_is_reported(ledger: Any, directory: Path) -> None:
    ledger.entries[TAKEOVER_RECORD] = {"stage": "odd"}
    writer = TakeoverWriter(ledger, directory, directory.parent / "ours")
    assert "cannot read the takeover's record" in writer.recover().message
    assert writer.record == TakeoverRecord()


def test_a_pending_write_is_resolved_at_the_start(ledger: Any, directory: Path) -> None:
    writer = writer_of(ledger, directory)
    writer._store_record(finishing().record)
    (directory / ".cpu_manager_state.topoproxy").write_text("half")
    later = TakeoverWriter(ledger, directory, directory.parent / "ours", now=lambda: 8.0)
    assert "was interrupted before its write" in later.recover().message
    assert os.listdir(directory) == ["cpu_manager_state"]
    writer._store_record(finishing().record)
    (directory / "cpu_manager_state").write_text("after")
    assert "was completed" in TakeoverWriter(ledger, directory, directory.parent / "ours").recover().message
    assert ledger.entries[TAKEOVER_RECORD]["stage"] == "finished"
    writer._store_record(finishing().record)
    (directory / "cpu_manager_state").unlink()
    (directory / "cpu_manager_state").mkdir()
    assert (
        "it is not a regular file"
        in TakeoverWriter(ledger, directory, directory.parent / "ours").recover().message
    )


def test_a_directory_that_cannot_be_written(
    ledger: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writer_of(ledger, directory).unwritable() == ""
    absent = directory / "absent"
    lack = f"there is no directory {absent} (kubelet.stateDir): is this a node with kubelet?"
    assert writer_of(ledger, absent).unwritable() == lack
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not write" in writer_of(ledger, directory).unwritable()

    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda path: ReadOnly)
    assert "is read-only for the daemon" in writer_of(ledger, directory).unwritable()


def test_the_file_is_read_with_its_error(directory: Path) -> None:
    assert read_state_file(directory) == ("before", "")
    assert read_state_file(directory / "absent") == (None, "")
    (directory / "cpu_manager_state").unlink()
    (directory / "cpu_manager_state").mkdir()
    assert read_state_file(directory)[0] is None
    assert "it is not a regular file" in read_state_file(directory)[1]
