"""What the executor needs from systemd, if containers are systemd scopes. Every call may block."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from msgspec import Struct

from proxy.model.idset import CpuSet, Mask


class UnitSets(Struct, frozen=True):
    """What systemd would write to the cpuset files of a unit; an empty set: nothing."""

    cpus: CpuSet
    mems: Mask


class SystemdEvent(Enum):
    """What systemd reports by itself."""

    CONNECTED = "connected"
    """Signals arrive from now on; earlier changes have not been reported."""
    LOST = "lost"
    RELOADED = "reloaded"
    """All units have been reloaded, and their files may have been written."""


class Units(Protocol):
    """The units of systemd. Every method but ``close`` and ``watch`` blocks, and may be called in any thread.

    Raises:
        UnavailableError: systemd cannot be reached, or does not answer in time.
        CgroupError: systemd refuses; errno ENOENT if there is no such unit.
    """

    def read(self, unit: str) -> UnitSets:
        """Read the cpuset properties of a unit."""

    def set(self, unit: str, cpus: CpuSet | None, mems: Mask | None) -> None:
        """Set the cpuset properties of a unit until it ends; its files have them when this returns.

        None leaves a property unchanged.

        Args:
            unit: The unit, such as ``cri-containerd-ID.scope``.
            cpus: ``AllowedCPUs``; empty for none of its own.
            mems: ``AllowedMemoryNodes``; empty for none of its own.
        """

    def watch(self, on_event: Callable[[SystemdEvent], None]) -> None:
        """Connect, and reconnect after each disconnection; ``on_event`` is called in a thread of its own."""

    def close(self) -> None:
        """Disconnect permanently."""


class Fences(Protocol):
    """Narrows groups above containers for a moment (cgroup v2). For the kernel worker."""

    def replace_cpus(self, path: str, cpus: CpuSet) -> CpuSet:
        """Write the CPU list of a group, whatever it contains.

        Returns:
            The list configured before; empty if the group had none of its own.

        Raises:
            CgroupError: The group is gone (ENOENT), or the kernel refuses.
        """
