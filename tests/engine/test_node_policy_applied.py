from __future__ import annotations

import json

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.handle import handle
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_effects import Change, NodePolicyApplied, WriteScope
from proxy.engine.node_events import HardwareChanged, KubeletCpusRead, NodePolicyRead, TakeoverChanged
from proxy.engine.node_policy import NodePolicy, PolicyValue, read_node_policy
from proxy.engine.node_policy_applied import AppliedPolicy, apply_node_policy, new_refusals
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules, Namespaces
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import KeepQuota, NodeBindPolicy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.label_selector import LabelSelector
from proxy.model.options import CpuOptions, Scope, TopologyOptions, TopologyPolicy
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.pools.node_keys import BIND_POLICY, NUMA_POLICY, NUMA_RESERVATION, RESERVATION, SYSTEM_QOS
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy
from tests.testkit.playbook import Playbook

MACHINE = regular_machine(2, 1, 2, 2)  # node 0: 0-1,4-5; node 1: 2-3,6-7
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
CALM = TopologyOptions()


def container(name: str, cpus: str = "", phase: Phase = Phase.RUNNING) -> Container:
    pod = Pod(f"s-{name}", name, "ns", name)
    pool = Pool.OWN if cpus else Pool.SHARED
    placement = Placement(pool, CpuSet.parse(cpus), Mask((0,)), excludes_be=True)
    return Container(name, "c", pod, Request(), placement, phase, owner=f"{name}/c" if cpus else "")


def state_with(*containers: Container, node: Node = NODE) -> NodeState:
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


def test_pools_follow_a_new_policy_and_owners_keep_their_cpus() -> None:
    state = state_with(
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


def test_an_unchanged_policy_changes_nothing() -> None:
    state = state_with(container("a", "0,4"))
    assert enacted(state, rules(state)).state is state


def test_a_reservation_that_leaves_no_cpus_is_refused_until_it_leaves_some() -> None:
    state = state_with(container("a", "0-3"))
    done = enacted(state, rules(state, "4-7"))
    assert done.state is state
    found = done.policy.reservation
    assert (str(found.value), found.source) == ("", "default")
    assert found.problem == (
        "cannot keep CPUs 4-7 back: they would leave the shared pool empty"
        " (the previous value stays in effect: none)"
    )
    free = state_with()
    assert str(apply_node_policy(free, rules(free, "4-7"), done.policy, CALM).state.pools.shared) == "0-3"
    assert enacted(free, rules(free, "0-7")).state is free, "all CPUs"


def test_set_aside_cpus_count_as_taken() -> None:
    from proxy.model.workload import SetAside

    pod = Pod(
        "s-p", "p", "ns", "p", reserved_for_pod=SetAside(None, preferred=False, cpus=CpuSet.parse("0-3"))
    )
    state = NodeState.of(NODE, [pod], [])
    assert enacted(state, rules(state, "4-7")).state is state


def test_the_feasible_one_of_two_values_is_in_effect() -> None:
    state = state_with(container("a", "0-3"))
    done = enacted(state, rules(state, "4", "5-7"))
    assert (str(done.policy.reservation.value), str(done.policy.system.value)) == ("4", "")
    assert "cannot keep CPUs 5-7 for class SYSTEM" in done.policy.system.problem
    assert str(done.state.pools.shared) == "5-7"
    done = enacted(state, rules(state, "4-7", "5"))
    assert (str(done.policy.reservation.value), str(done.policy.system.value)) == ("", "5")
    assert str(done.state.pools.shared) == "4,6-7"


def test_a_kubelet_reserve_that_empties_the_pool_is_not_followed() -> None:
    strict = changed_copy(NODE, options=CpuOptions(strict_cpu_reservation=True))
    state = state_with(container("a", "2,6"), container("b"), node=strict)
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
    owners_only = enacted(state_with(container("a", "2,6")), policy)
    assert str(owners_only.state.pools.shared) == "0-1,3-5,7", "CPUs without an owner remain shared"


def test_cpus_may_change_between_reserved_and_system() -> None:
    base = state_with()
    first = enacted(base, rules(base, "0-6"))
    assert str(first.state.pools.shared) == "7"
    second = apply_node_policy(first.state, rules(base, "7", "0-5"), first.policy, CALM)
    assert str(second.state.pools.shared) == "6"
    assert not second.policy.reservation.problem


def test_a_policy_that_the_machine_cannot_support_is_refused() -> None:
    node = changed_copy(NODE, options=CpuOptions(align_by_socket=True))
    state = state_with(node=node)
    policy = rules(state, "0", labels={NUMA_POLICY[0]: "SingleNUMANode", BIND_POLICY[0]: "FullPCPUsOnly"})
    done = enacted(state, policy)
    assert done.state.node.policy is TopologyPolicy.NONE
    assert "align-by-socket" in done.policy.policy.problem
    assert done.state.node.bind is NodeBindPolicy.FULL_PCPUS_ONLY, "the rest of the policy is in effect"
    assert str(done.state.node.node_reservation) == "0"
    blind = changed_copy(MACHINE, nodes=tuple(changed_copy(each, distance=()) for each in MACHINE.nodes))
    state = state_with(node=changed_copy(NODE, machine=blind, scope=Scope.POD))
    done = enacted(state, rules(state, labels={NUMA_POLICY[0]: "Restricted"}), TopologyOptions(True))
    assert "distances" in done.policy.policy.problem


def test_rules_outside_of_the_policy_are_updated_too() -> None:
    state = state_with(container("a", "0,4"), container("b"))
    strict = changed_copy(NODE, options=CpuOptions(strict_cpu_reservation=True), keep_quota=KeepQuota.ALWAYS)
    policy = changed_copy(rules(state), reserved=PolicyValue(CpuSet.parse("2"), "a test"))
    done = apply_node_policy(state, policy, rules(state), CALM, strict)
    assert str(done.state.pools.shared) == "1,3,5-7"
    assert str(done.state.owners["a/c"].cpus) == "0,4"
    assert (done.state.node.keep_quota, done.not_applied) == (KeepQuota.ALWAYS, ())
    assert violations(done.state) == []


def test_settings_that_keep_their_previous_value_are_reported_separately() -> None:
    state = state_with(container("a", "0-3"))
    assert enacted(state, rules(state, "0-1")).not_applied == ()
    (problem,) = enacted(state, rules(state, "4-7")).not_applied
    assert problem.startswith("cannot keep CPUs 4-7 back: they would leave the shared pool empty")


# -- events -------------------------------------------------------------------------------------------------

DECIDED = NodePolicyRead(NODE, CALM, None, None)
"""What our configuration alone says."""


class NewRules:
    """Matches the effect of changed rules of the node with any states before and after it."""

    def __init__(self, write_scope: WriteScope = WriteScope.MOVED) -> None:
        self.wanted = write_scope

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Change) and other.write_scope == self.wanted


def started(state: NodeState, configured: Node = NODE) -> Playbook[NodeState]:
    """Return a playbook of a node whose policy was read for the first time."""
    play = Playbook(state, handle)
    assert play >> changed_copy(DECIDED, configured=configured) << NodePolicyApplied({}, ())
    assert play.state.node is state.node
    assert play.state.facts.policy == read_node_policy(configured, MACHINE, None, None)
    return play


def keeping(cpus: str) -> NodeMeta:
    """A Node object that keeps CPUs back."""
    return NodeMeta(annotations={RESERVATION: json.dumps({"reservedCPUs": cpus})})


def test_rules_follow_the_node_object_that_was_read() -> None:
    play = started(state_with(container("a", "0,4"), container("b")))
    read = changed_copy(DECIDED, meta=keeping("0-1"))
    value = PolicyValue(CpuSet.parse("0-1"), f"annotation {RESERVATION} of the Node object")
    note = "CPUs 0 are kept back now, and ns/a/c owns them: it keeps them until it ends"
    assert play >> read << NewRules() << NodePolicyApplied({"reservedCPUs": value}, (note,))
    assert (str(play.state.pools.shared), play.state.facts.node_meta) == ("2-3,5-7", read.meta)
    assert play >> read << NodePolicyApplied({}, ()), "it is in effect already"
    free = PolicyValue(CpuSet(), "default")
    assert play >> DECIDED << NewRules() << NodePolicyApplied({"reservedCPUs": free}, ())
    assert play.state.facts.node_meta is None


def test_a_value_that_changes_no_rule_of_the_node_is_not_reported() -> None:
    play = started(state_with())
    read = changed_copy(DECIDED, meta=NodeMeta(labels={NUMA_RESERVATION: "true"}))
    assert play >> read << NodePolicyApplied({}, ())
    assert play.state.facts.policy is not None
    assert play.state.facts.policy.numa_reservation.value


def test_kubelets_settings_and_the_reserve_of_a_takeover_change_the_rules() -> None:
    play, free = started(state_with()), CpuSet()
    manager = CpuManager("static", {"full-pcpus-only": "true"}, CpuSet.parse("0"))
    assert play >> KubeletCpusRead(manager, {}) >> TakeoverChanged(static=True, reserved=CpuSet.parse("4"))
    whole = PolicyValue(NodeBindPolicy.FULL_PCPUS_ONLY, "kubelet's full-pcpus-only")
    both = PolicyValue(CpuSet.parse("0,4"), "kubelet's reserve, and the takeover from kubelet")
    changed = {"cpuBindPolicy": whole, "reservedSystemCPUs": both}
    assert play >> DECIDED << NewRules() << NodePolicyApplied(changed, ())
    assert play >> TakeoverChanged(static=True, reserved=CpuSet.parse("0"))
    own = PolicyValue(CpuSet.parse("0"), "kubelet's reserve")
    assert play >> DECIDED << NewRules() << NodePolicyApplied({"reservedSystemCPUs": own}, ())
    assert play >> TakeoverChanged(static=True, reserved=free)
    assert play >> DECIDED << NodePolicyApplied({}, ()), "it is within what kubelet reserves"


def test_a_value_that_only_changes_its_source_is_not_reported() -> None:
    whole = changed_copy(NODE, bind=NodeBindPolicy.FULL_PCPUS_ONLY)
    play = started(state_with(node=whole), whole)
    labels = {BIND_POLICY[0]: "FullPCPUsOnly"}
    read = NodePolicyRead(whole, CALM, changed_copy(keeping("1"), labels=labels), None)
    play >> read << NewRules()
    (applied,) = play._unnamed
    assert isinstance(applied, NodePolicyApplied)
    assert (list(applied.changed), applied.notes) == (["reservedCPUs"], ())


def test_options_of_the_configuration_rule_out_a_policy() -> None:
    blind = changed_copy(MACHINE, nodes=tuple(changed_copy(each, distance=()) for each in MACHINE.nodes))
    node = changed_copy(NODE, machine=blind)
    play = started(state_with(node=node), node)
    restricted = NodeMeta(labels={NUMA_POLICY[0]: "Restricted"})
    read = NodePolicyRead(node, TopologyOptions(True), restricted, None)
    (problem,) = new_refusals(play.state, read)
    assert "distances" in problem
    assert play >> read << NodePolicyApplied({}, ())
    change = {
        "topologyManagerPolicy": PolicyValue(
            TopologyPolicy.RESTRICTED, f"label {NUMA_POLICY[0]} of the Node object"
        )
    }
    assert play >> changed_copy(read, options=CALM) << NewRules() << NodePolicyApplied(change, ())


def test_another_configuration_keeps_the_machine_and_the_takeover() -> None:
    play = started(state_with(container("b")))
    there_now = {"cpus": tuple(cpu for cpu in MACHINE.cpus if cpu.id != 7), "present": CpuSet.parse("0-6")}
    less = changed_copy(MACHINE, **there_now)
    assert play >> HardwareChanged(less) << NewRules(WriteScope.ALL)
    assert play >> TakeoverChanged(static=False, reserved=CpuSet()) << NewRules(WriteScope.ALL)
    other = changed_copy(DECIDED, configured=changed_copy(NODE, keep_quota=KeepQuota.ALWAYS))
    assert play >> other << NewRules() << NodePolicyApplied({}, ())
    node = play.state.node
    assert (node.machine, node.static, node.keep_quota) == (less, False, KeepQuota.ALWAYS)
    assert node.topology == CpuTopology.of(less)
    assert play >> changed_copy(other, meta=keeping("7")) << NodePolicyApplied({}, ())
    assert play.state.facts.policy is not None
    assert "there is no CPU 7 here" in play.state.facts.policy.reservation.problem


def test_selected_namespaces_stay_selected_until_labels_are_read() -> None:
    selector = LabelSelector((("cpus", "exclusive"),))
    owners = Namespaces(selector=selector, selected=frozenset(("a",)))
    node = changed_copy(NODE, admission=AdmissionRules(owners=owners))
    play, read = Playbook(state_with(node=node), handle), changed_copy(DECIDED, configured=node)
    assert play >> read << NodePolicyApplied({}, ())
    assert play.state.node.admission.owners.selected == {"a"}, "they were known when the daemon started"
    known = changed_copy(read, labels={"a": {}, "b": {"cpus": "exclusive"}})
    assert play >> known << NewRules() << NodePolicyApplied({}, ())
    assert play.state.node.admission.owners.selected == {"b"}
    assert play >> known << NodePolicyApplied({}, ())


def test_a_configuration_that_the_node_cannot_apply_is_detected_beforehand() -> None:
    play = started(state_with(container("a", "0-3")))
    all_left = changed_copy(DECIDED, configured=changed_copy(NODE, node_reservation=CpuSet.parse("4-7")))
    (problem,) = new_refusals(play.state, all_left)
    assert problem.startswith("cannot keep CPUs 4-7 back: they would leave the shared pool empty")
    assert new_refusals(play.state, DECIDED) == []
    assert play >> all_left << NodePolicyApplied({}, ())
    assert new_refusals(play.state, all_left) == [], "it is known, and reported"
