"""What the executor needs from the runtime. Every call here may block and is made in a worker thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from msgspec import Struct, field

from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Phase

CONFIG_SOURCE = "kubernetes.io/config.source"
"""Annotation in which kubelet records where a pod comes from; ``file`` for static pods."""
_PHASES = {"CREATED": Phase.CREATED, "RUNNING": Phase.RUNNING, "EXITED": Phase.EXITED}
"""States of a container in the CRI, without the prefix."""


_Entry = TypeVar("_Entry")


class RuntimeList(list[_Entry]):
    """The entries of one of the runtime's lists that could be read.

    Attributes:
        unread_ids: Ids of the entries that could not be read; an empty id stands for entries with an
            unreadable id. The absence of these ids from the list does not show whether they exist.
    """

    def __init__(self, entries: Iterable[_Entry], unread_ids: Iterable[str] = ()) -> None:
        """Store entries."""
        super().__init__(entries)
        self.unread_ids = frozenset(unread_ids)


def unread_ids_of(entries: Sequence[object]) -> frozenset[str]:
    """Return the ids of the entries of a list that could not be read."""
    return entries.unread_ids if isinstance(entries, RuntimeList) else frozenset()


def _unchanged(cpus: CpuSet) -> CpuSet:
    return cpus


def _never(path: str) -> bool:
    return False


def _none(container_id: str) -> str:
    return ""


class RuntimeQuirks(Struct, frozen=True):
    """The differences between runtimes that the executor has to know; by default, there are none.

    Attributes:
        has_monitors: Returns whether the containers of a sandbox have monitors in cgroups of their own, by
            the path of the sandbox's cgroup.
        monitor: Returns the name by which ``Cgroups.find`` finds the monitor of a container, by its id.
        may_lose_controllers: Returns whether the cgroup at a path may be that of a sandbox without processes,
            so that it has no controllers.
        is_made_by_create: Returns whether the cgroup at a path is made with the create of its container, so
            that it does not show whether the container is being started.
        mask_as_sent: Returns the set that systemd reads if a runtime sends a set in the wrong byte order.
    """

    has_monitors: Callable[[str], bool] = _never
    monitor: Callable[[str], str] = _none
    may_lose_controllers: Callable[[str], bool] = _never
    is_made_by_create: Callable[[str], bool] = _never
    mask_as_sent: Callable[[CpuSet], CpuSet] = _unchanged


NO_QUIRKS = RuntimeQuirks()


class RuntimePod(Struct, frozen=True):
    """A sandbox as the runtime lists it, with its labels and the annotations that are read here."""

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

    @property
    def phase(self) -> Phase | None:
        """The phase of its life; None if the runtime does not know it."""
        return _PHASES.get(self.state)


class RuntimeDetail(Struct, frozen=True):
    """What the runtime reports about one container beyond the list.

    Attributes:
        cgroups_path: ``linux.cgroupsPath`` of the OCI spec (``/kubepods/podX/ID`` or ``slice:prefix:ID``);
            empty if the runtime does not report it.
        cpu_shares, cpu_quota, cpu_period, memory_limit: As in LinuxContainerResources, 0 if not reported.
        cpuset_cpus, cpuset_mems: The CPUs and memory nodes that the runtime has saved for the container.
        pid: The container's first process, in the runtime's PID namespace; 0 if there is none or it is not
            reported.
        hugepage_limits: Page size (``2MB``) and bytes of the limits on huge pages.
    """

    cgroups_path: str = ""
    cpu_shares: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    memory_limit: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    pid: int = 0
    hugepage_limits: tuple[tuple[str, int], ...] = ()


class Limits(Struct, frozen=True):
    """Fields of an update besides CPUs and memory nodes, as in LinuxContainerResources; 0 leaves a field."""

    cpu_period: int = 0
    cpu_quota: int = 0
    cpu_shares: int = 0
    memory_limit: int = 0
    memory_swap_limit: int = 0
    oom_score_adj: int = 0
    unified: Mapping[str, str] = field(default_factory=dict)


class Runtime(Protocol):
    """Calls to the container runtime that the executor makes itself.

    Every method raises UnavailableError when the runtime cannot be reached or does not answer in time, and
    RuntimeCallError when it answers with an error.
    """

    def version(self) -> str:
        """Return the runtime's name and version, for example ``containerd 1.6.20``."""

    def cgroup_driver(self) -> str:
        """Return the runtime's cgroup driver, ``cgroupfs`` or ``systemd``; empty if it does not report it."""

    def list_pods(self) -> Sequence[RuntimePod]:
        """List all sandboxes; a ``RuntimeList`` if some entries could not be read."""

    def list_containers(self, container_id: str = "") -> Sequence[RuntimeContainer]:
        """List all containers, or only one by its id; a ``RuntimeList`` if some entries could not be read."""

    def detail(self, container_id: str) -> RuntimeDetail:
        """Return the verbose status of one container."""

    def update_cpuset(self, container_id: str, cpus: CpuSet, mems: Mask | None, cpu_quota: int = 0) -> None:
        """Make the runtime save a cpuset: UpdateContainerResources with no other field set.

        Args:
            container_id: The container.
            cpus: The CPUs.
            mems: The memory nodes; None leaves them unchanged.
            cpu_quota: A CFS quota to set in the same call (-1 for no limit); 0 leaves it unchanged.
        """

    def update_limits(
        self, container_id: str, cpus: CpuSet | None, mems: Mask | None, limits: Limits
    ) -> None:
        """Change a container's resources: UpdateContainerResources; None or 0 leaves a field unchanged."""

    def raw_lists(self) -> tuple[bytes, bytes]:
        """List all sandboxes and containers; returns the answers to ListPodSandbox and ListContainers."""

    def close(self) -> None:
        """Close the channel."""


class RuntimeEvent(Struct, frozen=True):
    """An event from the runtime about a container or a sandbox; the id does not show which of the two.

    ``exit``: its first process has ended, and so have the others; ``start``: it runs; ``delete``: it is gone.
    """

    kind: Literal["exit", "start", "delete"]
    container_id: str


class RuntimeEventStream(Protocol):
    """The stream of the runtime's events.

    Attributes:
        report_unread: Called with each event that cannot be read, in any thread.
    """

    report_unread: Callable[[str], None]

    def listen(self) -> Iterator[RuntimeEvent]:
        """Subscribe; returns once the subscription is established, so that every later event is delivered.

        The iterator blocks until there is an event, and ends when the runtime ends the stream.

        Raises:
            UnavailableError: The runtime cannot be reached, or ``close`` was called; also raised by the
                iterator, if the connection is lost.
            RuntimeCallError: The runtime refuses; the code is UNIMPLEMENTED if it does not offer events.
        """

    def close(self) -> None:
        """End all subscriptions; callable from any thread."""
