"""The CPUs of a container compared with Koordinator's decision table: every difference is intended.

All kinds of pods on a node with an LSE and an LSR pod are decided twice: by the table
(``oracles.koordinator_hook``, held to Koordinator's own cases) and by the placement of topoproxy. If sets
differ, the difference must have one of the names below; ``docs/koordinator.md`` gives the reason of each.
"""

from __future__ import annotations

import itertools

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import Plan, place
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.workload import Pod, QosClass, Request
from proxy.pools.facts import pod_facts
from proxy.pools.published_pools import NodePool
from proxy.topology.regular_machine import regular_machine
from tests.oracles.koordinator_hook import Action, HookAnswer, HookedPod, decide
from tests.oracles.koordinator_rule import NodeRule

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
STRICT = (QosClass.LSE, QosClass.LSR)
LABELS = ("LSE", "LSR", "LS", "BE", "SYSTEM", "")
PARENTS = ("/kubepods", "/kubepods/burstable", "/kubepods/besteffort")
STATUSES = {
    "nothing": "",
    "free CPUs": '{"cpuset":"3,11"}',
    "owned CPUs": '{"cpuset":"0,3"}',
    "a node": '{"numaNodeResources":[{"node":1,"resources":{"cpu":"1"}}]}',
    "no node": '{"numaNodeResources":[{"node":9,"resources":{"cpu":"1"}}]}',
    "a fault": '{"cpuset":',
}


def crowded(system: str) -> NodeState:
    """An LSE pod on 0-1 and an LSR pod on 2."""
    state = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), system=CpuSet.parse(system)))
    for qos, cpus in ((QosClass.LSE, "0-1"), (QosClass.LSR, "2")):
        pod = Pod(f"s-{qos}", f"u-{qos}", "ns", qos.value, qos=qos, cpuset=CpuSet.parse(cpus))
        state = place(state.with_pod(pod), pod, "c", 0, Request(), f"c-{qos}").state
    return state


def rule_of(state: NodeState, kubelet: str, system: str) -> NodeRule:
    def parts(pool: CpuSet) -> tuple[NodePool, ...]:
        return tuple(NodePool(node.id, node.id, pool & node.cpus) for node in MACHINE.nodes)

    return NodeRule(kubelet, parts(state.pools.shared), parts(state.pools.be), system)


def named(what: str, pod: Pod, answer: HookAnswer, plan: Plan) -> str:
    """Name the difference."""
    refused = plan.container is None
    if what == "a fault":
        return "faulty: refused" if refused else "faulty: pooled"
    if what == "owned CPUs" and answer.row == 1:
        return "CPUs of others: refused" if refused else "CPUs of others: pooled"
    if what == "no node" and refused:
        return "nothing left on the nodes: refused"
    if pod.qos is QosClass.BE:
        return "label BE in any cgroup"
    if answer.action is Action.LEAVE:
        return "row 8: pooled"
    if pod.qos is QosClass.SYSTEM and answer.row == 7:
        return "class SYSTEM in any cgroup"
    return f"{what}, {pod.qos}, row {answer.row}"


INTENDED = {
    "faulty: refused",
    "faulty: pooled",
    "CPUs of others: refused",
    "CPUs of others: pooled",
    "nothing left on the nodes: refused",
    "row 8: pooled",
    "label BE in any cgroup",
    "class SYSTEM in any cgroup",
}


@pytest.mark.parametrize("system", ["", "7"])
@pytest.mark.parametrize("kubelet", ["none", "static"])
def test_differences_from_the_table_are_intended(kubelet: str, system: str) -> None:
    state = crowded(system)
    rule = rule_of(state, kubelet, system)
    found: set[str] = set()
    for label, parent, what in itertools.product(LABELS, PARENTS, STATUSES):
        labels = {"koordinator.sh/qosClass": label} if label else {}
        text = STATUSES[what]
        annotations = {"scheduling.koordinator.sh/resource-status": text} if text else {}
        answer = decide(rule, HookedPod.of(labels, annotations, f"{parent}/podu"), be_manager=True)
        pod = pod_facts("s", "u", "ns", "p", 0, labels, annotations, f"{parent}/podu")
        plan = place(state.with_pod(pod), pod, "c", 0, Request(512, 50_000, 100_000), "x")
        if plan.container is None:
            assert pod.qos in STRICT, (label, parent, what)
            assert plan.state.pools == state.pools
        elif answer.action is not Action.LEAVE and plan.state.desired_cpus(plan.container) == answer.cpus:
            continue
        found.add(named(what, pod, answer, plan))
    assert found <= INTENDED
    assert found >= INTENDED - {"row 8: pooled", "class SYSTEM in any cgroup"}
