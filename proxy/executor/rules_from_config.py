"""From the configuration and the machine to the rules of a node.

A setting that is already a rule names its field of ``Node`` itself (``proxy.config.setting.Setting.rule``).
Only rules that follow from several settings, or also from the machine, are made here.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.allocation.cpu_policy import CpuPolicy
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.config.schema import Config, CpuManagerPolicy, MemoryManagerPolicy, OwnerMemoryNodes
from proxy.config.setting import rules
from proxy.engine.node import Node
from proxy.model.koordinator import KeepQuota
from proxy.model.machine import Machine


def node_rules(
    config: Config,
    machine: Machine,
    devices: Mapping[str, Mapping[str, RegisteredDevice]] | None = None,
    *,
    quotas: bool = True,
) -> Node:
    """Make the rules of a node; the configuration was checked against the machine before.

    Args:
        config: The configuration.
        machine: The hardware.
        devices: Devices that we give out ourselves, as a simulation does: resource to id to device.
        quotas: Whether CFS quotas can be written; if they cannot, all containers keep theirs.
    """
    topology = CpuTopology.of(machine)
    as_set = dict(rules(config)) | ({} if quotas else {"keep_quota": KeepQuota.ALWAYS})
    named, amount = config.reserved_system_cpus, config.reserved_cpu_amount
    # The amount is turned into CPUs once: they stay the same when others go offline.
    reserved = named or CpuPolicy.of(topology, config.cpu_manager_policy_options, amount=amount).reserved
    return Node(
        machine,
        topology,
        static=config.cpu_manager_policy is CpuManagerPolicy.STATIC,
        reserved=reserved,
        follow_mems=config.memory_nodes is OwnerMemoryNodes.FOLLOW,
        closest=config.topology_manager_policy_options.prefer_closest_numa_nodes,
        reserved_memory=(
            config.reserved_memory if config.memory_manager_policy is MemoryManagerPolicy.STATIC else None
        ),
        devices=devices or {},
        admission=config.admission.rules,
        **as_set,
    )
