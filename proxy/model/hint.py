"""Topology hints (kubernetes v1.36 pkg/kubelet/cm/topologymanager/policy.go, filterProvidersHints)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from proxy.model.idset import Mask


class TopologyHint(Struct, frozen=True):
    """Where a provider could satisfy a request.

    Attributes:
        affinity: NUMA nodes; None where the provider does not care.
        preferred: True when no smaller set of nodes could ever do (by capacity, not by what is free).
    """

    affinity: Mask | None
    preferred: bool


Hints = Mapping[str, Sequence[TopologyHint] | None] | None
"""A provider's answer: resource to hints.

The three forms of nothing: None or an empty mapping, no preference at all; a resource with None, no
preference for it; a resource with an empty sequence, it cannot be satisfied.
"""
