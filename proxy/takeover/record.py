"""The record of a takeover: its stage, and a write that is under way.

Theory. A takeover is a value with three stages:

    none ──start──► started ──finish──► finished
      ▲                │                   │
      └────revert──────┴───────────────────┘

- ``none``: kubelet's CPU manager chooses CPUs, and they are adopted.
- ``started``: CPUs that it held at the start stay with their containers until these end; topoproxy chooses
  the CPUs of new containers.
- ``finished``: its file agrees. kubelet restarts under ``none``, or under ``static`` with a file that has all
  CPUs as they are in effect.

The record is one value of the daemon's ledger, and each change of it is one atomic write. A step that writes
kubelet's file writes the record twice: before, with the text to be written (``pending``), and afterwards,
with the new stage. The file itself is replaced as a whole or not at all. So after a crash the file is
compared with ``pending``: it is the new one (the step is completed), the old one (the step never happened),
or another program has written it (the step is undone, and this is reported). To settle this, only the record
has to be written.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from proxy.model.idset import CpuSet
from proxy.model.kubelet import Held
from proxy.takeover.inputs import STRICT_CPU_RESERVATION


class TakeoverStage(enum.StrEnum):
    """How far a takeover has come."""

    NONE = "none"
    STARTED = "started"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Pending:
    """A write of kubelet's file that is under way.

    Attributes:
        step: ``finish`` or ``revert``.
        before: The file's text before; None if there was none.
        after: The text that is being written.
        target: The policy for which it is written.
    """

    step: str
    before: str | None
    after: str
    target: str


@dataclass(frozen=True, slots=True)
class TakeoverRecord:
    """How far a takeover has come.

    Attributes:
        stage: Its stage.
        began, since: When it began, and when this stage was reached; seconds since the epoch.
        policy: kubelet's policy before the takeover.
        reserved: CPUs that kubelet reserved: they are never exclusive CPUs.
        strict: kubelet's option ``strict-cpu-reservation`` was on.
        options: The options of kubelet's policy, by name; empty in records of former versions.
        old: The CPUs that kubelet had assigned at the start.
        target: The policy that ``finish`` wrote; empty before ``finish``.
        written: What ``finish`` wrote; empty before ``finish``.
        forced: kubelet ran while ``finish`` wrote the file, so it may have something else in memory.
        forced_signs: The signs of that kubelet; empty in records of former versions.
        pending: The write that is under way.
    """

    stage: TakeoverStage = TakeoverStage.NONE
    began: float = 0.0
    since: float = 0.0
    policy: str = ""
    reserved: CpuSet = field(default_factory=CpuSet)
    strict: bool = False
    old: Held = field(default_factory=dict)
    target: str = ""
    written: str = ""
    forced: bool = False
    pending: Pending | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    forced_signs: tuple[str, ...] = ()

    @property
    def known_options(self) -> Mapping[str, str]:
        """The options of kubelet's former policy; records of former versions have only ``strict``."""
        return {**({STRICT_CPU_RESERVATION: "true"} if self.strict else {}), **self.options}

    @property
    def chooses_cpus(self) -> bool:
        """Whether topoproxy chooses the CPUs of new pods."""
        return self.stage is not TakeoverStage.NONE

    def in_effect(self, held: Held) -> Held:
        """Return those of the CPUs held by kubelet's CPU manager that count.

        Before a takeover all of them count. After its start only those count that kubelet assigned before:
        CPUs that kubelet assigns to new pods are in effect nowhere. After its end none count.
        """
        if self.stage is TakeoverStage.NONE:
            return held
        if self.stage is TakeoverStage.FINISHED:
            return {}
        both = {
            uid: {name: cpus for name, cpus in names.items() if self.old.get(uid, {}).get(name) == cpus}
            for uid, names in held.items()
        }
        return {uid: names for uid, names in both.items() if names}


class Resolution(NamedTuple):
    """The result of a write that was under way when the daemon ended.

    Attributes:
        record: The record without the write.
        message: The result as text; empty if there was no such write.
        is_completed: The write is in place.
    """

    record: TakeoverRecord
    message: str = ""
    is_completed: bool = False


def resolution_of(record: TakeoverRecord, text: str | None, now: float) -> Resolution:
    """Find out the result of a write that was under way when the daemon ended.

    Args:
        record: The record as the ledger has it.
        text: kubelet's file as it is now; None if there is none.
        now: Seconds since the epoch.
    """
    pending = record.pending
    if pending is None:
        return Resolution(record)
    step = f"the takeover's step {pending.step}"
    if text == pending.after:
        # The record of a revert is empty, so this is the last message that can name the options.
        options = options_text(record.known_options) if pending.step == "revert" else ""
        had = f" (kubelet had cpuManagerPolicyOptions: {options} before the takeover)" if options else ""
        message = f"{step} was completed: its file was there{had}"
        return Resolution(completed(record, now), message, is_completed=True)
    undone = dataclasses.replace(record, pending=None)
    if text == pending.before:
        return Resolution(undone, f"{step} was interrupted before its write: it is undone, repeat it")
    why = "another program wrote kubelet's file while it was under way"
    return Resolution(undone, f"{step} is undone: {why}; see topoproxy takeover status")


def options_text(options: Mapping[str, str]) -> str:
    """Write options as kubelet's configuration has them; empty without any."""
    text = ", ".join(f"{name}: {json.dumps(value)}" for name, value in sorted(options.items()))
    return f"{{{text}}}" if text else ""


def completed(record: TakeoverRecord, now: float) -> TakeoverRecord:
    """Return the record after the write that was under way is in place."""
    pending = record.pending
    assert pending is not None
    if pending.step == "revert":
        return TakeoverRecord()
    return dataclasses.replace(
        record,
        stage=TakeoverStage.FINISHED,
        since=now,
        target=pending.target,
        written=pending.after,
        pending=None,
    )


def dump(record: TakeoverRecord) -> dict[str, object] | None:
    """Return a record as plain data for the ledger; None for one that need not be kept."""
    if record == TakeoverRecord():
        return None
    data: dict[str, object] = msgspec.to_builtins(record, enc_hook=str)
    data["backup"] = ""  # not read any more; former versions need the key if a node is downgraded
    return data if record.pending else {key: value for key, value in data.items() if key != "pending"}


_OPTIONAL = ("pending", "options", "forced_signs")


def load(data: Mapping[str, Any] | None) -> TakeoverRecord | None:
    """Read a record; the empty record if there is none, None if the data is not a record."""
    if data is None:
        return TakeoverRecord()
    if any(
        each.name not in data for each in dataclasses.fields(TakeoverRecord) if each.name not in _OPTIONAL
    ):
        return None
    try:
        return msgspec.convert(data, TakeoverRecord, dec_hook=lambda _, text: CpuSet.parse(text))
    except (msgspec.ValidationError, AttributeError):  # a value is not a text
        return None
