"""Immutable mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V", covariant=True)


class FrozenMapping(Mapping[K, V]):
    """A mapping that never changes, so that it can be a default and be hashed; equal to any equal mapping."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[K, V] | None = None) -> None:
        self._entries = dict(entries or {})

    def __getitem__(self, key: K) -> V:
        return self._entries[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)
