"""What the keeper needs from the world. Every call here may block and is made in a worker thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from proxy.model.asks import PodAsk
from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import CpuManager
from proxy.model.nodeobject import NodeMeta
from proxy.model.workload import Near


@dataclass(frozen=True, slots=True)
class CpusetValue:
    """What the kernel holds for one cgroup.

    Attributes:
        cpus, mems: As configured; empty on v2 means "as the parent".
        effective_cpus, effective_mems: What tasks really get.
    """

    cpus: CpuSet
    mems: Mask
    effective_cpus: CpuSet
    effective_mems: Mask


class Cgroups(Protocol):
    """The cpuset controller's tree. Paths are relative to the hierarchy's root, without a leading slash."""

    @property
    def version(self) -> int:
        """1 or 2."""

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's cgroup.

        Args:
            parent: ``cgroup_parent`` as the CRI gives it (cgroupfs path or systemd slice name; may be empty).
            container_id: The runtime's id.

        Returns:
            The path, or None where the container has no cgroup (not started, or gone).
        """

    def pod_group(self, parent: str) -> str | None:
        """Give the path of the group that ``cgroup_parent`` names; None where it is not there."""

    def children(self, path: str) -> Sequence[str]:
        """Give the names of the groups right below a group; none where it is gone."""

    def read(self, path: str) -> CpusetValue:
        """Read a cgroup's cpuset.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def nodes(self, path: str) -> Mask:
        """Read a cgroup's memory nodes as configured; empty on v2 for those of the parent.

        Raises:
            CgroupError: It is gone (errno ENOENT) or cannot be read.
        """

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, inner: bool = True) -> bool:
        """Set a cgroup's CPUs and memory nodes (None: leave) and read them back.

        Files that hold the value already are not written. Parents that are too narrow (v1: EACCES; v2: the
        value would not take effect) are widened first, from the top, never narrowed, and never the root.

        Args:
            path: Which.
            cpus: The CPUs.
            mems: The memory nodes.
            inner: Whether groups below are the cgroup's own, as they are in a container: on v1 those that
                would stick out are narrowed first, and those that had all of the set have all again after it
                has grown. Else they are others' (a pod's containers), and stay as they are.

        Returns:
            True when something was written.

        Raises:
            CgroupError: An empty set was given, the cgroup is gone (ENOENT), the kernel refused, or the value
                read back differs from the one written.
        """


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """Whose CPU time is asked for.

    Attributes:
        parent: ``cgroup_parent`` as the CRI gives it; empty where the client gave none.
        containers: Ids of the containers, for pods without a group of their own.
    """

    parent: str
    containers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UsageReading:
    """The kernel's counters of CPU time at one moment.

    Attributes:
        at: Nanoseconds of a clock that never jumps.
        node: CPU time of the whole node, in nanoseconds.
        groups: By key of who was asked for: path of a group to its CPU time in nanoseconds.
    """

    at: int
    node: int
    groups: Mapping[str, Mapping[str, int]]


class UsageSource(Protocol):
    """Counters of CPU time."""

    def read(self, groups: Mapping[str, UsageGroup]) -> UsageReading:
        """Read the counters of the node and of some groups; who has none is left out.

        Raises:
            CgroupError: They cannot be read.
        """

    def best_effort(self, parents: Iterable[str]) -> str:
        """Find the group above all BestEffort pods.

        Args:
            parents: ``cgroup_parent`` of such pods.

        Returns:
            Its path below the hierarchy's root; empty where these parents tell none.
        """

    def close(self) -> None:
        """Close what is open."""


class CpuGroups(Protocol):
    """The cpu controller's tree. Paths are relative to the hierarchy's root, without a leading slash."""

    def find(self, parent: str, container_id: str) -> str | None:
        """Find a container's cgroup, as ``Cgroups.find`` does."""

    def pod_group(self, parent: str) -> str | None:
        """Find a pod's own cgroup.

        Args:
            parent: ``cgroup_parent`` as the CRI gives it.

        Returns:
            The path; None where there is none, or where its name is not that of one pod.
        """

    def quota(self, path: str) -> int:
        """Read a CFS quota: microseconds, -1 for none.

        Raises:
            CgroupError: The group is gone (errno ENOENT) or cannot be read.
        """

    def set_quota(self, path: str, quota: int) -> bool:
        """Set a CFS quota and read it back; the period stays. One that is so already is not written.

        Returns:
            True when something was written.

        Raises:
            CgroupError: The group is gone (ENOENT), or the kernel refused: on v1 with EINVAL where the quota
                does not go with those above and below.
        """


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Where the memory of a container is: bytes by NUMA node, without nodes that have none.

    Attributes:
        anon: Anonymous memory, locked memory with it.
        file: Page cache.
        huge: Huge pages.
    """

    anon: Mapping[int, int]
    file: Mapping[int, int]
    huge: Mapping[int, int]

    def outside(self, nodes: Mask) -> tuple[int, int]:
        """Give the bytes on other nodes: of anonymous and huge pages, and of page cache."""
        there = [{n: size for n, size in each.items() if n not in nodes} for each in (self.anon, self.huge)]
        cache = sum(size for n, size in self.file.items() if n not in nodes)
        return sum(sum(each.values()) for each in there), cache


class Memory(Protocol):
    """The memory controller's tree."""

    def use(self, parent: str, container_id: str) -> MemoryUse | None:
        """Tell where a container's memory is; None where it has no group.

        Raises:
            CgroupError: It cannot be read.
        """

    def migrates(self, path: str) -> bool:
        """Tell whether a change of a group's memory nodes moves the pages that are there.

        Args:
            path: The group in the cpuset controller's tree.
        """


SOURCE = "kubernetes.io/config.source"
"""Annotation by which kubelet says where it has a pod from; ``file`` for static pods."""


@dataclass(frozen=True, slots=True)
class RuntimePod:
    """A sandbox as the runtime lists it, with the labels and annotations that are read here."""

    id: str
    uid: str
    namespace: str
    name: str
    attempt: int
    ready: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RuntimeContainer:
    """A container as the runtime lists it; ``state`` is CREATED, RUNNING, EXITED or UNKNOWN."""

    id: str
    sandbox_id: str
    name: str
    attempt: int
    state: str


@dataclass(frozen=True, slots=True)
class RuntimeDetail:
    """What the runtime tells of one container beyond the list.

    Attributes:
        cgroups_path: ``linux.cgroupsPath`` of the OCI spec (``/kubepods/podX/ID`` or ``slice:prefix:ID``);
            empty where the runtime does not tell it.
        cpu_shares, cpu_quota, cpu_period, memory_limit: As in LinuxContainerResources, 0 where not told.
        cpuset_cpus, cpuset_mems: What the runtime has saved for it.
        pid: Its first process, as the runtime counts; 0 where there is none or it is not told.
    """

    cgroups_path: str = ""
    cpu_shares: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    memory_limit: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """Where a container's group is.

    Attributes:
        path: Below the root of the cpuset controller's hierarchy; empty where it was not found.
        why: Why not, in words.
    """

    path: str = ""
    why: str = ""


class Places(Protocol):
    """Finds the groups of containers whose names do not tell where they are."""

    def locate(self, container_id: str, told: RuntimeDetail) -> Located:
        """Find a container's group from what the runtime tells of it; what is found is remembered."""

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        """Take note of where a container's group is, as somebody found it before."""


class Runtime(Protocol):
    """Calls that we make ourselves at the container runtime.

    Every method raises UnavailableError when the runtime cannot be reached or does not answer in time, and
    RuntimeCallError when it answers with an error.
    """

    def version(self) -> str:
        """Ask ``name version``, as ``containerd 1.6.20``."""

    def cgroup_driver(self) -> str:
        """Ask who makes its cgroups: ``cgroupfs`` or ``systemd``; empty where it does not tell."""

    def list_pods(self) -> Sequence[RuntimePod]:
        """List all sandboxes."""

    def list_containers(self, container_id: str = "") -> Sequence[RuntimeContainer]:
        """List all containers, or the one with the id."""

    def detail(self, container_id: str) -> RuntimeDetail:
        """Ask for one container's status, verbose."""

    def update_cpuset(self, container_id: str, cpus: CpuSet, mems: Mask | None, cpu_quota: int = 0) -> None:
        """Make a cpuset lasting: UpdateContainerResources with nothing else set.

        Args:
            container_id: Which container.
            cpus: The CPUs.
            mems: The memory nodes; None to leave them.
            cpu_quota: A CFS quota that goes with it (-1 for none); 0 to leave it.
        """

    def close(self) -> None:
        """Close the channel."""


@dataclass(frozen=True, slots=True)
class RuntimeEvent:
    """What a runtime tells by itself of a container or of a sandbox; the id tells neither which.

    ``exit``: its first process has ended, and so the others; ``start``: it runs; ``delete``: it is gone.
    """

    kind: Literal["exit", "start", "delete"]
    container_id: str


class Events(Protocol):
    """What the runtime tells by itself."""

    def listen(self) -> Iterator[RuntimeEvent]:
        """Subscribe; returns when the subscription stands, so that what happens from then on is told.

        The iterator blocks until there is something, and ends when the runtime ends it.

        Raises:
            UnavailableError: The runtime cannot be reached, or has gone (by the iterator), or ``close`` came.
            RuntimeCallError: It refuses; with code 12 (UNIMPLEMENTED) it tells no events.
        """

    def close(self) -> None:
        """End all listening, from any thread."""


class Ledger(Protocol):
    """Durable key-value state; see proxy.ledger."""

    @property
    def entries(self) -> Mapping[str, Mapping[str, object]]:
        """Everything that is stored, by key."""

    def write(self, changes: Mapping[str, Mapping[str, object] | None]) -> None:
        """Store values (None: delete) in one atomic step; a crash leaves all of them or none.

        Raises:
            CannotCreateError: The state cannot be written.
        """

    def close(self) -> None:
        """Flush and close."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a CreateContainer request shows of devices that kubelet's device manager gave.

    Attributes:
        paths: Device files of the host, as ``/dev/nvidia0``.
        cdi: CDI device names, as ``vendor.com/class=name``.
        mounts: Host paths of mounts that lie below /dev or /sys.
    """

    paths: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.paths or self.cdi or self.mounts)


class Kubelet(Protocol):
    """What kubelet knows and the CRI does not carry. What cannot be had is None or empty, never an error."""

    @property
    def knows_pods(self) -> bool:
        """True where ``asks`` can give an answer."""

    @property
    def knows_devices(self) -> bool:
        """True where ``devices`` can give an answer."""

    def asks(self, uid: str, namespace: str, name: str) -> tuple[PodAsk, str] | None:
        """Ask for a pod's requests and limits.

        Returns:
            What its containers ask for, and where that came from, in words; None where kubelet does not know
            the pod, or does not answer in time.
        """

    def devices(self, namespace: str, pod: str, container: str) -> tuple[Near, ...] | None:
        """Ask which devices kubelet gave to a container, and where they are (the pod-resources API).

        Returns:
            One entry a device; None where kubelet does not answer or does not know the container.
        """

    def allocatable(self) -> Mapping[str, Mapping[str, Mask | None]]:
        """Ask for all devices that there are: resource to id to NUMA nodes; empty where nobody tells."""

    def close(self) -> None:
        """Close what is open."""


class Beside(Protocol):
    """What kubelet's CPU manager does. What cannot be found out is told in the answer, never an error."""

    def look(self) -> CpuManager:
        """Look at what it holds, and give that with the settings that are known.

        Quick: a ``stat`` while nothing has changed, at most a tenth of a second where a file is not whole.
        The same object is given as long as nothing has changed.
        """

    def refresh(self) -> None:
        """Find out its settings again, if that is due; takes as long as one question to kubelet."""


class NodeObject(Protocol):
    """The Node object of this node, wherever somebody tells of it: a file, an API server."""

    @property
    def source(self) -> str:
        """Where it is read, for people."""

    @property
    def problem(self) -> str:
        """Why it could not be read the last time; empty if it could."""

    def read(self) -> NodeMeta | None:
        """Give what it says: what it said last where it cannot be read now, None where it never could be."""

    def close(self) -> None:
        """Close what is open."""


class Hardware(Protocol):
    """Where devices are, from sysfs. Blocking, but quick."""

    def near(self, given: Given) -> tuple[Near, ...]:
        """Find the NUMA nodes of devices; one entry a device, ``nodes`` None where nothing tells."""
