"""The hints that ``align-by-socket`` prefers, and families of hints that respect it.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``isHintSocketAligned``. A set of nodes
is *aligned* if it touches as many sockets as the fewest nodes for the request would fill. Such a set is
preferred whatever its size, so the smallest hint need not be a preferred one, and the best preferred hint has
to be searched for. Choose the sockets W. Inside W, find the fewest nodes that meet the demands and touch
every socket of W; "touches this socket" is just one more demand. So the least over all choices of W is exact.

There are few choices on real machines (70 for 4 of 8 sockets). If there are more than ``CHOICES``, sockets
take the place of nodes, and the fewest of them that meet the demands are W. If the sockets are alike, that
still finds an aligned set whenever there is one, but not always the one with the fewest nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.demand import Demand, best_mask, least_node_count
from proxy.allocation.hint_family import Family
from proxy.model.idset import Mask

CHOICES = 1000
"""If there are at most this many choices of sockets, all are tried."""


class Sockets(Struct, frozen=True):
    """Which sets of nodes are aligned to sockets.

    Attributes:
        of_node: Node id to the bits of the sockets that it touches.
        aligned_socket_count: How many sockets an aligned set touches; 0 if no set is aligned.
    """

    of_node: tuple[tuple[int, int], ...]
    aligned_socket_count: int

    @classmethod
    def of(cls, topo: CpuTopology, size: int) -> Sockets:
        """Compute which sets are aligned on a machine.

        Args:
            topo: The machine.
            size: The fewest nodes that could hold the request if they were empty.
        """
        counts = topo.counts
        nodes_per_socket = counts.numa_nodes // counts.sockets if counts.sockets else 0
        touched = tuple((n, sum(1 << s for s, _ in topo.node_sockets[n])) for n in topo.nodes)
        return cls(touched, -(-size // nodes_per_socket) if nodes_per_socket else 0)

    def touched(self, bits: int) -> int:
        """Return the bits of the sockets that nodes touch."""
        touched = 0
        for node, sockets in self.of_node:
            if bits >> node & 1:
                touched |= sockets
        return touched

    def is_aligned(self, bits: int) -> bool:
        """Return whether nodes touch as many sockets as an aligned set does."""
        return self.touched(bits).bit_count() == self.aligned_socket_count

    def choices(self, demands: Sequence[Demand]) -> Iterable[int]:
        """Return the bits of sockets that an aligned set may be on."""
        all_sockets = tuple(Mask.from_bits(self.touched(-1)))
        if not self.aligned_socket_count:
            return ()
        if math.comb(len(all_sockets), self.aligned_socket_count) <= CHOICES:
            return (
                sum(1 << s for s in subset)
                for subset in itertools.combinations(all_sockets, self.aligned_socket_count)
            )
        whole = tuple(
            Demand(d.required, tuple((self.touched(nodes), n) for nodes, n in d.amounts)) for d in demands
        )
        best = best_mask(all_sockets, whole, floor=self.aligned_socket_count)
        return () if best is None else (best,)


@dataclass(frozen=True, slots=True)
class SocketFamily(Family):
    """A family in which alignment to sockets is preferred as well.

    Attributes:
        sockets: Which sets are aligned.
    """

    sockets: Sockets

    def prefers(self, bits: int) -> bool:
        """Return whether a hint with this mask is preferred."""
        return bits.bit_count() == self.size or self.sockets.is_aligned(bits)

    def preferred_masks(
        self, nodes: Sequence[int], demands: Sequence[Demand], floor: int, base: int = 0
    ) -> Sequence[int]:
        """Return the best of the aligned masks, see ``Family.preferred_masks``."""
        touching = dict(self.sockets.of_node)
        held = Demand(base.bit_count(), tuple((1 << node, 1) for node in Mask.from_bits(base)))
        candidates: list[tuple[int, list[int], tuple[Demand, ...]]] = []
        for chosen in self.sockets.choices(demands):
            inside = [node for node in nodes if node in touching and not touching[node] & ~chosen]
            touch = (
                Demand(1, tuple((1 << node, 1) for node in inside if touching[node] >> socket & 1))
                for socket in Mask.from_bits(chosen)
            )
            all_demands = (*demands, held, *touch)
            least = least_node_count(inside, all_demands)
            if least is not None:
                candidates.append((max(least, floor), inside, all_demands))
        if not candidates:
            return []
        fewest = min(size for size, _, _ in candidates)
        masks = (
            best_mask(inside, all_demands, 0, floor)
            for size, inside, all_demands in candidates
            if size == fewest
        )
        return [bits for bits in masks if bits]
