"""What the controller needs of systemd, where containers are its scopes. Every call may block."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from msgspec import Struct

from proxy.model.idset import CpuSet, Mask


class UnitSets(Struct, frozen=True):
    """What systemd would write into the cpuset files of a unit; an empty set stands for "nothing"."""

    cpus: CpuSet
    mems: Mask


class UnitNews(Enum):
    """What systemd reports by itself."""

    CONNECTED = "connected"
    """Signals arrive from now on; what was before has not been reported."""
    LOST = "lost"
    RELOADED = "reloaded"
    """All units have been reloaded, and their files may have been written."""


class Units(Protocol):
    """The units of systemd. Every method but ``close`` and ``watch`` blocks, and may be called in any thread.

    Raises:
        UnavailableError: systemd cannot be reached, or does not answer in time.
        CgroupError: It refuses; errno ENOENT where there is no such unit.
    """

    def read(self, unit: str) -> UnitSets:
        """Read what a unit is to have."""

    def set(self, unit: str, cpus: CpuSet | None, mems: Mask | None) -> None:
        """Set what a unit is to have until it ends (None: leave); its files have it when this returns.

        Args:
            unit: As ``cri-containerd-ID.scope``.
            cpus: ``AllowedCPUs``; empty for none of its own.
            mems: ``AllowedMemoryNodes``; empty for none of its own.
        """

    def watch(self, heard: Callable[[UnitNews], None]) -> None:
        """Connect, and again after each end; ``heard`` is called in a thread of its own."""

    def close(self) -> None:
        """Disconnect for good."""


class Fences(Protocol):
    """Narrows groups above containers for a moment (cgroup v2). For the kernel worker."""

    def swap(self, path: str, cpus: CpuSet) -> CpuSet:
        """Write the list of a group, whatever is in it.

        Returns:
            What was configured before; empty where the group had none of its own.

        Raises:
            CgroupError: The group is gone (ENOENT), or the kernel refuses.
        """
