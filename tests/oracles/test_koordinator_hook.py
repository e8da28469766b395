from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos, QosClass
from proxy.pools.annotations import RESOURCE_STATUS, NodeShare, ResourceStatus
from proxy.pools.facts import QOS_LABEL
from proxy.pools.published_pools import AnnotatedCpus, NodePool, Withheld, node_pools
from tests.oracles.koordinator_hook import Action, HookedPod, changes, decide, decide_host_app
from tests.oracles.koordinator_rule import NodeRule

GROUPS = {(0, 0): CpuSet.parse("0-3"), (1, 3): CpuSet.parse("4-7")}
SETS = st.builds(CpuSet.from_bits, st.integers(0, 255))
STATUS = st.builds(
    lambda cpus, nodes: ResourceStatus(str(cpus), cpus, tuple(NodeShare(node, 1000) for node in nodes)),
    SETS | st.just(CpuSet()),
    st.lists(st.integers(0, 4), max_size=2),
)
HOOKED_POD = st.builds(HookedPod, st.sampled_from(QosClass), st.sampled_from(KubeQos), STATUS)
HELD = st.lists(st.builds(AnnotatedCpus, st.sampled_from(QosClass), SETS), max_size=3)


def rule(held: list[AnnotatedCpus] | None = None, policy: str = "none", system: str = "") -> NodeRule:
    pools = node_pools(GROUPS, held or [], Withheld())
    return NodeRule(policy, pools.shared, pools.be, system)


def on(*nodes: int) -> ResourceStatus:
    return ResourceStatus(shares=tuple(NodeShare(node, 500) for node in nodes))


def named(cpus: str) -> ResourceStatus:
    return ResourceStatus(cpus, CpuSet.parse(cpus))


def test_every_row_in_turn() -> None:
    ls, be, lsr, system = QosClass.LS, QosClass.BE, QosClass.LSR, QosClass.SYSTEM
    here = rule([AnnotatedCpus(lsr, CpuSet([0]))], system="7")
    rows = [
        (1, decide(None, HookedPod(lsr, status=named("1,0")))),
        (2, decide(None, HookedPod(ls))),
        (3, decide(here, HookedPod(be, KubeQos.BEST_EFFORT, on(0)), be_manager=True)),
        (4, decide(here, HookedPod(ls, KubeQos.BEST_EFFORT, on(3, 0)))),
        (5, decide(here, HookedPod(system))),
        (6, decide(here, HookedPod(ls, KubeQos.BEST_EFFORT))),
        (7, decide(here, HookedPod(be, KubeQos.BEST_EFFORT, on(0)))),
        (8, decide(rule(policy="static"), HookedPod())),
        (9, decide(here, HookedPod(kube_qos=KubeQos.BURSTABLE))),
    ]
    assert [answer.row for _, answer in rows] == [row for row, _ in rows]
    assert [answer.upstream for _, answer in rows] == [
        "1,0",
        None,
        "0-3",
        "4-7,1-3",
        "7",
        "1-3,4-7",
        "",
        None,
        "1-3,4-7",
    ]
    assert [str(answer.cpus) for _, answer in rows] == ["0-1", "", "0-3", "1-7", "7", "1-7", "0-7", "", "1-7"]
    assert all(answer.why and not answer.problem for _, answer in rows)


def test_a_faulty_annotation_decides_nothing() -> None:
    hooked_pod = HookedPod.of({QOS_LABEL: "LSE"}, {RESOURCE_STATUS: "{"}, "/kubepods/podx")
    answer = decide(rule(), hooked_pod)
    assert (answer.row, answer.action) == (0, Action.LEAVE)
    assert answer.problem.startswith(f"annotation {RESOURCE_STATUS}: not JSON")


def test_what_a_pod_says_of_itself() -> None:
    annotations = {RESOURCE_STATUS: json.dumps({"cpuset": "1"})}
    hooked_pod = HookedPod.of({QOS_LABEL: "LS"}, annotations, "kubepods-burstable-podx.slice")
    assert hooked_pod == HookedPod(QosClass.LS, KubeQos.BURSTABLE, named("1"))


def test_a_be_pod_does_not_get_cpus_of_an_lse_pod_by_naming_them() -> None:
    here = rule([AnnotatedCpus(QosClass.LSE, CpuSet([0, 1]))])
    answer = decide(here, HookedPod(QosClass.BE, KubeQos.BEST_EFFORT, named("1-2")))
    assert (answer.row, answer.text, answer.cpus) == (1, "1-2", CpuSet([2]))
    assert answer.problem == "CPUs 1 are not in the BE pool"
    assert decide(here, HookedPod(QosClass.BE, status=named("0"))).cpus == CpuSet.parse("2-7")


def test_nodes_with_nothing_left_give_way_to_the_whole_pool() -> None:
    here = rule([AnnotatedCpus(QosClass.LSE, CpuSet.parse("4-7"))])
    answer = decide(here, HookedPod(QosClass.LS, status=on(3)))
    assert (answer.row, answer.text, answer.cpus) == (4, "", CpuSet.parse("0-3"))
    assert answer.problem == "nothing is left of the shared pool on NUMA nodes 3; the whole pool is used"


def test_an_empty_shared_pool_is_reported() -> None:
    full = rule([AnnotatedCpus(QosClass.LSE, CpuSet.parse("0-7"))])
    assert decide(full, HookedPod(QosClass.LS)).problem == "the shared pool is empty"


def test_only_host_applications_of_class_ls_are_given_cpus() -> None:
    assert decide_host_app(None, "a", "BE").row == 2
    assert decide_host_app(rule(), "a", "LS").cpus == CpuSet.parse("0-7")
    refused = decide_host_app(rule(), "a", "LSR")
    assert (refused.row, refused.upstream) == (0, None)
    assert refused.problem == "host application a is of class LSR; only LS can be given CPUs"


@given(HELD, HOOKED_POD, st.booleans(), st.sampled_from(["none", "static", ""]))
def test_no_container_is_put_on_owned_cpus(
    held: list[AnnotatedCpus], hooked_pod: HookedPod, gate: bool, policy: str
) -> None:
    pools = node_pools(GROUPS, held, Withheld())
    answer = decide(NodeRule(policy, pools.shared, pools.be), hooked_pod, be_manager=gate)
    if answer.row != 1:
        mine = {QosClass.LSE} if answer.row in (3, 7) else set(QosClass)
        for each in held:
            assert each.qos not in mine or answer.cpus.isdisjoint(each.cpus)
    if hooked_pod.qos is QosClass.BE and answer.row in (1, 3, 7):
        for each in held:
            assert each.qos is not QosClass.LSE or answer.cpus.isdisjoint(each.cpus)
    assert bool(answer.cpus) <= (answer.action is not Action.LEAVE)


@given(HELD, HELD, st.lists(HOOKED_POD, max_size=5), st.booleans())
def test_only_changed_answers_lead_to_a_change(
    before: list[AnnotatedCpus], after: list[AnnotatedCpus], hooked_pods: list[HookedPod], gate: bool
) -> None:
    old, new = rule(before), rule(after)
    pods = [(str(i), hooked_pod) for i, hooked_pod in enumerate(hooked_pods)]
    found = {change.key: change.answer for change in changes(old, new, pods, be_manager=gate)}
    for key, hooked_pod in pods:
        was, now = decide(old, hooked_pod, be_manager=gate), decide(new, hooked_pod, be_manager=gate)
        assert (key in found) == ((was.action, was.cpus) != (now.action, now.cpus))
        assert found.get(key, now) == now
    assert changes(new, new, pods, be_manager=gate) == ()


def test_the_same_cpus_in_other_pools_are_not_a_change() -> None:
    whole = NodeRule("none", (NodePool(0, 0, CpuSet.parse("0-7")),))
    cut = NodeRule("none", (NodePool(0, 0, CpuSet.parse("0-3")), NodePool(1, 0, CpuSet.parse("4-7"))))
    assert changes(whole, cut, [("a", HookedPod(QosClass.LS))]) == ()


def test_the_first_rule_sets_all_but_the_faulty() -> None:
    pods = [
        ("a", HookedPod(QosClass.LS)),
        ("b", HookedPod(problem="x")),
        ("c", HookedPod(QosClass.LSR, status=named("1"))),
    ]
    assert [change.key for change in changes(None, rule(), pods)] == ["a", "c"]
    faulty_first = [("b", HookedPod(QosClass.LS, problem="x")), ("a", HookedPod(QosClass.LS))]
    assert [change.key for change in changes(None, rule(), faulty_first)] == ["a"]
    static = rule(policy="static")
    assert changes(None, static, [("d", HookedPod())]) == (), "nothing is written where kubelet rules"
