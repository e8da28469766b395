"""Performs the steps: writes the record in the ledger and kubelet's file, in a crash-safe order.

Everything here may block and runs in one worker thread. The order of a step that writes the file:

    copy of the old file next to our state -> ledger: the write under way -> the file -> read it back, now and
    a moment later (a kubelet that still runs would have written again) -> ledger: the new stage

A step that was interrupted in between is found and resolved before the next step, and when the daemon starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

from proxy.backends.kubelet.checkpoint_writer import (
    CPU_STATE_FILE,
    read_cpu_state,
    remove_draft,
    replace_file,
    write_cpu_state,
)
from proxy.backends.kubelet.checkpoints import CheckpointError
from proxy.executor.ports import Ledger
from proxy.model.errors import CannotCreateError, PermissionDeniedError, TopoproxyError
from proxy.takeover.on_demand import TAKEOVER_RECORD
from proxy.takeover.record import Resolution, TakeoverRecord, completed, dump, load, resolution_of
from proxy.takeover.rules import StepOutcome, StepRefusedError

RECHECK_S = 1.0
"""Seconds after a write until the file is read once more."""


class TakeoverWriter:
    """Keeps the record, and writes kubelet's file.

    Attributes:
        record: How far the takeover has come, as the ledger has it.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        directory: Path,
        backups: Path,
        pause: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Store the paths; nothing is touched.

        Args:
            ledger: Keeps the record; None if the record is not kept.
            directory: kubelet's directory.
            backups: The directory for copies of its file.
            pause: Waits for some seconds.
            now: Seconds since the epoch.
        """
        self.record = TakeoverRecord()
        self._ledger = ledger
        self._directory = directory
        self._backups = backups
        self._pause = pause
        self._now = now

    def recover(self) -> Resolution:
        """Load the record, and find out the result of a write that was under way.

        Returns:
            The result; if it could not be found out, its message says why.
        """
        known = load(self._ledger.entries.get(TAKEOVER_RECORD) if self._ledger is not None else None)
        if known is None:
            message = "cannot read the takeover's record in the ledger: it is dropped (repeat takeover start)"
            return Resolution(self.record, message)
        self.record = known
        try:
            return self.resolve_pending()
        except TopoproxyError as error:
            return Resolution(self.record, str(error))

    def resolve_pending(self) -> Resolution:
        """Find out the result of a write that was under way.

        Raises:
            CheckpointError, CannotCreateError: The result cannot be found out, or cannot be recorded.
        """
        if self.record.pending is None:
            return Resolution(self.record)
        remove_draft(self._directory)
        resolution = resolution_of(self.record, read_cpu_state(self._directory), self._now())
        self._store_record(resolution.record)
        return resolution

    def carry_out(self, outcome: StepOutcome) -> StepOutcome:
        """Carry out the result of a step: write the record and kubelet's file.

        If the file cannot be read back, it may be the new one: the write stays under way in the record, and
        its result is found out before the next step.

        Raises:
            StepRefusedError: kubelet's file did not stay as it was written.
            CannotCreateError, PermissionDeniedError, CheckpointError: The file or the record cannot be
                written or read back.
        """
        pending = outcome.record.pending
        if pending is None:
            if outcome.record != self.record:
                self._store_record(outcome.record)
            return outcome
        self._back_up(pending.step, pending.before)
        self._store_record(outcome.record)
        try:
            write_cpu_state(self._directory, pending.after)
            self._check_unchanged(pending.after, pending.step)
        except (StepRefusedError, CannotCreateError, PermissionDeniedError):
            with contextlib.suppress(TopoproxyError):  # the first failure is the one that is reported
                self._store_record(dataclasses.replace(outcome.record, pending=None))
            raise
        self._store_record(completed(self.record, self._now()))
        return dataclasses.replace(outcome, record=self.record)

    def _check_unchanged(self, text: str, step: str) -> None:
        for wait in (0.0, RECHECK_S):
            if wait:
                self._pause(wait)
            if read_cpu_state(self._directory) != text:
                raise StepRefusedError(
                    f"cannot {step} the takeover: {self._directory / CPU_STATE_FILE} did not stay as it was"
                    " written, so kubelet runs after all",
                    ("stop kubelet, and repeat this",),
                )

    def _store_record(self, record: TakeoverRecord) -> None:
        if self._ledger is None:
            raise CannotCreateError("cannot keep the takeover's record: this daemon keeps no state")
        self._ledger.write({TAKEOVER_RECORD: dump(record)})
        self.record = record

    def _back_up(self, step: str, text: str | None) -> None:
        if text is None:
            return
        try:
            self._backups.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CannotCreateError(f"cannot make {self._backups}: {error.strerror}") from None
        path = self._backups / f"{CPU_STATE_FILE}.before-{step}"
        replace_file(path, text, path.with_name(f".{path.name}"))

    def unwritable(self) -> str:
        """Return why kubelet's file could not be written; empty if it could."""
        try:
            if os.statvfs(self._directory).f_flag & os.ST_RDONLY:
                return f"{self._directory} is read-only for the daemon"
        except FileNotFoundError:
            return f"there is no directory {self._directory} (kubelet.stateDir): is this a node with kubelet?"
        except OSError as error:
            return f"cannot look into {self._directory}: {error.strerror}"
        return (
            ""
            if os.access(self._directory, os.W_OK | os.X_OK)
            else f"the daemon may not write to {self._directory}"
        )


def read_state_file(directory: Path) -> tuple[str | None, str]:
    """Read kubelet's file: its text, and why it cannot be read."""
    try:
        return read_cpu_state(directory), ""
    except CheckpointError as error:
        return None, str(error)
