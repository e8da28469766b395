"""Checks of values that are valid individually, but impossible together.

``machine_checks`` compares them with the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from proxy.config.cluster_config import allowed_key_faults
from proxy.config.endpoint import PATH_LIMIT
from proxy.config.list_kinds import EVICTION_DEFAULT
from proxy.config.schema import Config, CpuManagerPolicy, MemoryManagerPolicy
from proxy.model.errors import ConfigError
from proxy.model.options import CpuOptions, check_cpu_options
from proxy.model.quantity import show_quantity

_CPU_OPTIONS = "cpuManagerPolicyOptions"
_REGISTRATION = "kubelet.sock"
"""The socket at which device plugins register, in each of their directories."""


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


def configuration_error(source: str, problems: list[str]) -> ConfigError:
    """Return the error that lists all problems of a configuration, one on each line."""
    if len(problems) == 1:
        return ConfigError(f"cannot use the configuration {source}: {problems[0]}")
    listed = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"cannot use the configuration {source}: {len(problems)} problems:{listed}")


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
    yield from reported(lambda: check_cpu_options(options, config.topology_manager_policy, 0, 0))
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
        parts = f"kubeReserved, systemReserved and evictionHard amount to {show_quantity(required)}"
    else:
        right = {required, required + EVICTION_DEFAULT}
        parts = f"kubeReserved and systemReserved amount to {show_quantity(required)}"
        parts += " (evictionHard may add to it)"
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


def reported(check: Callable[[], None]) -> Iterator[str]:
    """Yield the message of a check that raises ``ConfigError``."""
    try:
        check()
    except ConfigError as error:
        yield str(error).removeprefix("cannot use ")
