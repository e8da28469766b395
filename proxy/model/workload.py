"""Pods, containers, and their placements."""

from __future__ import annotations

import enum

from msgspec import Struct, field

from proxy.model.defects import InputDefect
from proxy.model.grants import Blocks, Share
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NumaExclusive, NumaPolicy
from proxy.model.label_selector import Labels
from proxy.model.options import TopologyPolicy
from proxy.model.quoting import printable
from proxy.model.requests import PodRequests

LONGEST_NAME = 63
"""Characters of a namespace's or container's name (a DNS label)."""
LONGEST_REF = LONGEST_NAME + 1 + 253
"""Characters of a namespace, a slash and a pod's name (a DNS subdomain)."""
POD_RECORD, CONTAINER_RECORD, CREATE_RECORD = "p/", "c/", "i/"
"""Prefixes of the ledger's keys: of a sandbox, a container, and a container whose create is in flight."""


class KubeQos(enum.StrEnum):
    """Kubernetes' own QoS class, read from the cgroup parent (the CRI does not carry it)."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class QosClass(enum.StrEnum):
    """Koordinator's QoS class, from the pod label ``koordinator.sh/qosClass``.

    LSE is latency-sensitive exclusive, LSR latency-sensitive reserved, LS latency-sensitive, BE best effort;
    SYSTEM is for the node's own services.
    """

    LSE = "LSE"
    LSR = "LSR"
    LS = "LS"
    BE = "BE"
    SYSTEM = "SYSTEM"
    NONE = ""


class Phase(enum.StrEnum):
    """The phase of a container's life, as known from the calls that passed.

    CREATING and STARTING are calls in flight at the runtime: a container in these phases may get a cgroup
    at any moment, with the cpuset that the call or the runtime's spec carries.
    """

    CREATING = "creating"
    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


LIVE = (Phase.STARTING, Phase.RUNNING)
"""Phases of a container that may have running processes, and so has a cgroup."""


class ContainerPart(Struct, frozen=True):
    """CPUs, memory and shares that were set aside for one container of a pod."""

    name: str
    cpus: CpuSet
    blocks: Blocks = ()
    shares: tuple[Share, ...] = ()


class SetAside(Struct, frozen=True):
    """The decision for a pod as a whole (scope ``pod``), before its containers are created.

    Attributes:
        affinity: NUMA nodes that all its containers follow; None for any.
        preferred: Whether the hint was preferred.
        cpus: CPUs that no other pod gets while the sandbox exists.
        blocks: Memory of the pod as a whole; empty if it is known by container.
        parts: The part of each container; empty if the containers are not known yet.
        shares: Other resources of the pod as a whole; empty if they are known by container.
    """

    affinity: Mask | None
    preferred: bool
    cpus: CpuSet
    blocks: Blocks = ()
    parts: tuple[ContainerPart, ...] = ()
    shares: tuple[Share, ...] = ()

    def part(self, name: str) -> ContainerPart | None:
        """Return the part of a container; None if the pod has no parts, or none of that name."""
        return next((part for part in self.parts if part.name == name), None)


class Pod(Struct, frozen=True):
    """Facts about one pod sandbox.

    Attributes:
        sandbox_id: The runtime's id of the sandbox; empty while it is being made.
        cpuset: CPUs from the resource-status annotation; None if there is none or it is malformed.
        defects: The defects of its labels and annotations.
        nodes: NUMA nodes whose part of a pool the annotation binds the pod to; None for no such binding.
        bind_required, bind_preferred: How its CPUs are to be bound (resource-spec annotation).
        exclusive: The pods that it would rather not share cores or NUMA nodes with (the same annotation).
        requests: The requests of its containers, from kubelet; None if only the CRI request is known.
        source: Where ``requests`` came from, as text.
        cpuset_chosen_locally: Whether ``cpuset`` was chosen here for the pod, and not named by a scheduler.
        reserved_for_pod: The decision for the pod as a whole; None if each container is decided by itself.
        aligned: How its resources are to be aligned as a whole (numa-topology-spec annotation).
        numa_exclusive: Whether it keeps apart from pods that span NUMA nodes (the same).
        volcano_policy, volcano_nodes: The preferences of Volcano's scheduler; applied if possible.
        cgroup_changed_by_hook: A hook has named its cgroup, and kubelet knows of another.
        total: CPUs that its containers request together, as its sandbox's configuration says; None if
            unknown. Only kept for pods whose annotation names CPUs, and with containers that may own CPUs by
            their create alone.
        labels: The labels by which ``enforce`` may select it.
    """

    sandbox_id: str
    uid: str
    namespace: str
    name: str
    attempt: int = 0
    qos: QosClass = QosClass.NONE
    kube_qos: KubeQos = KubeQos.GUARANTEED
    cgroup_parent: str = ""
    cpuset: CpuSet | None = None
    defects: tuple[InputDefect, ...] = ()
    nodes: Mask | None = None
    bind_required: BindPolicy = BindPolicy.NONE
    bind_preferred: BindPolicy = BindPolicy.NONE
    exclusive: ExclusivePolicy = ExclusivePolicy.NONE
    requests: PodRequests | None = None
    source: str = ""
    cpuset_chosen_locally: bool = False
    reserved_for_pod: SetAside | None = None
    aligned: NumaPolicy = NumaPolicy.NONE
    numa_exclusive: NumaExclusive = NumaExclusive.NONE
    volcano_policy: TopologyPolicy | None = None
    volcano_nodes: Mask | None = None
    cgroup_changed_by_hook: bool = False
    total: Request | None = None
    labels: Labels = ()

    @property
    def problem(self) -> str:
        """The defect that leaves the pod without CPUs of its own; empty if there is none."""
        return next((defect for defect in self.defects if defect.decisive), "") if self.defects else ""

    @property
    def ref(self) -> str:
        """``namespace/name``, as users write it; escaped and cut if that is not a name of Kubernetes."""
        return printable(f"{self.namespace}/{self.name}", LONGEST_REF)

    @property
    def key(self) -> str:
        """The identity of this pod: its uid, or its sandbox if the client sends no uid."""
        return self.uid or f"sandbox {self.sandbox_id}"

    def owner_key(self, name: str) -> str:
        """The identity of a container of this pod as an owner of CPUs: it stays the same when it restarts."""
        return f"{self.key}/{name}"


class LocatedDevice(Struct, frozen=True):
    """A device of a container, and its NUMA nodes.

    Attributes:
        name: As users know it: a path such as ``/dev/nvidia0``, a CDI name, or an id of a plugin.
        resource: The resource that it belongs to, such as ``nvidia.com/gpu``; empty if unknown.
        nodes: NUMA nodes that it is near to; None if it is near to none, or if that is unknown.
        source: Where the nodes came from, as text.
        fewest_numa_nodes: The smallest number of NUMA nodes that could hold all devices of this resource that
            the container has, if none were in use; 0 if that is unknown.
    """

    name: str
    resource: str = ""
    nodes: Mask | None = None
    source: str = ""
    fewest_numa_nodes: int = 0


CFS_PERIOD_US = 100_000
"""The period of CFS quotas that kubelet sets, in microseconds."""
MOST_CPU_SHARES = 262_144
"""The most CPU shares that a cgroup has (kubernetes v1.36 pkg/kubelet/cm/helpers_linux.go, MaxShares)."""


class Request(Struct, frozen=True):
    """The CPUs, memory and devices of a container in the CRI request.

    Attributes:
        cpu_shares, cpu_quota, cpu_period: As in LinuxContainerResources (quota -1 or 0: no limit).
        memory_limit: Bytes, 0 for none.
        cpuset_cpus, cpuset_mems: What the client requested, verbatim.
        huge_pages: Resource (``hugepages-2Mi``) and bytes, only what is requested.
        devices: The devices that kubelet's device manager assigned.
    """

    cpu_shares: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    memory_limit: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    huge_pages: tuple[tuple[str, int], ...] = ()
    devices: tuple[LocatedDevice, ...] = ()

    @property
    def period_us(self) -> int:
        """The period of the CFS quota in microseconds; kubelet's default if none is set."""
        return self.cpu_period or CFS_PERIOD_US

    @property
    def requested_milli(self) -> int:
        """The requested CPU time in thousandths of a CPU, rounded as its shares are."""
        return self.cpu_shares * 1000 // 1024

    @property
    def limit_milli(self) -> int:
        """The limit of CPU time in thousandths of a CPU; not positive if there is none."""
        return self.cpu_quota * 1000 // self.period_us


class Pool(enum.StrEnum):
    """Where a placement takes its CPUs from."""

    OWN = "own"
    SHARED = "shared"
    BE = "be"
    SYSTEM = "system"


class Placement(Struct, frozen=True):
    """The decision for one container: its pool or CPUs, its memory nodes, and the reasons.

    Attributes:
        pool: OWN for exclusive CPUs; otherwise the pool whose CPUs the container follows as it shrinks and
            grows.
        exclusive: The exclusive CPUs; empty unless ``pool`` is OWN.
        mems: Memory nodes.
        reasons: Sentences that say why.
        excludes_be: True when these CPUs are also taken out of the BE pool (LSE and exclusive Guaranteed; not
            LSR).
        blocks: Memory that it was granted, by node; empty if memory is not counted.
        devices: Devices that topoproxy assigned: resource and ids.
        pool_cpus_limit: CPUs to which its pool is narrowed for it; None if it is not narrowed.
        pool_numa_limit: NUMA nodes to whose CPUs, as they come and go, its pool is narrowed; None if it is
            not narrowed.
        cfs_quota_off: Whether its CFS quota must be off.
        replacement: CPUs in place of those of ``exclusive`` that are offline; it owns them for that time.
        hook_cpus: CPUs to which hooks have narrowed it; None if no hook has.
        hook_extra_cpus: The part of ``hook_cpus`` that is neither its own nor its pool's: others may own
            these CPUs, because the configuration lets hooks name them.
        hook_quota: The CFS quota that hooks set for an owner at its create, -1 for no quota; 0 if no hook has
            set one.
        shares: Other resources that providers granted it.
    """

    pool: Pool
    exclusive: CpuSet
    mems: Mask
    reasons: tuple[str, ...] = ()
    excludes_be: bool = False
    blocks: Blocks = ()
    devices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pool_cpus_limit: CpuSet | None = None
    pool_numa_limit: Mask | None = None
    cfs_quota_off: bool = False
    replacement: CpuSet = field(default_factory=CpuSet)
    hook_cpus: CpuSet | None = None
    hook_extra_cpus: CpuSet = field(default_factory=CpuSet)
    hook_quota: int = 0
    shares: tuple[Share, ...] = ()

    @property
    def is_narrowed(self) -> bool:
        """Whether it follows only a part of its pool."""
        return (
            self.pool_cpus_limit is not None or self.pool_numa_limit is not None or self.hook_cpus is not None
        )


class Container(Struct, frozen=True):
    """One container in the state.

    Attributes:
        id: The runtime's id; while it is being created, the token of the call.
        owner: The owner of exclusive CPUs: the pod's key for CPUs of a pod, ``key/container name`` for those
            of a container. Attempts of one container share an owner, so a restart keeps its CPUs.
        cgroup: Path of the container's cgroup below the hierarchy's root, once it is known.
    """

    id: str
    name: str
    pod: Pod
    request: Request
    placement: Placement
    phase: Phase
    attempt: int = 0
    owner: str = ""
    cgroup: str = ""

    def in_phase(self, phase: Phase, container_id: str = "") -> Container:
        """Return the container in another phase, and with another id if one is given."""
        return Container(
            container_id or self.id,
            self.name,
            self.pod,
            self.request,
            self.placement,
            phase,
            self.attempt,
            self.owner,
            self.cgroup,
        )

    @property
    def owns_cpus(self) -> bool:
        """Whether it owns CPUs; one that has exited owns nothing."""
        return self.placement.pool is Pool.OWN and self.phase is not Phase.EXITED

    @property
    def ref(self) -> str:
        """``namespace/pod/container``, as users write it; escaped and cut as ``Pod.ref``."""
        return f"{self.pod.ref}/{printable(self.name, LONGEST_NAME)}"


TOPOLOGY_AFFINITY = "TopologyAffinityError"
"""kubelet's reason for a rejection by the topology policy."""


class Verdict(Struct, frozen=True):
    """Admit or reject.

    Attributes:
        code: gRPC status code: OK admits.
        reason: Short CamelCase reason, as kubelet's (``TopologyAffinityError``).
        message: The sentence that the client is answered with. A pod's events show it, so it names other pods
            only if the configuration allows that.
        detail: The sentence for operators if it says more than ``message``; otherwise empty.
    """

    code: int = 0
    reason: str = ""
    message: str = ""
    detail: str = ""

    @property
    def operator_message(self) -> str:
        """The sentence for operators."""
        return self.detail or self.message

    @property
    def admitted(self) -> bool:
        """True when nothing prevents the request."""
        return self.code == 0
