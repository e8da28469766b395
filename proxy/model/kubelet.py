"""What kubelet's CPU manager does on a node, as far as that could be determined."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from proxy.model.idset import CpuSet

Held = Mapping[str, Mapping[str, CpuSet]]
"""Pod uid to container name to CPUs."""


class CpuManager(Struct, frozen=True):
    """Settings and allocations of kubelet's CPU manager.

    Attributes:
        policy: ``none`` or ``static``; empty where it is unknown.
        options: The policy's options that are set, by name.
        reserved: CPUs that it keeps back.
        topology_policy, topology_scope: Of its topology manager; empty where unknown.
        default: What containers without CPUs of their own run on, by its account.
        held: The containers that it gave CPUs, and the CPUs.
        sources: Name of an attribute to where its value came from, in words.
        problems: What could not be found out, or contradicts itself, one sentence each.
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
