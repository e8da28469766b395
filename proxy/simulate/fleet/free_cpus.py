"""The free CPUs of all NUMA nodes of a fleet, and how many of them aligned containers can use."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.simulate.hosts import Host


class FreeCpus:
    """CPUs that could still be given to one container alone, by node and NUMA node."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        """Count the free CPUs of some nodes."""
        self._numa = {id(host.node): [numa.cpus.bits for numa in host.node.machine.nodes] for host in hosts}
        self._free: list[list[int]] = [self._counts(host) for host in hosts]

    def update(self, at: int, host: Host) -> None:
        """Count the free CPUs of a node again."""
        self._free[at] = self._counts(host)

    def total(self) -> int:
        """Return how many there are."""
        return sum(map(sum, self._free))

    def useless(self, size: int) -> int:
        """Return how many are left over when all NUMA nodes are filled with containers of some size."""
        return sum(free % size for node in self._free for free in node)

    def holds(self, at: int, sizes: Sequence[int]) -> bool:
        """Return whether a node has room for containers of these sizes, each on one of its NUMA nodes.

        Larger ones are laid first, each on the NUMA node with the least room that is enough for it.
        """
        if len(sizes) == 1:
            return max(self._free[at]) >= sizes[0]
        left = sorted(self._free[at])
        for size in sorted(sizes, reverse=True):
            found = next((number for number, free in enumerate(left) if free >= size), None)
            if found is None:
                return False
            left[found] -= size
            left.sort()
        return True

    def _counts(self, host: Host) -> list[int]:
        left = host.ownable.bits
        return [(left & cpus).bit_count() for cpus in self._numa[id(host.node)]]
