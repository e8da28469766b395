"""The CPUs that a pod may claim: by its namespace, its class, its annotation and its request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.config.admission import AdmissionConfig
from proxy.engine.admission import assigned_cpus, permitted_claim, requested_cpus, sum_requests
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRule, AdmissionRules, BeyondLimit, Namespaces, ResourceStatusMode
from proxy.model.idset import CpuSet
from proxy.model.label_selector import LabelSelector
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Pod, Pool, QosClass, Request
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.facts import QOS_LABEL, pod_facts
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 8, 2)  # 32 CPUs
DEFAULT = AdmissionConfig().rules


def node_of(rules: AdmissionRules = DEFAULT, **more: Any) -> Node:
    return Node(MACHINE, CpuTopology.of(MACHINE), admission=rules, **more)


def cri_request(milli: int, limit: int | None = None) -> Request:
    """Return the CRI request that kubelet sends for a request and a limit (None: the same; 0: none)."""
    limit = milli if limit is None else limit
    return Request(max(2, milli * 1024 // 1000), limit * 100, 100_000)


def pod_of(
    annotation: str = "", qos: str = "", total: Request | None = None, namespace: str = "a", parent: str = ""
) -> Pod:
    annotations = {RESOURCE_STATUS: annotation} if annotation else {}
    labels = {QOS_LABEL: qos} if qos else {}
    parent = parent or "/kubepods/burstable"
    pod = pod_facts("s", "u", namespace, "p", 0, labels, annotations, f"{parent}/podu")
    return changed_copy(pod, total=total)


def rule_of(pod: Pod, node: Node | None = None) -> AdmissionRule | None:
    breach = permitted_claim(node or node_of(), pod)[1]
    return None if breach is None else breach.rule


@pytest.mark.parametrize(
    ("annotation", "qos", "total", "rule"),
    [
        ('{"cpuset":"0-30"}', "", cri_request(100), AdmissionRule.REQUEST),
        ('{"cpuset":"0-30"}', "LS", cri_request(100), AdmissionRule.REQUEST),
        ('{"cpuset":"0-5"}', "LSE", cri_request(100), AdmissionRule.REQUEST),
        ('{"cpuset":"0"}', "", cri_request(999), AdmissionRule.REQUEST),
        ('{"cpuset":"0"}', "", cri_request(1000), None),
        ('{"cpuset":"0-1"}', "", cri_request(1999), AdmissionRule.REQUEST),
        ('{"cpuset":"0-3"}', "LSR", cri_request(4000), None),
        ('{"cpuset":"0-3"}', "LSE", cri_request(4000), None),
        ('{"cpuset":"0-2"}', "LSR", cri_request(4000), None),  # fewer than it requests
        ('{"cpuset":"0-3"}', "LSR", cri_request(4000, 0), AdmissionRule.WHOLE_CPUS),  # no limit
        ('{"cpuset":"0-3"}', "LSR", cri_request(4000, 8000), AdmissionRule.WHOLE_CPUS),
        ('{"cpuset":"0-3"}', "LSR", cri_request(4500), AdmissionRule.WHOLE_CPUS),
        ('{"cpuset":"0-3"}', "LS", cri_request(4000, 0), None),  # bound on a node with a bind policy
        ('{"cpuset":"0-3"}', "BE", cri_request(2), None),  # BE owns no CPUs by its annotation
        ('{"cpu\\u0073et":"0-30"}', "", cri_request(100), AdmissionRule.REQUEST),
        ('{"CPUSET":"0-30"}', "", cri_request(100), AdmissionRule.REQUEST),
        ('{"CpuSet":"0-30","cpuset":null}', "", cri_request(100), AdmissionRule.REQUEST),  # as Go
        ('{"CpuSet":"0-30","cpuset":""}', "", cri_request(100), None),
        ('{"cpuset":"0","CPUSET":"0-30"}', "", cri_request(100), AdmissionRule.REQUEST),
        ('{"cpuset":"0-30","cpuset":"0-30"}', "", cri_request(100), AdmissionRule.REQUEST),
        ('{"cpuset":"0-30","numaNodeResources":[{"node":0,"resources":{"cpu":"31"}}]}', "", cri_request(100),
         AdmissionRule.REQUEST),
        ('{"numaNodeResources":[{"node":0,"resources":{"cpu":"31"}}]}', "", cri_request(100), None),
        ('{"cpuset":"0,0,0,1"}', "", cri_request(2000), None),
        ('{"cpuset":"0-1,3-4,30"}', "", cri_request(4000), AdmissionRule.REQUEST),
    ],
)  # fmt: skip
def test_an_annotation_names_no_more_cpus_than_the_pod_requests(
    annotation: str, qos: str, total: Request, rule: AdmissionRule | None
) -> None:
    pod = pod_of(annotation, qos, total)
    assert rule_of(pod) is rule
    plan = place(NodeState.empty(node_of()).with_pod(pod), pod, "c", 0, total, "t")
    owns = plan.container is not None and plan.container.placement.pool is Pool.OWN
    assert owns is (rule is None and bool(pod.cpuset) and qos != "BE")
    assert plan.limit is rule
    if rule is not None:
        assert (plan.verdict.code, plan.verdict.reason) == (9, rule.reason)
        assert plan.state == NodeState.empty(node_of()).with_pod(pod)


@pytest.mark.parametrize("qos", ["", "LS", "LSR", "LSE", "SYSTEM"])
@pytest.mark.parametrize(
    ("cpus", "rule"),
    [
        ("0", AdmissionRule.RESERVED_CPUS),
        ("4", AdmissionRule.RESERVED_CPUS),
        ("8", AdmissionRule.RESERVED_CPUS),
        ("9", None),
    ],
)
def test_reserved_cpus_are_never_named(cpus: str, rule: AdmissionRule | None, qos: str) -> None:
    kept = {"reserved": CpuSet([0]), "node_reservation": CpuSet([4]), "system": CpuSet([8])}
    pod = pod_of(f'{{"cpuset":"{cpus}"}}', qos, cri_request(1000), "kube-system")
    assert rule_of(pod, node_of(**kept)) is rule
    follow = changed_copy(DEFAULT, resource_status=ResourceStatusMode.FOLLOW)
    assert rule_of(pod, node_of(follow, **kept)) is None


def test_an_owner_keeps_cpus_that_are_reserved_later() -> None:
    """The owner's container crashes and is created again after the Node object has reserved the CPUs."""
    pod = pod_of('{"cpuset":"4-5"}', "LSR", cri_request(2000))
    state = NodeState.empty(node_of()).with_pod(pod)
    plan = place(state, pod, "c", 0, cri_request(2000), "c1")
    assert plan.container is not None
    later = plan.state.with_node(node_of(node_reservation=CpuSet([4])))
    again = place(later, pod, "c", 1, cri_request(2000), "c2")
    assert again.container is not None
    assert again.container.placement.exclusive == CpuSet([4, 5])
    other = changed_copy(pod, uid="v", sandbox_id="s2")
    assert place(later, other, "c", 0, cri_request(2000), "c3").verdict.reason == "AdmissionReservedCPUs"


def test_facts_of_kubelet_take_precedence_over_the_sandbox() -> None:
    requests = PodRequests(
        "u",
        (
            ContainerResources("init", ContainerKind.INIT, {"cpu": 6000}, {"cpu": 6000}),
            ContainerResources("side", ContainerKind.SIDECAR, {"cpu": 1000}, {"cpu": 1000}),
            ContainerResources("app", ContainerKind.APP, {"cpu": 3000}, {"cpu": 3000}),
        ),
        guaranteed=False,
    )
    pod = changed_copy(pod_of('{"cpuset":"0-5"}', "", cri_request(100)), requests=requests)
    assert requested_cpus(pod, Request()) == 6, (
        "the init container needs more than the containers that run after it"
    )
    assert rule_of(pod) is None
    more = changed_copy(pod, cpuset=CpuSet(range(7)))
    assert rule_of(more) is AdmissionRule.REQUEST
    whole = changed_copy(pod, requests=changed_copy(requests, pod_level_requests={"cpu": 8000}))
    assert requested_cpus(whole, Request()) == 8, "the pod-level request counts"
    assert (
        requested_cpus(
            changed_copy(pod, requests=changed_copy(requests, pod_level_requests={"memory": 1})), Request()
        )
        == 6
    )


def test_facts_of_kubelet_limit_a_pod_whose_sandbox_has_no_sum() -> None:
    app = ContainerResources("app", ContainerKind.APP, {"cpu": 3000}, {"cpu": 3000})
    pod = changed_copy(pod_of('{"cpuset":"0-3"}'), requests=PodRequests("u", (app,), guaranteed=False))
    assert pod.total is None
    assert rule_of(pod) is AdmissionRule.REQUEST
    assert rule_of(changed_copy(pod, cpuset=CpuSet(range(3)))) is None


def test_the_limit_counts_beyond_256_cpus() -> None:
    """The kernel takes no more than 262144 shares."""
    pod = pod_of("", "", Request(262_144, 300 * 100_000, 100_000))
    assert requested_cpus(pod, Request()) == 300
    assert requested_cpus(pod_of("", "", Request(262_144, -1, 100_000)), Request()) == 256
    assert requested_cpus(pod_of("", "", Request(262_143, 0, 0)), Request()) == 255
    for period in (0, 100_000, 50_000):  # the period of kubelet is 100 ms by default
        total = Request(262_144, 300 * (period or 100_000), period)
        assert requested_cpus(pod_of("", "", total), Request()) == 300
        assert requested_cpus(pod_of(), total) == 300, (
            "without a sum, the known requests of its containers count"
        )


@pytest.mark.parametrize("mode", ResourceStatusMode)
@pytest.mark.parametrize("qos", ["LSR", "LSE"])
def test_cpus_that_the_node_has_chosen_are_not_checked_again(qos: str, mode: ResourceStatusMode) -> None:
    """No annotation claims these CPUs: a later reservation or a new count removes none of them."""
    chosen = changed_copy(
        pod_of("", qos, cri_request(1000)), cpuset=CpuSet([4, 5]), cpuset_chosen_locally=True
    )
    node = node_of(changed_copy(DEFAULT, resource_status=mode), node_reservation=CpuSet([4]))
    assert permitted_claim(node, chosen) == (chosen, None)
    assert assigned_cpus(node, chosen) == CpuSet([4, 5])
    named = changed_copy(chosen, cpuset_chosen_locally=False)
    follows = mode is ResourceStatusMode.FOLLOW
    assert assigned_cpus(node, named) == (CpuSet([4, 5]) if follows else None)


def test_a_guaranteed_pod_is_limited_if_kubelet_sets_no_quota() -> None:
    """kubelet with cpuCFSQuota false, and pinned containers since 1.33."""
    for quota in (-1, 0):
        pod = pod_of('{"cpuset":"0-3"}', "LSR", Request(4096, quota, 100_000), parent="/kubepods")
        assert rule_of(pod) is None
        burstable = changed_copy(pod, kube_qos=KubeQos.BURSTABLE)
        assert rule_of(burstable) is AdmissionRule.WHOLE_CPUS


def test_without_a_sum_the_containers_that_are_here_count() -> None:
    """kubelet before 1.23 sends no sum: requests of containers are then added up at their creates."""
    node = node_of()
    pod = pod_of('{"cpuset":"0-3"}', "LSR")
    state = NodeState.empty(node).with_pod(pod)
    assert place(state, pod, "a", 0, cri_request(4000), "a1").container is not None
    assert place(state, pod, "a", 0, cri_request(2000), "a1").limit is AdmissionRule.REQUEST
    shared = changed_copy(pod, cpuset=None, qos=QosClass.LS)
    with_other = place(state, shared, "b", 0, cri_request(2000), "b1")
    assert place(with_other.state, pod, "a", 0, cri_request(2000), "a1").container is not None
    again = place(with_other.state, pod, "b", 1, cri_request(2000), "b2")
    assert again.limit is AdmissionRule.REQUEST, "attempts of one container count once"


def test_disabled_quotas_count_as_the_request() -> None:
    assert sum_requests([Request(1024, 100_000, 100_000), Request(2048, 100_000, 50_000)]) == Request(
        3072, 300_000, 100_000
    )
    assert sum_requests([Request(1024, -1, 100_000), Request(2048, 200_000, 0)]) == Request(
        3072, 300_000, 100_000
    )
    assert sum_requests([Request(2, 0, 0)]) == Request(0, 0, 100_000)
    assert sum_requests([Request(3, 0, 0)]).cpu_shares == 3, "two shares mean that there is no request"
    assert sum_requests([Request(1024, 0, 100_000), Request(2048, 200_000, 100_000)]) == Request(
        3072, 300_000, 100_000
    )


TEAMS = changed_copy(DEFAULT, owners=Namespaces(("team-*", "infra")))


@pytest.mark.parametrize(
    ("namespace", "listed"),
    [("team-a", True), ("infra", True), ("infra2", False), ("a-team-b", False), ("", False), ("team-", True)],
)
@pytest.mark.parametrize(
    ("annotation", "qos"), [('{"cpuset":"4-5"}', ""), ("", "LSR"), ("", "LSE"), ('{"cpuset":"4-5"}', "LSE")]
)
def test_namespaces_that_are_listed_may_own(namespace: str, listed: bool, annotation: str, qos: str) -> None:
    pod = pod_of(annotation, qos, cri_request(2000), namespace)
    assert rule_of(pod, node_of(TEAMS)) is (None if listed else AdmissionRule.NAMESPACE)


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        (TEAMS, "admission.namespaces"),
        (
            changed_copy(DEFAULT, owners=Namespaces(selector=LabelSelector((("tier", "x"),)))),
            "admission.namespaceSelector",
        ),
    ],
)
def test_the_namespace_and_the_setting_that_excludes_it_are_named(rules: AdmissionRules, what: str) -> None:
    breach = permitted_claim(node_of(rules), pod_of("", "LSE", cri_request(2000), "web"))[1]
    assert breach is not None
    assert breach.message == f"pods of namespace 'web' may not use class LSE ({what})"


def test_pods_of_other_namespaces_without_a_claim_are_not_rejected() -> None:
    node = node_of(TEAMS)
    for pod in (
        pod_of("", "LS"),
        pod_of("", "BE"),
        pod_of("", ""),
        pod_of('{"cpuset":"4-5"}', "BE"),
        pod_of('{"numaNodeResources":[{"node":1,"resources":{"cpu":"1"}}]}', "LS"),
    ):
        seen, breach = permitted_claim(node, pod)
        assert breach is None
        assert (seen.cpuset, seen.nodes) == (None, None), "the annotation is not read"


@pytest.mark.parametrize(("namespace", "keeps", "rule"), [
    ("a", "2-3", AdmissionRule.SYSTEM_NAMESPACE), ("kube-system", "2-3", None), ("a", "", None),
])  # fmt: skip
def test_class_system_is_for_listed_namespaces(
    namespace: str, keeps: str, rule: AdmissionRule | None
) -> None:
    """If the node keeps no CPUs for the class, the label grants no additional CPUs."""
    node = node_of(system=CpuSet.parse(keeps))
    pod = pod_of("", "SYSTEM", namespace=namespace)
    assert rule_of(pod, node) is rule
    state = NodeState.empty(node).with_pod(pod)
    plan = place(state, pod, "c", 0, Request(), "c1")
    assert plan.limit is rule
    assert admit(state, pod, Request()).limit is rule
    sharing = node_of(changed_copy(DEFAULT, beyond=BeyondLimit.SHARE), system=CpuSet.parse(keeps))
    shared = place(NodeState.empty(sharing).with_pod(pod), pod, "c", 0, Request(), "c1")
    assert shared.container is not None
    pool = Pool.SHARED if rule else Pool.SYSTEM
    assert shared.container.placement.pool is pool
    assert bool(shared.problem) is (rule is not None)


@pytest.mark.parametrize("qos", ["", "LS", "LSR", "LSE"])
def test_a_pod_shares_if_that_is_configured(qos: str) -> None:
    node = node_of(changed_copy(DEFAULT, beyond=BeyondLimit.SHARE), static=True)
    pod = pod_of('{"cpuset":"0-30"}', qos, cri_request(100))
    state = NodeState.empty(node).with_pod(pod)
    assert admit(state, pod, cri_request(100)).verdict.admitted
    plan = place(state, pod, "c", 0, cri_request(100), "c1")
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED
    assert plan.container.placement.cfs_quota_off is False
    assert plan.limit is AdmissionRule.REQUEST
    assert plan.problem.startswith("it owns no CPUs (request): its resource-status annotation names 31 CPUs")
    assert plan.state.pools.shared == MACHINE.online


@pytest.mark.parametrize("annotation", ['{"cpuset":"0-3"}', "{", '{"numaNodeResources":[{"node":1}]}'])
@pytest.mark.parametrize("qos", ["", "LS", "LSR", "BE"])
def test_an_ignored_annotation_has_no_effect(annotation: str, qos: str) -> None:
    rules = changed_copy(DEFAULT, resource_status=ResourceStatusMode.IGNORE)
    for static in (False, True):
        node = node_of(rules, static=static)
        with_it, without = pod_of(annotation, qos, cri_request(4000)), pod_of("", qos, cri_request(4000))
        seen, breach = permitted_claim(node, with_it)
        assert breach is None
        assert changed_copy(seen, defects=(), total=None) == changed_copy(without, total=None)
        state = NodeState.empty(node)
        one, other = (admit(state, pod, cri_request(4000)) for pod in (with_it, without))
        assert (one.verdict, one.pod.reserved_for_pod) == (other.verdict, other.pod.reserved_for_pod)


def test_an_ignored_annotation_lets_the_node_choose_for_lsr_pods() -> None:
    node = node_of(changed_copy(DEFAULT, resource_status=ResourceStatusMode.IGNORE), static=True)
    pod = pod_of('{"cpuset":"30-31"}', "LSR", cri_request(2000), parent="/kubepods")
    admission = admit(NodeState.empty(node), pod, cri_request(2000))
    assert admission.pod.reserved_for_pod is not None
    assert admission.pod.cpuset_chosen_locally
    assert admission.pod.cpuset == admission.pod.reserved_for_pod.cpus == admission.state.pods["s"].cpuset
    assert admission.pod.cpuset != CpuSet([30, 31])
    plan = place(admission.state, admission.pod, "c", 0, cri_request(2000), "c1")
    assert plan.container is not None
    assert plan.container.placement.exclusive == admission.pod.cpuset


def test_a_claim_that_is_not_allowed_is_rejected_when_the_sandbox_comes() -> None:
    pod = pod_of('{"cpuset":"0-30"}', "", cri_request(100))
    state = NodeState.empty(node_of())
    admission = admit(state, pod, cri_request(100))
    assert admission.verdict.reason == "AdmissionRequest"
    assert admission.verdict.message == (
        "cannot place a/p: its resource-status annotation names 31 CPUs, and its containers request"
        " 0 whole CPUs together (admission.resourceStatus is bounded)"
    )
    assert admission.explanation is not None
    unknown = changed_copy(pod, total=None)
    assert admit(state, unknown, Request()).verdict.admitted, "its request is not known yet"


def test_a_pod_whose_claim_is_not_allowed_is_reported_if_it_shares() -> None:
    state = NodeState.empty(node_of(changed_copy(DEFAULT, beyond=BeyondLimit.SHARE)))
    pod = pod_of('{"cpuset":"0-30"}', "", cri_request(100))
    admission = admit(state, pod, cri_request(100))
    assert admission.verdict.admitted
    assert (admission.pod, admission.limit) == (pod, AdmissionRule.REQUEST)
    assert admission.problem.startswith("it owns no CPUs (request): its resource-status annotation names")


def test_cpus_that_a_pod_may_not_claim_are_not_kept_for_it() -> None:
    """Otherwise, a rejected annotation would still keep the CPUs from other pods."""
    node = node_of()
    evil = pod_of('{"cpuset":"0-30"}', "", cri_request(100))
    honest = changed_copy(pod_of('{"cpuset":"4-5"}', "LSR", cri_request(2000)), uid="v", sandbox_id="s2")
    state = NodeState.empty(node).with_pod(evil).with_pod(honest)
    assert assigned_cpus(node, evil) is None
    assert state.promised_cpus("") == CpuSet([4, 5])


@given(
    st.sampled_from(["", "LS", "LSR", "LSE", "SYSTEM", "BE"]),
    st.sets(st.integers(0, 40), max_size=40),
    st.integers(0, 34_000),
    st.sampled_from([None, 0, 500, 2000, 4000, 34_000]),
    st.booleans(),
)
def test_a_pod_never_owns_more_cpus_by_an_annotation_than_it_requests(
    qos: str, named: set[int], milli: int, limit: int | None, guaranteed: bool
) -> None:
    node = node_of(reserved=CpuSet([0]), system=CpuSet([1]))
    parent = "/kubepods" if guaranteed else "/kubepods/burstable"
    text = f'{{"cpuset":"{CpuSet(named)}"}}'
    pod = pod_of(text, qos, cri_request(milli, limit), "kube-system", parent)
    plan = place(NodeState.empty(node).with_pod(pod), pod, "c", 0, cri_request(milli, limit), "c1")
    own = CpuSet() if plan.container is None else plan.container.placement.exclusive
    assert len(own) <= milli // 1000
    assert own.isdisjoint(node.reserved | node.system)
    if qos in ("LSR", "LSE") and own:
        assert milli % 1000 == 0
