"""Values that hold on a node, each with who says so. ``proxy.plan.prescribe`` finds them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from proxy.model.idset import CpuSet
from proxy.model.koordinator import NodeBindPolicy, NumaStrategy
from proxy.model.options import Policy, Scope
from proxy.model.workload import Placement
from proxy.plan.node import Node

T_co = TypeVar("T_co", covariant=True)

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Value(Generic[T_co]):
    """One value that holds.

    Attributes:
        value: The value.
        source: Who says so, in words.
        problem: What is wrong with what somebody else says, in words; empty where nothing is.
    """

    value: T_co
    source: str = DEFAULT
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Prescribed:
    """What holds on a node.

    Attributes:
        bind: How CPUs of owners are bound.
        strategy: Which NUMA nodes are filled first.
        policy, scope: Of the topology manager.
        reserved: CPUs that nobody owns (``reservedSystemCPUs``).
        reservation: CPUs that neither pools nor owners use.
        apply_policy: What a scheduler does with the reservation; the node keeps the CPUs in any case.
        system: CPUs of class SYSTEM.
        system_alone: Whether nobody else uses them.
        amplification: Resource to how many times a scheduler counts it.
        numa_reservation: Whether kubelet's reserve is taken out of the NUMA nodes of the node's report.
    """

    bind: Value[NodeBindPolicy]
    strategy: Value[NumaStrategy]
    policy: Value[Policy]
    scope: Value[Scope]
    reserved: Value[CpuSet]
    reservation: Value[CpuSet]
    apply_policy: Value[str]
    system: Value[CpuSet]
    system_alone: Value[bool]
    amplification: Value[Mapping[str, float]]
    numa_reservation: Value[bool]

    def on(self, node: Node) -> Node:
        """Give a node with these rules."""
        return dataclasses.replace(
            node,
            bind=self.bind.value,
            strategy=self.strategy.value,
            policy=self.policy.value,
            scope=self.scope.value,
            reserved=self.reserved.value,
            reservation=self.reservation.value,
            system=self.system.value,
            system_alone=self.system_alone.value,
            alike=dict[object, Placement](),
        )

    def named(self) -> dict[str, Value[object]]:
        """Give all values under the names that people know them by."""
        return {
            "cpuBindPolicy": self.bind,
            "numaAllocateStrategy": self.strategy,
            "topologyManagerPolicy": self.policy,
            "topologyManagerScope": self.scope,
            "reservedSystemCPUs": self.reserved,
            "reservedCPUs": self.reservation,
            "applyPolicy": self.apply_policy,
            "systemCPUs": self.system,
            "systemCPUsExclusive": self.system_alone,
            "amplification": self.amplification,
            "numaReservation": self.numa_reservation,
        }
