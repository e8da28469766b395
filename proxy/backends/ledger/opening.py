"""Open a state directory's ledger, and rename a file that must not be used."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from proxy.backends.ledger import format as fmt
from proxy.backends.ledger.file_ledger import (
    LEDGER_FILE,
    LEDGER_LIMIT_BYTES,
    DamagedError,
    FileLedger,
    ledger_error,
)


def open_ledger(
    state_dir: Path, machine: str, *, sync: bool = False, now: Callable[[], float] = time.time
) -> tuple[FileLedger, list[str]]:
    """Open the ledger of a state directory, or begin a new one.

    A file that cannot be used (damaged in the middle, of an unknown format, from another machine, not a
    regular file) is renamed to ``ledger.jsonl.bad-<time>`` and kept, and a new empty ledger begins.

    Args:
        state_dir: The directory; made with mode 0700 if it is missing.
        machine: Fingerprint of the machine, ``Machine.fingerprint``.
        sync: Sync each batch to the disk.
        now: Clock, seconds since the epoch.

    Returns:
        The ledger, and warnings for the operator, in sentences.

    Raises:
        CannotCreateError: The directory or the file cannot be made, read or renamed.
    """
    path = state_dir / LEDGER_FILE
    notes: list[str] = []
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(state_dir.stat().st_mode) & 0o022:
            notes.append(f"others may write to the state directory {state_dir}: set its mode to 0700")
        ledger = FileLedger(path, machine, sync=sync)
        try:
            notes += ledger.load()
        except DamagedError as error:
            aside = _aside(path, now())
            path.rename(aside)
            notes.append(
                f"the ledger {path} is not used: {error}; it is kept as {aside.name}, and an empty one begins"
            )
            ledger = FileLedger(path, machine, sync=sync)
            notes += ledger.load()
    except OSError as error:
        raise ledger_error("open", path, error) from None
    return ledger, notes


def read_entries(state_dir: Path, machine: str) -> dict[str, Mapping[str, object]]:
    """Return the contents of a ledger without opening it for writing; empty if it is missing or not usable.

    Args:
        state_dir: The directory.
        machine: Fingerprint of the machine.
    """
    try:
        fd = os.open(state_dir / LEDGER_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            state = fmt.recover(file.read(LEDGER_LIMIT_BYTES), machine)
    except OSError:
        return {}
    return {} if state.refused else dict(state.entries)


def _aside(path: Path, now: float) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    aside = path.with_name(f"{path.name}.bad-{stamp}")
    count = 1
    while os.path.lexists(aside):
        count += 1
        aside = path.with_name(f"{path.name}.bad-{stamp}-{count}")
    return aside
