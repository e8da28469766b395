"""The grants of the topology manager's providers to one container."""

from __future__ import annotations

from msgspec import Struct, field

from proxy.model.idset import CpuSet, Mask


class Block(Struct, frozen=True):
    """An amount of one resource (bytes) on a mask of nodes."""

    affinity: Mask
    resource: str
    size: int


Blocks = tuple[Block, ...]
"""Memory that a container or a pod was given on NUMA nodes."""


class Share(Struct, frozen=True):
    """An amount of a resource that is neither CPUs, memory nor devices.

    Attributes:
        provider: Name of the provider that granted it and that accounts for it.
        resource: Name of the resource.
        amount: How much, in the unit of the provider.
        nodes: NUMA nodes on which it lies; None if it lies on no particular node.
    """

    provider: str
    resource: str
    amount: int
    nodes: Mask | None = None


class Grants(Struct, frozen=True):
    """Everything that was granted to one container.

    Attributes:
        cpus: Exclusive CPUs; empty if it gets none.
        blocks: Memory by NUMA nodes.
        devices: Resource and device ids, for devices that topoproxy assigns itself.
        shares: The grants of providers of other resources.
    """

    cpus: CpuSet = field(default_factory=CpuSet)
    blocks: Blocks = ()
    devices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    shares: tuple[Share, ...] = ()
