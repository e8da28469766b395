"""The events of a node, as values: the input of ``proxy.engine.handle``.

Times are in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.call_events import (
    CallCompleted,
    CallConfined,
    CallOrphaned,
    CallSent,
    OrphanEnded,
    OrphanListed,
    ResendWanted,
    RuntimeSyncDue,
    RuntimeSyncStarted,
    SavedCpusLearned,
    StartEnded,
    StartRefused,
    StartRequested,
    UpdateAccepted,
    UpdateEnded,
    UpdateRequested,
)
from proxy.engine.container_events import (
    AllocateFailed,
    ContainerCreated,
    ContainerFound,
    ContainerIsBack,
    ContainersRemoved,
    ContainersUpdated,
    ContainerTouched,
    CpusAssigned,
    CpusNotFreed,
    CreateDelegated,
    CreateFailed,
    CreateLost,
    CreateNotReserved,
    CreateRequested,
    CreateResumed,
    CreateWithoutDevices,
    DevicesAllocated,
    PhaseChanged,
)
from proxy.engine.enforcement_state import Enforcement
from proxy.engine.held_devices import PodDevices
from proxy.engine.node import Node
from proxy.engine.owners import ReservationCpus
from proxy.engine.partition import PartitionEvent, PartitionsRead
from proxy.engine.pod_events import (
    PodChangedByHook,
    PodLearned,
    SandboxFailed,
    SandboxRemoved,
    SandboxRequested,
    SandboxRunning,
    SandboxStopped,
)
from proxy.engine.quotas import CpuControllerChecked, QuotaEvent, QuotasRead
from proxy.engine.suppression import BeQuotasRead, SuppressionEvent
from proxy.engine.systemd_masks import UnitCpusRead
from proxy.engine.write_conflicts import DriftEvent
from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import CpuManager, Held, NodeMeta
from proxy.model.machine import Machine
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyOptions
from proxy.model.pod_selection import PodSelection
from proxy.model.workload import Container, Pod

# -- reservations -------------------------------------------------------------------------------------------


class ReservationCpusChanged(Struct, frozen=True):
    """The CPUs of a reservation that are part of no placement have changed.

    Attributes:
        reservation: Its name.
        cpus: Those CPUs; None if there are none.
        placed: Containers whose placements change with it.
    """

    reservation: str
    cpus: ReservationCpus | None
    placed: tuple[Container, ...] = ()


# -- the node -----------------------------------------------------------------------------------------------


class RuntimeListed(Struct, frozen=True):
    """The runtime has listed all of its sandboxes and containers.

    Attributes:
        pods: Ids of all sandboxes.
        containers: Ids of all containers.
        since: The number of the newest change when the lists were requested.
    """

    pods: Collection[str]
    containers: Collection[str]
    since: int


class NodePolicyRead(Struct, frozen=True):
    """The Node object, the configuration and namespace labels were read; answered by ``NodePolicyApplied``.

    Attributes:
        configured: The node according to topoproxy's configuration, on the machine as it was at the start.
        options: The options of the topology manager in topoproxy's configuration.
        meta: The newest Node object; None if there is none, or it could never be read.
        labels: The labels of each namespace; None if they could never be read.
    """

    configured: Node
    options: TopologyOptions
    meta: NodeMeta | None
    labels: Mapping[str, Mapping[str, str]] | None


class TakeoverChanged(Struct, frozen=True):
    """A takeover from kubelet has reached another stage.

    Attributes:
        static: Whether whole-CPU Guaranteed containers get exclusive CPUs.
        reserved: CPUs that are reserved in addition, because kubelet reserved them.
    """

    static: bool
    reserved: CpuSet


class HardwareChanged(Struct, frozen=True):
    """CPUs or memory came or went.

    Attributes:
        machine: The machine as it is now.
    """

    machine: Machine


class KubeletCpusRead(Struct, frozen=True):
    """The settings and allocations of kubelet's CPU manager were read.

    Attributes:
        manager: Its settings and allocations.
        held: The allocations that count as owned.
    """

    manager: CpuManager
    held: Held


class DevicesChanged(Struct, frozen=True):
    """The devices of a resource that topoproxy assigns have changed.

    Attributes:
        resource: The resource.
        devices: All of its devices by id, healthy or not; None if the resource was withdrawn.
    """

    resource: str
    devices: Mapping[str, RegisteredDevice] | None


class DevicesImported(Struct, frozen=True):
    """Another device manager had assigned devices of a resource before; containers keep them.

    Attributes:
        resource: The resource.
        pods: The devices that the containers of pods hold, by key of the pod.
        every: Whether unknown pods count too, because the runtime has not listed its pods yet.
    """

    resource: str
    pods: Mapping[str, PodDevices]
    every: bool


class ModeChanged(Struct, frozen=True):
    """The mode of the node has changed. Kernel writes that are queued already follow the new mode, too.

    Attributes:
        mode: The mode from now on.
    """

    mode: NodeMode


class EnforcementChanged(Struct, frozen=True):
    """Other pods are selected for enforcement.

    Attributes:
        selection: The pods from now on.
    """

    selection: PodSelection


class EnforcementRead(Struct, frozen=True):
    """The ledger shows to which pods the last daemon applied the plan; comes after ``LedgerRead``.

    Attributes:
        mode: The mode of that daemon.
        enforcement: To which pods it applied the plan.
    """

    mode: NodeMode
    enforcement: Enforcement


class EnforcementPaused(Struct, frozen=True):
    """An operator has paused or resumed the change of running pods.

    Attributes:
        paused: Whether it is paused.
    """

    paused: bool


class EnforcementStepDue(Struct, frozen=True):
    """The next running pods may be changed; answered by ``EnforcementStep`` if there are any.

    Attributes:
        count: The most pods of one step.
        skip: Keys of pods that are skipped.
    """

    count: int
    skip: frozenset[str] = frozenset()


class EnforcementStepDone(Struct, frozen=True):
    """Pods of a step have reached their target.

    Attributes:
        keys: Their keys.
    """

    keys: frozenset[str]


class EnforcementStepFailed(Struct, frozen=True):
    """The plan could not be applied to pods of a step.

    Attributes:
        keys: Their keys.
    """

    keys: frozenset[str]


class LedgerRead(Struct, frozen=True):
    """The ledger of an earlier run has been read.

    Attributes:
        pods: Its sandboxes, in the order in which they came.
        containers: Its containers.
        reservation_cpus: CPUs of that run's reservations, by reservation.
        lost_creates: Tokens of the containers whose creates were in flight.
        at: When it was read.
        devices: The devices that pods held, by key of the pod.
        resources: The resources of device plugins that were registered.
        arriving_sandboxes: Tokens of the sandboxes whose RunPodSandbox another process is relaying.
        be_groups: Whether that run narrowed the cgroups of class BestEffort.
    """

    pods: tuple[Pod, ...]
    containers: tuple[Container, ...]
    reservation_cpus: Mapping[str, ReservationCpus]
    lost_creates: tuple[str, ...]
    at: float
    devices: Mapping[str, PodDevices] = {}
    resources: tuple[str, ...] = ()
    arriving_sandboxes: frozenset[str] = frozenset()
    be_groups: bool = False


class MemoryNodesCompared(Struct, frozen=True):
    """The memory nodes of all running containers have been compared with the kernel.

    Attributes:
        as_planned: Ids of containers that have the planned nodes.
        wider_than_planned: All nodes of containers that have more than were decided, because their memory is
            there.
    """

    as_planned: frozenset[str]
    wider_than_planned: Mapping[str, Mask]


class LossesDue(Struct, frozen=True):
    """It is time to report hardware losses of containers; answered by ``LossesChanged``."""


NodeEvent = (
    LedgerRead
    | ContainerCreated
    | CreateFailed
    | CreateLost
    | PhaseChanged
    | ContainersRemoved
    | ContainerTouched
    | ContainerIsBack
    | ContainersUpdated
    | CpusAssigned
    | CreateRequested
    | CreateResumed
    | CreateDelegated
    | CreateNotReserved
    | CreateWithoutDevices
    | DevicesAllocated
    | AllocateFailed
    | StartRequested
    | UpdateRequested
    | CpusNotFreed
    | ContainerFound
    | SandboxRequested
    | PodChangedByHook
    | PodLearned
    | SandboxRunning
    | SandboxFailed
    | SandboxStopped
    | SandboxRemoved
    | ReservationCpusChanged
    | CallSent
    | CallCompleted
    | CallOrphaned
    | StartRefused
    | StartEnded
    | UpdateAccepted
    | UpdateEnded
    | ResendWanted
    | CallConfined
    | OrphanListed
    | OrphanEnded
    | RuntimeListed
    | NodePolicyRead
    | TakeoverChanged
    | HardwareChanged
    | KubeletCpusRead
    | DevicesChanged
    | DevicesImported
    | MemoryNodesCompared
    | LossesDue
    | SavedCpusLearned
    | RuntimeSyncDue
    | RuntimeSyncStarted
    | ModeChanged
    | EnforcementChanged
    | EnforcementRead
    | EnforcementPaused
    | EnforcementStepDue
    | EnforcementStepDone
    | EnforcementStepFailed
    | UnitCpusRead
    | DriftEvent
    | CpuControllerChecked
    | QuotasRead
    | QuotaEvent
    | PartitionsRead
    | PartitionEvent
    | BeQuotasRead
    | SuppressionEvent
)
