"""What the controller needs beside the kernel and the runtime. Every call may block: a worker makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from proxy.model.idset import Mask
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.requests import PodRequests
from proxy.model.workload import Near


class Ledger(Protocol):
    """Durable key-value state; see proxy.backends.ledger."""

    @property
    def entries(self) -> Mapping[str, Mapping[str, object]]:
        """Everything that is stored, by key."""

    def write(self, changes: Mapping[str, Mapping[str, object] | None]) -> None:
        """Store values (None: delete) in one atomic step; a crash leaves all of them or none.

        Raises:
            CannotCreateError: The state cannot be written.
            RecordError: Some of the values cannot be stored, whenever that is tried: they are deleted in the
                same step, and the others are stored.
        """

    def close(self) -> None:
        """Flush and close."""


class MachineEvents(Protocol):
    """What the kernel tells by itself of CPUs and memory that come and go."""

    def fileno(self) -> int:
        """A descriptor that is readable when there is something."""

    def heard(self) -> bool:
        """Take what is there, without waiting; True where the machine may be another one now.

        Raises:
            OSError: Nothing more can be heard.
        """

    def close(self) -> None:
        """Listen no more."""


class Displaced(Protocol):
    """Tasks that the kernel has moved out of a cgroup whose last CPU or memory node went (v1 does so)."""

    def bring_back(self, path: str) -> int:
        """Move them back into a group that holds none and has CPUs and memory nodes again.

        Returns:
            How many processes were moved.

        Raises:
            CgroupError: We may not move them.
        """


class DeviceFacts(Struct, frozen=True):
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

    def asks(self, uid: str, namespace: str, name: str) -> tuple[PodRequests, str] | None:
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


class KubeletCpuManager(Protocol):
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

    def near(self, given: DeviceFacts) -> tuple[Near, ...]:
        """Find the NUMA nodes of devices; one entry a device, ``nodes`` None where nothing tells."""
