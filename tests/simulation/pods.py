"""The classes of pods of a simulated node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodKind:
    """A class of pods.

    Attributes:
        qos: Koordinator's label.
        kube: The level of the pod's cgroup, which shows the Kubernetes QoS class.
        named: CPUs that the scheduler names; 0 for none.
        whole: Whole CPUs that its container requests; 0 for none.
        chosen: CPUs that the pod requests, and that the daemon chooses when its sandbox is made; 0 for none.
        weight: How many there are of it.
    """

    qos: str
    kube: str
    named: int = 0
    whole: int = 0
    chosen: int = 0
    weight: int = 1


KINDS = (
    PodKind("LS", "burstable", weight=4),
    PodKind("", "burstable", weight=2),
    PodKind("BE", "besteffort", weight=3),
    PodKind("", "besteffort", weight=1),
    PodKind("LSE", "", named=2, weight=2),
    PodKind("LSR", "", named=2, weight=2),
    PodKind("LSE", "", named=1, weight=1),
    PodKind("LSE", "", chosen=2, weight=2),
    PodKind("LSR", "", chosen=1, weight=2),
    PodKind("", "", whole=1, weight=3),
    PodKind("", "", whole=2, weight=2),
    PodKind("SYSTEM", "burstable", weight=1),
)
