"""Facts about the state directory: its disk, and whether the next start of the daemon can use the ledger."""

from __future__ import annotations

import os
from pathlib import Path

from proxy.backends.kubelet.small_file import read_small_file
from proxy.backends.ledger.file_ledger import LEDGER_FILE, LEDGER_LIMIT_BYTES
from proxy.backends.ledger.format import recover
from proxy.config import Config
from proxy.doctor.facts import StateFacts
from proxy.model.machine import Machine


def read_state(config: Config, machine: Machine | None) -> StateFacts:
    """Examine the state directory; it may not exist yet.

    Args:
        config: Names the directory.
        machine: The machine to which a ledger must belong; None if it cannot be read.
    """
    directory = config.state_dir
    existing = next(
        (candidate for candidate in (directory, *directory.parents) if candidate.is_dir()), Path("/")
    )
    try:
        disk = os.statvfs(existing)
    except OSError as error:
        return StateFacts(str(directory), f"cannot examine {directory}: {error.strerror}")
    names, unread, ledger = list[str](), "", ""
    try:
        names = sorted(candidate.name for candidate in directory.iterdir()) if existing == directory else []
    except PermissionError as error:
        unread = f"cannot read {directory}: {error.strerror}"
    except OSError as error:
        return StateFacts(str(directory), f"cannot examine {directory}: {error.strerror}")
    unexamined = "the machine cannot be read, to which a ledger belongs" if machine is None else ""
    if LEDGER_FILE not in names:
        unexamined = "there is no ledger yet"
    elif machine is not None:
        try:
            ledger = _ledger(directory / LEDGER_FILE, machine)
        except PermissionError as error:
            unread = f"cannot read {directory / LEDGER_FILE}: {error.strerror}"
    return StateFacts(
        str(directory),
        free_bytes=disk.f_bavail * disk.f_frsize,
        read_only=bool(disk.f_flag & os.ST_RDONLY),
        ledger=ledger,
        unexamined=unexamined,
        unread=unread,
        set_aside=tuple(name for name in names if name.startswith(f"{LEDGER_FILE}.bad-")),
    )


def _ledger(path: Path, machine: Machine) -> str:
    try:
        content = read_small_file(str(path), LEDGER_LIMIT_BYTES)[0]
    except FileNotFoundError:
        return ""
    except PermissionError:
        raise
    except OSError as error:
        return str(error.strerror)
    except ValueError as error:
        return str(error)
    return recover(content, machine.fingerprint).refused
