"""The containers that the kernel lets run on the CPUs of an owner, by a reading of all cpusets."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.engine.state import NodeState
from proxy.executor.kernel_ports import CpusetValue
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Pool


class CpuUsers:
    """Which containers may run where.

    Most owners share with none. So it is first compared with sums: of containers without CPUs of their own,
    and of CPUs that several owners have.
    """

    def __init__(self, state: NodeState, read: Mapping[str, CpusetValue]) -> None:
        """Sum up.

        Args:
            state: The node.
            read: The cpusets in the kernel, by container id.
        """
        self._each: list[tuple[Container, int]] = []
        self._sharers = self._be = self._contested = 0
        owned: dict[str, int] = {}
        for container_id, value in read.items():
            if (container := state.containers.get(container_id)) is None:
                continue
            bits = value.effective_cpus.bits
            self._each.append((container, bits))
            if container.placement.pool is Pool.BE:
                self._be |= bits
            elif container.owner:
                owned[container.owner] = owned.get(container.owner, 0) | bits
            else:
                self._sharers |= bits
        once = 0
        for bits in owned.values():
            self._contested |= once & bits
            once |= bits

    def others(self, owner: str, cpus: CpuSet, *, hard: bool) -> list[Container]:
        """Return the containers of others that may run on some of an owner's CPUs, sorted by name.

        Args:
            owner: The owner's key.
            cpus: Its CPUs.
            hard: Whether BE containers may not borrow them.
        """
        mine = cpus.bits
        if not mine & (self._sharers | self._contested | (self._be if hard else 0)):
            return []
        found = (
            container
            for container, bits in self._each
            if bits & mine and container.owner != owner and (hard or container.placement.pool is not Pool.BE)
        )
        return sorted(found, key=lambda container: container.ref)
