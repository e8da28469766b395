"""Checks of a configuration against the machine, and the configuration that a node starts with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from proxy.config.checks import configuration_error, ineffective, reported
from proxy.config.cluster_config import IGNORED
from proxy.config.schema import Config, MemoryManagerPolicy
from proxy.model import phrases
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine, NumaNode
from proxy.model.options import check_cpu_options, check_topology_options
from proxy.model.phrases import counted, cpus_are, no_cpus
from proxy.model.quantity import show_quantity

_NOT_FREE = "for exclusive CPUs under full-pcpus-only: reserve whole cores"


def check_against(config: Config, machine: Machine) -> None:
    """Refuse settings that this machine cannot meet.

    Raises:
        ConfigError: Reserved CPUs do not exist or are offline, all CPUs are reserved, nodes cannot keep their
            reserved memory, or a policy's option does not fit the machine.
    """
    if problems := [*_unsatisfiable(config, machine), *_while_offline(config, machine)]:
        raise configuration_error(config.source, problems)


def check_start(config: Config, machine: Machine) -> list[str]:
    """Refuse settings that this machine cannot meet, unless offline hardware is the reason.

    CPUs that are offline (one thread of each core when SMT is switched off) and memory that was removed were
    present when the settings were written. If the daemon did not start then, the node would have no proxy.

    Returns:
        Settings that wait for offline hardware, settings without effect, and keys that were renamed, one
        sentence each.

    Raises:
        ConfigError: As ``check_against``.
    """
    if problems := list(_unsatisfiable(config, machine)):
        raise configuration_error(config.source, problems)
    return [
        *(f"{what}: this takes effect when it is back online" for what in _while_offline(config, machine)),
        *ineffective(config),
        *config.former_keys,
    ]


def partly_reserved_cores(config: Config, machine: Machine) -> str:
    """Return why CPUs do not count as free for owners under full-pcpus-only; empty if all count.

    The other threads of a core with a reserved CPU do not count as free for a request (kubernetes
    pkg/kubelet/cm/cpumanager/policy_static.go, ``GetAvailablePhysicalCPUs``).
    """
    if not config.cpu_manager_policy_options.full_pcpus_only:
        return ""
    reserved, amount = config.reserved_system_cpus, config.reserved_cpu_amount or 0
    cores = machine.cores.values()
    lost = CpuSet.union_of(core for core in cores if core & reserved) - reserved
    if lost:
        rest = f"their other threads ({phrases.cpus(lost)}) do not count as free"
        return f"reservedSystemCPUs: it reserves a part of some cores, and {rest} {_NOT_FREE}"
    threads = max(map(len, cores), default=1)
    if amount % threads:
        part = f"{counted(amount, 'CPU')}, and a core has {threads}"
        rest = "the rest of a core does not count as free"
        return f"kubeReserved and systemReserved: they reserve {part}: {rest} {_NOT_FREE}"
    return ""


def _unsatisfiable(config: Config, machine: Machine) -> Iterator[str]:
    """List settings that this machine can never satisfy."""
    yield from _reserved_cpus(config, machine)
    yield from _check_excluded_cpus(config, machine)
    yield from _machine_options(config, machine)
    if config.memory_manager_policy is MemoryManagerPolicy.STATIC:
        yield from memory_misfits(_usable(machine), _reserved_memory(config, machine, away=False))


def _while_offline(config: Config, machine: Machine) -> Iterator[str]:
    """List settings that this machine satisfies once offline CPUs and NUMA nodes are back."""
    online = f"(online: {machine.online})"
    if offline := (config.reserved_system_cpus - machine.online) & machine.present:
        yield f"reservedSystemCPUs: {cpus_are(offline)} offline {online}"
    elif machine.online <= config.reserved_system_cpus and (offline := machine.present - machine.online):
        kept = f"all CPUs are reserved; none are left for containers while {cpus_are(offline)} offline"
        yield f"reservedSystemCPUs: {kept} {online}"
    koordinator = config.koordinator
    for name, cpus in (
        ("reservedCPUs", koordinator.reserved_cpus),
        ("systemCPUs", koordinator.system_cpus),
    ):
        if offline := (cpus - machine.online) & machine.present:
            yield f"koordinator.{name}: {cpus_are(offline)} not online here {online}"
    if config.memory_manager_policy is MemoryManagerPolicy.STATIC:
        yield from memory_misfits(_usable(machine), _reserved_memory(config, machine, away=True))


def _usable(machine: Machine) -> dict[int, dict[str, int]]:
    return {node.id: usable_memory(node) for node in machine.nodes}


def _reserved_memory(config: Config, machine: Machine, *, away: bool) -> dict[int, Mapping[str, int]]:
    """Return the reserves of nodes whose memory is offline (``away``), or of the others.

    The memory of a node is offline if the node has none now, or does not exist now but may appear.
    """
    absent = machine.possible_nodes - Mask(machine.node_by_id)
    absent |= Mask(node.id for node in machine.nodes if node.mem_bytes == 0 and not node.cpus)
    return {node: amounts for node, amounts in config.reserved_memory.items() if (node in absent) is away}


def start_config(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """Return the configuration to start with, and the warnings of ``check_start``.

    If only the settings from the cluster make the configuration impossible, the node starts without them.

    Raises:
        ConfigError: The node's own settings are impossible.
    """
    try:
        return config, check_start(config, machine)
    except ConfigError as error:
        if config.without_cluster is None:
            raise
        fault = f"{IGNORED}: {error}"
        own_config = replace(config.without_cluster, origin=config.origin, cluster_fault=fault)
        return own_config, check_start(own_config, machine)


def _reserved_cpus(config: Config, machine: Machine) -> Iterator[str]:
    reserved, amount = config.reserved_system_cpus, config.reserved_cpu_amount or 0
    online = f"(online: {machine.online})"
    if absent := reserved - machine.online - machine.present:
        yield f"reservedSystemCPUs: {no_cpus(absent)} {online}"
    elif reserved and machine.online | machine.present <= reserved:
        yield f"reservedSystemCPUs: all CPUs are reserved; none are left for containers {online}"
    elif amount and amount >= len(machine.online):
        yield (
            f"kubeReserved and systemReserved: they reserve {amount} of {len(machine.online)} CPUs; "
            f"none are left for containers {online}"
        )


def _check_excluded_cpus(config: Config, machine: Machine) -> Iterator[str]:
    """Check the CPUs that are reserved for processes outside pods and for class SYSTEM."""
    koordinator, online = config.koordinator, f"(online: {machine.online})"
    for name, cpus in (
        ("reservedCPUs", koordinator.reserved_cpus),
        ("systemCPUs", koordinator.system_cpus),
    ):
        if absent := cpus - machine.online - machine.present:
            yield f"koordinator.{name}: {cpus_are(absent)} not online here {online}"
    strict = config.cpu_manager_policy_options.strict_cpu_reservation
    unshared = koordinator.excluded_cpus | (config.reserved_system_cpus if strict else CpuSet())
    if koordinator.excluded_cpus and machine.online <= unshared:
        yield f"koordinator: all CPUs are reserved; none are left for containers {online}"


def _machine_options(config: Config, machine: Machine) -> Iterator[str]:
    policy, nodes = config.topology_manager_policy, len(machine.nodes)
    distances = all(len(n.distance) == nodes for n in machine.nodes)
    yield from reported(
        lambda: check_cpu_options(config.cpu_manager_policy_options, policy, len(machine.packages), nodes)
    )
    options = config.topology_manager_policy_options
    yield from reported(lambda: check_topology_options(options, policy, nodes, distances=distances))


def usable_memory(node: NumaNode) -> dict[str, int]:
    """Return the memory that a node can reserve or promise: bytes by resource, without its huge pages.

    Memory is left out if the machine does not report its size.
    """
    pages = {
        f"hugepages-{show_quantity(kib << 10)}": (kib << 10) * p.nr
        for kib, p in (node.hugepages or {}).items()
    }
    memory = {} if node.mem_bytes is None else {"memory": node.mem_bytes - sum(pages.values())}
    return memory | pages


def memory_misfits(
    usable: Mapping[int, Mapping[str, int]], reserved: Mapping[int, Mapping[str, int]]
) -> list[str]:
    """Check reserved memory against the memory of the nodes.

    Args:
        usable: Node to resource to bytes; memory is missing if its size is unknown.
        reserved: Node to resource to bytes.

    Returns:
        One sentence for each problem, starting with the key.
    """
    problems = []
    for node, amounts in reserved.items():
        if node not in usable:
            existing = ", ".join(map(str, usable))
            problems.append(f"reservedMemory: there is no NUMA node {node} (there are: {existing})")
            continue
        for name, size in amounts.items():
            if (name != "memory" or name in usable[node]) and size > (
                usable_bytes := max(usable[node].get(name, 0), 0)
            ):
                problems.append(
                    f"reservedMemory: NUMA node {node} cannot keep {show_quantity(size)} of {name}, "
                    f"it has {show_quantity(usable_bytes)}"
                    + (" besides its huge pages" if name == "memory" else "")
                )
    return problems
