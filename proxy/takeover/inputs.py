"""The inputs of a takeover: kubelet's file and settings, the owners of CPUs, and whether kubelet runs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proxy.backends.kubelet.checkpoints import (
    Checkpoint,
    CheckpointError,
    HeldCpus,
    held_cpus,
    read_cpu_checkpoint,
)
from proxy.engine.enforcement import is_applied_to_all
from proxy.engine.owners import NEVER_PINNED_BY_KUBELET
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.model.workload import Phase, Pod

STRICT_CPU_RESERVATION = "strict-cpu-reservation"


class NotAppliedToAll(enum.StrEnum):
    """Why the plan is not applied to all pods, so that CPUs of kubelet's pods could not be kept for them."""

    OBSERVE = "observe"
    """The mode is ``observe``."""
    SELECTION = "selection"
    """Mode enforce selects only a part of the pods."""
    LAGGING = "lagging"
    """A change of mode or selection has not reached all running pods yet."""
    RELEASED = "released"
    """The node is released, or about to be."""


@dataclass(frozen=True, slots=True)
class OwningContainer:
    """A container that has exclusive CPUs, according to our own state.

    Attributes:
        uid, name: As kubelet's file names it.
        ref: ``namespace/pod/container``.
        cpus: Its exclusive CPUs.
    """

    uid: str
    name: str
    ref: str
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class CpuManagerFile:
    """kubelet's ``cpu_manager_state`` as it was read.

    Attributes:
        text: Its content; None if there is no file.
        problem: Why it cannot be used, as text; empty if it can.
        checkpoint, held: Its parsed content; None if it cannot be used.
    """

    text: str | None = None
    problem: str = ""
    checkpoint: Checkpoint | None = None
    held: HeldCpus | None = None

    @classmethod
    def of(cls, text: str | None) -> CpuManagerFile:
        """Read the file's text."""
        if text is None:
            return cls(None, "it does not exist")
        try:
            checkpoint = read_cpu_checkpoint(text)
            held = held_cpus(checkpoint)
        except CheckpointError as error:
            return cls(text, str(error))
        if checkpoint.version is None:
            return cls(text, "its checksum is wrong")
        return cls(text, "", checkpoint, held)

    @property
    def policy(self) -> str:
        """The policy for which it was written; empty if it cannot be used."""
        return self.checkpoint.policy if self.checkpoint is not None else ""

    @property
    def version(self) -> int:
        """Its version; 0 if it cannot be used."""
        return (self.checkpoint.version or 0) if self.checkpoint is not None else 0


@dataclass(frozen=True, slots=True)
class TakeoverInputs:
    """All inputs of the rules of a takeover, at one moment.

    Attributes:
        directory: The directory of kubelet's file.
        file: The file.
        manager: What is known of kubelet's CPU manager.
        running: Signs that kubelet runs, as text; empty if there are none.
        unwritable: Why the file could not be written, as text; empty if it could.
        owning: The owners of exclusive CPUs, according to our own state.
        pods: Pods that exist: uid to ``namespace/name``.
        static_pods: Uids of pods that kubelet has from files (static pods).
        decided_elsewhere: Uids of pods whose CPUs a label or the scheduler decides, not kubelet.
        online, shareable: CPUs of the machine, and those of them that pools may use.
        configured: Our own ``cpuManagerPolicy`` as configured.
        ready: The state has been reconciled with the runtime.
        not_applied: Why the plan is not applied to all pods; None if it is.
        memory_policy: The policy of kubelet's memory manager by its state file; empty if there is none.
    """

    directory: Path
    file: CpuManagerFile
    manager: CpuManager
    running: tuple[str, ...] = ()
    unwritable: str = ""
    owning: tuple[OwningContainer, ...] = ()
    pods: Mapping[str, str] = field(default_factory=dict)
    static_pods: frozenset[str] = frozenset()
    decided_elsewhere: frozenset[str] = frozenset()
    online: CpuSet = field(default_factory=CpuSet)
    shareable: CpuSet = field(default_factory=CpuSet)
    configured: str = "none"
    ready: bool = True
    not_applied: NotAppliedToAll | None = None
    memory_policy: str = ""

    @property
    def owned(self) -> Mapping[tuple[str, str], OwningContainer]:
        """The owners of exclusive CPUs, by uid and name."""
        return {(owner.uid, owner.name): owner for owner in self.owning}

    def ref(self, uid: str, name: str) -> str:
        """Return the name of a container of kubelet's file; with the uid if the pod is unknown."""
        return f"{self.pods.get(uid) or f'pod {uid}'}/{name}"


def owning_containers(state: NodeState) -> tuple[OwningContainer, ...]:
    """List the owners of exclusive CPUs that have not ended."""
    return tuple(
        OwningContainer(c.pod.uid, c.name, c.ref, c.placement.exclusive)
        for c in sorted(state.containers.values(), key=lambda c: (c.ref, c.attempt, c.id))
        if c.owns_cpus
    )


def live_pods(state: NodeState) -> dict[str, str]:
    """List the pods that have a sandbox or a container that has not ended."""
    live = [c.pod for c in state.containers.values() if c.phase is not Phase.EXITED]
    return {pod.uid: pod.ref for pod in (*state.pods.values(), *live)}


def not_applied_reason(state: NodeState) -> NotAppliedToAll | None:
    """Return why the plan is not applied to all pods; None if it is."""
    if is_applied_to_all(state):
        return None
    if state.mode.in_release:
        return NotAppliedToAll.RELEASED
    if not state.mode.enforces:
        return NotAppliedToAll.OBSERVE
    return NotAppliedToAll.LAGGING if state.enforcement.selection.all else NotAppliedToAll.SELECTION


def pods_decided_elsewhere(state: NodeState) -> frozenset[str]:
    """List pods whose CPUs are not decided by kubelet."""
    return frozenset(pod.uid for pod in state.pods.values() if _is_decided_elsewhere(pod))


def _is_decided_elsewhere(pod: Pod) -> bool:
    return pod.qos in NEVER_PINNED_BY_KUBELET or bool(pod.cpuset)
