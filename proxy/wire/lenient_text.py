r"""Converts bytes that may not be UTF-8 to text.

protobuf says that a string is UTF-8, and the runtimes' Go code does not check it. Bytes that are not UTF-8
become ``\xff`` and the like: texts that differ stay different, which U+FFFD would not give, and
everything that is printed or encoded later is plain text. In JSON such an escape is a syntax error, so an
annotation with such bytes counts as malformed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb

ENTRIES_LIMIT, ENTRY_LIMIT = 1000, 4096
"""Entries of a map of labels, and bytes of one, that are decoded; labels of Kubernetes are much shorter."""


def text(raw: bytes) -> str:
    """Decode bytes; never raises."""
    try:
        return raw.decode()  # without arguments it takes half as long
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")


def identity(raw: bytes) -> str:
    """Decode what is looked up by its exact name: an id, a path.

    Returns:
        An empty string where the bytes are not UTF-8. No call of ours could name such a container.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


class Keys:
    """Reads those entries of a map whose keys are wanted.

    A pod may carry hundreds of kilobytes of annotations, and most pods have none that count. So all bytes are
    searched first, which is one pass in C, and only entries in which a wanted key can be are decoded.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        """Prepare to look for some keys; each has a prefix and a slash, as in ``koordinator.sh/qosClass``."""
        self._keys = frozenset(key.encode() for key in keys)
        prefixes = {key.partition(b"/")[0] + b"/" for key in self._keys}
        self._marks = tuple(
            sorted(p for p in prefixes if not any(other != p and other in p for other in prefixes))
        )

    def of(self, entries: Sequence[bytes]) -> dict[str, str]:
        """Return the wanted entries of a map; of a key that occurs twice the last value, as in protobuf."""
        if not entries:
            return {}
        joined = b"".join(entries[:])  # one call each; iteration costs three times that
        for mark in self._marks:
            if mark in joined:
                return self._found(entries)
        return {}

    def and_others(self, entries: Sequence[bytes]) -> dict[str, str]:
        """Return all entries of a map of labels; where there are too many for labels, the wanted ones."""
        if not entries:
            return {}
        if len(entries) > ENTRIES_LIMIT:
            return self.of(entries)
        read = (entry_of(raw) for raw in entries[:] if len(raw) <= ENTRY_LIMIT)
        return {text(entry.key): text(entry.value) for entry in read if entry is not None}

    def _found(self, entries: Sequence[bytes]) -> dict[str, str]:
        found: dict[str, str] = {}
        for raw in entries:
            if any(mark in raw for mark in self._marks):
                entry = entry_of(raw)
                if entry is not None and entry.key in self._keys:
                    found[entry.key.decode()] = text(entry.value)
        return found


def entry_of(raw: bytes) -> pb.Entry | None:
    """Decode one entry of a map; None where it is not a message, which the runtime refuses."""
    try:
        return pb.Entry.FromString(raw)
    except DecodeError:
        return None
