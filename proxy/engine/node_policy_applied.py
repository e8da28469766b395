"""Apply the policy of a node while containers run.

The policy may change at any moment while containers run. Owners keep their CPUs, even those that are newly
reserved: taking CPUs from a running owner would break a promise. Such CPUs become reserved when their owner
ends. Pools follow at once. So a reservation that is possible on an empty node may leave the shared pool empty
on a running one. Then it is rejected, the old reservation stays in effect, and the new one is tried again as
owners end. The CPUs of class SYSTEM are treated in the same way; if both together are not possible, each is
tried by itself.

CPUs that a takeover keeps back, because kubelet reserved them, count as reserved in addition to those of the
policy, whatever the source of these.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct, structs

from proxy.engine.node import Node
from proxy.engine.node_effects import NodeEffects, NodePolicyApplied, pool_changes
from proxy.engine.node_events import NodePolicyRead
from proxy.engine.node_policy import NodePolicy, PolicyValue, read_node_policy
from proxy.engine.state import NodeState
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet
from proxy.model.options import TopologyOptions, check_cpu_options, check_topology_options

T = TypeVar("T")


class AppliedPolicy(Struct, frozen=True):
    """The result of applying a policy.

    Attributes:
        state: The state under the policy in effect.
        policy: The policy in effect, with the problems of values that are not.
        notes: Sentences about owners of CPUs that are reserved now, one for each owner.
        not_applied: Why parts of the policy keep their previous values, one sentence each.
    """

    state: NodeState
    policy: NodePolicy
    notes: tuple[str, ...] = ()
    not_applied: tuple[str, ...] = ()


def node_policy_read(state: NodeState, event: NodePolicyRead) -> tuple[NodeState, NodeEffects]:
    """Apply the policy that was read to the rules of the node, except for impossible parts."""
    applied = _applied(state, event)
    after = applied.state.with_facts(policy=applied.policy, node_meta=event.meta)
    changed = dict[str, PolicyValue[object]]()
    if state.facts.policy is not None and after.node is not state.node:
        previous = state.facts.policy.named()
        changed = {
            name: policy_value
            for name, policy_value in applied.policy.named().items()
            if policy_value.value != previous[name].value
        }
    return after, (*pool_changes(state, after), NodePolicyApplied(changed, applied.notes))


def new_refusals(state: NodeState, event: NodePolicyRead) -> list[str]:
    """Return why the node cannot apply another configuration, without the reasons that are known already."""
    before = state.facts.policy
    known_problems = {value.problem for value in before.named().values()} if before is not None else ()
    return [reason for reason in _applied(state, event).not_applied if reason not in known_problems]


def _applied(state: NodeState, event: NodePolicyRead) -> AppliedPolicy:
    facts, rules = state.facts, event.configured.for_running(state.node)
    policy = read_node_policy(event.configured, state.node.machine, event.meta, facts.cpu_manager)
    policy = _with_kubelet_reserved(policy, facts.kubelet_reserved)
    rules = rules if event.labels is None else rules.with_namespace_labels(event.labels)
    return apply_node_policy(state, policy, facts.policy or policy, event.options, rules)


def _with_kubelet_reserved(policy: NodePolicy, kubelet_cpus: CpuSet) -> NodePolicy:
    reserved = policy.reserved
    if kubelet_cpus <= reserved.value:
        return policy
    message = f"{reserved.source}, and the takeover from kubelet"
    return structs.replace(policy, reserved=PolicyValue(reserved.value | kubelet_cpus, message))


def apply_node_policy(
    state: NodeState,
    policy: NodePolicy,
    before: NodePolicy,
    options: TopologyOptions,
    rules: Node | None = None,
) -> AppliedPolicy:
    """Apply a policy to a running node; impossible parts keep their previous values.

    Args:
        state: The node as it is.
        policy: The policy that was read.
        before: The policy in effect.
        options: The options of the topology manager in topoproxy's configuration.
        rules: The node with those rules of topoproxy's configuration that are not part of a policy; the node
            as it is if None.
    """
    rules = rules or state.node
    problem = _policy_problem(policy.on(rules), options)
    not_applied: tuple[str, ...] = ()
    if problem:
        policy = structs.replace(policy, policy=_keep_previous(before.policy, problem), scope=before.scope)
        not_applied = (policy.policy.problem,)
    node, is_possible = policy.on(rules), True
    if node != state.node:
        is_possible = not _shared_pool_empty(state.with_node(node))
    elif not state.pools.shared:  # owners of an earlier run (by its ledger) have all that the rules leave
        before = _keeping_no_cpus(policy)
        is_possible = _shared_pool_empty(state.with_node(before.on(rules)))  # then no policy helps
    if not is_possible:
        policy, too_large = _applicable(state, rules, policy, before)
        not_applied, node = (*not_applied, *too_large), policy.on(rules)
    if node == state.node:
        return AppliedPolicy(state, policy, not_applied=not_applied)
    after = state.with_node(node)
    return AppliedPolicy(after, policy, tuple(_owners_of_reserved(state, after)), not_applied)


def _applicable(
    state: NodeState, rules: Node, policy: NodePolicy, before: NodePolicy
) -> tuple[NodePolicy, list[str]]:
    """Return the part of a policy that can be applied, if not all of it can, and why the rest cannot."""
    parts = (
        ("reserved", (), "keep CPUs {} from the shared pool (strict-cpu-reservation)"),
        ("reservation", (), "keep CPUs {} back"),
        ("system", ("system_cpus_exclusive",), "keep CPUs {} for class SYSTEM"),
    )
    not_applied: list[str] = []
    names = [name for main, companions, _ in parts for name in (main, *companions)]
    applicable = structs.replace(policy, **{name: getattr(before, name) for name in names})
    for main, companions, action in parts:
        candidate = structs.replace(
            applicable, **{name: getattr(policy, name) for name in (main, *companions)}
        )
        if not _shared_pool_empty(state.with_node(candidate.on(rules))):
            applicable = candidate
            continue
        message = (
            f"cannot {action.format(getattr(policy, main).value)}: they would leave the shared pool empty"
        )
        value = _keep_previous(getattr(before, main), message)
        applicable, not_applied = structs.replace(applicable, **{main: value}), [*not_applied, value.problem]
    return applicable, not_applied


def _keeping_no_cpus(policy: NodePolicy) -> NodePolicy:
    """Return a policy that keeps no CPUs from the shared pool."""
    none = PolicyValue(CpuSet())
    return structs.replace(
        policy, reserved=none, reservation=none, system=none, system_cpus_exclusive=PolicyValue(False)
    )


def _keep_previous(before: PolicyValue[T], problem: str) -> PolicyValue[T]:
    value = str(before.value) or "none"
    return structs.replace(before, problem=f"{problem} (the previous value stays in effect: {value})")


def _shared_pool_empty(state: NodeState) -> bool:
    """Return whether containers without exclusive CPUs would have no CPUs, now or when promises are kept."""
    # If all CPUs are reserved, all are shareable, because containers have to run somewhere.
    return state.node.machine.online <= state.node.withheld or not state.pools.shared - state.cpus_set_aside()


def _policy_problem(node: Node, options: TopologyOptions) -> str:
    """Return why a topology policy is not possible on this machine or with other settings; empty if it is."""
    machine = node.machine
    count = len(machine.nodes)
    distances = all(len(numa_node.distance) == count for numa_node in machine.nodes)
    try:
        check_cpu_options(node.options, node.policy, len(machine.packages), count)
        check_topology_options(options, node.policy, count, distances=distances)
    except ConfigError as error:
        return str(error)
    return ""


def _owners_of_reserved(before: NodeState, after: NodeState) -> list[str]:
    """Return sentences about owners of CPUs that are reserved now and were not before."""
    newly_withheld = after.node.withheld - before.node.withheld
    kept_cpus: dict[str, CpuSet] = {}
    for container in after.containers.values():
        clash = container.placement.exclusive & newly_withheld
        if clash and container.owns_cpus:
            kept_cpus[container.ref] = clash
    return [
        f"CPUs {cpus} are kept back now, and {ref} owns them: it keeps them until it ends"
        for ref, cpus in sorted(kept_cpus.items())
    ]
