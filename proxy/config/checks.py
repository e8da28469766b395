"""Checks of values that are valid individually, but impossible together or on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from proxy.config.cluster_config import IGNORED, allowed_key_faults
from proxy.config.endpoint import PATH_LIMIT
from proxy.config.list_kinds import EVICTION_DEFAULT
from proxy.config.schema import Config, CpuManagerPolicy, MemoryManagerPolicy
from proxy.model import phrases
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine, NumaNode
from proxy.model.options import CpuOptions, check_cpu_options, check_topology_options
from proxy.model.phrases import counted, cpus_are, no_cpus
from proxy.model.quantity import show_quantity

_CPU_OPTIONS = "cpuManagerPolicyOptions"
_REGISTRATION = "kubelet.sock"
"""The socket at which device plugins register, in each of their directories."""
_NOT_FREE = "for exclusive CPUs under full-pcpus-only: reserve whole cores"


def check(config: Config) -> list[str]:
    """Find settings that contradict each other.

    Returns:
        One sentence for each problem, starting with the key; empty if there is no problem.
    """
    return [
        *_sockets(config),
        *_long_paths(config),
        *_device_plugins(config),
        *_cpus(config),
        *_memory(config),
        *_kubelet(config),
        *_allowed(config),
    ]


def check_against(config: Config, machine: Machine) -> None:
    """Reject settings that this machine cannot meet.

    Raises:
        ConfigError: Reserved CPUs do not exist or are offline, all CPUs are reserved, nodes cannot keep their
            reserved memory, or a policy's option does not fit the machine.
    """
    if problems := [*_unsatisfiable(config, machine), *_while_offline(config, machine)]:
        raise configuration_error(config.source, problems)


def check_start(config: Config, machine: Machine) -> list[str]:
    """Reject settings that this machine cannot meet, unless offline hardware is the reason.

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


def ineffective(config: Config) -> list[str]:
    """Return the settings that can have no effect, one sentence each."""
    found = []
    sources = config.kubelet.pods, config.kubelet.pods_api, config.cluster_facts.directory
    if config.device_plugins.enabled and not any(sources):
        unset = "kubelet.pods, kubelet.podsApi and clusterFacts.directory are not set"
        found.append(
            f"devicePlugins.enabled: no container gets devices, since the pods' limits are not known: {unset}"
        )
    if not config.admission.namespace_selector.all and not config.cluster_facts.directory:
        found.append(
            "admission.namespaceSelector: it selects no namespace, since their labels are not known:"
            " clusterFacts.directory is not set"
        )
    return found


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


def configuration_error(source: str, problems: list[str]) -> ConfigError:
    """Return the error that lists all problems of a configuration, one on each line."""
    if len(problems) == 1:
        return ConfigError(f"cannot use the configuration {source}: {problems[0]}")
    listed = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"cannot use the configuration {source}: {len(problems)} problems:{listed}")


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


def _allowed(config: Config) -> Iterator[str]:
    allowed = config.cluster_config.allowed
    yield from allowed_key_faults(allowed, config)
    if allowed and config.cluster_facts.directory is None:
        yield "clusterConfig.allowed: has no effect without clusterFacts.directory"


def _sockets(config: Config) -> Iterator[str]:
    if config.listen == config.runtime:
        yield f"listen: {config.listen} is the runtime's own socket, and the relay would call itself"
    if config.admin_path in {config.listen, config.runtime}:
        yield f"adminSocket: {config.admin_path} is in use for CRI calls already"
    if config.hooks.serve in {config.listen, config.runtime, config.admin_path}:
        yield f"hooks.serve: {config.hooks.serve} is in use for other calls already"
    serve = config.pod_resources.serve
    if serve is not None and serve == config.kubelet.pod_resources:
        yield f"podResources.serve: {serve} is kubelet's own socket, and the server would call itself"
    elif serve is not None and serve in {
        config.listen,
        config.runtime,
        config.admin_path,
        config.hooks.serve,
    }:
        yield f"podResources.serve: {serve} is in use for other calls already"


def _long_paths(config: Config) -> Iterator[str]:
    """List sockets with a derived path that is too long; configured ones were checked when read."""
    sockets = {"adminSocket": config.admin_path}
    plugins = config.device_plugins
    if plugins.enabled:
        sockets["devicePlugins.socketDirectory"] = plugins.socket_directory / _REGISTRATION
        if plugins.shim:
            sockets["devicePlugins.shimDirectory"] = plugins.shim_directory / _REGISTRATION
    for key, path in sockets.items():
        if (length := len(os.fsencode(path))) > PATH_LIMIT:
            yield f"{key}: the path {path} is {length} bytes long, a unix socket's at most {PATH_LIMIT}"


def _device_plugins(config: Config) -> Iterator[str]:
    if not config.device_plugins.enabled:
        return
    plugins, kubelets = config.device_plugins, config.kubelet.plugin_directory
    directories = {"socketDirectory": plugins.socket_directory}
    if plugins.shim:
        directories["shimDirectory"] = plugins.shim_directory
        if plugins.shim_directory == plugins.socket_directory:
            yield (
                "devicePlugins.shimDirectory: must differ from socketDirectory, whose registrations are not "
                "forwarded to kubelet"
            )
    for name, directory in directories.items():
        if kubelets == directory or kubelets in directory.parents:
            yield f"devicePlugins.{name}: {directory} is kubelet's own, and its sockets would be removed"
        elif others := [key for key, path in _other_sockets(config).items() if path.parent == directory]:
            there = f"{directory} is the directory of {' and '.join(others)}"
            yield f"devicePlugins.{name}: {there}, and the sockets in it would be removed"


def _other_sockets(config: Config) -> dict[str, Path]:
    """Return all sockets except those of device plugins, by key."""
    sockets = {
        "listen": config.listen,
        "runtime": config.runtime,
        "adminSocket": config.admin_path,
        "hooks.serve": config.hooks.serve,
        "podResources.serve": config.pod_resources.serve,
        "kubelet.podsApi": config.kubelet.pods_api,
        "kubelet.podResources": config.kubelet.pod_resources,
    }
    return {key: path for key, path in sockets.items() if path is not None}


def _cpus(config: Config) -> Iterator[str]:
    options = config.cpu_manager_policy_options
    if config.cpu_manager_policy is not CpuManagerPolicy.STATIC and options != CpuOptions():
        # kubelet's policy none takes no option either.
        on = ", ".join(name for name, value in options.as_kubelet().items() if value)
        yield f"{_CPU_OPTIONS}: {on} cannot be used with cpuManagerPolicy {config.cpu_manager_policy}"
    # A machine without sockets and nodes: only faults that every machine has are reported.
    yield from _reported(lambda: check_cpu_options(options, config.topology_manager_policy, 0, 0))
    if options.strict_cpu_reservation and not config.reserved_system_cpus and not config.reserved_cpu_amount:
        yield (
            f"{_CPU_OPTIONS}: strict-cpu-reservation needs CPUs that are reserved, "
            "and neither reservedSystemCPUs nor the cpu of kubeReserved and systemReserved reserves any"
        )


def _memory(config: Config) -> Iterator[str]:
    if config.memory_manager_policy is not MemoryManagerPolicy.STATIC:
        return  # kubelet ignores reservedMemory then.
    reserved = sum(node.get("memory", 0) for node in config.reserved_memory.values())
    if not reserved:
        yield "memoryManagerPolicy: Static needs memory in reservedMemory on at least one NUMA node"
        return
    amounts = [part.memory for part in (config.kube_reserved, config.system_reserved)]
    if amounts == [None, None] and config.eviction_memory is None:
        return
    required = sum(amount or 0 for amount in amounts)
    if config.eviction_memory is not None:
        required += config.eviction_memory
        right = {required}
        parts = f"kubeReserved, systemReserved and evictionHard say {show_quantity(required)}"
    else:
        right = {required, required + EVICTION_DEFAULT}
        parts = f"kubeReserved and systemReserved say {show_quantity(required)} (evictionHard may add to it)"
    if reserved not in right:
        yield f"reservedMemory: the nodes keep {show_quantity(reserved)} of memory together, and {parts}"


def _kubelet(config: Config) -> Iterator[str]:
    kubelet = config.kubelet
    files = {
        "tokenFile": kubelet.token_file,
        "caFile": kubelet.ca_file,
        "certFile": kubelet.cert_file,
        "keyFile": kubelet.key_file,
        "insecureSkipVerify": kubelet.insecure_skip_verify,
    }
    set_keys = [f"kubelet.{key}" for key, value in files.items() if value]
    addresses = {"pods": kubelet.pods, "configz": kubelet.configz}
    plain = [f"kubelet.{key} {address}" for key, address in addresses.items() if address.startswith("http:")]
    if set_keys and not any(addresses.values()):
        yield f"{set_keys[0]}: has no effect without kubelet.pods or kubelet.configz"
    elif set_keys and not any(address.startswith("https:") for address in addresses.values()):
        yield f"{set_keys[0]}: has no effect with {' and '.join(plain)}, only with https://"
    if (kubelet.cert_file is None) != (kubelet.key_file is None):
        present, other = ("certFile", "keyFile") if kubelet.cert_file else ("keyFile", "certFile")
        yield f"kubelet.{present}: needs kubelet.{other} too"
    if kubelet.ca_file and kubelet.insecure_skip_verify:
        yield "kubelet.caFile: has no effect with kubelet.insecureSkipVerify"
    own = {config.listen: "listen", config.runtime: "runtime", config.admin_path: "adminSocket"}
    for key, path in (("podsApi", kubelet.pods_api), ("podResources", kubelet.pod_resources)):
        if path in own:
            yield f"kubelet.{key}: {path} is {own[path]}, not a socket of kubelet's"


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
    yield from _reported(
        lambda: check_cpu_options(config.cpu_manager_policy_options, policy, len(machine.packages), nodes)
    )
    options = config.topology_manager_policy_options
    yield from _reported(lambda: check_topology_options(options, policy, nodes, distances=distances))


def _reported(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except ConfigError as error:
        yield str(error).removeprefix("cannot use ")


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
