"""Builds a regular machine from a few numbers, for simulations and tests."""

from __future__ import annotations

from collections.abc import Callable

from proxy.model.errors import TopologyError
from proxy.model.idset import CpuSet
from proxy.model.machine import Cache, Cpu, HugePages, Machine, NumaNode

_LOCAL, _SAME_SOCKET, _REMOTE = 10, 12, 21
_PAGE_SIZES_KB = (2048, 1048576)


def regular_machine(
    sockets: int,
    nodes_per_socket: int,
    cores_per_node: int,
    threads: int = 2,
    mem_bytes_per_node: int = 64 << 30,
    sibling_offset: bool = True,
) -> Machine:
    """Make a machine of equal parts: one die per socket, one L3 per NUMA node.

    Args:
        sockets: Sockets in the machine.
        nodes_per_socket: NUMA nodes in each socket.
        cores_per_node: Physical cores in each NUMA node.
        threads: CPUs of each core.
        mem_bytes_per_node: MemTotal of each node in bytes.
        sibling_offset: True: the ids of a core's threads differ by the number of cores (0 and 32, as on most
            servers). False: the ids are consecutive (0 and 1).

    Raises:
        TopologyError: A count is below one, or there would be more CPUs than ids.
    """
    cores = sockets * nodes_per_socket * cores_per_node
    counts = (sockets, nodes_per_socket, cores_per_node, threads)
    if min(counts) < 1 or cores * threads > CpuSet.LIMIT:
        raise TopologyError(
            f"cannot describe a machine of {counts}: counts are 1 or more, CPUs at most 65536"
        )

    cpus_of = _numbering(cores, threads, sibling_offset=sibling_offset)
    node_count = sockets * nodes_per_socket
    node_cpus = [cpus_of(node * cores_per_node, cores_per_node) for node in range(node_count)]
    per_socket = nodes_per_socket * cores_per_node
    cpus = {
        cpu: _cpu(cpu, core, per_socket, cores_per_node, cpus_of)
        for core in range(cores)
        for cpu in cpus_of(core, 1)
    }
    everything = cpus_of(0, cores)
    return Machine(
        cpus=tuple(cpus[cpu] for cpu in everything),
        nodes=tuple(
            NumaNode(
                node,
                node_cpus[node],
                mem_bytes_per_node,
                {size: HugePages(0, 0, 0) for size in _PAGE_SIZES_KB},
                _distances(node, node_count, nodes_per_socket),
            )
            for node in range(node_count)
        ),
        present=everything,
        possible=everything,
        caches={cpus.first(): Cache(cpus, 3, node, "32768K") for node, cpus in enumerate(node_cpus)},
        extra=_facts(threads, mem_bytes_per_node * node_count),
    )


def _facts(threads: int, mem_bytes: int) -> dict[str, object]:
    """Return the facts that /proc and sysfs would report about the machine as a whole."""
    return {
        "smt": {"control": "on" if threads > 1 else "notsupported", "active": int(threads > 1)},
        "memory": {"total_bytes": mem_bytes, "hugepages": None, "hugepages_source": None},
    }


def _numbering(cores: int, threads: int, *, sibling_offset: bool) -> Callable[[int, int], CpuSet]:
    """Return a function that maps consecutive cores (the first core and their number) to their CPUs."""

    def cpus_of(first: int, count: int) -> CpuSet:
        if sibling_offset:
            return CpuSet(
                core + thread * cores for core in range(first, first + count) for thread in range(threads)
            )
        return CpuSet(range(first * threads, (first + count) * threads))

    return cpus_of


def _cpu(cpu: int, core: int, per_socket: int, per_node: int, cpus_of: Callable[[int, int], CpuSet]) -> Cpu:
    socket, node = core // per_socket, core // per_node
    package = cpus_of(socket * per_socket, per_socket).first()
    llc = cpus_of(node * per_node, per_node).first()
    name = cpus_of(core, 1).first()
    return Cpu(cpu, name, package, package, None, llc, node, core % per_socket, socket)


def _distances(node: int, count: int, per_socket: int) -> tuple[int, ...]:
    near = [_SAME_SOCKET if other // per_socket == node // per_socket else _REMOTE for other in range(count)]
    near[node] = _LOCAL
    return tuple(near)
