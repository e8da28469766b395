"""Distances between NUMA nodes.

Source: kubernetes v1.36, pkg/kubelet/cm/topologymanager/numa_info.go ``CalculateAverageFor``.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.model.idset import Mask
from proxy.model.machine import Machine


class Distances(Struct, frozen=True):
    """The distance table of a machine.

    Attributes:
        rows: Node id to the distances to other nodes by their ids (ACPI SLIT: 10 is the node itself).
    """

    rows: Mapping[int, Mapping[int, int]]

    @classmethod
    def of(cls, machine: Machine) -> Distances | None:
        """Read a machine's table; None if a node does not report its distances to all nodes."""
        ids = [node.id for node in machine.nodes]
        if any(len(node.distance) != len(ids) for node in machine.nodes):
            return None
        return cls({node.id: dict(zip(ids, node.distance, strict=True)) for node in machine.nodes})

    def total(self, nodes: Mask) -> int:
        """Add up the distances of all ordered pairs, a node with itself included.

        Masks of equal size compare by this as they do by their average, in whole numbers.

        Raises:
            KeyError: The table does not have one of the nodes.
        """
        ids = list(nodes)
        return sum(row[other] for row in (self.rows[node] for node in ids) for other in ids)
