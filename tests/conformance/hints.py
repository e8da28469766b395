"""Hints and distance tables as the files write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.allocation.distance import Distances
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask


def hint(raw: Mapping[str, Any] | None) -> TopologyHint:
    """Read a hint; null is the hint without an affinity that is not preferred."""
    affinity = (raw or {}).get("affinity")
    return TopologyHint(None if affinity is None else Mask(affinity), bool((raw or {}).get("preferred")))


def hints(raw: Sequence[Mapping[str, Any]]) -> list[TopologyHint]:
    return [hint(entry) for entry in raw]


def answer(raw: Mapping[str, Any] | None) -> Hints:
    """Read a provider's answer: hints by resource."""
    return {name: None if each is None else hints(each) for name, each in (raw or {}).items()}


def plain(value: TopologyHint) -> dict[str, Any]:
    """Write a hint as the files do."""
    affinity = value.affinity
    return {"affinity": None if affinity is None else list(affinity), "preferred": value.preferred}


def shown(found: Hints) -> dict[str, list[dict[str, Any]] | None]:
    """Write down a provider's answer with the hints in one order; nothing at all is an empty answer."""
    return {
        name: None if each is None else sorted((plain(h) for h in each), key=_place)
        for name, each in (found or {}).items()
    }


def _place(written: Mapping[str, Any]) -> tuple[object, ...]:
    nodes = written["affinity"]
    return (nodes is not None, len(nodes or ()), nodes or [], written["preferred"])


def distances(raw: Sequence[Sequence[int]] | Mapping[str, Sequence[int]]) -> Distances:
    """Read a table: row i is node i, or rows by node; column i is node i."""
    rows = raw.items() if isinstance(raw, Mapping) else enumerate(raw)
    return Distances({int(node): dict(enumerate(row)) for node, row in rows})
