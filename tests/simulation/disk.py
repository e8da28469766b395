"""The simulated disk: the real ledger on a real file, which crashes cut and a full disk refuses."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.backends.ledger import open_ledger
from proxy.backends.ledger.file_ledger import LEDGER_FILE
from proxy.model.errors import CannotCreateError

if TYPE_CHECKING:
    from proxy.backends.ledger.file_ledger import FileLedger
    from tests.simulation.daemon import SimulatedDaemon
    from tests.simulation.node import SimulatedNode

Changes = Mapping[str, Mapping[str, object] | None]


class SimulatedDisk:
    """The state directory of the node; it lives on when the daemon does not."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))

    def open(self, fingerprint: str, process: SimulatedDaemon) -> SimulatedLedger:
        """Open the ledger, as a daemon does at its start."""
        ledger, _notes = open_ledger(self.directory, fingerprint)
        self.node.promises.ledger_opened(dict(ledger.entries))
        return SimulatedLedger(self, ledger, process)

    @property
    def size(self) -> int:
        """The length of the ledger's file."""
        return (self.directory / LEDGER_FILE).stat().st_size

    def cut(self, before: int, part: float) -> bool:
        """Leave a part of the last line, as a crash in the middle of a write does.

        Returns:
            False if the file was replaced as a whole, which no crash can cut.
        """
        after = self.size
        if after <= before:
            return False
        os.truncate(self.directory / LEDGER_FILE, before + int(part * (after - before)))
        return True

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


class SimulatedLedger:
    """Implements ``proxy.executor.ports.Ledger``; what is written in full is never lost by a crash."""

    def __init__(self, disk: SimulatedDisk, ledger: FileLedger, process: SimulatedDaemon) -> None:
        self._disk = disk
        self._ledger = ledger
        self._process = process

    @property
    def problem(self) -> str:
        return self._ledger.problem

    @property
    def entries(self) -> Mapping[str, Mapping[str, object]]:
        return self._ledger.entries

    def write(self, changes: Changes) -> None:
        node = self._disk.node
        if not self._process.alive:
            raise CannotCreateError("cannot write the ledger: the daemon has ended")
        node.before_effect(self._process, f"ledger {len(changes)}")
        if node.faults.disk_is_full():
            node.promises.disk_works = False
            raise CannotCreateError("cannot write the ledger: no space left")
        before = self._disk.size
        self._ledger.write(changes)
        node.schedule.trace(f"ledger {' '.join(sorted(changes))}")
        part = node.faults.crash_cuts_ledger()
        if part is not None and self._disk.cut(before, part):
            node.crash("in the middle of a write to the ledger")
        node.promises.stored(changes)
        node.before_effect(self._process, "ledger written")

    def close(self) -> None:
        self._ledger.close()
