"""What can be configured: one frozen value, each field with its YAML key, its bounds and its explanation.

The same table reads the file, checks the command line, and prints the
defaults (``topoproxy check-config --defaults``), so the three cannot differ.
Where kubelet has a setting, its name and its words are used.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from proxy.config.kinds import CPUS, FOLDER, OPTIONAL_SOCKET, SOCKET, TRUTH, Kind, choice, duration, whole
from proxy.model.idset import CpuSet

API_VERSION = "topoproxy/v1"
KIND = "TopoproxyConfiguration"


class CpuManagerPolicy(enum.StrEnum):
    """Who gives exclusive CPUs to Guaranteed containers."""

    NONE = "none"
    STATIC = "static"


class Mode(enum.StrEnum):
    """What is done with a decision."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    PASSTHROUGH = "passthrough"


class OnError(enum.StrEnum):
    """What happens to a call when deciding fails by a fault of ours."""

    FORWARD = "forward"
    REFUSE = "refuse"


class MemoryNodes(enum.StrEnum):
    """What cpuset.mems of containers with CPUs of their own is."""

    FOLLOW = "follow"
    LEAVE = "leave"


class LogLevel(enum.StrEnum):
    """The least important records that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """How records look."""

    TEXT = "text"
    KLOG = "klog"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file: its name, how its value is read, and what it means."""

    key: str
    kind: Kind
    doc: str


def _key(name: str, kind: Kind, doc: str) -> dict[str, Setting]:
    return {"setting": Setting(name, kind, doc)}


def _section(name: str, doc: str) -> dict[str, str]:
    return {"section": name, "doc": doc}


@dataclass(frozen=True, slots=True)
class SettleConfig:
    """The second, lasting write of a cpuset, through the runtime."""

    enabled: bool = field(
        default=True,
        metadata=_key(
            "enabled",
            TRUTH,
            "Tell the runtime each new cpuset too, so that it does not write an old one back.",
        ),
    )
    per_second: int = field(
        default=10,
        metadata=_key("perSecond", whole(1, 1000), "At most so many of these updates in a second."),
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log on standard error."""

    level: LogLevel = field(
        default=LogLevel.INFO, metadata=_key("level", choice(LogLevel), "Least important records to write.")
    )
    format: LogFormat = field(
        default=LogFormat.TEXT,
        metadata=_key(
            "format", choice(LogFormat), "text for people, klog as kubelet's, json one object a line."
        ),
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration. Durations are seconds, sockets and folders absolute paths.

    Attributes:
        source: The file that it came from, for messages; not a setting and no part of equality.
    """

    mode: Mode = field(
        default=Mode.ENFORCE,
        metadata=_key(
            "mode",
            choice(Mode),
            "enforce: place containers. observe: decide and log, change nothing. passthrough: only relay.",
        ),
    )
    cpu_manager_policy: CpuManagerPolicy = field(
        default=CpuManagerPolicy.NONE,
        metadata=_key(
            "cpuManagerPolicy",
            choice(CpuManagerPolicy),
            "static: Guaranteed containers with whole CPUs own CPUs; kubelet's own policy must be none then.",
        ),
    )
    reserved_system_cpus: CpuSet = field(
        default=CpuSet(),
        metadata=_key("reservedSystemCPUs", CPUS, "CPUs that are never given away, as a list such as 0-1,8."),
    )
    memory_nodes: MemoryNodes = field(
        default=MemoryNodes.FOLLOW,
        metadata=_key(
            "memoryNodes",
            choice(MemoryNodes),
            "follow: containers that own CPUs take memory of those CPUs' nodes. leave: of any node.",
        ),
    )
    on_error: OnError = field(
        default=OnError.FORWARD,
        metadata=_key(
            "onError",
            choice(OnError),
            "A fault of our own while deciding: forward the call as it came, or refuse it.",
        ),
    )
    listen: Path = field(
        default=Path("/run/topoproxy/cri.sock"),
        metadata=_key("listen", SOCKET, "Where kubelet connects (its containerRuntimeEndpoint)."),
    )
    runtime: Path = field(
        default=Path("/run/containerd/containerd.sock"),
        metadata=_key("runtime", SOCKET, "The socket of the container runtime."),
    )
    admin_socket: Path | None = field(
        default=None,
        metadata=_key(
            "adminSocket",
            OPTIONAL_SOCKET,
            'Where "topoproxy status" asks; empty: admin.sock beside the listen socket.',
        ),
    )
    state_dir: Path = field(
        default=Path("/var/lib/topoproxy"), metadata=_key("stateDir", FOLDER, "Where placements are kept.")
    )
    sysfs_root: Path = field(
        default=Path("/sys"), metadata=_key("sysfsRoot", FOLDER, "Where the kernel describes the hardware.")
    )
    procfs_root: Path = field(
        default=Path("/proc"), metadata=_key("procfsRoot", FOLDER, "Where the kernel describes processes.")
    )
    cgroup_root: Path = field(
        default=Path("/sys/fs/cgroup"),
        metadata=_key("cgroupRoot", FOLDER, "Where the cgroup hierarchies are mounted."),
    )
    reconcile_period: float = field(
        default=10.0,
        metadata=_key(
            "reconcilePeriod",
            duration(0.1, 3600),
            "How often the kernel's cpusets are compared with the plan and repaired.",
        ),
    )
    call_timeout: float = field(
        default=5.0,
        metadata=_key(
            "callTimeout", duration(0.1, 60), "Longest that a held call waits for a decision and its writes."
        ),
    )
    drain_timeout: float = field(
        default=20.0,
        metadata=_key("drainTimeout", duration(0, 600), "After SIGTERM, how long calls in flight may go on."),
    )
    settle: SettleConfig = field(
        default=SettleConfig(), metadata=_section("settle", "Making cpusets last at the runtime.")
    )
    log: LogConfig = field(default=LogConfig(), metadata=_section("log", "The log on standard error."))
    source: str = field(default="built-in defaults", compare=False)

    @property
    def admin_path(self) -> Path:
        """Where the admin socket is: as configured, or ``admin.sock`` beside the listening socket."""
        return self.admin_socket or self.listen.with_name("admin.sock")


def keys(of: type[Any] | Any) -> Iterator[tuple[Field[Any], str, Setting | None]]:
    """Walk the fields that are keys of the file: field, key, and its setting (None: a section)."""
    for item in fields(of):
        setting: Setting | None = item.metadata.get("setting")
        if setting is not None:
            yield item, setting.key, setting
        elif "section" in item.metadata:
            yield item, item.metadata["section"], None
