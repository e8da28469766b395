"""Hints and distance tables as the files write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.place.distance import Distances


def hint(raw: Mapping[str, Any]) -> TopologyHint:
    affinity = raw["affinity"]
    return TopologyHint(None if affinity is None else Mask(affinity), raw["preferred"])


def hints(raw: Sequence[Mapping[str, Any]]) -> list[TopologyHint]:
    return [hint(entry) for entry in raw]


def plain(value: TopologyHint) -> dict[str, Any]:
    """Write a hint as the files do."""
    affinity = value.affinity
    return {"affinity": None if affinity is None else list(affinity), "preferred": value.preferred}


def distances(raw: Sequence[Sequence[int]] | Mapping[str, Sequence[int]]) -> Distances:
    """Read a table: row i is node i, or rows by node; column i is node i."""
    rows = raw.items() if isinstance(raw, Mapping) else enumerate(raw)
    return Distances({int(node): dict(enumerate(row)) for node, row in rows})
