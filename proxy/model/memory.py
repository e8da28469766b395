"""Memory that a container or a pod was given on NUMA nodes."""

from __future__ import annotations

from msgspec import Struct

from proxy.model.idset import Mask


class Block(Struct, frozen=True):
    """An amount of one resource (bytes) on a mask of nodes."""

    affinity: Mask
    resource: str
    size: int


Blocks = tuple[Block, ...]
