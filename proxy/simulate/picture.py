"""Machines at the end of a simulation, as a picture: NUMA nodes as rows, CPUs as a bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import counted
from proxy.model.requests import MEMORY, in_bytes
from proxy.model.workload import Container, Phase, Pool
from proxy.observe.value_text import clean
from proxy.simulate.nodes import PODS, SimulatedNode
from proxy.simulate.quality import remaining_cpus_of
from proxy.topology.text import size_text

OWNED, RESERVED, LEFT = "#", "=", "."
LEGEND = f"{OWNED} owned by one container or pod, {RESERVED} reserved, {LEFT} shared and left to be owned"
_BAR = 32
"""Columns of the longest bar."""


@dataclass(frozen=True, slots=True)
class NumaNodeRow:
    """One NUMA node, or the devices that are near to none.

    Attributes:
        node: Its id; None for devices that are near to no node.
        cpus: Its CPUs.
        owned: Its exclusive CPUs.
        reserved: Its CPUs that are never exclusive.
        pods: How many pods were given CPUs, memory or devices of it.
        memory: Bytes given and bytes that can be given; None if memory is not counted by node.
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
    def remaining(self) -> CpuSet:
        """CPUs that could still become exclusive."""
        return self.cpus - self.owned - self.reserved


def rows_of(simulated_node: SimulatedNode) -> list[NumaNodeRow]:
    """Return the rows of a machine's NUMA nodes; the last row has devices near to none, if there are any."""
    node, owned = simulated_node.node, simulated_node.owned
    staying = [c for c in simulated_node.state.containers.values() if c.phase is not Phase.EXITED]
    assigned = _assigned_devices(staying)
    pods = _pods(simulated_node, staying)
    rows = [
        NumaNodeRow(
            numa.id,
            numa.cpus,
            numa.cpus & owned,
            numa.cpus & node.reserved,
            len(pods.get(numa.id, ())),
            _memory(simulated_node, numa.id),
            _devices(simulated_node, assigned, numa.id),
        )
        for numa in node.machine.nodes
    ]
    nowhere = _devices(simulated_node, assigned, None)
    if nowhere:
        none = CpuSet()
        rows.append(NumaNodeRow(None, none, none, none, len(pods.get(None, ())), None, nowhere))
    return rows


def _assigned_devices(containers: list[Container]) -> dict[str, set[str]]:
    assigned: dict[str, set[str]] = {}
    for container in containers:
        for resource, ids in container.placement.devices:
            assigned.setdefault(resource, set()).update(ids)
    return assigned


def _devices(
    simulated_node: SimulatedNode, assigned: Mapping[str, set[str]], node: int | None
) -> dict[str, tuple[int, int]]:
    """Count the devices near to a node: given and healthy."""
    counts: dict[str, tuple[int, int]] = {}
    for resource, plugin in simulated_node.node.devices.items():
        near = [d for d in plugin.values() if (node in d.nodes if d.nodes else node is None)]
        assigned_ids = assigned.get(resource, set())
        if near:
            counts[resource] = (sum(d.id in assigned_ids for d in near), sum(d.healthy for d in near))
    return counts


def _pods(simulated_node: SimulatedNode, containers: list[Container]) -> dict[int | None, set[str]]:
    """Return the pods that have CPUs, memory or devices of each node."""
    pods: dict[int | None, set[str]] = {}
    for container in containers:
        placement = container.placement
        nodes = Mask()
        if placement.pool is Pool.OWN:
            nodes |= simulated_node.node.machine.nodes_of(placement.exclusive)
        for block in placement.blocks:
            nodes |= block.affinity
        for node in nodes:
            pods.setdefault(node, set()).add(container.pod.key)
        for resource, ids in placement.devices:
            for name in ids:
                for at in simulated_node.node.devices[resource][name].nodes or (None,):
                    pods.setdefault(at, set()).add(container.pod.key)
    return pods


def _memory(simulated_node: SimulatedNode, node: int) -> tuple[int, int] | None:
    memory = simulated_node.state.memory
    numa = memory.nodes.get(node) if memory is not None else None
    if numa is None:
        return None
    table = numa.table(MEMORY)
    return table.reserved, table.allocatable


def lines_of(simulated_node: SimulatedNode) -> list[str]:
    """Draw a machine."""
    rows = rows_of(simulated_node)
    longest = max((len(row.cpus) for row in rows), default=1) or 1
    scale = min(1.0, _BAR / longest)
    cells = [_cells(row, scale) for row in rows]
    return [
        _headline(simulated_node),
        *(f"  {line}" for line in columns(cells)),
        f"  {_remaining(simulated_node)}",
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out cells in columns, to the left; columns that are empty in all rows are left out."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = [at for at, width in enumerate(widths) if width]
    return ["  ".join(row[at].ljust(widths[at]) for at in shown).rstrip() for row in rows]


def bar(row: NumaNodeRow, scale: float) -> str:
    """Draw a node's CPUs: one column for each, or for several if the node is large.

    Each kind of CPUs has at least one column, so that a bar never hides that CPUs are owned or free.
    """
    parts = [(OWNED, len(row.owned)), (RESERVED, len(row.reserved - row.owned)), (LEFT, len(row.remaining))]
    width = max(round(len(row.cpus) * scale), sum(count > 0 for _, count in parts))
    sizes = [max(1, round(count * scale)) if count else 0 for _, count in parts]
    while sum(sizes) != width and any(sizes):
        at = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[at] += 1 if sum(sizes) < width else -1
    return "".join(sign * size for (sign, _), size in zip(parts, sizes, strict=True))


def amount_text(resource: str, amount: int) -> str:
    """Write an amount of a resource."""
    if resource == "cpu":
        return f"{amount / 1000:g}"
    if in_bytes(resource):
        return size_text(amount)
    return str(amount)


def _headline(simulated_node: SimulatedNode) -> str:
    machine = simulated_node.node.machine
    requested = [
        f"{clean(name)} {amount_text(name, offer - simulated_node.free[name])} of {amount_text(name, offer)}"
        for name, offer in _interesting(simulated_node)
    ]
    cpus = f"{len(simulated_node.owned)} of {counted(len(machine.online), 'CPU')} owned"
    pods = counted(simulated_node.pod_count, "pod")
    return f"{clean(simulated_node.name)}: {pods}, {cpus}; requested: {', '.join(requested)}"


def _remaining(simulated_node: SimulatedNode) -> str:
    remaining = remaining_cpus_of(simulated_node.node, simulated_node.ownable)
    return (
        f"left {counted(remaining.cpus, 'CPU')}, {remaining.whole} in whole cores; "
        f"at most {remaining.largest} on one node, or {remaining.largest_whole} in whole cores"
    )


def _interesting(simulated_node: SimulatedNode) -> Iterable[tuple[str, int]]:
    for name, offer in simulated_node.offers.items():
        if name != PODS:
            yield name, offer


def _cells(row: NumaNodeRow, scale: float) -> list[str]:
    if row.node is None:
        head = ["no node", "", "", "", ""]
    else:
        reserved = len(row.reserved - row.owned)
        head = [
            f"node {row.node}",
            bar(row, scale),
            f"{len(row.owned)} owned" if row.cpus else "no CPUs",
            f"{reserved} reserved" if reserved else "",
            f"{len(row.remaining)} left" if row.cpus else "",
        ]
    memory = ""
    if row.memory is not None:
        memory = f"memory {size_text(row.memory[0])} of {size_text(row.memory[1])}"
    devices = ", ".join(f"{clean(name)} {assigned} of {of}" for name, (assigned, of) in row.devices.items())
    return [*head, memory, devices, counted(row.pods, "pod") if row.pods else ""]
