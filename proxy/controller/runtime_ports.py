"""What the controller needs of the runtime. Every call here may block and is made in a worker thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from msgspec import Struct, field

from proxy.model.idset import CpuSet, Mask

SOURCE = "kubernetes.io/config.source"
"""Annotation by which kubelet says where it has a pod from; ``file`` for static pods."""


_Entry = TypeVar("_Entry")


class Listed(list[_Entry]):
    """The entries of one of the runtime's lists that could be read.

    Attributes:
        unread: Ids of the other entries; an empty id stands for entries whose id could not be read either.
            Nothing may be concluded from the absence of these from the list.
    """

    def __init__(self, entries: Iterable[_Entry], unread: Iterable[str] = ()) -> None:
        """Hold entries."""
        super().__init__(entries)
        self.unread = frozenset(unread)


def unread_in(entries: Sequence[object]) -> frozenset[str]:
    """Give the ids of the entries of a list that could not be read."""
    return entries.unread if isinstance(entries, Listed) else frozenset()


def _unchanged(cpus: CpuSet) -> CpuSet:
    return cpus


def _never(path: str) -> bool:
    return False


def _none(container_id: str) -> str:
    return ""


class RuntimeQuirks(Struct, frozen=True):
    """How runtimes differ, as far as the controller has to know; by default they do not.

    Attributes:
        has_monitors: Returns whether the containers of a sandbox have monitors in groups of their own, by
            the path of the sandbox's group.
        monitor: Returns the name by which ``Cgroups.find`` finds the monitor of a container, by its id.
        is_left_behind: Returns whether the group at a path may be a sandbox's that holds no process, so that
            it has no controllers.
        mask_as_sent: Returns the set that systemd reads where a runtime sends a set in the wrong byte order.
    """

    has_monitors: Callable[[str], bool] = _never
    monitor: Callable[[str], str] = _none
    is_left_behind: Callable[[str], bool] = _never
    mask_as_sent: Callable[[CpuSet], CpuSet] = _unchanged


NO_QUIRKS = RuntimeQuirks()


class RuntimePod(Struct, frozen=True):
    """A sandbox as the runtime lists it, with the labels and annotations that are read here."""

    id: str
    uid: str
    namespace: str
    name: str
    attempt: int
    ready: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class RuntimeContainer(Struct, frozen=True):
    """A container as the runtime lists it; ``state`` is CREATED, RUNNING, EXITED or UNKNOWN."""

    id: str
    sandbox_id: str
    name: str
    attempt: int
    state: str


class RuntimeDetail(Struct, frozen=True):
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


class Limits(Struct, frozen=True):
    """What an update may say beside CPUs and memory nodes, as in LinuxContainerResources; 0 to leave it."""

    cpu_period: int = 0
    cpu_quota: int = 0
    cpu_shares: int = 0
    memory_limit: int = 0
    memory_swap_limit: int = 0
    oom_score_adj: int = 0
    unified: Mapping[str, str] = field(default_factory=dict)


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
        """List all sandboxes; a ``Listed`` where some entries could not be read."""

    def list_containers(self, container_id: str = "") -> Sequence[RuntimeContainer]:
        """List all containers, or the one with the id; a ``Listed`` where some entries could not be read."""

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

    def update_limits(
        self, container_id: str, cpus: CpuSet | None, mems: Mask | None, limits: Limits
    ) -> None:
        """Change what a container may use: UpdateContainerResources; what is None or 0 is left."""

    def raw_lists(self) -> tuple[bytes, bytes]:
        """List all sandboxes and containers; the runtime's answers to ListPodSandbox and ListContainers."""

    def close(self) -> None:
        """Close the channel."""


class RuntimeEvent(Struct, frozen=True):
    """What a runtime tells by itself of a container or of a sandbox; the id tells neither which.

    ``exit``: its first process has ended, and so the others; ``start``: it runs; ``delete``: it is gone.
    """

    kind: Literal["exit", "start", "delete"]
    container_id: str


class Events(Protocol):
    """What the runtime tells by itself.

    Attributes:
        unread: Called with each event that cannot be read, in any thread.
    """

    unread: Callable[[str], None]

    def listen(self) -> Iterator[RuntimeEvent]:
        """Subscribe; returns when the subscription stands, so that what happens from then on is told.

        The iterator blocks until there is something, and ends when the runtime ends it.

        Raises:
            UnavailableError: The runtime cannot be reached, or has gone (by the iterator), or ``close`` came.
            RuntimeCallError: It refuses; with code UNIMPLEMENTED it tells no events.
        """

    def close(self) -> None:
        """End all listening, from any thread."""
