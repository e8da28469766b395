"""Kernel files that are set temporarily, and get their original values back.

Theory. Three values of each file are known: the current one, the one that we have written (if any), and its
*own* value from before. If the current value is the one that we have written, the remembered own value
counts; otherwise another process has written since, and its value is the own value from then on. So restoring
never undoes a value that another process has set in between.

The own values are stored in a file before the kernel's files are written. It records both our previous value
and our next one as ours, so a crash in between loses nothing. The file belongs below ``/run``: a reboot
resets the kernel's files as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from proxy.atomic_write import write_file

SIZE_LIMIT = 16 << 20
Put: TypeAlias = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True)
class AppliedSettings:
    """The result of one ``KernelSettings.apply``.

    Attributes:
        written: Files that were written, including those whose own value was restored.
        refused: File to the kernel's error, if the kernel refused the value; the file keeps its previous
            value.
    """

    written: tuple[Path, ...] = ()
    refused: Mapping[Path, OSError] = field(default_factory=dict)


def put(path: Path, value: str) -> None:
    """Write a file of the kernel, which must exist.

    Raises:
        OSError: The kernel refuses the value.
    """
    handle = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(handle, f"{value}\n".encode())
    finally:
        os.close(handle)


class KernelSettings:
    """Files that are set for a while. Calls from several threads wait for each other.

    Args:
        state: The file that stores the own values; its directory is created.
        put: Writes a file.
    """

    def __init__(self, state: Path, put: Put = put) -> None:
        self._state = state
        self._put = put
        self._lock = threading.RLock()
        self._known = _load(state)
        """File to its own value and the values that may be ours."""
        self._saved = dict(self._known)

    def own(self, path: Path) -> str | None:
        """Return the own value of a file; None if it cannot be read."""
        with self._lock:
            return self._own_and_current(path)[0]

    def adopt(self, path: Path, own: str) -> None:
        """Adopt a file that the kernel created with one of our values: record its original value."""
        with self._lock:
            _, now = self._own_and_current(path)
            if now is not None and str(path) not in self._known and own != now:
                self._known[str(path)] = (own, now)

    def apply(self, wanted_values: Mapping[Path, str]) -> AppliedSettings:
        """Write these values, and restore the own values of all other files that were set before.

        Raises:
            OSError: The previous values cannot be stored; no file has been written.
        """
        with self._lock:
            plan = self._plan(wanted_values)
            self._save()
            written: list[Path] = []
            refused: dict[Path, OSError] = {}
            for path, value in plan.items():
                try:
                    self._put(path, value)
                    written.append(path)
                except OSError as error:
                    refused[path] = error
            self._record_results(plan, refused)
            with contextlib.suppress(OSError):  # the first record is enough to restore everything
                self._save()
            return AppliedSettings(tuple(written), refused)

    def _own_and_current(self, path: Path) -> tuple[str | None, str | None]:
        """Return a file's own value and its current one."""
        try:
            now = path.read_text().strip()
        except (OSError, ValueError):
            return None, None
        own, *ours = self._known.get(str(path), (now,))
        return (own if now in ours else now), now

    def _plan(self, wanted_values: Mapping[Path, str]) -> dict[Path, str]:
        """Return the values to write, and remember the own values of files that will hold other values."""
        plan: dict[Path, str] = {}
        for path in {**dict.fromkeys(map(Path, self._known)), **dict.fromkeys(wanted_values)}:
            own, now = self._own_and_current(path)
            if own is None or now is None:
                self._known.pop(str(path), None)  # the device is gone, and so is its file
                continue
            wanted = wanted_values.get(path, own)
            if wanted != now:
                plan[path] = wanted
                self._known[str(path)] = (own, now, wanted)
            elif wanted == own:
                self._known.pop(str(path), None)
        return plan

    def _record_results(self, plan: Mapping[Path, str], refused: Mapping[Path, OSError]) -> None:
        """Store the values that the kernel now has, and forget files that have their own value again."""
        for path, value in plan.items():
            own, before, _ = self._known[str(path)]
            now = before
            if path not in refused:
                with contextlib.suppress(OSError, ValueError):
                    now = path.read_text().strip()
            if now == own or (path not in refused and value == own):
                del self._known[str(path)]
            else:
                self._known[str(path)] = (own, now)

    def _save(self) -> None:
        if self._known == self._saved:
            return
        self._state.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_file(self._state, json.dumps(self._known).encode(), mode=0o644)
        self._saved = dict(self._known)


def _load(state: Path) -> dict[str, tuple[str, ...]]:
    """Read the stored values; empty if there are no valid ones."""
    try:
        with state.open("rb") as stream:
            data = json.loads(stream.read(SIZE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    known: dict[str, tuple[str, ...]] = {}
    for path, entry in data.items():
        if isinstance(entry, list) and entry and all(isinstance(value, str) for value in entry):
            known.setdefault(os.path.realpath(path), tuple(entry))  # earlier versions stored links
    return known
