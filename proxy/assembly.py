"""Makes the executor and its parts from the configuration, before anything runs.

The daemon imports this module after its socket is open, so modules that every node needs are imported at the
top. Modules that only some nodes use (for partitions, BE (best effort) suppression, a Node object, asking
kubelet for pods) are imported where they are needed, so only those nodes spend memory on them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.backends.cgroup.cfs_quota import KernelCpuGroups, open_cpu_groups
from proxy.backends.cgroup.cpuset import KernelCgroups, open_cgroups
from proxy.backends.cgroup.displaced_tasks import KernelDisplacedTasks
from proxy.backends.cgroup.fences import KernelFences
from proxy.backends.cgroup.inotify import InotifyWrites
from proxy.backends.cgroup.locator import KernelGroupLocator
from proxy.backends.cgroup.memory import KernelMemory, open_memory
from proxy.backends.runtime.client import GrpcRuntime
from proxy.backends.runtime.containerd_events import ContainerdEvents
from proxy.backends.runtime.quirks import QUIRKS
from proxy.backends.systemd.units import SystemdUnits
from proxy.config.schema import Config, OnError, OwnerPartitions
from proxy.engine.partition import PARTITION_RECORD
from proxy.executor.context import ExecutorOptions
from proxy.executor.machine.hotplug import NO_UEVENTS
from proxy.executor.node_executor import NodeExecutor, Ports
from proxy.executor.rules_from_config import node_rules
from proxy.kubelet_assembly import (
    device_plugin_registry_of,
    kubelet_allocations_of,
    kubelet_cpu_manager_of,
    kubelet_of,
)
from proxy.model.errors import CgroupError, TopologyError
from proxy.model.koordinator import KeepQuota, SuppressMode
from proxy.model.machine import Machine
from proxy.topology.devices import SysfsDevices
from proxy.topology.reader import is_machine_unchanged, read_machine
from proxy.topology.uevents import subscribe_to_uevents

if TYPE_CHECKING:
    from proxy.backends.cluster.files import AgentFiles
    from proxy.engine.suppression import SuppressionSettings
    from proxy.executor.best_effort.suppression import Suppression
    from proxy.executor.context import NodeContext
    from proxy.executor.kernel_ports import (
        Cgroups,
        CpuGroups,
        GroupLocator,
        GroupQuotas,
        UsageSource,
        WriteEvents,
    )
    from proxy.executor.partitions.ports import Partitions as KernelPartitions
    from proxy.executor.ports import (
        DeviceLocator,
        DisplacedTasks,
        Ledger,
        MachineEvents,
        NodeObject,
    )
    from proxy.executor.systemd.ports import Fences, Units
    from proxy.telemetry.port import Telemetry


def executor_of(
    config: Config,
    machine: Machine,
    cgroups: Cgroups | None,
    ledger: Ledger | None,
    entries: Collection[str],
    *,
    reread: bool,
    telemetry: Telemetry,
) -> NodeExecutor:
    """Make the executor of a node.

    Args:
        config: The configuration.
        machine: The hardware.
        cgroups: The cpuset tree; found below ``cgroupRoot`` if None.
        ledger: Keeps the placements; None to keep none.
        entries: Keys of the ledger's entries; they may be known even if the ledger cannot be written.
        reread: Whether the machine is read again periodically; a machine from a description never changes.
        telemetry: Logs, counts and reports problems.
    """
    groups, problem = _cpu_groups(config, cgroups)
    node = node_rules(config, machine, quotas=groups is not None)
    if not node.admission.owners.selector.all and (files := _cluster_files(config)) is not None:
        # Owners that are adopted must not lose their claims.
        node = node.with_namespace_labels(files.namespaces.read())
    tree = cgroups or open_cgroups(config.cgroup_root)
    runtime = GrpcRuntime(str(config.runtime))

    def ports(context: NodeContext) -> Ports:
        runtime.report_unread = context.report_unreadable
        runtime.timeout = lambda: context.options.call_timeout
        if problem and config.koordinator.keep_quota is not KeepQuota.ALWAYS:
            context.telemetry.problem(
                "cannot remove the CFS quotas of containers with exclusive CPUs", err=problem
            )
        return _ports(config, context, _root_of(config, cgroups), groups, entries, reread=reread)

    return NodeExecutor(
        node,
        tree,
        runtime,
        ledger,
        options_of(config),
        telemetry,
        time.monotonic,
        time.time,
        ports,
    )


def _ports(
    config: Config,
    context: NodeContext,
    root: Path | None,
    groups: CpuGroups | None,
    entries: Collection[str],
    *,
    reread: bool,
) -> Ports:
    """Make the ports that a node may have in addition to cpusets, a runtime and a ledger."""
    cgroups = context.cpuset_writer.cgroups
    memory = open_memory(root) if root is not None else None
    files = _cluster_files(config)
    partitions, kind = _partitions(config, cgroups, entries)
    units, fences = _systemd(cgroups)
    return Ports(
        hardware=lambda known: _changed_machine(config, known) if reread else None,
        kubelet=kubelet_of(config, context, files),
        devices=_device_locator(config, context),
        kubelet_cpu_manager=kubelet_cpu_manager_of(config, context),
        node_object=_node_object(config, files),
        namespaces=None if files is None else files.namespaces,
        cluster=files,
        topology_options=config.topology_manager_policy_options,
        cpu_groups=groups,
        memory=memory,
        machine_events=_machine_events(context) if reread else None,
        displaced=_displaced_tasks(config, cgroups) if reread else None,
        group_locator=_group_locator(config, cgroups, groups, memory),
        units=units,
        fences=fences,
        runtime_events=_runtime_events(config, context),
        write_events=_write_events(context),
        partitions=partitions,
        partition_kind=kind,
        device_plugins=device_plugin_registry_of(config, context),
        kubelet_devices=kubelet_allocations_of(config, context),
    )


def _runtime_events(config: Config, context: NodeContext) -> ContainerdEvents:
    events = ContainerdEvents(str(config.runtime))
    events.timeout = lambda: context.options.call_timeout
    return events


def _write_events(context: NodeContext) -> WriteEvents | None:
    """Watch the writes to cpusets, if the kernel reports them."""
    root = getattr(context.cpuset_writer.cgroups, "root", None)
    if not isinstance(root, Path):
        return None
    try:
        return InotifyWrites(root)
    except CgroupError as error:
        seconds = context.options.reconcile_period / 2
        context.telemetry.problem(
            "cannot watch the writes to cpusets: they are compared periodically until a restart",
            seconds=seconds,
            err=error,
        )
        return None


def _root_of(config: Config, cgroups: Cgroups | None) -> Path | None:
    """Return the directory in which controllers are searched; None if a tree has no directory."""
    root = config.cgroup_root if cgroups is None else getattr(cgroups, "root", None)
    return root if isinstance(root, Path) else None


def _partitions(
    config: Config, cgroups: Cgroups, entries: Collection[str]
) -> tuple[KernelPartitions | None, str]:
    """Return the port to partitions and their kind; also if an earlier run has left some to be removed."""
    requested = "" if config.apply.partitions is OwnerPartitions.NONE else config.apply.partitions.value
    if not requested and not any(key.startswith(PARTITION_RECORD) for key in entries):
        return None, ""
    from proxy.backends.cgroup.partitions import open_partitions

    return open_partitions(cgroups), requested


def _group_locator(
    config: Config, cgroups: Cgroups, quotas: CpuGroups | None, memory: KernelMemory | None
) -> GroupLocator | None:
    """Make the locator of a container's group, which uses the runtime's answer."""
    if not isinstance(cgroups, KernelCgroups):
        return None
    others = [tree for tree in (quotas, memory) if isinstance(tree, KernelCpuGroups | KernelMemory)]
    return KernelGroupLocator(cgroups, others, config.procfs_root)


def _systemd(cgroups: Cgroups) -> tuple[Units | None, Fences | None]:
    """Return the ports to systemd, whose scopes hold containers on cgroup v2, and to its slices."""
    if isinstance(cgroups, KernelCgroups) and cgroups.version == 2:
        return SystemdUnits(), KernelFences(cgroups.root)
    return None, None


def _cpu_groups(config: Config, cgroups: Cgroups | None) -> tuple[CpuGroups | None, str]:
    """Find the cpu controller's tree next to the cpuset controller's; or None, and why there is none."""
    root = _root_of(config, cgroups)
    if root is None:
        return None, "the cpu controller's tree is not known"
    try:
        return open_cpu_groups(root), ""
    except CgroupError as error:
        return None, str(error)


def suppression_of(
    config: Config, executor: NodeExecutor, record: Mapping[str, object] | None
) -> Suppression | None:
    """Make BE suppression, which limits BE pods to what other pods leave; None if there is nothing to do.

    Args:
        config: The configuration.
        executor: The executor of the BE containers.
        record: The limits that an earlier run has set and not removed, by the ledger.
    """
    mode = config.be_suppress.mode
    if mode is SuppressMode.OFF and not record:
        return None
    from proxy.executor.best_effort.suppression import Suppression

    usage: UsageSource | None = None
    groups: GroupQuotas | None = None
    try:
        usage = usage_of(config)
        groups = open_cpu_groups(config.cgroup_root) if mode is SuppressMode.QUOTA or record else None
    except CgroupError as error:
        executor.telemetry.problem("cannot suppress BE pods", err=error)
    return Suppression(executor, executor.writes, suppression_settings(config), usage, groups, record)


def suppression_settings(config: Config) -> SuppressionSettings:
    """Return the settings of BE suppression."""
    from proxy.engine.suppression import SuppressionSettings

    settings = config.be_suppress
    return SuppressionSettings(
        settings.mode, settings.threshold, settings.min_percent or None, settings.period
    )


def usage_of(config: Config) -> UsageSource | None:
    """Open the counters of the CPU time of pods; None if BE pods are not suppressed.

    Raises:
        CgroupError: There are no counters.
    """
    if config.be_suppress.mode is SuppressMode.OFF:
        return None
    from proxy.backends.cgroup.cpu_usage import open_usage

    return open_usage(config.cgroup_root, config.procfs_root)


def _cluster_files(config: Config) -> AgentFiles | None:
    directory = config.cluster_facts.directory
    if directory is None:
        return None
    from proxy.backends.cluster.files import AgentFiles

    return AgentFiles(directory)


def _node_object(config: Config, files: AgentFiles | None) -> NodeObject | None:
    if config.koordinator.node_object is None:
        return None if files is None else files.node
    from proxy.backends.kubelet.node_file import NodeFile

    return NodeFile(config.koordinator.node_object)


def options_of(config: Config) -> ExecutorOptions:
    """Return the options of the executor."""
    return ExecutorOptions(
        mode=config.mode,
        refuse_on_error=config.on_error is OnError.REFUSE,
        call_timeout=config.call_timeout,
        settle_per_second=config.settle.per_second if config.settle.enabled else 0,
        reconcile_period=config.reconcile_period,
        history=config.explain_history,
        quirks=QUIRKS,
        selection=config.enforce.selection,
        pods_per_step=config.enforce.pods_per_step,
        step_period=config.enforce.step_period,
    )


def _device_locator(config: Config, context: NodeContext) -> DeviceLocator:
    """Return the source of devices' NUMA nodes: sysfs."""
    return SysfsDevices(
        config.sysfs_root, procfs_root=config.procfs_root, report_problem=context.telemetry.problem
    )


def _machine_events(context: NodeContext) -> MachineEvents | None:
    """Watch for CPUs and memory that are added or removed, if the kernel reports that."""
    events, problem = subscribe_to_uevents()
    if problem:
        context.telemetry.problem(NO_UEVENTS, err=problem)
    return events


def _displaced_tasks(config: Config, cgroups: Cgroups) -> DisplacedTasks | None:
    """Make the part that moves displaced tasks back into their groups (cgroup v1)."""
    if cgroups.version != 1 or not isinstance(cgroups, KernelCgroups):
        return None
    return KernelDisplacedTasks(cgroups.root, config.procfs_root)


def _changed_machine(config: Config, known: Machine) -> Machine | None:
    """Read the machine again if its CPUs or its memory changed."""
    try:
        if is_machine_unchanged(known, config.sysfs_root):
            return None
        return read_machine(config.sysfs_root, config.procfs_root)
    except (OSError, ValueError, TopologyError):
        return None  # it is read again at the next reconcile
