"""Reads a state file that kubelet may be writing at the same time.

Kubelet writes a temporary file, syncs it, and renames it over the old one, so a reader finds a whole file,
the old or the new one (kubernetes v1.36 pkg/kubelet/util/store/filestore.go, writeFile). This is not so with
an editor, a restored backup, or a file system that reorders writes. An empty, partial or altered file does
not have the right checksum. Such a file is read again a few times over a short period; if it stays so, the
last good content stays in effect and the caller is notified. If the file is missing, nothing is known:
kubelet never removes it, but operators do, before a kubelet with another policy starts.

While nothing has changed, a check costs a ``stat``. A freed inode is soon reused, and file times have a
resolution of some milliseconds, so two contents can have the same stamp. For this reason, a file that was
changed just before it was read is read once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.backends.kubelet.small_file import FileStamp, file_stamp, read_small_file

if TYPE_CHECKING:
    from proxy.backends.kubelet.checkpoints import Checkpoint

CPU_STATE_FILE = "cpu_manager_state"
PAUSES_S = (0.002, 0.004, 0.008, 0.016, 0.032)
"""Seconds between reads of a file that is not whole."""
RECENT_NS = 100_000_000
"""A file that was changed within this time may have been changed again with the same stamp."""


class StateFileContents(Struct, frozen=True):
    """The contents of a state file.

    Attributes:
        checkpoint: The last valid content; None if nothing is known.
        problem: Why the file cannot be used now; empty if it can.
    """

    checkpoint: Checkpoint | None = None
    problem: str = ""


class StateFile:
    """One state file; for one thread at a time."""

    def __init__(
        self,
        path: str,
        pause: Callable[[float], None] = time.sleep,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Store the path; nothing is opened yet.

        Args:
            path: The file.
            pause: Waits for some seconds.
            wall_clock_ns: Nanoseconds since the epoch; the same clock as that of the file times.
        """
        self.path = path
        self._pause = pause
        self._wall_clock_ns = wall_clock_ns
        self._stamp: FileStamp | None = None
        self._content = b""
        self._contents = StateFileContents()

    def read(self) -> StateFileContents:
        """Return the content of the file; the same object as before while the file is unchanged."""
        try:
            now = file_stamp(self.path)
            if now is None:
                self._set_contents(StateFileContents(), None, b"")
            elif now != self._stamp:
                self._read()
        except OSError as error:
            self._set_problem(error.strerror or str(error))
        return self._contents

    def _read(self) -> None:
        """Read the file, and read it again if it is not whole."""
        for pause in (*PAUSES_S, None):
            try:
                content, seen = read_small_file(self.path)
            except FileNotFoundError:
                self._set_contents(StateFileContents(), None, b"")
                return
            except ValueError as error:
                self._set_problem(str(error))
                return
            stamp = seen if self._wall_clock_ns() - seen.modified_ns > RECENT_NS else None
            if (
                self._contents.checkpoint is not None
                and not self._contents.problem
                and content == self._content
            ):
                self._stamp = stamp
                return
            checkpoint, cause = _parsed_checkpoint(content)
            if checkpoint is not None:
                self._set_contents(StateFileContents(checkpoint), stamp, content)
                return
            if pause is not None:
                self._pause(pause)
        self._set_problem(cause)
        self._stamp = stamp

    def _set_contents(self, contents: StateFileContents, stamp: FileStamp | None, content: bytes) -> None:
        if contents != self._contents:
            self._contents = contents
        self._stamp, self._content = stamp, content

    def _set_problem(self, cause: str) -> None:
        """Record why the file cannot be read; its last good content stays in effect."""
        stands = "; its last content stays in effect" if self._contents.checkpoint is not None else ""
        contents = StateFileContents(
            self._contents.checkpoint, f"cannot use kubelet's state file {self.path}: {cause}{stands}"
        )
        if contents != self._contents:
            self._contents = contents
        self._stamp = None


def _parsed_checkpoint(content: bytes) -> tuple[Checkpoint | None, str]:
    """Parse a content; if it is not a whole file of kubelet, return None and the reason."""
    from proxy.backends.kubelet.checkpoints import CheckpointError, read_cpu_checkpoint

    if not content.strip():
        return None, "it is empty"
    try:
        checkpoint = read_cpu_checkpoint(content.decode())
    except UnicodeDecodeError:
        return None, "it is not UTF-8"
    except CheckpointError as error:
        return None, str(error).partition(": ")[2]
    if not checkpoint.checksum:
        return None, "it has no checksum"
    if checkpoint.version is None:
        return None, "its checksum does not match its content"
    return checkpoint, ""
