"""Topology hints (kubernetes v1.36 pkg/kubelet/cm/topologymanager/policy.go, filterProvidersHints)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from proxy.model.idset import Mask


class TopologyHint(Struct, frozen=True):
    """The NUMA nodes on which a provider could satisfy a request.

    Attributes:
        affinity: NUMA nodes; None if the provider has no preference.
        preferred: True when no smaller set of nodes has the capacity, whatever is free.
    """

    affinity: Mask | None
    preferred: bool


Hints = Mapping[str, Sequence[TopologyHint] | None] | None
"""A provider's answer: resource to hints.

Without hints it has three forms. None or an empty mapping: no preference at all. A resource with None: no
preference for this resource. A resource with an empty sequence: this resource cannot be satisfied.
"""
