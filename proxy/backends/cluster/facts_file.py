"""Read one file of the cluster agent when it has changed.

A file that cannot be used changes nothing: the last contents that could be used stay in effect, and their age
is known. A file that goes away does not mean that there are no objects.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import structs

from proxy.backends.cluster.facts_format import CURRENT_S, LARGEST, ClusterFacts, FactsKind, decode_facts
from proxy.backends.kubelet.small_file import Stamp, read_small, stamp
from proxy.permissions import Trust
from proxy.pools.go_json import short

T = TypeVar("T")


class FactsFile(Generic[T]):
    """One file of the cluster agent; safe to use from several threads."""

    def __init__(
        self,
        directory: Path,
        kind: FactsKind,
        convert: Callable[[ClusterFacts], T],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Name a file; it is read when it is requested.

        Args:
            directory: Where the agent writes.
            kind: Which of its files.
            convert: Converts the objects to the value that is used; raises ValueError for objects it cannot
                use.
            wall: Seconds since the epoch, as the file system has them.
        """
        self.path = directory / kind.file_name
        self._kind = kind
        self._convert = convert
        self._wall = wall
        self._lock = threading.Lock()
        self._seen: Stamp | None = None
        self._facts: ClusterFacts | None = None
        self._digest = b""
        self._items = 0
        self._value: T | None = None
        self._confirmed = 0.0
        self._problem = ""

    @property
    def source(self) -> str:
        """The path of the file, for messages."""
        return str(self.path)

    @property
    def problem(self) -> str:
        """Why it could not be read the last time, and what is in effect instead; empty if it could."""
        if not self._problem:
            return ""
        stays = "" if self._facts is None else " (its last content stays in effect)"
        return f"cannot read {self.path}: {self._problem}{stays}"

    @property
    def is_current(self) -> bool:
        """Whether the agent has confirmed the contents within the last ``CURRENT_S`` seconds."""
        return self._facts is not None and -CURRENT_S <= self._wall() - self._confirmed <= CURRENT_S

    def read(self) -> T | None:
        """Return the contents; the last ones if it cannot be read now, None if it never could be."""
        with self._lock:
            try:
                now = stamp(str(self.path))
                if now is None:
                    self._seen, self._problem = None, "there is no such file"
                elif now != self._seen:
                    self._seen = now
                    self._read_again()
            except (OSError, ValueError) as error:
                cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._problem = short(cause)
            return self._value

    def _read_again(self) -> None:
        """Read the file, and use it if it can be used; else ignore it until it has changed."""
        if problem := Trust().file_problem(self.path):
            raise ValueError(problem)
        data, self._seen = read_small(str(self.path), LARGEST)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest != self._digest:
            facts = decode_facts(data, self._kind)
            self._value, self._items = self._convert(facts), len(facts.items)
            self._facts, self._digest = structs.replace(facts, items=[]), digest
        self._confirmed = self._seen.modified_ns / 1e9
        self._problem = ""

    def page(self) -> dict[str, object]:
        """Return what is in effect and how old it is, as plain data."""
        facts, now = self._facts, self._wall()
        return {
            "name": self._kind.value,
            "path": self.source,
            "node": "" if facts is None else facts.node,
            "resourceVersion": "" if facts is None else facts.resource_version,
            "items": self._items,
            "read_s": None if facts is None else round(max(0.0, now - facts.read_at), 1),
            "confirmed_s": None if facts is None else round(max(0.0, now - self._confirmed), 1),
            "problem": self.problem,
        }
