from __future__ import annotations

import json

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_policy import NodePolicy, PolicyValue, read_node_policy
from proxy.engine.node_policy_applied import AppliedPolicy, apply_node_policy
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import KeepQuota, NodeBindPolicy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.options import CpuOptions, Scope, TopologyOptions, TopologyPolicy
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.pools.node_keys import BIND_POLICY, NUMA_POLICY, RESERVATION, SYSTEM_QOS
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy

MACHINE = described(2, 1, 2, 2)  # node 0: 0-1,4-5; node 1: 2-3,6-7
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
CALM = TopologyOptions()


def container(name: str, cpus: str = "", phase: Phase = Phase.RUNNING) -> Container:
    pod = Pod(f"s-{name}", name, "ns", name)
    pool = Pool.OWN if cpus else Pool.SHARED
    placement = Placement(pool, CpuSet.parse(cpus), Mask((0,)), excludes_be=True)
    return Container(name, "c", pod, Request(), placement, phase, owner=f"{name}/c" if cpus else "")


def there(*containers: Container, node: Node = NODE) -> NodeState:
    return NodeState.of(node, [c.pod for c in containers], containers)


def rules(
    state: NodeState, reserved: str = "", system: str = "", labels: dict[str, str] | None = None
) -> NodePolicy:
    annotations = {}
    if reserved:
        annotations[RESERVATION] = json.dumps({"reservedCPUs": reserved})
    if system:
        annotations[SYSTEM_QOS] = json.dumps({"cpuset": system})
    meta = NodeMeta(labels=labels or {}, annotations=annotations)
    return read_node_policy(NODE, state.node.machine, meta, None)


def enacted(state: NodeState, policy: NodePolicy, options: TopologyOptions = CALM) -> AppliedPolicy:
    return apply_node_policy(state, policy, rules(state), options)


def test_pools_follow_and_owners_keep_what_they_have() -> None:
    state = there(
        container("a", "0,4"), container("b"), container("c", "3"), container("d", "1", Phase.EXITED)
    )
    done = enacted(state, rules(state, "0-1", "2"))
    assert str(done.state.pools.shared) == "5-7"
    assert str(done.state.pools.system) == "2"
    assert str(done.state.owners["a/c"].cpus) == "0,4"
    assert done.notes == ("CPUs 0 are kept back now, and ns/a/c owns them: it keeps them until it ends",)
    assert violations(done.state) == []
    again = apply_node_policy(done.state, rules(state, "0-1", "2"), done.policy, CALM)
    assert again.state is done.state
    assert again.notes == ()


def test_nothing_new_changes_nothing() -> None:
    state = there(container("a", "0,4"))
    assert enacted(state, rules(state)).state is state


def test_a_reservation_that_leaves_nothing_is_refused_until_it_does() -> None:
    state = there(container("a", "0-3"))
    done = enacted(state, rules(state, "4-7"))
    assert done.state is state
    found = done.policy.reservation
    assert (str(found.value), found.source) == ("", "default")
    assert found.problem == (
        "cannot keep CPUs 4-7 back: they would leave the shared pool empty"
        " (the previous value stays in effect: none)"
    )
    free = there()
    assert str(apply_node_policy(free, rules(free, "4-7"), done.policy, CALM).state.pools.shared) == "0-3"
    assert enacted(free, rules(free, "0-7")).state is free, "all CPUs"


def test_what_is_set_aside_counts_as_taken() -> None:
    from proxy.model.workload import SetAside

    pod = Pod(
        "s-p", "p", "ns", "p", reserved_for_pod=SetAside(None, preferred=False, cpus=CpuSet.parse("0-3"))
    )
    state = NodeState.of(NODE, [pod], [])
    assert enacted(state, rules(state, "4-7")).state is state


def test_of_two_values_the_possible_one_is_in_effect() -> None:
    state = there(container("a", "0-3"))
    done = enacted(state, rules(state, "4", "5-7"))
    assert (str(done.policy.reservation.value), str(done.policy.system.value)) == ("4", "")
    assert "cannot keep CPUs 5-7 for class SYSTEM" in done.policy.system.problem
    assert str(done.state.pools.shared) == "5-7"
    done = enacted(state, rules(state, "4-7", "5"))
    assert (str(done.policy.reservation.value), str(done.policy.system.value)) == ("", "5")
    assert str(done.state.pools.shared) == "4,6-7"


def test_a_kubelet_reserve_that_empties_the_pool_is_not_followed() -> None:
    strict = changed_copy(NODE, options=CpuOptions(strict_cpu_reservation=True))
    state = there(container("a", "2,6"), container("b"), node=strict)
    policy = read_node_policy(
        strict, MACHINE, None, CpuManager(policy="static", reserved=CpuSet.parse("0-1,3-5,7"))
    )
    done = enacted(state, policy)
    assert done.state is state
    assert str(done.policy.reserved.value) == ""
    assert done.policy.reserved.problem == (
        "cannot keep CPUs 0-1,3-5,7 from the shared pool (strict-cpu-reservation): they would leave the"
        " shared pool empty (the previous value stays in effect: none)"
    )
    less = read_node_policy(
        strict, MACHINE, None, CpuManager(policy="static", reserved=CpuSet.parse("0-1,3-5"))
    )
    assert str(apply_node_policy(state, less, done.policy, CALM).state.pools.shared) == "7"
    owners_only = enacted(there(container("a", "2,6")), policy)
    assert str(owners_only.state.pools.shared) == "0-1,3-5,7", "others may share what has no owner"


def test_cpus_may_change_from_one_to_the_other() -> None:
    base = there()
    first = enacted(base, rules(base, "0-6"))
    assert str(first.state.pools.shared) == "7"
    second = apply_node_policy(first.state, rules(base, "7", "0-5"), first.policy, CALM)
    assert str(second.state.pools.shared) == "6"
    assert not second.policy.reservation.problem


def test_a_policy_that_cannot_be_here_is_refused() -> None:
    node = changed_copy(NODE, options=CpuOptions(align_by_socket=True))
    state = there(node=node)
    policy = rules(state, "0", labels={NUMA_POLICY[0]: "SingleNUMANode", BIND_POLICY[0]: "FullPCPUsOnly"})
    done = enacted(state, policy)
    assert done.state.node.policy is TopologyPolicy.NONE
    assert "align-by-socket" in done.policy.policy.problem
    assert done.state.node.bind is NodeBindPolicy.FULL_PCPUS_ONLY, "the rest is in force"
    assert str(done.state.node.reservation) == "0"
    blind = changed_copy(MACHINE, nodes=tuple(changed_copy(each, distance=()) for each in MACHINE.nodes))
    state = there(node=changed_copy(NODE, machine=blind, scope=Scope.POD))
    done = enacted(state, rules(state, labels={NUMA_POLICY[0]: "Restricted"}), TopologyOptions(True))
    assert "distances" in done.policy.policy.problem


def test_rules_that_no_policy_has_follow_too() -> None:
    state = there(container("a", "0,4"), container("b"))
    strict = changed_copy(NODE, options=CpuOptions(strict_cpu_reservation=True), keep_quota=KeepQuota.ALWAYS)
    policy = changed_copy(rules(state), reserved=PolicyValue(CpuSet.parse("2"), "a test"))
    done = apply_node_policy(state, policy, rules(state), CALM, strict)
    assert str(done.state.pools.shared) == "1,3,5-7"
    assert str(done.state.owners["a/c"].cpus) == "0,4"
    assert (done.state.node.keep_quota, done.kept) == (KeepQuota.ALWAYS, ())
    assert violations(done.state) == []


def test_what_keeps_its_previous_value_is_said_apart() -> None:
    state = there(container("a", "0-3"))
    assert enacted(state, rules(state, "0-1")).kept == ()
    (words,) = enacted(state, rules(state, "4-7")).kept
    assert words.startswith("cannot keep CPUs 4-7 back: they would leave the shared pool empty")
