"""Infer the likely writer of a cpuset that another program has changed.

The kernel does not report which process writes (fanotify would, but needs CAP_SYS_ADMIN, which a program that
writes cpusets should not have). So the writer is inferred from the value, and from the programs that were
active:

1. kubelet's CPU manager holds exactly this set for the container, or as its default set: no other program has
   a reason to write it. (kubelet 1.36: the CPU manager reconciles by UpdateContainerResources. An update that
   passes through topoproxy carries the planned set, so this kubelet uses the runtime's own socket.)
2. systemd has just reloaded: it writes the properties of each unit to the kernel. Under the systemd cgroup
   driver, the cpuset property is the last set that runc sent.
3. the runtime has saved exactly this set: runc writes all of its saved resources at each update of any of
   them, so the last set that was sent to it comes back; or a client updated the container at the runtime's
   own socket.
4. an update by kubelet has just passed through topoproxy, and the kernel's set differs from the set that it
   carried.

Otherwise the writer is unknown, such as a shell or an agent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from msgspec import Struct

from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.model.workload import Container

HINT_S = 3.0
"""A write counts as caused by an event for this many seconds after it."""
ANY_CONTAINER = ""
"""The key of a hint that concerns all containers."""


class WriterKind(StrEnum):
    """The programs besides topoproxy that write cpusets on a node."""

    KUBELET = "kubelet"
    SYSTEMD = "systemd"
    RUNC = "runc"
    UNKNOWN = "unknown"


class WriterHint(Struct, frozen=True):
    """A program that may write a cpuset was seen to be active.

    Attributes:
        writer: The program.
        at: When, in seconds of a monotonic clock.
    """

    writer: WriterKind
    at: float


_NO_HINT = WriterHint(WriterKind.UNKNOWN, float("-inf"))


class Evidence(Struct, frozen=True):
    """The evidence about the writer of a cpuset.

    Attributes:
        cpus: The cpuset that the kernel held.
        saved: The set that the runtime has saved for the container; None if it is unknown.
        kubelet: Sets that kubelet's CPU manager would write for it.
        hint: The program that was active just before the write.
    """

    cpus: CpuSet
    saved: CpuSet | None = None
    kubelet: Collection[CpuSet] = ()
    hint: WriterKind = WriterKind.UNKNOWN


def likely_writer(evidence: Evidence) -> WriterKind:
    """Return the likely writer."""
    if evidence.cpus in evidence.kubelet:
        return WriterKind.KUBELET
    if evidence.hint is WriterKind.SYSTEMD:
        return WriterKind.SYSTEMD
    if evidence.cpus == evidence.saved:
        return WriterKind.RUNC
    return evidence.hint


def hinted_writer(hints: Mapping[str, WriterHint], container_id: str, now: float) -> WriterKind:
    """Return the likely writer of a container's cpuset: the last program that was active recently."""
    recent = (hints.get(container_id, _NO_HINT), hints.get(ANY_CONTAINER, _NO_HINT))
    last = max(recent, key=lambda hint: hint.at)
    return last.writer if now - last.at <= HINT_S else WriterKind.UNKNOWN


def kubelet_sets(manager: CpuManager, container: Container) -> list[CpuSet]:
    """Return the sets that kubelet's CPU manager would write for a container."""
    if manager.policy != "static":
        return []
    assigned = manager.held.get(container.pod.uid, {}).get(container.name)
    return [cpus for cpus in (assigned, manager.default) if cpus]


ADVICE = {
    WriterKind.KUBELET: "have kubelet use the socket of topoproxy, or set its cpuManagerPolicy to none",
    WriterKind.SYSTEMD: "look for AllowedCPUs= on the container's scope and the slices above it",
    WriterKind.RUNC: "look for a program that updates containers at the runtime's own socket",
    WriterKind.UNKNOWN: "look for an agent on this node that writes cpuset.cpus",
}
"""What an operator can do about each writer."""
