"""Values read from outside: the state of kubelet's CPU manager, and a part of the Kubernetes Node object."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from proxy.model.idset import CpuSet

Held = Mapping[str, Mapping[str, CpuSet]]
"""Pod uid to container name to CPUs."""


class CpuManager(Struct, frozen=True):
    """Settings and allocations of kubelet's CPU manager.

    Attributes:
        policy: ``none`` or ``static``; empty if unknown.
        options: The policy's options that are set, by name.
        reserved: CPUs that it keeps back.
        topology_policy, topology_scope: Of its topology manager; empty if unknown.
        default: The CPUs of containers without exclusive CPUs, by its state.
        held: The CPUs that it assigned, by pod uid and container name.
        sources: Name of an attribute to where its value came from, as text.
        problems: Values that could not be read, or that contradict each other, one sentence each.
    """

    policy: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    reserved: CpuSet = field(default_factory=CpuSet)
    topology_policy: str = ""
    topology_scope: str = ""
    default: CpuSet = field(default_factory=CpuSet)
    held: Held = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


class NodeMeta(Struct, frozen=True):
    """A Node object of Kubernetes.

    Attributes:
        name, uid: Empty if the object has none.
        labels, annotations: As in its metadata.
        capacity, allocatable: Resource to amount in thousandths; empty if it has no status.
        problems: Members that could not be read, one sentence each.
    """

    name: str = ""
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
