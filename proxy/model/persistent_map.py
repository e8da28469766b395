"""An immutable mapping that is cheap to change.

A node's state is a value, and most calls change one entry of it. A dictionary of a thousand entries would be
copied whole each time; here the entries lie in 64 small dictionaries, and a change copies only the dictionary
that it concerns and the list of the dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

V = TypeVar("V")
_BUCKETS = 64
_EMPTY: dict[str, Any] = {}
"""The bucket of all maps that have no entry there; it is never changed."""


class PersistentMap(Mapping[str, V]):
    """Text keys to values; never changes."""

    __slots__ = ("_buckets", "_size", "_values")

    def __init__(self, entries: Mapping[str, V] | None = None) -> None:
        buckets: list[dict[str, V]] = [_EMPTY] * _BUCKETS
        for key, value in (entries or {}).items():
            at = hash(key) % _BUCKETS
            if buckets[at] is _EMPTY:
                buckets[at] = {}
            buckets[at][key] = value
        self._buckets = buckets
        self._size = len(entries or {})
        self._values: tuple[V, ...] | None = None

    def put(self, key: str, value: V) -> PersistentMap[V]:
        """Return the map with an entry added or replaced."""
        at = hash(key) % _BUCKETS
        buckets = self._buckets.copy()
        bucket = buckets[at]
        buckets[at] = {**bucket, key: value}
        table: PersistentMap[V] = _new(PersistentMap)
        table._buckets = buckets
        table._size = self._size if key in bucket else self._size + 1
        table._values = None
        return table

    def drop(self, key: str) -> PersistentMap[V]:
        """Return the map without an entry; the same map if it has no such entry."""
        at = hash(key) % _BUCKETS
        if key not in self._buckets[at]:
            return self
        buckets = self._buckets.copy()
        buckets[at] = bucket = buckets[at].copy()
        del bucket[key]
        table: PersistentMap[V] = _new(PersistentMap)
        table._buckets = buckets
        table._size = self._size - 1
        table._values = None
        return table

    def __getitem__(self, key: str) -> V:
        return self._buckets[hash(key) % _BUCKETS][key]

    def get(self, key: str, default: V | None = None) -> V | None:  # type: ignore[override]  # the form used
        """Return a value, or the default."""
        return self._buckets[hash(key) % _BUCKETS].get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._buckets[hash(key) % _BUCKETS]

    def __iter__(self) -> Iterator[str]:
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._size

    # A view of the standard library looks every key up again; these are read for every decision.

    def values(self) -> tuple[V, ...]:  # type: ignore[override]  # all callers only go over it
        """Return all values."""
        values = self._values
        if values is None:
            values = self._values = tuple(
                [value for bucket in self._buckets if bucket for value in bucket.values()]
            )
        return values

    def items(self) -> list[tuple[str, V]]:  # type: ignore[override]  # the same
        """Return all pairs."""
        return [pair for bucket in self._buckets if bucket for pair in bucket.items()]

    def compared(self, before: PersistentMap[V]) -> list[tuple[str, V, V | None]]:
        """Return all pairs, each with the value that the key had in another map; None if it had none."""
        pairs: list[tuple[str, V, V | None]] = []
        for bucket, old in zip(self._buckets, before._buckets, strict=True):
            if not bucket:
                continue
            if bucket is old:
                pairs += [(key, value, value) for key, value in bucket.items()]
            else:
                pairs += [(key, value, old.get(key)) for key, value in bucket.items()]
        return pairs


_new = PersistentMap.__new__
