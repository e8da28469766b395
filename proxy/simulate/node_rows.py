"""The use of each NUMA node of a machine at the end of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.model.idset import CpuSet, Mask
from proxy.model.requests import MEMORY
from proxy.model.workload import Container, Phase, Pool
from proxy.simulate.hosts import Host


@dataclass(frozen=True, slots=True)
class NumaNodeRow:
    """One NUMA node, or what is on none.

    Attributes:
        node: Its id; None for devices that are near to no node.
        cpus: Its CPUs.
        owned: Exclusive ones.
        reserved: Those that are never exclusive.
        pods: How many pods were given CPUs, memory or devices of it.
        memory: Bytes given and bytes that can be given; None where memory is not counted by node.
        devices: Resource to devices given and healthy ones; a device near to several nodes is in each.
    """

    node: int | None
    cpus: CpuSet
    owned: CpuSet
    reserved: CpuSet
    pods: int
    memory: tuple[int, int] | None
    devices: Mapping[str, tuple[int, int]]

    @property
    def left(self) -> CpuSet:
        """CPUs that could still become exclusive."""
        return self.cpus - self.owned - self.reserved


def rows_of(host: Host) -> list[NumaNodeRow]:
    """Look at the NUMA nodes of a machine; the last row is that of devices near to none, if there are any."""
    node, owned = host.node, host.owned
    staying = [c for c in host.state.containers.values() if c.phase is not Phase.EXITED]
    given = _given(staying)
    pods = _pods(host, staying)
    rows = [
        NumaNodeRow(
            numa.id,
            numa.cpus,
            numa.cpus & owned,
            numa.cpus & node.reserved,
            len(pods.get(numa.id, ())),
            _memory(host, numa.id),
            _devices(host, given, numa.id),
        )
        for numa in node.machine.nodes
    ]
    nowhere = _devices(host, given, None)
    if nowhere:
        none = CpuSet()
        rows.append(NumaNodeRow(None, none, none, none, len(pods.get(None, ())), None, nowhere))
    return rows


def _given(containers: list[Container]) -> dict[str, set[str]]:
    given: dict[str, set[str]] = {}
    for container in containers:
        for resource, ids in container.placement.devices:
            given.setdefault(resource, set()).update(ids)
    return given


def _devices(host: Host, given: Mapping[str, set[str]], node: int | None) -> dict[str, tuple[int, int]]:
    """Count the devices near to a node: given and healthy."""
    found: dict[str, tuple[int, int]] = {}
    for resource, plugin in host.node.devices.items():
        here = [d for d in plugin.values() if (node in d.nodes if d.nodes else node is None)]
        taken = given.get(resource, set())
        if here:
            found[resource] = (sum(d.id in taken for d in here), sum(d.healthy for d in here))
    return found


def _pods(host: Host, containers: list[Container]) -> dict[int | None, set[str]]:
    """Return the pods that were given something of each node."""
    pods: dict[int | None, set[str]] = {}
    for container in containers:
        placement = container.placement
        nodes = Mask()
        if placement.pool is Pool.OWN:
            nodes |= host.node.machine.nodes_of(placement.exclusive)
        for block in placement.blocks:
            nodes |= block.affinity
        for node in nodes:
            pods.setdefault(node, set()).add(container.pod.key)
        for resource, ids in placement.devices:
            for name in ids:
                for at in host.node.devices[resource][name].nodes or (None,):
                    pods.setdefault(at, set()).add(container.pod.key)
    return pods


def _memory(host: Host, node: int) -> tuple[int, int] | None:
    memory = host.state.memory
    numa = memory.nodes.get(node) if memory is not None else None
    if numa is None:
        return None
    table = numa.table(MEMORY)
    return table.reserved, table.allocatable
