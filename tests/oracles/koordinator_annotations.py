"""Annotations of a Node as Koordinator's manager writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from proxy.pools.node_keys import RAW_ALLOCATABLE, Texts, amplification_ratios, with_ratios


def with_ratio(annotations: Texts, name: str, ratio: float) -> tuple[dict[str, str], bool, str]:
    """Return annotations with the ratio of one resource.

    Returns:
        The annotations, whether they changed, and what is wrong with the given ones: if something is wrong,
        nothing is changed.
    """
    ratios, problem = amplification_ratios(annotations)
    if problem or (ratios or {}).get(name, 0.0) == ratio:
        return dict(annotations), False, problem
    return with_ratios(annotations, {**(ratios or {}), name: ratio}), True, ""


def with_raw_allocatable(annotations: Texts, held: Mapping[str, str | float]) -> dict[str, str]:
    """Return annotations with what was allocatable before amplification."""
    return {**annotations, RAW_ALLOCATABLE: json.dumps(dict(sorted(held.items())), separators=(",", ":"))}
