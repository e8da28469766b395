"""Settings that belong together: the sections of the configuration file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from proxy.config.enums import LogFormat, LogLevel, OwnerPartitions
from proxy.config.kinds import (
    BOOLEAN,
    BYTES,
    CPU_AMOUNT,
    CPUS,
    DIRECTORY,
    OPTIONAL_ADDRESS,
    OPTIONAL_FILE,
    OPTIONAL_SOCKET,
    choice,
    duration,
    whole_number,
)
from proxy.config.list_kinds import RESOURCES
from proxy.config.setting import key
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset, KeepQuota, NodeBindPolicy, NumaStrategy, SuppressMode


@dataclass(frozen=True, slots=True)
class ReserveConfig:
    """The resources that are reserved for the system; None if an amount is not given.

    Attributes:
        cpu: Thousandths of a CPU.
        memory: Bytes.
        ephemeral_storage, pid: Not used here.
    """

    cpu: int | None = field(
        default=None, metadata=key("cpu", CPU_AMOUNT, "CPUs, such as 500m or 2; empty: not set.", live=True)
    )
    memory: int | None = field(
        default=None, metadata=key("memory", BYTES, "Bytes, such as 1Gi; empty: not set.")
    )
    ephemeral_storage: int | None = field(
        default=None,
        metadata=key(
            "ephemeral-storage", BYTES, "Accepted as by kubelet, but not used by topoproxy.", live=True
        ),
    )
    pid: int | None = field(
        default=None,
        metadata=key("pid", BYTES, "Accepted as by kubelet, but not used by topoproxy.", live=True),
    )


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """The data that may be read from kubelet. Paths are None if they are not given."""

    pods: str = field(
        default="",
        metadata=key(
            "pods",
            OPTIONAL_ADDRESS,
            "Where the /pods of this node's kubelet is read, such as https://127.0.0.1:10250. "
            "Empty: not read.",
        ),
    )
    pods_api: Path | None = field(
        default=None,
        metadata=key(
            "podsApi",
            OPTIONAL_SOCKET,
            "The socket of kubelet's pods API, read before pods. Empty: not read.",
        ),
    )
    pod_resources: Path | None = field(
        default=None,
        metadata=key(
            "podResources",
            OPTIONAL_SOCKET,
            "The socket of kubelet's pod-resources API, which lists devices. Empty: not read.",
        ),
    )
    configz: str = field(
        default="",
        metadata=key(
            "configz",
            OPTIONAL_ADDRESS,
            "Where kubelet's settings are read, such as https://127.0.0.1:10250. Empty: not read.",
        ),
    )
    config_file: Path | None = field(
        default=None,
        metadata=key(
            "configFile",
            OPTIONAL_FILE,
            "kubelet's configuration file, read if configz does not answer; empty: config.yaml in "
            "stateDir, if it is there.",
        ),
    )
    state_dir: Path = field(
        default=Path("/var/lib/kubelet"),
        metadata=key(
            "stateDir",
            DIRECTORY,
            "Where kubelet keeps the state file of its CPU manager, with the CPUs that it assigned.",
        ),
    )
    token_file: Path | None = field(
        default=None,
        metadata=key("tokenFile", OPTIONAL_FILE, "Holds the bearer token for pods and configz."),
    )
    ca_file: Path | None = field(
        default=None,
        metadata=key(
            "caFile",
            OPTIONAL_FILE,
            "The authorities that may have signed kubelet's certificate; empty: those of the system.",
        ),
    )
    cert_file: Path | None = field(
        default=None,
        metadata=key("certFile", OPTIONAL_FILE, "topoproxy's client certificate for pods; needs keyFile."),
    )
    key_file: Path | None = field(
        default=None, metadata=key("keyFile", OPTIONAL_FILE, "The key of certFile.")
    )
    insecure_skip_verify: bool = field(
        default=False,
        metadata=key(
            "insecureSkipVerify", BOOLEAN, "Accept any certificate from kubelet, even a forged one."
        ),
    )
    timeout: float = field(
        default=0.5,
        metadata=key("timeout", duration(0.01, 5), "Longest time that one request to kubelet may take."),
    )

    @property
    def plugin_directory(self) -> Path:
        """The directory where device plugins register with kubelet."""
        return self.state_dir / "device-plugins"


@dataclass(frozen=True, slots=True)
class PodResourcesConfig:
    """Serving kubelet's pod-resources API.

    Attributes:
        serve: The socket; None if the API is not served.
    """

    serve: Path | None = field(
        default=None,
        metadata=key(
            "serve",
            OPTIONAL_SOCKET,
            "The socket at which monitoring agents can ask which CPUs, memory and devices containers have. "
            "Empty: not served.",
        ),
    )


@dataclass(frozen=True, slots=True)
class DevicePluginsConfig:
    """Acting as the device manager of device plugins that register here."""

    enabled: bool = field(
        default=False,
        metadata=key("enabled", BOOLEAN, "Serve device plugins, and assign their devices to containers."),
    )
    socket_directory: Path = field(
        default=Path("/var/lib/topoproxy/device-plugins"),
        metadata=key(
            "socketDirectory",
            DIRECTORY,
            "Where device plugins register (kubelet.sock) and have their sockets. Sockets in it are "
            "removed at a start.",
        ),
    )
    timeout: float = field(
        default=10.0,
        metadata=key(
            "timeout",
            duration(0.01, 60),
            "Longest time that a device plugin may take for an answer; for PreStartContainer it is 30s.",
            live=True,
        ),
    )
    shim: tuple[str, ...] = field(
        default=(),
        metadata=key(
            "shim",
            RESOURCES,
            "Resources that topoproxy manages although their plugins register in shimDirectory; all other "
            "registrations there are forwarded to kubelet. Empty: there is no such directory.",
        ),
    )
    shim_directory: Path = field(
        default=Path("/var/lib/topoproxy/device-shim"),
        metadata=key(
            "shimDirectory",
            DIRECTORY,
            "Where plugins register whose resources are divided between topoproxy and kubelet. Sockets in "
            "it are removed at a start.",
        ),
    )


@dataclass(frozen=True, slots=True)
class KoordinatorConfig:
    """Settings that Koordinator's users write to a Node object, for nodes without one."""

    reserved_cpus: CpuSet = field(
        default=CpuSet(),
        metadata=key(
            "reservedCPUs",
            CPUS,
            "CPUs for processes outside pods (node reservation): neither pools nor owners use them.",
            live=True,
            rule="node_reservation",
        ),
    )
    system_cpus: CpuSet = field(
        default=CpuSet(),
        metadata=key(
            "systemCPUs",
            CPUS,
            "CPUs for class SYSTEM; empty: its pods run on the shared pool.",
            live=True,
            rule="system",
        ),
    )
    system_exclusive: bool = field(
        default=True,
        metadata=key(
            "systemCPUsExclusive",
            BOOLEAN,
            "Nothing else runs on systemCPUs.",
            live=True,
            rule="system_cpus_exclusive",
        ),
    )

    bind_policy: NodeBindPolicy = field(
        default=NodeBindPolicy.NONE,
        metadata=key(
            "cpuBindPolicy",
            choice(NodeBindPolicy),
            "How owned CPUs are bound: whole cores, or one thread of each core. Empty: as each pod requests.",
            live=True,
            rule="bind",
        ),
    )
    strategy: NumaStrategy = field(
        default=NumaStrategy.NONE,
        metadata=key(
            "numaAllocateStrategy",
            choice(NumaStrategy),
            "The order of NUMA nodes for owned CPUs: the fullest first, the emptiest first, or evenly. "
            "Empty: not set.",
            live=True,
            rule="strategy",
        ),
    )

    keep_quota: KeepQuota = field(
        default=KeepQuota.NEVER,
        metadata=key(
            "keepCFSQuota",
            choice(KeepQuota),
            "Which owners of CPUs keep their CFS quota: none, those in pods with several containers, or all.",
            live=True,
            rule="keep_quota",
        ),
    )
    be_cpuset: BeCpuset = field(
        default=BeCpuset.NARROW,
        metadata=key(
            "beCpuset",
            choice(BeCpuset),
            "How BE containers are confined to the BE pool. narrow: each container gets the CPUs of the "
            "pool. erase: requests name no CPUs, and the cgroups of BestEffort and of its pods hold the "
            "pool.",
            rule="be_cpuset",
        ),
    )
    node_object: Path | None = field(
        default=None,
        metadata=key(
            "nodeObject",
            OPTIONAL_FILE,
            "A JSON file with the Node object or its metadata. What its labels and annotations prescribe "
            "takes precedence over the settings of this section. Empty: none.",
        ),
    )

    @property
    def excluded_cpus(self) -> CpuSet:
        """CPUs that neither the shared pool nor owners use."""
        return self.reserved_cpus | self.system_cpus if self.system_exclusive else self.reserved_cpus


@dataclass(frozen=True, slots=True)
class BeSuppressConfig:
    """Limiting BE (best effort) pods to the CPU time that the other pods leave."""

    mode: SuppressMode = field(
        default=SuppressMode.OFF,
        metadata=key(
            "mode",
            choice(SuppressMode),
            "How BE pods are limited: not at all, by fewer CPUs, or by one CFS quota for all of them.",
            live=True,
        ),
    )
    threshold: int = field(
        default=65,
        metadata=key(
            "threshold",
            whole_number(1, 100),
            "Percent of the node's CPUs that all pods together should use; BE pods get what the others "
            "leave of it.",
            live=True,
        ),
    )
    min_percent: int = field(
        default=0,
        metadata=key(
            "minPercent",
            whole_number(0, 100),
            "Percent of the node's CPUs that BE pods have in any case; 0: not set.",
            live=True,
        ),
    )
    period: float = field(
        default=1.0, metadata=key("period", duration(0.1, 60), "How often usage is measured.", live=True)
    )


@dataclass(frozen=True, slots=True)
class ApplyConfig:
    """Settings for the kernel beyond the plain cpusets."""

    partitions: OwnerPartitions = field(
        default=OwnerPartitions.NONE,
        metadata=key(
            "partitions",
            choice(OwnerPartitions),
            "On cgroup v2 (Linux 6.7 or later), make the CPUs of each owner a cpuset partition. root: a "
            "separate scheduling domain without any other process of the node. isolated: also without load "
            "balancing.",
        ),
    )


@dataclass(frozen=True, slots=True)
class SettleConfig:
    """The second write of a cpuset, through the runtime, which makes it last."""

    enabled: bool = field(
        default=True,
        metadata=key(
            "enabled",
            BOOLEAN,
            "Also send each new cpuset to the runtime, so that it does not restore an old one.",
            live=True,
        ),
    )
    per_second: int = field(
        default=10,
        metadata=key("perSecond", whole_number(1, 1000), "The most such updates per second.", live=True),
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log on standard error."""

    level: LogLevel = field(
        default=LogLevel.INFO,
        metadata=key("level", choice(LogLevel), "The lowest level of records that are written.", live=True),
    )
    format: LogFormat = field(
        default=LogFormat.TEXT,
        metadata=key(
            "format",
            choice(LogFormat),
            "text: for people. klog: as kubelet's log. json: one object per line.",
            live=True,
        ),
    )
