"""What holds on a node, and who says so: the Node object, kubelet, or our configuration.

Theory (Koordinator's document; reference koordinator c.1, e.1, e.5, h). What an operator writes at the Node
object comes first, and what our configuration says next. Where neither says anything, what kubelet was told
about the same thing holds, so that a node that is taken over from kubelet goes on as it did:
``full-pcpus-only`` is ``FullPCPUsOnly``, ``distribute-cpus-across-numa`` is ``DistributeEvenly``, the policy
of its topology manager is ours, with its scope, and what its static policy keeps back is owned by nobody.
Koordinator's code lets kubelet's ``full-pcpus-only`` win over a label; its document has it as it is here, and
the scheduler's configuration, which is for all nodes, last.

``None`` in a label is an answer: nothing is prescribed, whatever kubelet and the configuration say. An empty
text is none. What cannot be read counts as absent, and what is wrong with it stays beside the value that
holds instead.

Koordinator knows the scope ``pod`` only. With a label the scope of our configuration is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.model.idset import CpuSet
from proxy.model.koordinator import KUBERNETES, NodeBindPolicy, NumaPolicy, NumaStrategy
from proxy.model.kubelet import CpuManager
from proxy.model.machine import Machine
from proxy.model.nodeobject import NodeMeta
from proxy.model.options import Policy, Scope
from proxy.place.binding.wish import ARM
from proxy.place.cputopo import CpuTopology
from proxy.place.packed import NotEnoughCpus, take_packed
from proxy.plan.node import Node
from proxy.plan.prescribed import DEFAULT, Prescribed, Value
from proxy.pools.nodekeys import (
    AMPLIFICATION,
    BIND_POLICY,
    NUMA_POLICY,
    NUMA_RESERVATION,
    NUMA_STRATEGY,
    RESERVATION,
    SYSTEM_QOS,
    Reservation,
    amplification_ratios,
    read_label,
    reservation,
    system_qos,
)

APPLY = ("", "Default", "ReservedCPUsOnly")
"""Values of a reservation's ``applyPolicy``."""
TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
"""As kubelet reads its options."""


def prescribe(base: Node, machine: Machine, meta: NodeMeta | None, kubelet: CpuManager | None) -> Prescribed:
    """Find out what holds.

    Args:
        base: The node as our configuration has it. CPUs for a reservation that only tells how many are chosen
            on its machine, so that they stay the same when others go offline.
        machine: The machine as it is now.
        meta: The Node object; None where there is none.
        kubelet: What its CPU and topology managers do; None where nobody tells.
    """
    said, told = meta or NodeMeta(), kubelet or CpuManager()
    policy, scope = _policy(base, said, told)
    kept, apply_policy = _reservation(base, machine, said)
    system, alone = _system(base, machine, said)
    ratios, no_ratios = amplification_ratios(said.annotations)
    return Prescribed(
        _bind(base, said, told),
        _strategy(base, said, told),
        policy,
        scope,
        _reserved(base, machine, told),
        kept,
        apply_policy,
        system,
        alone,
        Value(ratios or {}, _annotation(AMPLIFICATION) if ratios else DEFAULT, no_ratios),
        _numa_reservation(said),
    )


def node_reservation(annotations: Mapping[str, str], topology: CpuTopology) -> tuple[Reservation, str]:
    """Read the node's reservation, with CPUs where it only tells how many; and what is wrong with it.

    The CPUs are those that kubelet would choose for a reserve of as many (reference koordinator d).
    """
    found, problem = reservation(annotations)
    if found.text:
        return found.with_cpus(found.cpus), problem
    try:
        return found.with_cpus(take_packed(topology, topology.cpus, found.count)), problem
    except NotEnoughCpus as error:
        return found.with_cpus(CpuSet()), problem or f"cannot choose CPUs for the node's reservation: {error}"


def _bind(base: Node, said: NodeMeta, told: CpuManager) -> Value[NodeBindPolicy]:
    value, key, problem = read_label(NodeBindPolicy, BIND_POLICY, said.labels)
    whole = NodeBindPolicy.FULL_PCPUS_ONLY
    if key:
        if value is NodeBindPolicy.SPREAD_BY_PCPUS and _whole_cores_only(base):
            arch = base.machine.architecture
            problem = f"{value} cannot be had on {arch}: pods that own CPUs are refused"
        return Value(value, _label(key), problem)
    if base.bind is NodeBindPolicy.NONE and _option(told, "full-pcpus-only"):
        return Value(whole, _kubelets("full-pcpus-only", told, "options"), problem)
    return Value(base.bind, _configured("koordinator.cpuBindPolicy", base.bind), problem)


def _whole_cores_only(base: Node) -> bool:
    return base.machine.architecture in ARM and base.topology.cpus_per_core > 1


def _strategy(base: Node, said: NodeMeta, told: CpuManager) -> Value[NumaStrategy]:
    value, key, problem = read_label(NumaStrategy, NUMA_STRATEGY, said.labels)
    if key:
        return Value(value, _label(key))
    if base.strategy is NumaStrategy.NONE and _option(told, "distribute-cpus-across-numa"):
        source = _kubelets("distribute-cpus-across-numa", told, "options")
        return Value(NumaStrategy.DISTRIBUTE_EVENLY, source, problem)
    return Value(base.strategy, _configured("koordinator.numaAllocateStrategy", base.strategy), problem)


def _policy(base: Node, said: NodeMeta, told: CpuManager) -> tuple[Value[Policy], Value[Scope]]:
    value, key, problem = read_label(NumaPolicy, NUMA_POLICY, said.labels)
    scope = Value(base.scope, _configured("topologyManagerScope", base.scope is not Scope.CONTAINER))
    if key:
        return Value(KUBERNETES[value], _label(key)), scope
    kubelets = told.topology_policy
    if base.policy is Policy.NONE and kubelets in tuple(Policy) and kubelets != Policy.NONE:
        if told.topology_scope in tuple(Scope):
            source = _kubelets("topologyManagerScope", told, "topology_scope")
            scope = Value(Scope(told.topology_scope), source)
        source = _kubelets("topologyManagerPolicy", told, "topology_policy")
        return Value(Policy(kubelets), source, problem), scope
    own = base.policy is not Policy.NONE
    return Value(base.policy, _configured("topologyManagerPolicy", own), problem), scope


def _reserved(base: Node, machine: Machine, told: CpuManager) -> Value[CpuSet]:
    own = _configured("reservedSystemCPUs, or the amounts,", base.reserved)
    kubelets = told.reserved & machine.present
    if base.reserved or told.policy != "static" or not kubelets:
        return Value(base.reserved, own)
    return Value(kubelets, _kubelets("reserve", told, "reserved"))


def _reservation(base: Node, machine: Machine, said: NodeMeta) -> tuple[Value[CpuSet], Value[str]]:
    found, problem = node_reservation(said.annotations, base.topology)
    cpus, absent = _there(found.cpus, machine, RESERVATION)
    problem = problem or absent
    apply_policy = Value(APPLY[1])
    if found.policy in APPLY[1:]:
        apply_policy = Value(found.policy, _annotation(RESERVATION))
    elif found.policy:
        wrong = f"{found.policy!r:.60} is not one of {', '.join(APPLY[1:])}"
        apply_policy = Value(APPLY[1], problem=f"annotation {RESERVATION}: applyPolicy {wrong}")
    if cpus:
        return Value(cpus, _annotation(RESERVATION), problem), apply_policy
    source = _configured("koordinator.reservedCPUs", base.reservation)
    return Value(base.reservation, source, problem), apply_policy


def _system(base: Node, machine: Machine, said: NodeMeta) -> tuple[Value[CpuSet], Value[bool]]:
    found, problem = system_qos(said.annotations)
    cpus, absent = _there(found.cpus, machine, SYSTEM_QOS)
    problem = problem or absent
    if cpus:
        alone = Value(found.exclusive, _annotation(SYSTEM_QOS))
        return Value(cpus, _annotation(SYSTEM_QOS), problem), alone
    source = _configured("koordinator.systemCPUs", base.system)
    alone = Value(base.system_alone, _configured("koordinator.systemCPUsExclusive", not base.system_alone))
    return Value(base.system, source, problem), alone


def _there(cpus: CpuSet, machine: Machine, key: str) -> tuple[CpuSet, str]:
    """Give the CPUs that the machine has, offline ones too, and tell of others."""
    absent = cpus - machine.present
    problem = f"annotation {key}: there is no CPU {absent} here (CPUs: {machine.present})"
    return cpus & machine.present, problem if absent else ""


def _numa_reservation(said: NodeMeta) -> Value[bool]:
    text = said.labels.get(NUMA_RESERVATION, "")
    if text in ("true", "false"):
        return Value(text == "true", _label(NUMA_RESERVATION))
    problem = f"label {NUMA_RESERVATION}: {text!r:.60} is neither true nor false" if text else ""
    return Value(value=False, problem=problem)


def _option(told: CpuManager, name: str) -> bool:
    # Of a policy that is not in force its options say nothing (reference koordinator e.1).
    return told.policy == "static" and told.options.get(name) in TRUE


def _label(key: str) -> str:
    return f"label {key} of the Node object"


def _annotation(key: str) -> str:
    return f"annotation {key} of the Node object"


def _kubelets(name: str, told: CpuManager, attribute: str) -> str:
    where = told.sources.get(attribute, "")
    return f"kubelet's {name} ({where})" if where else f"kubelet's {name}"


def _configured(name: str, given: object) -> str:
    return f"{name} of the configuration" if given else DEFAULT
