"""Memory that a container or a pod was given on NUMA nodes."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.model.idset import Mask


@dataclass(frozen=True, slots=True)
class Block:
    """An amount of one resource (bytes) on a mask of nodes."""

    affinity: Mask
    resource: str
    size: int


Blocks = tuple[Block, ...]
