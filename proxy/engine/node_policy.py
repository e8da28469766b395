"""The policy of a node, from the Node object, kubelet and topoproxy's configuration.

Precedence. The labels and annotations of the Node object come first, and topoproxy's configuration next. If
neither sets a value, the corresponding setting of kubelet applies, so that a node that is taken over from
kubelet continues as before: ``full-pcpus-only`` becomes ``FullPCPUsOnly``, ``distribute-cpus-across-numa``
becomes ``DistributeEvenly``, the policy of its topology manager applies with its scope, and no container owns
the CPUs that its static policy reserves. In Koordinator's code, kubelet's ``full-pcpus-only`` takes
precedence over a label (pkg/scheduler/plugins/nodenumaresource/topology_options.go). Koordinator's
documentation has the order used here; the configuration of the scheduler, which is for all nodes, comes last.

The label value ``None`` is a value: nothing is prescribed, whatever kubelet and the configuration set. An
empty value counts as absent. A value that cannot be read counts as absent, too, and the problem is reported
with the value that applies instead. Koordinator has no scope but ``pod``; if a label sets the policy, the
scope of topoproxy's configuration applies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

from msgspec import Struct

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.koordinator.bind_request import ARM
from proxy.allocation.packed import NotEnoughCpus, take_packed
from proxy.engine.node import Node
from proxy.model.idset import CpuSet
from proxy.model.koordinator import KUBERNETES, NodeBindPolicy, NumaPolicy, NumaStrategy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.machine import Machine
from proxy.model.options import (
    Scope,
    TopologyPolicy,
)
from proxy.model.phrases import no_cpus
from proxy.model.workload import Placement
from proxy.pools.node_keys import (
    AMPLIFICATION,
    BIND_POLICY,
    NUMA_POLICY,
    NUMA_RESERVATION,
    NUMA_STRATEGY,
    RESERVATION,
    SYSTEM_QOS,
    NodeReservation,
    amplification_ratios,
    read_label,
    reservation,
    system_qos,
)

T_co = TypeVar("T_co", covariant=True)

DEFAULT_SOURCE = "default"


class PolicyValue(Struct, Generic[T_co], frozen=True):
    """A value of the policy that is in effect, and its source.

    Attributes:
        value: The value.
        source: The place where it was set, as text.
        problem: What is wrong with a value that was set elsewhere; empty if nothing is.
    """

    value: T_co
    source: str = DEFAULT_SOURCE
    problem: str = ""


class NodePolicy(Struct, frozen=True):
    """The policy that applies on a node.

    Attributes:
        bind: How CPUs of owners are bound.
        strategy: Which NUMA nodes are filled first.
        policy, scope: The policy and the scope of the topology manager.
        reserved: CPUs that no container owns (``reservedSystemCPUs``).
        reservation: CPUs that neither pools nor owners use.
        apply_policy: How a scheduler treats the reservation; the node keeps the CPUs in any case.
        system: CPUs for pods of class SYSTEM.
        system_cpus_exclusive: Whether no other container uses them.
        amplification: For each resource, the factor by which a scheduler multiplies its amount.
        numa_reservation: Whether kubelet's reserved amounts are subtracted from the NUMA nodes in the node's
            report.
    """

    bind: PolicyValue[NodeBindPolicy]
    strategy: PolicyValue[NumaStrategy]
    policy: PolicyValue[TopologyPolicy]
    scope: PolicyValue[Scope]
    reserved: PolicyValue[CpuSet]
    reservation: PolicyValue[CpuSet]
    apply_policy: PolicyValue[str]
    system: PolicyValue[CpuSet]
    system_cpus_exclusive: PolicyValue[bool]
    amplification: PolicyValue[Mapping[str, float]]
    numa_reservation: PolicyValue[bool]

    def on(self, node: Node) -> Node:
        """Return a node with these rules."""
        return dataclasses.replace(
            node,
            bind=self.bind.value,
            strategy=self.strategy.value,
            policy=self.policy.value,
            scope=self.scope.value,
            reserved=self.reserved.value,
            node_reservation=self.reservation.value,
            system=self.system.value,
            system_cpus_exclusive=self.system_cpus_exclusive.value,
            pool_placements=dict[object, Placement](),
        )

    def named(self) -> dict[str, PolicyValue[object]]:
        """Return all values under the names of the configuration."""
        return {
            "cpuBindPolicy": self.bind,
            "numaAllocateStrategy": self.strategy,
            "topologyManagerPolicy": self.policy,
            "topologyManagerScope": self.scope,
            "reservedSystemCPUs": self.reserved,
            "reservedCPUs": self.reservation,
            "applyPolicy": self.apply_policy,
            "systemCPUs": self.system,
            "systemCPUsExclusive": self.system_cpus_exclusive,
            "amplification": self.amplification,
            "numaReservation": self.numa_reservation,
        }


APPLY_POLICIES = ("", "Default", "ReservedCPUsOnly")
"""Values of a reservation's ``applyPolicy``."""
KUBELET_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
"""The texts that kubelet reads as true in its options."""


def read_node_policy(
    base: Node, machine: Machine, meta: NodeMeta | None, kubelet: CpuManager | None
) -> NodePolicy:
    """Return the policy that applies.

    Args:
        base: The node according to topoproxy's configuration. CPUs for a reservation that only has a count
            are chosen on its machine, so that they stay the same when other CPUs go offline.
        machine: The machine as it is now.
        meta: The Node object; None if there is none.
        kubelet: The settings of kubelet's CPU and topology managers; None if they are unknown.
    """
    meta, kubelet = meta or NodeMeta(), kubelet or CpuManager()
    policy, scope = _policy(base, meta, kubelet)
    reserved_cpus, apply_policy = _reservation(base, machine, meta)
    system, exclusive = _system(base, machine, meta)
    ratios, ratio_problem = amplification_ratios(meta.annotations)
    return NodePolicy(
        _bind(base, meta, kubelet),
        _strategy(base, meta, kubelet),
        policy,
        scope,
        _reserved(base, machine, kubelet),
        reserved_cpus,
        apply_policy,
        system,
        exclusive,
        PolicyValue(
            ratios or {}, _source_annotation(AMPLIFICATION) if ratios else DEFAULT_SOURCE, ratio_problem
        ),
        _numa_reservation(meta),
    )


def node_reservation(annotations: Mapping[str, str], topology: CpuTopology) -> tuple[NodeReservation, str]:
    """Read the node's reservation, with chosen CPUs if it only has a count; and its problem, if any.

    The CPUs are those that kubelet would reserve for the count (koordinator a7a1b76,
    pkg/koordlet/statesinformer/impl/states_noderesourcetopology.go).
    """
    annotated, problem = reservation(annotations)
    if annotated.text:
        return annotated.with_cpus(annotated.cpus), problem
    try:
        return annotated.with_cpus(take_packed(topology, topology.cpus, annotated.count)), problem
    except NotEnoughCpus as error:
        return annotated.with_cpus(
            CpuSet()
        ), problem or f"cannot choose CPUs for the node's reservation: {error}"


def _bind(base: Node, meta: NodeMeta, kubelet: CpuManager) -> PolicyValue[NodeBindPolicy]:
    value, key, problem = read_label(NodeBindPolicy, BIND_POLICY, meta.labels)
    full_cores = NodeBindPolicy.FULL_PCPUS_ONLY
    if key:
        if value is NodeBindPolicy.SPREAD_BY_PCPUS and _whole_cores_only(base):
            arch = base.machine.architecture
            problem = f"{value} is not available on {arch}: pods that own CPUs are rejected"
        return PolicyValue(value, _source_label(key), problem)
    if base.bind is NodeBindPolicy.NONE and _kubelet_option(kubelet, "full-pcpus-only"):
        return PolicyValue(full_cores, _source_kubelet("full-pcpus-only", kubelet, "options"), problem)
    return PolicyValue(base.bind, _source_config("koordinator.cpuBindPolicy", base.bind), problem)


def _whole_cores_only(base: Node) -> bool:
    return base.machine.architecture in ARM and base.topology.cpus_per_core > 1


def _strategy(base: Node, meta: NodeMeta, kubelet: CpuManager) -> PolicyValue[NumaStrategy]:
    value, key, problem = read_label(NumaStrategy, NUMA_STRATEGY, meta.labels)
    if key:
        return PolicyValue(value, _source_label(key))
    if base.strategy is NumaStrategy.NONE and _kubelet_option(kubelet, "distribute-cpus-across-numa"):
        source = _source_kubelet("distribute-cpus-across-numa", kubelet, "options")
        return PolicyValue(NumaStrategy.DISTRIBUTE_EVENLY, source, problem)
    return PolicyValue(
        base.strategy, _source_config("koordinator.numaAllocateStrategy", base.strategy), problem
    )


def _policy(
    base: Node, meta: NodeMeta, kubelet: CpuManager
) -> tuple[PolicyValue[TopologyPolicy], PolicyValue[Scope]]:
    value, key, problem = read_label(NumaPolicy, NUMA_POLICY, meta.labels)
    scope = PolicyValue(base.scope, _source_config("topologyManagerScope", base.scope is not Scope.CONTAINER))
    if key:
        return PolicyValue(KUBERNETES[value], _source_label(key)), scope
    kubelet_policy = kubelet.topology_policy
    if (
        base.policy is TopologyPolicy.NONE
        and kubelet_policy in tuple(TopologyPolicy)
        and kubelet_policy != TopologyPolicy.NONE
    ):
        if kubelet.topology_scope in tuple(Scope):
            source = _source_kubelet("topologyManagerScope", kubelet, "topology_scope")
            scope = PolicyValue(Scope(kubelet.topology_scope), source)
        source = _source_kubelet("topologyManagerPolicy", kubelet, "topology_policy")
        return PolicyValue(TopologyPolicy(kubelet_policy), source, problem), scope
    is_configured = base.policy is not TopologyPolicy.NONE
    return PolicyValue(base.policy, _source_config("topologyManagerPolicy", is_configured), problem), scope


def _reserved(base: Node, machine: Machine, kubelet: CpuManager) -> PolicyValue[CpuSet]:
    source = _source_config("reservedSystemCPUs, or the amounts,", base.reserved)
    kubelet_reserved = kubelet.reserved & machine.present
    if base.reserved or kubelet.policy != "static" or not kubelet_reserved:
        return PolicyValue(base.reserved, source)
    return PolicyValue(kubelet_reserved, _source_kubelet("reserve", kubelet, "reserved"))


def _reservation(
    base: Node, machine: Machine, meta: NodeMeta
) -> tuple[PolicyValue[CpuSet], PolicyValue[str]]:
    annotated, problem = node_reservation(meta.annotations, base.topology)
    cpus, absent = _present(annotated.cpus, machine, RESERVATION)
    problem = problem or absent
    apply_policy = PolicyValue(APPLY_POLICIES[1])
    if annotated.policy in APPLY_POLICIES[1:]:
        apply_policy = PolicyValue(annotated.policy, _source_annotation(RESERVATION))
    elif annotated.policy:
        problem_text = f"{annotated.policy!r:.60} is not one of {', '.join(APPLY_POLICIES[1:])}"
        apply_policy = PolicyValue(
            APPLY_POLICIES[1], problem=f"annotation {RESERVATION}: applyPolicy {problem_text}"
        )
    if cpus:
        return PolicyValue(cpus, _source_annotation(RESERVATION), problem), apply_policy
    source = _source_config("koordinator.reservedCPUs", base.node_reservation)
    return PolicyValue(base.node_reservation, source, problem), apply_policy


def _system(base: Node, machine: Machine, meta: NodeMeta) -> tuple[PolicyValue[CpuSet], PolicyValue[bool]]:
    annotated, problem = system_qos(meta.annotations)
    cpus, absent = _present(annotated.cpus, machine, SYSTEM_QOS)
    problem = problem or absent
    if cpus:
        exclusive = PolicyValue(annotated.exclusive, _source_annotation(SYSTEM_QOS))
        return PolicyValue(cpus, _source_annotation(SYSTEM_QOS), problem), exclusive
    source = _source_config("koordinator.systemCPUs", base.system)
    exclusive = PolicyValue(
        base.system_cpus_exclusive,
        _source_config("koordinator.systemCPUsExclusive", not base.system_cpus_exclusive),
    )
    return PolicyValue(base.system, source, problem), exclusive


def _present(cpus: CpuSet, machine: Machine, key: str) -> tuple[CpuSet, str]:
    """Return the CPUs that the machine has, including offline ones, and a problem that names the others."""
    absent = cpus - machine.present
    problem = f"annotation {key}: {no_cpus(absent)} here (CPUs: {machine.present})"
    return cpus & machine.present, problem if absent else ""


def _numa_reservation(meta: NodeMeta) -> PolicyValue[bool]:
    text = meta.labels.get(NUMA_RESERVATION, "")
    if text in ("true", "false"):
        return PolicyValue(text == "true", _source_label(NUMA_RESERVATION))
    problem = f"label {NUMA_RESERVATION}: {text!r:.60} is neither true nor false" if text else ""
    return PolicyValue(value=False, problem=problem)


def _kubelet_option(kubelet: CpuManager, name: str) -> bool:
    # The options of a policy that is not in effect are ignored.
    return kubelet.policy == "static" and kubelet.options.get(name) in KUBELET_TRUE


def _source_label(key: str) -> str:
    return f"label {key} of the Node object"


def _source_annotation(key: str) -> str:
    return f"annotation {key} of the Node object"


def _source_kubelet(name: str, kubelet: CpuManager, attribute: str) -> str:
    where = kubelet.sources.get(attribute, "")
    return f"kubelet's {name} ({where})" if where else f"kubelet's {name}"


def _source_config(name: str, is_set: object) -> str:
    return f"{name} of the configuration" if is_set else DEFAULT_SOURCE
