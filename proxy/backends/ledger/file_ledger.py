"""The durable record of placements: a journal file that is appended to and, now and then, compacted.

A batch is one append of one line, so a crash of the process at any instruction leaves all of the batch or
none of it (data that the kernel has accepted can be read by a later process). By default nothing is synced:
after a loss of power no container is left whose placement would matter, and the node starts again from the
runtime's report. With ``sync=True`` each batch is synced, which takes 0.2 ms and more. Compaction writes the
whole state next to the file, syncs it and renames it over the file, so that the name always leads to a
complete file.

Only one process writes at a time; the daemon's lock ensures this.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

from proxy.atomic_write import write_completely, write_file
from proxy.backends.ledger import format as fmt
from proxy.model.errors import CannotCreateError, RecordError

LEDGER_FILE = "ledger.jsonl"
_COMPACT_BYTES = 64 * 1024
"""A file shorter than this is never compacted."""
_COMPACT_FACTOR = 4
"""A file is compacted when it is this many times as long as after the last compaction."""
LEDGER_LIMIT_BYTES = 256 * 1024 * 1024
"""No ledger is this long: a longer file is something else and is not read into memory."""
_CLOSE_S = 1.0
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class FileLedger:
    """Implements ``proxy.executor.ports.Ledger`` on one file. Made by ``open_ledger``; thread-safe.

    Attributes:
        path: The file.
        problem: Why the last compaction failed; empty if it succeeded. A failed compaction loses no record.
    """

    def __init__(self, path: Path, machine: str, *, sync: bool) -> None:
        self.path = path
        self.problem = ""
        self._machine = machine
        self._sync = sync
        self._lock = threading.Lock()
        self._entries: fmt.Packed = {}
        self._number = 0
        self._size = 0
        self._compact_at = _COMPACT_BYTES
        self._fd = -1
        self._file_id = (0, 0)

    @property
    def entries(self) -> Mapping[str, Mapping[str, object]]:
        """Everything that is stored, by key: a view that later writes do not change."""
        return fmt.PackedView(self._entries)

    def write(self, changes: Mapping[str, Mapping[str, object] | None]) -> None:
        """Store values (None: delete) in one atomic step; see ``proxy.executor.ports.Ledger``.

        Raises:
            CannotCreateError: The state cannot be written; it is unchanged, in memory and on disk.
            RecordError: Some of the values cannot be stored; the others have been stored.
        """
        packed, rejected = fmt.pack(changes)
        if packed:
            self._write(packed)
        if rejected:
            raise RecordError(rejected)

    def _write(self, packed: Mapping[str, bytes | None]) -> None:
        with self._lock:
            if self._fd < 0:
                raise CannotCreateError(f"cannot write the ledger {self.path}: it is closed")
            after = fmt.apply(self._entries, packed)
            try:
                self._restore_file()
                self._append(fmt.batch(self._number + 1, packed))
            except OSError as error:
                raise ledger_error("write", self.path, error) from None
            self._number += 1
            self._entries = after
            if self._size > self._compact_at:
                self._try_compact()

    def close(self) -> None:
        """Sync and close; later writes are refused. If a write hangs, return without closing."""
        if not self._lock.acquire(timeout=_CLOSE_S):
            return
        try:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.fsync(fd)
                os.close(fd)
        finally:
            self._lock.release()

    def _restore_file(self) -> None:
        """Cut off the rest of a failed write, or write the file again if it was removed or replaced."""
        try:
            now = os.lstat(self.path)
        except FileNotFoundError:
            self._compact()
            return
        if (now.st_dev, now.st_ino) != self._file_id or now.st_size < self._size:
            self._compact()
        elif now.st_size > self._size:
            os.ftruncate(self._fd, self._size)

    def _append(self, line: bytes) -> None:
        try:
            write_completely(self._fd, line)
            if self._sync:
                os.fdatasync(self._fd)
        except OSError:
            # If even this fails, the next write tries again before it appends.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)

    def _try_compact(self) -> None:
        try:
            self._compact()
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror or error}"
            self._compact_at = 2 * self._size  # do not try again at each write

    def _compact(self) -> None:
        """Replace the file by a shorter file with the same state."""
        text = fmt.header(self._machine)
        if self._entries:
            text += fmt.batch(1, self._entries)
        write_file(self.path, text, draft=self.path.with_name(f"{LEDGER_FILE}.new"))
        old = self._fd
        self._open()
        self._size, self._number = len(text), int(bool(self._entries))
        self._compact_at = max(_COMPACT_BYTES, _COMPACT_FACTOR * self._size)
        self.problem = ""
        if old >= 0:
            os.close(old)

    def _open(self) -> None:
        fd = os.open(self.path, _OPEN_FLAGS)
        now = os.fstat(fd)
        self._fd, self._file_id = fd, (now.st_dev, now.st_ino)

    def load(self) -> list[str]:
        """Read the contents of the file, or begin a new file; used by ``open_ledger``.

        Returns:
            Messages for the operator.

        Raises:
            OSError: The file cannot be read or written.
            DamagedError: The file must not be used.
        """
        with contextlib.suppress(FileNotFoundError):
            self.path.with_name(f"{LEDGER_FILE}.new").unlink()  # a compaction that was interrupted
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            self._compact()
            return []
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is not a regular file")
        if status.st_size > LEDGER_LIMIT_BYTES:
            raise DamagedError(f"it is {status.st_size} bytes long")
        self._open()
        try:
            return self._load_open_file(stat.S_IMODE(status.st_mode))
        except BaseException:
            self.close()
            raise

    def _load_open_file(self, mode: int) -> list[str]:
        """Read the contents of the open file; return messages for the operator."""
        notes: list[str] = []
        if mode & 0o077:
            os.fchmod(self._fd, 0o600)
            notes.append(f"the ledger {self.path} could be read by others (mode is now 0600)")
        state = fmt.recover(_read_all(self._fd), self._machine)
        if state.refused:
            raise DamagedError(state.refused)
        if state.cut_bytes:
            os.ftruncate(self._fd, state.good_bytes)
            message = (
                f"its last {state.cut_bytes} bytes, no complete record, were cut off (a crash while writing)"
            )
            notes.append(f"the ledger {self.path} was repaired: {message}")
        packed, rejected = fmt.pack(state.entries, LEDGER_LIMIT_BYTES)
        for key, error in rejected.items():
            notes.append(f"the ledger's record {fmt.short_text(key)} is left out: {error}")
        self._entries = fmt.apply({}, packed)
        self._number, self._size = state.number, state.good_bytes
        return notes


class DamagedError(Exception):
    """The file must not be used; the message says why."""


def _read_all(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def ledger_error(action: str, path: Path, error: OSError) -> CannotCreateError:
    """Return an error that names the action that failed on the ledger, and its cause."""
    return CannotCreateError(f"cannot {action} the ledger {path}: {error.strerror or error}")
