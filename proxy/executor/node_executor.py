"""The executor of a node: makes all parts, connects them, and closes them. It does nothing else.

The state of the node is in ``store``. Every part takes the context (``NodeContext``) and the parts that it
uses. The order below is the order of their dependencies. A part registers with earlier parts only in its own
constructor: as an observer of the store (``store.subscribe``) or of the kernel's writes (``kernel_writes``),
as the performer of an effect (``store.perform_by``), or as a function that an earlier part calls
(``write_with``, ``do_first``). Observers are notified in the order in which they subscribe here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct, field

from proxy.engine.node import Node
from proxy.executor.call_tracker import CallTracker
from proxy.executor.confinement import Confinement
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.context import ExecutorOptions, NodeContext
from proxy.executor.cpuset_mems import CpusetMems
from proxy.executor.create_decisions import CreateDecisions
from proxy.executor.device_grants import DeviceGrants
from proxy.executor.device_ports import DevicePlugins, KubeletAllocations
from proxy.executor.drift.detection import Drift
from proxy.executor.fact_lookup import FactLookup, KubeletCpus
from proxy.executor.hook_overrides import HookOverrides
from proxy.executor.kernel_ports import Cgroups, CpuGroups, GroupLocator, MemoryTree
from proxy.executor.kernel_view import KernelView
from proxy.executor.kernel_writes import CgroupLocator, KernelWrites
from proxy.executor.ledger_recovery import LedgerRecovery
from proxy.executor.machine.hotplug import Hotplug
from proxy.executor.node_policy_sync import NodePolicySync
from proxy.executor.owner_moves import OwnerMoves
from proxy.executor.ports import (
    ClusterFiles,
    DeviceLocator,
    DisplacedTasks,
    Kubelet,
    KubeletCpuManager,
    Ledger,
    MachineEvents,
    NamespaceLabels,
    NodeObject,
)
from proxy.executor.problem_expiry import ProblemExpiry
from proxy.executor.quotas import OwnerQuotas
from proxy.executor.reconciler import Reconciler
from proxy.executor.reservations import Reservations
from proxy.executor.runtime_events import JOIN_S, RuntimeEvents
from proxy.executor.runtime_ports import Runtime, RuntimeEventStream
from proxy.executor.runtime_sync import RuntimeSync
from proxy.executor.sandboxes import Sandboxes
from proxy.executor.shutdown import CLOSE_S, ShutdownTime
from proxy.executor.systemd.ports import Fences, Units
from proxy.executor.systemd.unit_properties import UnitProperties
from proxy.model.machine import Machine
from proxy.model.options import TopologyOptions
from proxy.telemetry.port import Telemetry

if TYPE_CHECKING:
    from proxy.executor.kernel_ports import WriteEvents
    from proxy.executor.partitions.ports import Partitions
    from proxy.executor.partitions.sync import PartitionSync


class Ports(Struct, frozen=True):
    """The optional ports of a node, besides cpusets, a runtime and a ledger; None if there is none.

    Attributes:
        hardware: Returns the machine if it differs from the known one, otherwise None; called in a thread.
        kubelet: What kubelet knows of pods and devices.
        devices: Where devices are, from sysfs.
        kubelet_cpu_manager: The settings and assignments of kubelet's CPU manager.
        node_object: The Node object.
        namespaces: The labels of namespaces.
        cluster: What the cluster agent has read.
        topology_options: The options of the topology manager in the configuration.
        cpu_groups: The cpu controller's tree.
        memory: Where memory is.
        machine_events: What the kernel reports about CPUs and memory.
        displaced: Brings back tasks that the kernel has moved away.
        group_locator: Finds a cgroup by the runtime's answer.
        units: The units of systemd.
        fences: Narrows cgroups above containers.
        runtime_events: What the runtime reports by itself.
        write_events: What the kernel reports about writes to cpusets.
        partitions: The kernel's partitions.
        partition_kind: ``root`` or ``isolated``; empty to end the partitions of an earlier run.
        device_plugins: The device plugins whose devices topoproxy assigns.
        kubelet_devices: The devices that kubelet's device manager has assigned.
    """

    hardware: Callable[[Machine], Machine | None] = lambda known: None
    kubelet: Kubelet | None = None
    devices: DeviceLocator | None = None
    kubelet_cpu_manager: KubeletCpuManager | None = None
    node_object: NodeObject | None = None
    namespaces: NamespaceLabels | None = None
    cluster: ClusterFiles | None = None
    topology_options: TopologyOptions = field(default_factory=TopologyOptions)
    cpu_groups: CpuGroups | None = None
    memory: MemoryTree | None = None
    machine_events: MachineEvents | None = None
    displaced: DisplacedTasks | None = None
    group_locator: GroupLocator | None = None
    units: Units | None = None
    fences: Fences | None = None
    runtime_events: RuntimeEventStream | None = None
    write_events: WriteEvents | None = None
    partitions: Partitions | None = None
    partition_kind: str = ""
    device_plugins: DevicePlugins | None = None
    kubelet_devices: KubeletAllocations | None = None


class NodeExecutor(NodeContext):
    """The parts of a node's executor."""

    def __init__(
        self,
        node: Node,
        cgroups: Cgroups,
        runtime: Runtime,
        ledger: Ledger | None,
        options: ExecutorOptions,
        telemetry: Telemetry,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] | None = None,
        ports: Callable[[NodeContext], Ports] = lambda context: Ports(),
    ) -> None:
        """Make all parts, on the running event loop; nothing runs yet.

        Args:
            node: The machine and the rules at the start.
            cgroups: The cgroups of the kernel.
            runtime: The container runtime.
            ledger: Where placements are kept; None to keep none.
            options: The options of the executor.
            telemetry: Where to log, count and report problems.
            clock: A monotonic clock, in seconds.
            wall_clock: Seconds since the epoch, for display; ``clock`` if None.
            ports: Makes the optional ports; called once, with the context that they may report to.
        """
        super().__init__(node, cgroups, runtime, ledger, options, telemetry, clock, wall_clock)
        others = ports(self)
        self.cluster = others.cluster
        self.device_plugins = others.device_plugins
        subscribe = self.store.subscribe
        self.writes = writes = KernelWrites(self)
        subscribe(writes)
        self.overrides = HookOverrides(self, writes)
        subscribe(self.overrides)
        subscribe(self.rejections)
        subscribe(ProblemExpiry(self))
        self.lifecycle = lifecycle = ContainerLifecycle(self)
        self.fact_lookup = FactLookup(self, lifecycle, others.kubelet, others.devices)
        self.health.watch(self.fact_lookup.worker)
        self.creates = creates = CreateDecisions(self)
        self.sandboxes = Sandboxes(self, lifecycle, writes)
        self.device_grants = self._device_grants(others)
        self.kubelet_cpus = kubelet_cpus = KubeletCpus(self, others.kubelet_cpu_manager)
        self.node_policy = NodePolicySync(
            self, node, others.node_object, others.topology_options, others.namespaces
        )
        self.quotas = quotas = OwnerQuotas(self, others.cpu_groups)
        subscribe(quotas)
        self.kernel_view = KernelView(self, quotas)
        self.mems = mems = CpusetMems(self, others.memory)
        self.partitions = self._partitions(others)
        if self.partitions is not None:
            subscribe(self.partitions)
        self.drift = drift = Drift(self, writes, kubelet_cpus, others.write_events)
        self.unit_properties = unit_properties = UnitProperties(
            self, writes, drift.compare_soon, others.units, others.fences
        )
        self.cgroup_locator = CgroupLocator(self, writes, others.group_locator)
        self.confinement = Confinement(self, writes, drift, unit_properties.fencing)
        self.reservations = reservations = Reservations(
            self, writes, self.confinement, drift, lifecycle, creates
        )
        self.owner_moves = OwnerMoves(self, reservations)
        self.hotplug = Hotplug(
            self, writes, mems, reservations, others.hardware, others.machine_events, others.displaced
        )
        self.runtime_events = RuntimeEvents(self, lifecycle, others.runtime_events)
        subscribe(self.runtime_events)
        self.call_tracker = call_tracker = CallTracker(
            self,
            writes,
            quotas,
            mems,
            reservations,
            self.confinement,
            unit_properties.fencing,
        )
        self.runtime_sync = RuntimeSync(self, call_tracker, quotas, mems, unit_properties)
        subscribe(self.runtime_sync)
        self.recovery = LedgerRecovery(
            self,
            call_tracker,
            quotas,
            self.owner_moves,
            self.cgroup_locator,
            self.partitions,
            has_devices=self.device_grants is not None,
        )
        self.reconciler = Reconciler(self, parts=self)

    def _device_grants(self, others: Ports) -> DeviceGrants | None:
        if others.device_plugins is None:
            return None
        return DeviceGrants(
            self,
            others.device_plugins,
            self.creates,
            self.sandboxes,
            self.fact_lookup.worker,
            others.kubelet_devices,
        )

    def _partitions(self, others: Ports) -> PartitionSync | None:
        if others.partitions is None:
            return None
        from proxy.executor.partitions.sync import PartitionSync

        return PartitionSync(self, others.partitions, others.partition_kind)

    async def close(self, limit: float = CLOSE_S, *, handing_over: bool = False) -> None:
        """Write what waits and end the workers, within ``limit`` seconds; a stuck worker is not waited for.

        The parts that take calls (``call_tracker``, ``reconciler``, ``runtime_sync``) have their own workers.

        Args:
            limit: The seconds.
            handing_over: Whether another process continues; then fences stay around the calls that are still
                in flight.
        """
        ending = ShutdownTime(limit, self.telemetry.warning)
        await ending.step("stop listening to the runtime", self.runtime_events.close(), JOIN_S)
        self.hotplug.close()
        if self.device_grants is not None:
            self.device_grants.close()
        await ending.step("end tasks", self.end_tasks())
        await ending.step("write the ledger", self.ledger_writer.close(), limit, min_seconds=1.0)
        await ending.step("take fences away", self.unit_properties.close(fences_stay=handing_over))
        self.cpuset_writer.end()
        workers = (
            self.recorder,
            self.kernel,
            self.fact_lookup,
            self.node_policy,
            self.kubelet_cpus,
            self.mems,
            self.kernel_view,
        )
        closing = (asyncio.to_thread(part.close) for part in workers)
        await ending.step("end the workers", asyncio.gather(*closing), limit)
        await ending.step("stop watching writes", self.drift.close())
        if self.partitions is not None:
            self.partitions.close()
