"""What the executor needs besides the kernel and the runtime. Every call may block: a worker makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from proxy.model.idset import Mask
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.requests import PodRequests
from proxy.model.workload import LocatedDevice


class Ledger(Protocol):
    """Durable key-value state; see proxy.backends.ledger."""

    @property
    def problem(self) -> str:
        """Why the last attempt to compact it failed; empty if it did not. No record is lost by that."""

    @property
    def entries(self) -> Mapping[str, Mapping[str, object]]:
        """All stored values, by key."""

    def write(self, changes: Mapping[str, Mapping[str, object] | None]) -> None:
        """Store values (None: delete) in one atomic step; a crash leaves all of them or none.

        Raises:
            CannotCreateError: The state cannot be written.
            RecordError: Some of the values can never be stored, however often that is tried: they are deleted
                in the same step, and the others are stored.
        """

    def close(self) -> None:
        """Flush and close the ledger."""


class MachineEvents(Protocol):
    """Events that the kernel sends when CPUs or memory come or go."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when events have arrived."""

    def read_changes(self) -> bool:
        """Read the events that have arrived, without waiting; True if the machine may have changed.

        Raises:
            OSError: No further events can be received.
        """

    def close(self) -> None:
        """End the subscription."""


class DisplacedTasks(Protocol):
    """Tasks that the kernel has moved out of a cgroup that lost its last CPU or memory node (only on v1)."""

    def move_back(self, path: str) -> int:
        """Move a cgroup's tasks back into it.

        Returns:
            The number of processes that were moved.

        Raises:
            CgroupError: The kernel refused to move one of them; the others have been moved.
        """


class DeviceFacts(Struct, frozen=True):
    """The traces in a CreateContainer request of devices that kubelet's device manager assigned.

    Attributes:
        paths: Device files of the host, for example ``/dev/nvidia0``.
        cdi: CDI device names, of the form ``vendor.com/class=name``.
        mounts: Host paths of mounts that lie below /dev or /sys.
    """

    paths: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.paths or self.cdi or self.mounts)


class Kubelet(Protocol):
    """What kubelet knows and the CRI does not carry. Missing data is None or empty, never an error."""

    @property
    def knows_pods(self) -> bool:
        """True if ``pod_requests`` can return an answer."""

    @property
    def knows_devices(self) -> bool:
        """True if ``devices`` can return an answer."""

    def pod_requests(self, uid: str, namespace: str, name: str) -> tuple[PodRequests, str] | None:
        """Query kubelet for a pod's requests and limits.

        Returns:
            The requests and limits of its containers, and their source, as text; None if kubelet does not
            know the pod or does not answer in time.
        """

    def devices(self, namespace: str, pod: str, container: str) -> tuple[LocatedDevice, ...] | None:
        """Read the devices that kubelet assigned to a container, and where they are (pod-resources API).

        Returns:
            One entry per device; None if kubelet does not answer or does not know the container.
        """

    def allocatable(self) -> Mapping[str, Mapping[str, Mask | None]]:
        """Query kubelet for all devices: resource to id to NUMA nodes; empty if kubelet does not answer."""

    def close(self) -> None:
        """Close the connections."""


class KubeletCpuManager(Protocol):
    """Settings and assignments of kubelet's CPU manager. Failures are part of the answer, never raised."""

    def read(self) -> CpuManager:
        """Return the current assignments, with the settings that are known.

        This is quick: a ``stat`` while nothing has changed, at most 0.1 seconds if a file is incomplete.
        As long as nothing has changed, the same object is returned.
        """

    def refresh(self) -> None:
        """Read the settings again, if that is due; takes as long as one request to kubelet."""


class NodeObject(Protocol):
    """The Node object of this node, from a file or from an API server."""

    @property
    def source(self) -> str:
        """Where the object is read from, for display."""

    @property
    def problem(self) -> str:
        """Why the last attempt to read it failed; empty if it succeeded."""

    def read(self) -> NodeMeta | None:
        """Return its content: the last known one if it cannot be read now, None if it never could be read."""

    def close(self) -> None:
        """Close all open files and connections."""


class NamespaceLabels(Protocol):
    """The labels of namespaces."""

    @property
    def source(self) -> str:
        """Where they are read from, for display."""

    @property
    def problem(self) -> str:
        """Why the last attempt to read them failed; empty if it succeeded."""

    def read(self) -> Mapping[str, Mapping[str, str]] | None:
        """Return the labels of each namespace: the last known ones, None if they never could be read."""


class ClusterFiles(Protocol):
    """What the cluster agent has read from the API server."""

    def read(self) -> None:
        """Read the files that have changed."""

    def page(self) -> list[dict[str, object]]:
        """Return what is in effect of each file and how old it is, as plain data."""


class DeviceLocator(Protocol):
    """Locates devices by sysfs. Blocking, but quick."""

    def locate(self, given: DeviceFacts) -> tuple[LocatedDevice, ...]:
        """Find the NUMA nodes of devices; one entry per device, ``nodes`` is None if they are unknown."""
