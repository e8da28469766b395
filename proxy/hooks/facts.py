"""What a hook receives: the engine's facts as plain values.

QoS classes are Koordinator's: LSE (latency-sensitive exclusive), LSR (latency-sensitive reserved), LS
(latency-sensitive), BE (best effort) and SYSTEM. Maps and lists of a request may be read from the message
lazily, so pass them on or copy them, and rely only on the methods of ``Mapping`` and ``Sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.hooks.slot_init import slot_init
from proxy.model.idset import CpuSet, Mask


@slot_init
@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod's sandbox.

    Attributes:
        sandbox_id: The runtime's id; empty until RunPodSandbox has been answered.
        uid, namespace, name, attempt: As kubelet sends them.
        qos: Koordinator's QoS class (``LSE``, ``LSR``, ``LS``, ``BE``, ``SYSTEM``), empty for none.
        kube_qos: ``Guaranteed``, ``Burstable`` or ``BestEffort``.
        runtime_handler: Which runtime class it requests; empty for the default one.
        cgroup_parent: The pod's cgroup, as the cgroup driver writes it.
        labels, annotations: Of the pod.
    """

    sandbox_id: str = ""
    uid: str = ""
    namespace: str = ""
    name: str = ""
    attempt: int = 0
    qos: str = ""
    kube_qos: str = "Guaranteed"
    runtime_handler: str = ""
    cgroup_parent: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory or file of the host in a container.

    A hook that replaces a mount of the request, and leaves its ``host_path``, changes only these fields:
    SELinux relabelling and id mappings are kept.

    Attributes:
        container_path, host_path: Absolute paths.
        readonly: The container cannot write to it.
        propagation: ``private``, ``host_to_container`` or ``bidirectional``.
    """

    container_path: str
    host_path: str
    readonly: bool = False
    propagation: str = "private"


@dataclass(frozen=True, slots=True)
class Device:
    """A device file in a container.

    Attributes:
        container_path, host_path: Absolute paths.
        permissions: Which of ``r``, ``w`` and ``m`` (mknod) the container may do.
    """

    container_path: str
    host_path: str
    permissions: str = "rw"


@slot_init
@dataclass(frozen=True, slots=True)
class Resources:
    """The CPUs and memory of a request, as in the CRI's LinuxContainerResources.

    Attributes:
        cpu_period, cpu_quota: Microseconds; quota -1 for no limit, 0 for not set.
        cpu_shares: Relative weight; 0 for not set.
        memory_limit, memory_swap_limit: Bytes; 0 for not set.
        oom_score_adj: -1000 to 1000.
        cpuset_cpus, cpuset_mems: What the client requested, verbatim; see ``Decision`` for what it gets.
        hugepage_limits: Page size (``2MB``) and bytes.
        unified: Files of cgroup v2 and the values to write into them.
    """

    cpu_period: int = 0
    cpu_quota: int = 0
    cpu_shares: int = 0
    memory_limit: int = 0
    memory_swap_limit: int = 0
    oom_score_adj: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    hugepage_limits: Mapping[str, int] = field(default_factory=dict)
    unified: Mapping[str, str] = field(default_factory=dict)


@slot_init
@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """A container, as its request describes it.

    Attributes:
        id: The runtime's id; empty until CreateContainer has been answered.
        name, attempt: As kubelet sends them.
        phase: ``creating``, ``created``, ``starting``, ``running`` or ``exited``.
        image: As the request names it; empty if it is not known any more.
        labels, annotations: Of the container.
        envs: Its environment, in order. Bytes that are not UTF-8 are lone surrogates (``surrogateescape``).
        command, args: What it runs; empty for the image's own.
        mounts, devices, cdi_devices: What it has been given.
        resources: The client's request. For a container that exists, all requests so far, merged.

    After a restart of the daemon, the envs, command, args, mounts and devices of containers that existed
    before it are empty, because the runtime's lists do not contain them.
    """

    id: str = ""
    name: str = ""
    attempt: int = 0
    phase: str = "creating"
    image: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    args: Sequence[str] = ()
    mounts: Sequence[Mount] = ()
    devices: Sequence[Device] = ()
    cdi_devices: Sequence[str] = ()
    resources: Resources = field(default_factory=Resources)


@slot_init
@dataclass(frozen=True, slots=True)
class Decision:
    """What the engine has decided for a container, and why.

    Attributes:
        pool: ``own``, ``shared``, ``be`` or ``system``: where its CPUs are taken from.
        cpus: The CPUs that it runs on now.
        own: Its exclusive CPUs; empty unless ``pool`` is ``own``.
        mems: Its NUMA nodes for memory; None if the engine does not set them.
        unlimited: Its CFS quota is off.
        reasons: Why, in sentences.
        allowed: CPUs that a hook may choose from: the container's CPUs if no hook narrows them. If the
            configuration lets hooks reassign exclusive CPUs, all online CPUs except reserved ones.
        allowed_mems: NUMA nodes that a hook may choose from.
    """

    pool: str = "shared"
    cpus: CpuSet = field(default_factory=CpuSet)
    own: CpuSet = field(default_factory=CpuSet)
    mems: Mask | None = None
    unlimited: bool = False
    reasons: Sequence[str] = ()
    allowed: CpuSet = field(default_factory=CpuSet)
    allowed_mems: Mask = field(default_factory=Mask)


@dataclass(frozen=True, slots=True)
class Pools:
    """The node's CPUs by what may use them.

    Attributes:
        shared: The shared pool: what LS and Burstable pods run on.
        be: The BE pool: what BE and BestEffort pods run on.
        owned: Exclusive CPUs.
        owners: Runtime's container id to the exclusive CPUs that it runs on: ``Decision.own``.
    """

    shared: CpuSet = field(default_factory=CpuSet)
    be: CpuSet = field(default_factory=CpuSet)
    owned: CpuSet = field(default_factory=CpuSet)
    owners: Mapping[str, CpuSet] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """One container that exists.

    Attributes:
        pod: Its pod.
        container: The container.
        decision: Its placement.
    """

    pod: PodFacts
    container: ContainerFacts
    decision: Decision
