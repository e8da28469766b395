"""Who has probably written a cpuset that is not ours. Pure.

The kernel does not tell who writes (fanotify would, for CAP_SYS_ADMIN, which a writer of cpusets should not
have). So it is inferred, from what was going on and from the value:

1. kubelet holds that very set for the container, or as its default: nobody else would have a reason to write
   it. (kubelet 1.36, CPU manager: it reconciles by UpdateContainerResources. What comes through us carries
   our set; so this is a kubelet at the runtime's own socket.)
2. systemd has just reloaded: it writes to each unit what its properties say, which under its driver is what
   runc told it last.
3. the runtime has saved that very set: runc writes the whole of its saved resources at each update of
   anything, so what it last was told comes back; or somebody updated the container at the runtime's socket.
4. an update by kubelet has just passed through us: what the runtime made of it differs from what it carried.

Else it is unknown: a shell, an agent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from proxy.model.idset import CpuSet


class Author(StrEnum):
    """Who writes cpusets on a node beside us."""

    KUBELET = "kubelet"
    SYSTEMD = "systemd"
    RUNC = "runc"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known around a write.

    Attributes:
        found: What the kernel held.
        saved: What the runtime has saved for the container; None where nobody knows.
        kubelet: Sets that kubelet's CPU manager would write for it.
        hint: Who was seen to be at work just before.
    """

    found: CpuSet
    saved: CpuSet | None = None
    kubelet: Collection[CpuSet] = ()
    hint: Author = Author.UNKNOWN


def likely(evidence: Evidence) -> Author:
    """Tell who wrote, probably."""
    if evidence.found in evidence.kubelet:
        return Author.KUBELET
    if evidence.hint is Author.SYSTEMD:
        return Author.SYSTEMD
    if evidence.saved is not None and evidence.found == evidence.saved:
        return Author.RUNC
    return evidence.hint


NEXT = {
    Author.KUBELET: "have kubelet use our socket, or set its cpuManagerPolicy to none",
    Author.SYSTEMD: "look for AllowedCPUs= on the container's scope and the slices above it",
    Author.RUNC: "look for who updates containers at the runtime's own socket",
    Author.UNKNOWN: "look for an agent on this node that writes cpuset.cpus",
}
"""What to do about each, in words."""
