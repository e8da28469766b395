"""The daemon's state directory: its lock, and the ledger in it.

One process uses the directory at a time. If the disk is full or cannot be written, the daemon serves without
a lock or without a ledger: a node without a proxy is worse than a proxy that rebuilds its state at each
start.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.backends.ledger import FileLedger, open_ledger, read_entries
from proxy.model.errnos import FULL
from proxy.model.errors import CannotCreateError
from proxy.sockets.instance_lock import InstanceLock

UNWRITABLE_ERRNOS = (errno.EROFS, *FULL)
"""Errors for which a lock cannot be taken although the state directory is configured correctly."""
NOT_KEPT = "placements are not kept (a restart queries the runtime)"


class StateDirectory:
    """The state directory, open for this process.

    Attributes:
        ledger: Keeps records; None if the directory cannot be written.
        entries: The records of the last run, by key.
        notes: Notes on the ledger that must be reported.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Make the directory if necessary, lock it, and read the ledger.

        Args:
            path: The directory.
            fingerprint: Of the machine: records of another machine are not used.

        Raises:
            CannotCreateError: Another process uses the directory, or it cannot be made or read.
        """
        self.ledger: FileLedger | None = None
        self.entries: Mapping[str, Mapping[str, Any]] = {}
        self.notes: list[str] = []
        self._lock: InstanceLock | None = None
        try:
            self._lock = _locked(path)
        except CannotCreateError as error:
            if getattr(error.__cause__, "errno", None) not in UNWRITABLE_ERRNOS:
                raise
            self.notes = [f"{error}: {NOT_KEPT}"]
            return
        try:
            self._open_ledger(path, fingerprint)
        except BaseException:
            self.close()
            raise

    def _open_ledger(self, path: Path, fingerprint: str) -> None:
        try:
            self.ledger, self.notes = open_ledger(path, fingerprint)
        except CannotCreateError as error:
            self.notes = [f"{error}: {NOT_KEPT}"]
            self.entries = read_entries(path, fingerprint)
        else:
            self.entries = dict(self.ledger.entries)

    def close(self) -> None:
        """Close the ledger and let another process use the directory."""
        if self.ledger is not None:
            self.ledger.close()
        if self._lock is not None:
            self._lock.release()


def _locked(path: Path) -> InstanceLock:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotCreateError(f"cannot make the state directory {path}: {error.strerror}") from error
    return InstanceLock.acquire(path / "lock", f"use the state directory {path}")
