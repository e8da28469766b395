"""The configuration: one frozen value, each field with its YAML key, its bounds and its explanation.

The same table reads the file, checks the command line, and prints the defaults
(``topoproxy check-config --defaults``), so the three cannot differ. If kubelet has a setting, its name and
its terms are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from proxy.config.admission import AdmissionConfig, EnforceConfig
from proxy.config.cluster import ClusterConfig, RejectedPodsConfig
from proxy.config.cluster_config import ClusterConfigConfig, ClusterFactsConfig
from proxy.config.enums import (
    CpuManagerPolicy,
    FailurePolicy,
    LogFormat,
    LogLevel,
    MemoryManagerPolicy,
    OnError,
    OwnerMemoryNodes,
    OwnerPartitions,
)
from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.hooks import HooksConfig
from proxy.config.kinds import (
    BOOLEAN,
    CPUS,
    DIRECTORY,
    OPTIONAL_SOCKET,
    SOCKET,
    choice,
    duration,
    whole_number,
)
from proxy.config.list_kinds import CPU_OPTIONS, EVICTION, RESERVED_MEMORY, TOPOLOGY_OPTIONS, Reserved
from proxy.config.origin import Origin
from proxy.config.sections import (
    ApplyConfig,
    BeSuppressConfig,
    DevicePluginsConfig,
    KoordinatorConfig,
    KubeletConfig,
    LogConfig,
    PodResourcesConfig,
    ReserveConfig,
    SettleConfig,
)
from proxy.config.setting import Setting, key, keys, section
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.options import CpuOptions, Scope, TopologyOptions, TopologyPolicy

__all__ = [
    "API_VERSION",
    "KIND",
    "AdmissionConfig",
    "ApplyConfig",
    "BeSuppressConfig",
    "ClusterConfig",
    "ClusterConfigConfig",
    "ClusterFactsConfig",
    "Config",
    "CpuManagerPolicy",
    "DevicePluginsConfig",
    "EnforceConfig",
    "FailurePolicy",
    "HooksConfig",
    "KoordinatorConfig",
    "KubeletConfig",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "MemoryManagerPolicy",
    "OnError",
    "OwnerMemoryNodes",
    "OwnerPartitions",
    "PodResourcesConfig",
    "RejectedPodsConfig",
    "ReserveConfig",
    "Setting",
    "SettleConfig",
    "keys",
]

API_VERSION = "topoproxy/v1"
KIND = "TopoproxyConfiguration"


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration. Durations are in seconds; sockets and directories are absolute paths.

    Attributes:
        reserved_memory: NUMA node to resource to bytes.
        eviction_memory: Bytes of ``memory.available`` in ``evictionHard``; None if it is not set.
        source: The file that it came from, for messages. Not a setting, and ignored by comparisons with
            ``==``.
        origin: How to read it again; None if that is impossible. Not a setting.
        without_cluster: The configuration without the settings of the cluster; None if there are none. Not a
            setting.
        cluster_fault: Why the settings of the cluster are ignored; empty if they are not. Not a setting.
        former_keys: One sentence for each key of the files that was renamed. Not a setting.
    """

    mode: NodeMode = field(
        default=NodeMode.ENFORCE,
        metadata=key(
            "mode",
            choice(NodeMode, NodeMode.ENFORCE, NodeMode.OBSERVE, NodeMode.PASSTHROUGH),
            "enforce: place containers. observe: decide and log, change nothing. passthrough: only relay.",
            live=True,
            restart_for=(NodeMode.PASSTHROUGH,),
        ),
    )
    enforce: EnforceConfig = field(
        default=EnforceConfig(),
        metadata=section(
            "enforce", "To which pods mode enforce applies the plan: all by default. The others are observed."
        ),
    )
    cpu_manager_policy: CpuManagerPolicy = field(
        default=CpuManagerPolicy.NONE,
        metadata=key(
            "cpuManagerPolicy",
            choice(CpuManagerPolicy),
            "static: Guaranteed containers with whole CPUs own CPUs; kubelet's own policy must be none then.",
        ),
    )
    cpu_manager_policy_options: CpuOptions = field(
        default=CpuOptions(),
        metadata=key(
            "cpuManagerPolicyOptions",
            CPU_OPTIONS,
            "How static chooses CPUs; all are false by default.",
            live=True,
            rule="options",
        ),
    )
    reserved_system_cpus: CpuSet = field(
        default=CpuSet(),
        metadata=key(
            "reservedSystemCPUs",
            CPUS,
            "CPUs that are never given to owners, as a list such as 0-1,8. Takes precedence over the "
            "amounts of CPU below.",
            live=True,
        ),
    )
    kube_reserved: ReserveConfig = field(
        default=ReserveConfig(),
        metadata=section(
            "kubeReserved", "Resources that are reserved for kubelet and the container runtime."
        ),
    )
    system_reserved: ReserveConfig = field(
        default=ReserveConfig(),
        metadata=section(
            "systemReserved",
            "Resources that are reserved for the rest of the system, in addition to kubeReserved.",
        ),
    )
    topology_manager_policy: TopologyPolicy = field(
        default=TopologyPolicy.NONE,
        metadata=key(
            "topologyManagerPolicy",
            choice(TopologyPolicy),
            "How strictly CPUs, memory and devices are aligned to NUMA nodes. restricted and "
            "single-numa-node reject pods that cannot be aligned.",
            live=True,
            rule="policy",
        ),
    )
    topology_manager_scope: Scope = field(
        default=Scope.CONTAINER,
        metadata=key(
            "topologyManagerScope",
            choice(Scope),
            "Whether each container is aligned separately, or all containers of a pod together.",
            live=True,
            rule="scope",
        ),
    )
    topology_manager_policy_options: TopologyOptions = field(
        default=TopologyOptions(),
        metadata=key(
            "topologyManagerPolicyOptions",
            TOPOLOGY_OPTIONS,
            "How NUMA nodes are preferred, and a limit on their number (no limit by default).",
            live=True,
        ),
    )
    memory_manager_policy: MemoryManagerPolicy = field(
        default=MemoryManagerPolicy.NONE,
        metadata=key(
            "memoryManagerPolicy",
            choice(MemoryManagerPolicy),
            "Static: Guaranteed pods are promised memory and huge pages of NUMA nodes; needs reservedMemory.",
        ),
    )
    reserved_memory: Reserved = field(
        default=FrozenMapping(),
        metadata=key(
            "reservedMemory",
            RESERVED_MEMORY,
            "What Static reserves for the system on each NUMA node: [{numaNode: 0, limits: {memory: 1Gi}}]. "
            "If kubeReserved, systemReserved or evictionHard name memory, the sum over all nodes must "
            "equal theirs.",
        ),
    )
    eviction_memory: int | None = field(
        default=None,
        metadata=key(
            "evictionHard",
            EVICTION,
            "kubelet's eviction thresholds. Only memory.available (kubelet's default is 100Mi) is used, to "
            "check reservedMemory.",
        ),
    )
    memory_nodes: OwnerMemoryNodes = field(
        default=OwnerMemoryNodes.FOLLOW,
        metadata=key(
            "memoryNodes",
            choice(OwnerMemoryNodes),
            "follow: containers that own CPUs get memory from the NUMA nodes of these CPUs. leave: from any "
            "node.",
            live=True,
        ),
    )
    on_error: OnError = field(
        default=OnError.FORWARD,
        metadata=key(
            "onError",
            choice(OnError),
            "After an internal error in a decision: forward the call unchanged, or refuse it.",
            live=True,
        ),
    )
    listen: Path = field(
        default=Path("/run/topoproxy/cri.sock"),
        metadata=key("listen", SOCKET, "Where kubelet connects (its containerRuntimeEndpoint)."),
    )
    runtime: Path = field(
        default=Path("/run/containerd/containerd.sock"),
        metadata=key("runtime", SOCKET, "The socket of the container runtime."),
    )
    admin_socket: Path | None = field(
        default=None,
        metadata=key(
            "adminSocket",
            OPTIONAL_SOCKET,
            'The socket of commands such as "topoproxy status"; empty: admin.sock next to the listen socket.',
        ),
    )
    state_dir: Path = field(
        default=Path("/var/lib/topoproxy"),
        metadata=key("stateDir", DIRECTORY, "The directory in which placements are kept."),
    )
    sysfs_root: Path = field(
        default=Path("/sys"), metadata=key("sysfsRoot", DIRECTORY, "Where the kernel describes the hardware.")
    )
    procfs_root: Path = field(
        default=Path("/proc"), metadata=key("procfsRoot", DIRECTORY, "Where the kernel describes processes.")
    )
    cgroup_root: Path = field(
        default=Path("/sys/fs/cgroup"),
        metadata=key("cgroupRoot", DIRECTORY, "Where the cgroup hierarchies are mounted."),
    )
    reconcile_period: float = field(
        default=10.0,
        metadata=key(
            "reconcilePeriod",
            duration(0.1, 3600),
            "How often the kernel's cpusets are compared with the plan and repaired.",
            live=True,
        ),
    )
    call_timeout: float = field(
        default=5.0,
        metadata=key(
            "callTimeout",
            duration(0.1, 60),
            "Longest that a held call waits for a decision and its writes.",
            live=True,
        ),
    )
    busy_poll: float = field(
        default=0.0003,
        metadata=key(
            "busyPoll",
            duration(0, 0.001),
            "While calls follow each other closely, how long the daemon looks for the next message before it "
            "sleeps: calls take less time, and more CPU time. 0: it sleeps at once.",
        ),
    )
    drain_timeout: float = field(
        default=20.0,
        metadata=key(
            "drainTimeout",
            duration(0, 600),
            "How long calls in flight may continue after SIGTERM.",
            live=True,
        ),
    )
    release_at_stop: bool = field(
        default=False,
        metadata=key(
            "releaseAtStop",
            BOOLEAN,
            "On SIGTERM, restore for all containers what they would have without topoproxy, within "
            "drainTimeout; the next start places them again.",
            live=True,
        ),
    )
    explain_history: int = field(
        default=500,
        metadata=key(
            "explainHistory",
            whole_number(0, 100_000),
            'How many decisions about containers that are gone "topoproxy explain" still shows.',
            live=True,
        ),
    )
    kubelet: KubeletConfig = field(
        default=KubeletConfig(),
        metadata=section("kubelet", "Where facts are read from kubelet; by default none are."),
    )
    pod_resources: PodResourcesConfig = field(
        default=PodResourcesConfig(),
        metadata=section("podResources", "Serving kubelet's pod-resources API to monitoring agents."),
    )
    cluster_facts: ClusterFactsConfig = field(
        default=ClusterFactsConfig(),
        metadata=section("clusterFacts", "What the cluster agent reads for the daemon."),
    )
    device_plugins: DevicePluginsConfig = field(
        default=DevicePluginsConfig(),
        metadata=section("devicePlugins", "Being the device manager of device plugins; off by default."),
    )
    koordinator: KoordinatorConfig = field(
        default=KoordinatorConfig(),
        metadata=section("koordinator", "Koordinator's settings for the CPUs of a node."),
    )
    admission: AdmissionConfig = field(
        default=AdmissionConfig(),
        metadata=section("admission", "Which pods may own CPUs, and how many."),
    )
    be_suppress: BeSuppressConfig = field(
        default=BeSuppressConfig(),
        metadata=section(
            "beSuppress", "Limiting BE pods to the CPU time that the other pods leave (Koordinator)."
        ),
    )
    apply: ApplyConfig = field(
        default=ApplyConfig(), metadata=section("apply", "How owned CPUs are kept in the kernel.")
    )
    settle: SettleConfig = field(
        default=SettleConfig(),
        metadata=section("settle", "Sending cpusets to the runtime, so that they last."),
    )
    hooks: HooksConfig = field(
        default=HooksConfig(),
        metadata=section("hooks", "Plugins that are called while a CRI call is processed."),
    )
    cluster: ClusterConfig = field(
        default=ClusterConfig(),
        metadata=section("cluster", "What topoproxy agent publishes; the daemon does not use it."),
    )
    cluster_config: ClusterConfigConfig = field(
        default=ClusterConfigConfig(),
        metadata=section("clusterConfig", "Settings from the cluster; none by default."),
    )
    rejected_pods: RejectedPodsConfig = field(
        default=RejectedPodsConfig(),
        metadata=section("rejectedPods", "What topoproxy agent does with pods that this node rejects."),
    )
    log: LogConfig = field(default=LogConfig(), metadata=section("log", "The log on standard error."))
    source: str = field(default="built-in defaults", compare=False)
    origin: Origin | None = field(default=None, compare=False)
    without_cluster: Config | None = field(default=None, compare=False)
    cluster_fault: str = field(default="", compare=False)
    former_keys: tuple[str, ...] = field(default=(), compare=False)

    @property
    def admin_path(self) -> Path:
        """The path of the admin socket: as configured, or ``admin.sock`` next to the listening socket."""
        return self.admin_socket or self.listen.with_name("admin.sock")

    @property
    def reserved_cpu_amount(self) -> int | None:
        """How many CPUs ``kubeReserved`` and ``systemReserved`` keep, rounded up together.

        None if neither sets an amount, or if ``reservedSystemCPUs`` names CPUs: that list takes precedence
        over the amounts (kubernetes v1.36 cmd/kubelet/app/server.go, run).
        """
        amounts = [part.cpu for part in (self.kube_reserved, self.system_reserved) if part.cpu is not None]
        return None if not amounts or self.reserved_system_cpus else -(-sum(amounts) // 1000)
