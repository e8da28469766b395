"""The files into which the cluster agent writes the objects that it has read from the API server.

Each file is one JSON object: the kind of the objects, when and at which resourceVersion they were read, and
the objects themselves, in the form of Kubernetes but without the fields that are not used here. ``node.json``
has one object, ``namespaces.json`` all namespaces, ``pods.json`` the pods that are bound to the node.

A file is replaced as a whole when its objects change. Between changes, the agent sets the file's modification
time to the time when the API server last confirmed the objects: by an event, a bookmark or the start of a
watch, which happens at least every 90 seconds. So a reader knows two ages: how long ago the objects were
read, and since when they may be outdated.

An unusable file changes nothing: the last usable contents stay in effect, and their age is known. If a file
disappears, that does not mean that there are no objects.
"""

from __future__ import annotations

import enum
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct, structs

from proxy.backends.kubelet.small_file import FileStamp, file_stamp, read_small_file
from proxy.model.quoting import printable
from proxy.permissions import TrustCheck

SCHEMA = "topoproxy-cluster-facts/1"
FILE_LIMIT_BYTES = 16 << 20
"""The most bytes that a file may have. 500 pods of ten containers each take 2 MiB, and 10,000 namespaces of
ten labels each take 4 MiB."""
CURRENT_S = 110.0
"""Facts count as current for this many seconds after the API server has confirmed them: a watch lasts 90
seconds, and the agent records a confirmation every 10 seconds."""

T = TypeVar("T")


class FactsFile(Generic[T]):
    """One file of the cluster agent; safe to use from several threads."""

    def __init__(
        self,
        directory: Path,
        kind: FactsKind,
        convert: Callable[[ClusterFacts], T],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Set the path of a file; it is read when it is requested.

        Args:
            directory: The directory into which the agent writes.
            kind: Which of the agent's files.
            convert: Converts the objects to the value that is used; raises ValueError for objects that it
                cannot use.
            wall_clock: Returns the seconds since the epoch; the same clock as that of the file times.
        """
        self.path = directory / kind.file_name
        self._kind = kind
        self._convert = convert
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._stamp: FileStamp | None = None
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
        """Why the last read of the file failed, and what is in effect instead; empty if it succeeded."""
        if not self._problem:
            return ""
        stays = "" if self._facts is None else " (its last content stays in effect)"
        return f"cannot read {self.path}: {self._problem}{stays}"

    @property
    def is_current(self) -> bool:
        """Whether the agent has confirmed the contents within the last ``CURRENT_S`` seconds."""
        return self._facts is not None and -CURRENT_S <= self._wall_clock() - self._confirmed <= CURRENT_S

    def read(self) -> T | None:
        """Return the contents; if they cannot be read now, the last usable ones; None if there are none."""
        with self._lock:
            try:
                now = file_stamp(str(self.path))
                if now is None:
                    self._stamp, self._problem = None, "there is no such file"
                elif now != self._stamp:
                    self._stamp = now
                    self._read_again()
            except (OSError, ValueError) as error:
                cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._problem = printable(cause)
            return self._value

    def _read_again(self) -> None:
        """Read the file; if it cannot be used, raise an error, and ignore the file until it changes."""
        if problem := TrustCheck().file_problem(self.path):
            raise ValueError(problem)
        data, self._stamp = read_small_file(str(self.path), FILE_LIMIT_BYTES)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest != self._digest:
            facts = decode_facts(data, self._kind)
            self._value, self._items = self._convert(facts), len(facts.items)
            self._facts, self._digest = structs.replace(facts, items=[]), digest
        self._confirmed = self._stamp.modified_ns / 1e9
        self._problem = ""

    def page(self) -> dict[str, object]:
        """Return the content in effect and its age, as plain data."""
        facts, now = self._facts, self._wall_clock()
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


class FactsKind(enum.StrEnum):
    """The kind of objects in a file."""

    NODE = "node"
    NAMESPACES = "namespaces"
    PODS = "pods"

    @property
    def file_name(self) -> str:
        """The name of the file."""
        return f"{self.value}.json"


class ClusterFacts(Struct, frozen=True, rename="camel"):
    """The contents of a file.

    Attributes:
        kind: The kind of the objects.
        node: The node whose agent has read the objects.
        read_at: When the objects were read, in seconds since the epoch.
        resource_version: The resourceVersion of the list or of the last event; empty if unknown.
        items: The objects; for encoding, they can already be JSON (``msgspec.Raw``).
        schema: The version of the format.
    """

    kind: FactsKind
    node: str
    read_at: float
    resource_version: str
    items: Sequence[Any]
    schema: str = SCHEMA


_DECODER = msgspec.json.Decoder(ClusterFacts)


def encode_facts(facts: ClusterFacts) -> bytes:
    """Return the contents of a file.

    Raises:
        ValueError: The contents would be larger than ``FILE_LIMIT_BYTES``.
    """
    data = msgspec.json.encode(facts)
    if len(data) > FILE_LIMIT_BYTES:
        raise ValueError(
            f"{facts.kind} would be {len(data) >> 20} MiB, and the limit is {FILE_LIMIT_BYTES >> 20} MiB"
        )
    return data


def decode_facts(data: bytes, kind: FactsKind) -> ClusterFacts:
    """Read the contents of a file.

    Raises:
        ValueError: The data is not a file of the cluster agent, or is of another version or kind.
    """
    try:
        facts = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a file of the cluster agent: {error}") from None
    if facts.schema != SCHEMA:
        raise ValueError(f"its schema is {facts.schema!r:.60}, and this version reads {SCHEMA}")
    if facts.kind is not kind:
        raise ValueError(f"it has {facts.kind}, not {kind}")
    if kind is FactsKind.NODE and len(facts.items) != 1:
        raise ValueError(f"it has {len(facts.items)} Node objects, not one")
    return facts


def namespace_labels(facts: ClusterFacts) -> dict[str, Mapping[str, str]]:
    """Return the labels of each namespace; a namespace without a readable name is left out."""
    labels_by_namespace: dict[str, Mapping[str, str]] = {}
    for item in facts.items:
        metadata = item.get("metadata") if isinstance(item, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if isinstance(metadata, dict) and isinstance(name, str) and name:
            labels = metadata.get("labels")
            pairs = labels.items() if isinstance(labels, dict) else ()
            labels_by_namespace[name] = {key: value for key, value in pairs if isinstance(value, str)}
    return labels_by_namespace
