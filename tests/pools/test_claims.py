from __future__ import annotations

import itertools

import pytest

from proxy.model.defects import InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import KeepQuota, NumaPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Pod, Pool, QosClass, Request
from proxy.pools.claims import (
    DecisionRow,
    claim,
    may_own,
    ownership_problem,
    pool_of,
    quota_of_owner,
    row_of,
    whole_cpus,
)
from tests.testkit.changed_copy import changed_copy

ONLINE = CpuSet.parse("0-7")
WHOLE_TWO = Request(cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)


def pod(qos: QosClass = QosClass.NONE, kube: KubeQos = KubeQos.GUARANTEED, cpus: str = "", problem: str = ""):
    defects = (InputDefect(problem, decisive=True),) if problem else ()
    return Pod("s", "u", "ns", "p", 0, qos, kube, "", CpuSet.parse(cpus) or None, defects)


@pytest.mark.parametrize(
    ("shares", "quota", "period", "count"),
    [
        (2048, 200_000, 100_000, 2),
        (2048, 200_000, 0, 2),  # the period's default is 100 ms
        (2048, -1, 100_000, 2),  # pinned by kubelet: quota off since 1.33
        (1024, 0, 0, 1),
        (2048, 150_000, 100_000, 0),  # request 2, limit 1.5
        (2048, 400_000, 100_000, 0),  # request below the limit: not Guaranteed
        (1536, 150_000, 100_000, 0),
        (1536, -1, 100_000, 0),
        (2048, 1, 100_000, 0),
        (-1024, 0, 0, 0),  # the CRI's numbers are signed
        (2, 0, 0, 0),  # no request
        (0, 0, 0, 0),
        (512, 50_000, 100_000, 0),
        (2048, 100_000, 50_000, 2),
        (262_144, 30_000_000, 100_000, 300),  # shares are capped
        (262_144, 25_600_000, 100_000, 256),
        (262_144, 30_050_000, 100_000, 0),
        (262_144, -1, 100_000, 0),
        (262_144, 400_000, 100_000, 0),
        (262_144, 25_500_000, 100_000, 0),
        (262_144, 30_000_000, 0, 300),
        (262_144, 15_000_000, 50_000, 300),
    ],
)
def test_whole_cpus_are_counted_if_quota_and_shares_agree(
    shares: int, quota: int, period: int, count: int
) -> None:
    assert whole_cpus(Request(shares, quota, period)) == count


@pytest.mark.parametrize(
    ("the_pod", "static", "pool", "hard"),
    [
        (pod(QosClass.LSE, cpus="2-3"), False, Pool.OWN, True),
        (pod(QosClass.LSR, cpus="2-3"), False, Pool.OWN, False),
        (pod(QosClass.LS, cpus="2-3"), False, Pool.OWN, False),
        (pod(QosClass.NONE, KubeQos.BURSTABLE, cpus="2-3"), False, Pool.OWN, False),
        (pod(QosClass.BE, KubeQos.BEST_EFFORT, cpus="2-3"), False, Pool.BE, False),
        (pod(QosClass.LS), True, Pool.SHARED, False),
        (pod(QosClass.LS, KubeQos.BEST_EFFORT), True, Pool.SHARED, False),
        (pod(QosClass.SYSTEM), True, Pool.SYSTEM, False),
        (pod(QosClass.BE), True, Pool.BE, False),
        (pod(kube=KubeQos.BURSTABLE), True, Pool.SHARED, False),
        (pod(kube=KubeQos.BEST_EFFORT), True, Pool.BE, False),
        (pod(), True, Pool.OWN, True),
        (pod(), False, Pool.SHARED, False),
        (pod(QosClass.LSE), True, Pool.OWN, True),
        (pod(QosClass.LSR), False, Pool.SHARED, False),
    ],
)
def test_the_pool_of_each_class(the_pod: Pod, static: bool, pool: Pool, hard: bool) -> None:
    made = claim(the_pod, WHOLE_TWO, ONLINE, static=static)
    assert (made.pool, made.excludes_be, made.fatal, made.problem) == (pool, hard, False, "")
    if pool is Pool.OWN:
        assert (made.cpus, made.count) == ((the_pod.cpuset, 0) if the_pod.cpuset else (None, 2))
        assert made.per_pod is bool(the_pod.cpuset)


@pytest.mark.parametrize("qos", [QosClass.LSE, QosClass.LSR])
@pytest.mark.parametrize("bad", [{"problem": "annotation is not JSON"}, {"cpus": "6-9"}])
def test_a_bad_annotation_refuses_pods_that_want_exclusive_cpus(qos: QosClass, bad: dict[str, str]) -> None:
    made = claim(pod(qos, **bad), WHOLE_TWO, ONLINE, static=True)
    assert made.fatal
    assert bad.get("problem", "8-9 are not online") in made.problem


def test_a_bad_annotation_leaves_other_pods_in_their_pool() -> None:
    for qos, pool in ((QosClass.LS, Pool.SHARED), (QosClass.NONE, Pool.SHARED), (QosClass.BE, Pool.BE)):
        made = claim(pod(qos, problem="nonsense"), WHOLE_TWO, ONLINE, static=True)
        assert (made.pool, made.fatal, made.problem) == (pool, False, "nonsense")


def test_cpus_of_an_annotation_that_is_partly_wrong_are_not_taken() -> None:
    made = claim(pod(QosClass.LS, cpus="2-3", problem="nonsense"), WHOLE_TWO, ONLINE, static=True)
    assert (made.pool, made.problem) == (Pool.SHARED, "nonsense")


def test_a_pod_that_names_missing_cpus_does_not_silently_get_other_cpus() -> None:
    """As with an annotation that cannot be read: a Guaranteed pod shares, and its fault is reported."""
    for static in (False, True):
        preferences = claim(pod(cpus="7-8"), WHOLE_TWO, ONLINE, static=static)
        assert (preferences.pool, preferences.cpus, preferences.count) == (Pool.SHARED, None, 0)
        assert "8 is not online" in preferences.problem


@pytest.mark.parametrize("cpus", ["", "2-3"])
def test_the_reason_names_the_class_by_label_or_else_by_kubernetes(cpus: str) -> None:
    for the_pod, name in (
        (pod(QosClass.LS, KubeQos.BURSTABLE, cpus), "LS"),
        (pod(QosClass.NONE, KubeQos.BURSTABLE, cpus), "Burstable"),
    ):
        assert claim(the_pod, WHOLE_TWO, ONLINE, static=True).reason.startswith(f"{name} pod")


def test_pinning_by_kubelet_is_kept_if_topoproxy_does_not_allocate() -> None:
    pinned = Request(cpu_shares=2048, cpu_quota=-1, cpu_period=100_000, cpuset_cpus="4-5")
    made = claim(pod(), pinned, ONLINE, static=False)
    assert (made.pool, made.cpus, made.excludes_be) == (Pool.OWN, CpuSet.parse("4-5"), True)
    for other in ("0-7", "", "x", "8-9", "4"):  # its default set, none, garbage, not here, another number
        request = Request(cpu_shares=2048, cpuset_cpus=other)
        assert claim(pod(), request, ONLINE, static=False).pool is Pool.SHARED
    everything = Request(cpu_shares=8192, cpuset_cpus="0-7")
    assert claim(pod(), everything, ONLINE, static=False).cpus == ONLINE
    assert claim(pod(kube=KubeQos.BURSTABLE), pinned, ONLINE, static=False).pool is Pool.SHARED
    assert claim(pod(), pinned, ONLINE, static=True).cpus is None


@pytest.mark.parametrize(
    ("qos", "kube", "pool"),
    [
        (QosClass.LS, KubeQos.BURSTABLE, Pool.SHARED),
        (QosClass.LSR, KubeQos.GUARANTEED, Pool.SHARED),
        (QosClass.NONE, KubeQos.GUARANTEED, Pool.SHARED),
        (QosClass.BE, KubeQos.BEST_EFFORT, Pool.BE),
        (QosClass.SYSTEM, KubeQos.BURSTABLE, Pool.SHARED),
    ],
)
def test_numa_nodes_without_cpus_bind_a_pod_to_the_pool_of_these_nodes(
    qos: QosClass, kube: KubeQos, pool: Pool
) -> None:
    bound = changed_copy(pod(qos, kube), nodes=Mask((1,)))
    made = claim(bound, WHOLE_TWO, ONLINE, static=True)
    assert (made.pool, made.nodes, made.cpus, made.count, made.problem) == (pool, Mask((1,)), None, 0, "")
    assert made.reason.endswith("pod: its resource-status annotation binds it to NUMA node 1")
    aligned = claim(changed_copy(bound, aligned=NumaPolicy.RESTRICTED), WHOLE_TWO, ONLINE, static=True)
    assert aligned.reason.endswith("pod: it was aligned, which binds it to NUMA node 1")


@pytest.mark.parametrize(
    ("qos", "pool"), [(QosClass.LS, Pool.SHARED), (QosClass.NONE, Pool.SHARED), (QosClass.BE, Pool.BE)]
)
def test_a_pod_with_a_fault_is_bound_to_no_numa_nodes(qos: QosClass, pool: Pool) -> None:
    bound = changed_copy(pod(qos, KubeQos.BURSTABLE, problem="nonsense"), nodes=Mask((1,)))
    made = claim(bound, WHOLE_TWO, ONLINE, static=True)
    assert (made.pool, made.nodes, made.problem) == (pool, None, "nonsense")


def test_a_be_pod_is_narrowed_to_the_cpus_that_it_names_and_owns_none() -> None:
    made = claim(pod(QosClass.BE, KubeQos.BEST_EFFORT, cpus="2-3"), WHOLE_TWO, ONLINE, static=True)
    assert (made.pool, made.within, made.cpus) == (Pool.BE, CpuSet((2, 3)), None)


def test_the_pool_of_a_container_without_exclusive_cpus() -> None:
    batch = pod(QosClass.BE, KubeQos.BURSTABLE)
    assert pool_of(batch) == (Pool.BE, "BE pod runs on the BE pool")
    assert pool_of(pod(kube=KubeQos.BEST_EFFORT))[0] is Pool.BE
    assert pool_of(pod(QosClass.LSE, cpus="2-3")) == (Pool.SHARED, "LSE pod runs on the shared pool")
    assert pool_of(pod(QosClass.SYSTEM, KubeQos.BEST_EFFORT))[0] is Pool.SYSTEM


def test_the_reason_names_the_component_that_chose_the_cpus() -> None:
    named = pod(QosClass.LSR, cpus="0-1")
    here = changed_copy(named, cpuset_chosen_locally=True)
    why = [claim(each, WHOLE_TWO, ONLINE, static=True).reason for each in (named, here)]
    assert why == [
        "LSR pod: its resource-status annotation names CPUs 0-1",
        "LSR pod: CPUs 0-1 were chosen for it as a whole",
    ]


QOS = tuple(QosClass)
KUBE = tuple(KubeQos)


@pytest.mark.parametrize(
    ("qos", "kube", "reported", "row"),
    [
        (QosClass.NONE, KubeQos.BURSTABLE, {"named": True, "bound": True}, DecisionRow.NAMED),
        (QosClass.BE, KubeQos.BEST_EFFORT, {"bound": True}, DecisionRow.BE_ON_NODES),
        (QosClass.SYSTEM, KubeQos.BURSTABLE, {"bound": True}, DecisionRow.SHARED_ON_NODES),
        (QosClass.LSE, KubeQos.GUARANTEED, {"bound": True}, DecisionRow.SHARED_ON_NODES),
        (QosClass.SYSTEM, KubeQos.BEST_EFFORT, {}, DecisionRow.SYSTEM),
        (QosClass.LS, KubeQos.BEST_EFFORT, {}, DecisionRow.LS),
        (QosClass.NONE, KubeQos.BEST_EFFORT, {}, DecisionRow.BEST_EFFORT),
        (QosClass.BE, KubeQos.BEST_EFFORT, {}, DecisionRow.BEST_EFFORT),
        (QosClass.LSR, KubeQos.GUARANTEED, {}, DecisionRow.SHARED),
        (QosClass.BE, KubeQos.BURSTABLE, {}, DecisionRow.SHARED),
    ],
)
def test_the_first_row_that_fits_decides(
    qos: QosClass, kube: KubeQos, reported: dict[str, bool], row: DecisionRow
) -> None:
    assert row_of(qos, kube, **reported) is row


def test_the_rows_have_koordinators_numbers() -> None:
    assert [int(row) for row in DecisionRow] == [1, 3, 4, 5, 6, 7, 9]


@pytest.mark.parametrize(("qos", "kube"), list(itertools.product(QOS, KUBE)))
def test_the_rows_determine_the_pool_on_a_topoproxy_node(qos: QosClass, kube: KubeQos) -> None:
    """Every class in every cgroup without named CPUs: the row decides the pool, and the label BE wins."""
    pod = Pod("s", "u", "ns", "n", qos=qos, kube_qos=kube)
    pools = {
        DecisionRow.SYSTEM: Pool.SYSTEM,
        DecisionRow.LS: Pool.SHARED,
        DecisionRow.BEST_EFFORT: Pool.BE,
        DecisionRow.SHARED: Pool.SHARED,
    }
    expected = Pool.BE if qos is QosClass.BE else pools[row_of(qos, kube)]
    made = claim(pod, Request(), CpuSet.parse("0-7"), static=False)
    assert (made.pool, made.nodes, made.within, made.cpus) == (expected, None, None, None)


def test_volcanos_nodes_narrow_the_shared_pool_and_no_other() -> None:
    there = CpuSet.parse("0-7")
    preferences = Mask((1,))
    shares = Pod("s", "u", "ns", "n", kube_qos=KubeQos.BURSTABLE, volcano_nodes=preferences)
    assert claim(shares, Request(), there, static=False).nodes == preferences
    best_effort = Pod("s", "u", "ns", "n", kube_qos=KubeQos.BEST_EFFORT, volcano_nodes=preferences)
    assert claim(best_effort, Request(), there, static=False).nodes is None
    bound = Pod("s", "u", "ns", "n", kube_qos=KubeQos.BURSTABLE, volcano_nodes=preferences, nodes=Mask((0,)))
    assert claim(bound, Request(), there, static=False).nodes == Mask((0,))


def test_a_pod_with_a_fault_is_not_narrowed_to_the_nodes_of_volcano() -> None:
    faulty = pod(QosClass.LS, KubeQos.BURSTABLE, problem="nonsense")
    made = claim(changed_copy(faulty, volcano_nodes=Mask((1,))), Request(), ONLINE, static=False)
    assert (made.pool, made.nodes, made.problem) == (Pool.SHARED, None, "nonsense")


def test_which_pods_may_own_cpus_without_an_annotation() -> None:
    owning = {(qos, kube) for qos, kube in itertools.product(QosClass, KubeQos) if may_own(pod(qos, kube))}
    assert owning == {(qos, KubeQos.GUARANTEED) for qos in (QosClass.NONE, QosClass.LSE, QosClass.LSR)}
    assert not any(may_own(pod(qos, problem="nonsense")) for qos in QosClass)


@pytest.mark.parametrize(
    ("containers", "keep", "quota"),
    [
        (1, KeepQuota.NEVER, -1),
        (3, KeepQuota.NEVER, -1),
        (1, KeepQuota.SEVERAL_CONTAINERS, -1),
        (2, KeepQuota.SEVERAL_CONTAINERS, None),
        (1, KeepQuota.ALWAYS, None),
    ],
)
def test_owners_whose_quota_is_switched_off(containers: int, keep: KeepQuota, quota: int | None) -> None:
    assert quota_of_owner(containers=containers, keep=keep) == quota


def resources(
    name: str, cpu: int, limit: int | None = None, kind: ContainerKind = ContainerKind.APP
) -> ContainerResources:
    return ContainerResources(name, kind, {"cpu": cpu}, {"cpu": cpu if limit is None else limit})


def test_containers_that_request_whole_cpus_together_may_own_them() -> None:
    assert not ownership_problem(QosClass.LSE, PodRequests("u", (resources("a", 1500), resources("b", 500))))
    init = resources("i", 300, kind=ContainerKind.INIT)
    assert not ownership_problem(
        QosClass.LSR,
        PodRequests("u", (init, resources("s", 700, kind=ContainerKind.SIDECAR), resources("a", 300))),
    )
    assert not ownership_problem(QosClass.LS, PodRequests("u", (resources("a", 1500, 9000),)))


def test_the_reason_why_a_pod_may_not_own_cpus() -> None:
    uneven = ownership_problem(
        QosClass.LSE, PodRequests("u", (resources("a", 1000), resources("b", 1000, 2000)))
    )
    assert uneven == "LSE pod: container b requests 1000m CPU and is limited to 2000m; the two must be equal"
    broken = ownership_problem(QosClass.LSR, PodRequests("u", (resources("a", 1500),)))
    assert broken == "LSR pod: its containers request 1500m CPU together; it must be whole CPUs"
    assert "request 0m CPU" in ownership_problem(QosClass.LSR, PodRequests("u", (ContainerResources("a"),)))


def test_the_request_of_the_pod_itself_counts_in_place_of_its_containers() -> None:
    containers = (ContainerResources("a"), resources("b", 500, 1500))

    def problem(own: dict[str, int], limits: dict[str, int] | None = None) -> str:
        requests = PodRequests("u", containers, limits is None, own, pod_level_limits=limits or {})
        return ownership_problem(QosClass.LSR, requests)

    assert not problem({"cpu": 4000})
    assert not problem({"cpu": 4000}, {"cpu": 4000})
    assert problem({"cpu": 4000}, {"cpu": 5000}) == (
        "LSR pod: it requests 4000m CPU and is limited to 5000m; the two must be equal"
    )
    assert problem({"cpu": 1500}) == "LSR pod: it requests 1500m CPU; it must be whole CPUs"
    assert problem({"memory": 5}).startswith("LSR pod: container b requests 500m CPU")
