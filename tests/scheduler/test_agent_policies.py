"""The rules that topoproxy's agent publishes: the extender decides by them as the node does."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from proxy.agent.objects.node_page import NodePage, read_node_page
from proxy.agent.objects.node_resource_topology import koordinator_topology, nfd_topology
from proxy.agent.objects.numatopology import numatopology
from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.pod_dry_run import dry_run
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules, BeyondLimit, Namespaces
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NodeBindPolicy, NumaStrategy
from proxy.model.kubelet import CpuManager
from proxy.model.label_selector import LabelSelector
from proxy.model.mode import NodeMode
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.observe.node_description import describe_node
from proxy.pools.topology_keys import FLOOR_CPUS, POD_LIMIT, POLICIES
from proxy.scheduler.decision import evaluate, expected_node
from proxy.scheduler.node_facts import SchedulableNode, join_facts
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.pod_demand import PodDemand, read_demand
from proxy.scheduler.resource_topology import read_resource_topology
from proxy.topology.regular_machine import regular_machine
from tests.scheduler.objects import cpus, demand
from tests.scheduler.objects import pod as pod_object

MACHINE = regular_machine(2, 1, 4, 2)
SINGLE = TopologyPolicy.SINGLE_NUMA_NODE
LSR = {"koordinator.sh/qosClass": "LSR"}
BOTH, VOLCANO, KOORDINATOR = "both", "Numatopology alone", "Koordinator's form"
FORMS = (BOTH, VOLCANO, KOORDINATOR)


def make(**rules: Any) -> Node:
    return Node(MACHINE, CpuTopology.of(MACHINE), **{"static": True, "policy": SINGLE, **rules})


def page_of(state: NodeState, kubelet: CpuManager | None = None) -> NodePage:
    description = describe_node(state, "n1", kubelet or CpuManager("none"))
    return read_node_page(json.loads(json.dumps(to_builtins(description))))


def published(page: NodePage, form: str) -> SchedulableNode:
    """Return the node as the extender reads it from the objects of the agent."""
    numa = None if form == KOORDINATOR else read_numatopology(numatopology(page))
    zones = {BOTH: nfd_topology, KOORDINATOR: koordinator_topology}.get(form)
    return join_facts("n1", None, numa, read_resource_topology(zones(page)) if zones else None)


def arrive(state: NodeState, *pods: PodDemand) -> NodeState:
    for pod in pods:
        outcome = dry_run(state, pod.arrival())
        assert outcome.verdict.admitted
        state = outcome.state
    return state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("node", "pod"),
    [
        (make(bind=NodeBindPolicy.FULL_PCPUS_ONLY), demand("odd", 3)),
        (make(options=CpuOptions(full_pcpus_only=True)), demand("odd", 3)),
        (make(admission=AdmissionRules(pod_limit=4)), demand("much", 6)),
        (make(admission=AdmissionRules(node_limit=4), reserved=CpuSet((0,))), demand("much", 6)),
        (make(), demand("impossible", 100, labels=LSR)),
        (make(), demand("spans", 9)),
    ],
)
def test_rules_of_the_configuration_refuse_pods_as_on_the_node(node: Node, pod: PodDemand, form: str) -> None:
    """Even if kubelet's CPU manager has the policy none, as docs/kubelet-facts.md advises."""
    state = arrive(NodeState.empty(node), demand("first", 2))
    outcome = dry_run(state, pod.arrival())
    verdict = evaluate(pod, expected_node(published(page_of(state), form)))
    assert (verdict.fits, verdict.reason) == (False, outcome.verdict.reason)
    assert evaluate(demand("fits", 2), expected_node(published(page_of(state), form))).fits


@pytest.mark.parametrize("form", FORMS)
def test_strategy_and_options_are_read_back(form: str) -> None:
    node = make(strategy=NumaStrategy.LEAST_ALLOCATED, closest=True, scope=Scope.POD)
    kubelet = CpuManager("none", {"full-pcpus-only": "true"})
    rules = published(page_of(NodeState.empty(node), kubelet), form).rules
    assert (rules.strategy, rules.closest, rules.scope) == (NumaStrategy.LEAST_ALLOCATED, True, Scope.POD)
    assert (rules.static, rules.options, rules.bind) == (True, CpuOptions(), NodeBindPolicy.NONE)


@pytest.mark.parametrize("form", FORMS)
def test_the_floor_is_a_number_and_the_node_may_keep_other_cpus(form: str) -> None:
    """The floor is CPUs 7 and 15 on NUMA node 1; a pod of 8 takes that node, the pool keeps other CPUs."""
    state = arrive(NodeState.empty(make(admission=AdmissionRules(floor=2))), demand("first", 2))
    found = published(page_of(state), form)
    assert (found.reserved, found.free) == (CpuSet(), cpus("1-7,9-15"))
    whole = evaluate(demand("whole", 8), expected_node(found))
    assert str(whole.cpus) == "4-7,12-15"
    assert not evaluate(demand("next", 6), expected_node(found, [demand("whole", 8)])).fits
    assert evaluate(demand("next", 4), expected_node(found, [demand("whole", 8)])).fits


def test_the_floor_is_not_counted_if_the_object_names_no_pods() -> None:
    """Reserved CPUs, which the shared pool keeps in any case, look like owned ones there."""
    node = make(admission=AdmissionRules(floor=2, node_limit=14), reserved=CpuSet((0, 8)))
    state = NodeState.empty(node)
    raw = numatopology(page_of(state), allocations=False)
    found = join_facts("n1", None, read_numatopology(raw), None)
    everything = demand("all", 6, 8)
    assert evaluate(everything, expected_node(found)).fits
    assert dry_run(state, everything.arrival()).verdict.admitted


@pytest.mark.parametrize("form", FORMS)
def test_an_earlier_agent_reports_the_floor_as_a_reserve(form: str) -> None:
    state = arrive(NodeState.empty(make(admission=AdmissionRules(floor=2, pod_limit=4))), demand("first", 2))
    description = describe_node(state, "n1", CpuManager("static"))
    earlier = {
        name: value for name, value in description.items() if name not in ("floorCPUs", "withheldCPUs")
    }
    policies = description["policies"]
    assert isinstance(policies, dict)
    kept = ("cpuManagerPolicy", "topologyManagerPolicy", "topologyManagerScope", "memoryManagerPolicy")
    earlier["policies"] = {name: policies[name] for name in kept}
    found = published(read_node_page(json.loads(json.dumps(to_builtins(earlier)))), form)
    assert (found.reserved, found.free) == (cpus("7,15"), cpus("1-6,9-14"))
    assert not evaluate(demand("whole", 8), expected_node(found)).fits
    assert evaluate(demand("much", 6), expected_node(found)).fits


def test_the_extender_decides_as_the_node_whatever_its_rules_are() -> None:
    chance = random.Random(5)
    judged = Counter[bool]()
    for _ in range(60):
        node = make(
            policy=chance.choice(list(TopologyPolicy)),
            scope=chance.choice(list(Scope)),
            options=CpuOptions(strict_cpu_reservation=chance.random() < 0.5),
            bind=chance.choice(list(NodeBindPolicy)),
            reserved=CpuSet(chance.sample(range(16), chance.randint(0, 2))),
            node_reservation=CpuSet(chance.sample(range(16), chance.randint(0, 1))),
            admission=AdmissionRules(
                floor=chance.choice((None, 1, 3)),
                numa_floor=chance.choice((None, 0, 1)),
                pod_limit=chance.choice((None, 5)),
                node_limit=chance.choice((None, 10)),
            ),
        )
        state = NodeState.empty(node)
        for number in range(chance.randint(0, 4)):
            pod = demand(f"p{number}", chance.randint(1, 5), labels=LSR if chance.random() < 0.3 else {})
            state = dry_run(state, pod.arrival()).state
        for form in FORMS:
            found = published(page_of(state), form)
            for count in (1, 2, 4, 6):
                pod = demand("wanted", count, labels=LSR if chance.random() < 0.3 else {})
                outcome = dry_run(state, pod.arrival())
                verdict = evaluate(pod, expected_node(found))
                assert verdict.fits is outcome.verdict.admitted, (form, node, verdict)
                judged[verdict.fits] += 1
    assert min(judged.values()) > 100


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [None, 6, 7, 12])
@pytest.mark.parametrize("first", [(), (2,), (4, 1)])
def test_without_a_floor_the_extender_counts_every_owned_cpu(
    form: str, limit: int | None, first: tuple[int, ...]
) -> None:
    """The node counts CPUs up to its limit, and keeps one CPU in the shared pool."""
    rules = AdmissionRules(floor=0, numa_floor=0, node_limit=limit)
    node = make(policy=TopologyPolicy.BEST_EFFORT, admission=rules)
    state = arrive(NodeState.empty(node), *(demand(f"p{count}", count) for count in first))
    expected = expected_node(published(page_of(state), form))
    most = limit or len(MACHINE.online) - 1
    for count in range(1, len(MACHINE.online) + 1):
        pod = demand("wanted", count)
        outcome, verdict = dry_run(state, pod.arrival()), evaluate(pod, expected)
        assert (verdict.fits, verdict.reason) == (outcome.verdict.admitted, outcome.verdict.reason)
        assert verdict.fits is (sum(first) + count <= most)


def in_namespace(namespace: str, name: str, count: int, **more: Any) -> PodDemand:
    raw = pod_object(name, count, **more)
    raw["metadata"]["namespace"] = namespace
    return read_demand(raw)


@pytest.mark.parametrize("form", FORMS)
def test_owned_cpus_are_counted_by_namespace(form: str) -> None:
    """Namespace a owns four CPUs of six, namespace b owns one, and c none."""
    node = make(policy=TopologyPolicy.BEST_EFFORT, admission=AdmissionRules(namespace_limit=6))
    first = in_namespace("a", "p1", 3), in_namespace("a", "p2", 1, labels=LSR), in_namespace("b", "p3", 1)
    state = arrive(NodeState.empty(node), *first)
    table = NodeTable()
    table.put(published(page_of(state), form))
    for namespace, most in (("a", 2), ("b", 5), ("c", 6)):
        for count in (most, most + 1):
            wanted = in_namespace(namespace, "wanted", count)
            assert dry_run(state, wanted.arrival()).verdict.admitted is (count == most)
            assert table.filter(wanted).fits == (["n1"] if count == most else [])
            reason = "" if count == most else "AdmissionNamespaceLimit"
            assert table.place("n1", wanted).reason == reason
    table.assume("n1", in_namespace("c", "pending", 4), 0)
    assert table.place("n1", in_namespace("c", "wanted", 3)).reason == "AdmissionNamespaceLimit"
    assert table.place("n1", in_namespace("b", "wanted", 3)).fits


def test_nodes_that_differ_in_the_owners_namespaces_are_not_alike() -> None:
    node = make(policy=TopologyPolicy.BEST_EFFORT, admission=AdmissionRules(namespace_limit=6))
    table = NodeTable()
    for name, namespace in (("n1", "a"), ("n2", "b")):
        page = page_of(arrive(NodeState.empty(node), in_namespace(namespace, "p", 4)))
        table.put(replace(published(page, VOLCANO), name=name))
    assert table.filter(in_namespace("a", "wanted", 4)).fits == ["n2"]
    assert table.filter(in_namespace("b", "wanted", 4)).fits == ["n1"]


@pytest.mark.parametrize(
    "rules", [AdmissionRules(namespace_limit=8), AdmissionRules(owners=Namespaces(("team-*",)))]
)
def test_pods_of_two_namespaces_are_evaluated_once_unless_a_rule_distinguishes_them(
    rules: AdmissionRules,
) -> None:
    plain = published(page_of(NodeState.empty(make())), VOLCANO)
    ruled = replace(published(page_of(NodeState.empty(make(admission=rules))), VOLCANO), name="n2")
    table = NodeTable()

    def evaluations() -> int:
        """Return how many evaluations equal pods of two namespaces take, with n1 as their candidate."""
        before = table.evaluations
        for namespace in ("team-a", "team-b"):
            assert table.filter(in_namespace(namespace, "p", 2), ["n1"]).fits == ["n1"]
        return table.evaluations - before

    table.put(plain)
    assert evaluations() == 1
    table.put(ruled)
    assert evaluations() == 2
    for end in (
        lambda: table.remove("n2"),
        lambda: table.put_unknown("n2", "cannot be read"),
        lambda: table.put(replace(plain, name="n2")),
    ):
        table.put(ruled)
        signatures = {table.signature_of(in_namespace(name, "p", 2)) for name in ("team-a", "team-b")}
        assert len(signatures) == 2
        end()
        assert evaluations() == 0, "the verdict from before is still known"


def test_pending_pods_of_two_namespaces_make_nodes_differ_only_under_a_rule() -> None:
    """Both nodes have a pending pod of the same size: under a limit, not equal for the next pod."""
    for rules, expected in ((AdmissionRules(), {"n1", "n2"}), (AdmissionRules(namespace_limit=6), {"n2"})):
        node = published(page_of(NodeState.empty(make(policy=TopologyPolicy.NONE, admission=rules))), VOLCANO)
        table = NodeTable()
        for name, namespace in (("n1", "a"), ("n2", "b")):
            table.put(replace(node, name=name))
            table.assume(name, in_namespace(namespace, f"pending-{name}", 4), 0)
        assert set(table.filter(in_namespace("a", "wanted", 4)).fits) == expected
        assert table.evaluations == (2 if rules.distinguish_namespaces else 1)


def test_a_pod_that_the_object_shows_in_part_counts_once() -> None:
    node = make(policy=TopologyPolicy.BEST_EFFORT, admission=AdmissionRules(namespace_limit=6))
    page = page_of(arrive(NodeState.empty(node), in_namespace("a", "grows", 2)))
    expected = expected_node(published(page, VOLCANO), [in_namespace("a", "grows", 3)])
    assert not expected.rejected
    assert evaluate(in_namespace("a", "wanted", 1), expected).fits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("patterns", [("team-*", "search"), ("search",), (), ("*",)])
def test_namespaces_whose_pods_may_not_own_cpus_are_refused(form: str, patterns: tuple[str, ...]) -> None:
    state = NodeState.empty(make(admission=AdmissionRules(owners=Namespaces(patterns))))
    expected = expected_node(published(page_of(state), form))
    for namespace in ("team-a", "search", "other"):
        for labels in (LSR, {}):
            wanted = in_namespace(namespace, "wanted", 2, labels=labels)
            outcome, verdict = dry_run(state, wanted.arrival()), evaluate(wanted, expected)
            assert (verdict.fits, verdict.reason) == (outcome.verdict.admitted, outcome.verdict.reason)
            assert verdict.fits is (not labels or Namespaces(patterns).admits(namespace))


def test_labels_that_namespaces_must_have_are_not_known() -> None:
    """Namespaces that their names exclude are refused all the same."""
    owners = Namespaces(("team-*",), LabelSelector((("cpus", "own"),)))
    found = published(page_of(NodeState.empty(make(admission=AdmissionRules(owners=owners)))), BOTH)
    assert evaluate(in_namespace("team-a", "p", 2, labels=LSR), expected_node(found)).fits
    verdict = evaluate(in_namespace("other", "p", 2, labels=LSR), expected_node(found))
    assert verdict.reason == "AdmissionNamespace"


@pytest.mark.parametrize(
    "rules", [{"namespace_limit": 1}, {"owners": Namespaces(("other",))}, {"node_limit": 1}, {"pod_limit": 1}]
)
def test_rules_beyond_which_pods_share_refuse_none(rules: dict[str, Any]) -> None:
    node = make(admission=AdmissionRules(**rules, beyond=BeyondLimit.SHARE))
    found = published(page_of(NodeState.empty(node)), BOTH)
    assert evaluate(demand("much", 6, labels=LSR), expected_node(found)).fits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("floor", [0, 2])
def test_owned_cpus_that_became_reserved_count_as_owned(form: str, floor: int) -> None:
    rules = AdmissionRules(floor=floor, numa_floor=0, node_limit=8)
    state = arrive(NodeState.empty(make(admission=rules)), demand("first", 4))
    state = state.with_node(make(admission=rules, reserved=CpuSet((0, 1, 2))))
    expected = expected_node(published(page_of(state), form))
    for count in (3, 4, 5):
        outcome = dry_run(state, demand("wanted", count).arrival())
        verdict = evaluate(demand("wanted", count), expected)
        assert (verdict.fits, verdict.reason) == (outcome.verdict.admitted, outcome.verdict.reason)
        assert verdict.fits is (count <= 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "annotation topoproxy/policies is not a JSON object"),
        ('{"maxCPUsPerPod":"many"}', "maxCPUsPerPod is 'many', no number of CPUs"),
        ('{"cpuBindPolicy":"Other"}', "cpuBindPolicy: 'Other' is not a valid NodeBindPolicy"),
        ('{"floorCPUs":"7-1"}', "floorCPUs: .*7-1"),
        ('{"ownerNamespaces":"team-a"}', "ownerNamespaces: not JSON"),
        ('{"ownerNamespaces":"{}"}', "ownerNamespaces: '{}' is no list of namespaces"),
        ('{"ownerNamespaces":"[1]"}', r"ownerNamespaces: '\[1\]' is no list of namespaces"),
    ],
)
def test_malformed_policies_make_a_node_unknown(text: str, message: str) -> None:
    raw = numatopology(page_of(NodeState.empty(make())))
    raw["metadata"]["annotations"] = {POLICIES: text}
    with pytest.raises(ValueError, match=message):
        join_facts("n1", None, read_numatopology(raw), None)


def test_rules_are_published_if_the_plan_is_applied() -> None:
    state = NodeState.empty(make(admission=AdmissionRules(floor=2, pod_limit=4)))
    page = page_of(state)
    policies = json.loads(numatopology(page)["metadata"]["annotations"][POLICIES])
    assert (policies[POD_LIMIT], policies[FLOOR_CPUS]) == ("4", "7,15")
    assert {"name": POD_LIMIT, "value": "4"} in nfd_topology(page)["attributes"]
    observed = page_of(replace(state, mode=NodeMode.OBSERVE))
    assert numatopology(observed)["metadata"]["annotations"] == {}
    assert POLICIES not in koordinator_topology(observed)["metadata"]["annotations"]
    assert POD_LIMIT not in {each["name"] for each in nfd_topology(observed)["attributes"]}
