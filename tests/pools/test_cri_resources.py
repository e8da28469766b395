"""The CRI requests of kubelet, derived from a Pod object."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from proxy.model.idset import CpuSet
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, QosClass, Request
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.cri_resources import (
    carries_other_amounts,
    cgroup_parent,
    cri_request,
    pod_of,
    quota,
    sandbox_total,
    shares,
    with_amounts_of_create,
)
from proxy.pools.facts import QOS_LABEL, kube_qos
from proxy.pools.pod_spec import pod_spec


@pytest.mark.parametrize(
    ("milli", "expected"), [(0, 2), (1, 2), (2, 2), (3, 3), (999, 1022), (1000, 1024), (256001, 262144)]
)
def test_shares_are_computed_as_by_kubelet(milli: int, expected: int) -> None:
    assert shares(milli) == expected


@pytest.mark.parametrize(("milli", "expected"), [(0, 0), (1, 1000), (10, 1000), (11, 1100), (2500, 250_000)])
def test_a_quota_is_computed_as_by_kubelet(milli: int, expected: int) -> None:
    assert quota(milli) == expected


def test_a_container_with_requests_and_limits() -> None:
    limits = {"cpu": 2000, "memory": 1 << 30, "hugepages-1Gi": 2 << 30, "hugepages-2Mi": 0, "a/b": 1}
    assert cri_request(
        ContainerResources("a", requests={"cpu": 1500, "memory": 5}, limits=limits)
    ) == Request(
        cpu_shares=1536,
        cpu_quota=200_000,
        cpu_period=100_000,
        memory_limit=1 << 30,
        huge_pages=(("hugepages-1Gi", 2 << 30),),
    )


def test_a_container_without_requests_has_the_least_shares_and_no_limit() -> None:
    assert cri_request(ContainerResources("a")) == Request(cpu_shares=2, cpu_period=100_000)


def test_shares_come_from_the_limit_only_if_nothing_is_requested() -> None:
    assert cri_request(ContainerResources("a", limits={"cpu": 2000})).cpu_shares == 2048
    assert cri_request(ContainerResources("a", requests={"cpu": 0}, limits={"cpu": 2000})).cpu_shares == 2


def test_a_sandbox_without_limits_has_none() -> None:
    pod = PodRequests("u", (ContainerResources("a", requests={"cpu": 500, "memory": 9}),))
    assert sandbox_total(pod) == Request(cpu_shares=512, cpu_period=100_000)


def test_limits_of_the_pod_itself_stand_in_for_missing_ones() -> None:
    own = {"cpu": 4000, "memory": 99, "hugepages-2Mi": 7}
    bare = cri_request(ContainerResources("a"), own)
    assert (bare.cpu_quota, bare.memory_limit, bare.huge_pages) == (400_000, 99, ())
    limited = cri_request(ContainerResources("a", limits={"cpu": 1000, "memory": 5}), own)
    assert (limited.cpu_quota, limited.memory_limit) == (100_000, 5)


def test_the_sandbox_carries_what_all_containers_need_together() -> None:
    def resources(kind: ContainerKind, milli: int) -> ContainerResources:
        return ContainerResources(
            f"{kind}", kind, {"cpu": milli}, {"cpu": milli, "memory": milli, "hugepages-2Mi": 8}
        )

    pod = PodRequests(
        "u",
        (
            resources(ContainerKind.SIDECAR, 1000),
            resources(ContainerKind.INIT, 4000),
            resources(ContainerKind.APP, 2000),
        ),
    )
    assert sandbox_total(pod) == Request(
        cpu_shares=5120, cpu_quota=500_000, cpu_period=100_000, memory_limit=5000
    )
    own = PodRequests("u", pod.containers, pod_level_requests={"cpu": 8000})
    assert sandbox_total(own, {"memory": 1}) == Request(
        cpu_shares=8192, cpu_quota=500_000, cpu_period=100_000, memory_limit=1
    )


@pytest.mark.parametrize(
    ("qos", "path"),
    [
        (KubeQos.GUARANTEED, "/kubepods/podu-1"),
        (KubeQos.BURSTABLE, "/kubepods/burstable/podu-1"),
        (KubeQos.BEST_EFFORT, "/kubepods/besteffort/podu-1"),
    ],
)
def test_the_cgroup_parent_names_the_qos_class(qos: KubeQos, path: str) -> None:
    assert cgroup_parent("u-1", qos) == path
    assert kube_qos(path) is qos


def test_a_pod_object_is_converted_for_the_placement() -> None:
    metadata = {
        "name": "web",
        "namespace": "shop",
        "uid": "burstable-1",  # must not be mistaken for the class
        "labels": {QOS_LABEL: "LSR"},
        "annotations": {RESOURCE_STATUS: '{"cpuset": "2-3"}'},
    }
    resources = {"limits": {"cpu": 2, "memory": "1Gi"}}
    containers = [{"name": "main", "resources": resources}]
    raw = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    spec = pod_spec(raw)
    pod = pod_of(spec, "s-1", "a file")
    assert (pod.sandbox_id, pod.uid, pod.ref, pod.source) == ("s-1", "burstable-1", "shop/web", "a file")
    assert (pod.qos, pod.kube_qos) == (QosClass.LSR, KubeQos.GUARANTEED)
    assert (pod.cpuset, pod.cgroup_parent) == (CpuSet.parse("2-3"), "/kubepods/podburstable-1")
    assert pod.requests == spec.requests


def test_a_pod_without_uid_has_its_cgroup_by_its_sandbox() -> None:
    raw = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "a"}]},
    }
    pod = pod_of(pod_spec(raw), "s-1")
    assert (pod.key, pod.cgroup_parent) == ("sandbox s-1", "/kubepods/besteffort/pods-1")


def amounts(cpu: int, memory: int) -> dict[str, int]:
    return {"cpu": cpu, "memory": memory}


@pytest.mark.parametrize("milli", [10, 100, 999, 1000, 1500, 1999, 2000, 2001, 4000, 256_000, 300_000])
def test_a_report_is_replaced_by_what_a_create_carries(milli: int) -> None:
    former = ContainerResources("a", requests=amounts(2000, 5), limits={**amounts(2000, 5), "x/y": 1})
    resized = ContainerResources("a", requests=amounts(milli, 7), limits={**amounts(milli, 7), "x/y": 1})
    other = ContainerResources("b", requests=amounts(2000, 5), limits=amounts(2000, 5))
    report, current = PodRequests("u", (former, other)), PodRequests("u", (resized, other))
    create = cri_request(resized)
    assert carries_other_amounts(report, "a", create)
    assert with_amounts_of_create(report, "a", create) == current
    assert not carries_other_amounts(current, "a", create)


def test_a_create_as_it_was_reported_carries_no_other_amounts() -> None:
    container = ContainerResources("a", requests=amounts(1500, 5), limits=amounts(2500, 5))
    report = PodRequests("u", (container,), guaranteed=False, pod_level_limits={"cpu": 9000})
    usual = cri_request(container)
    same = (
        usual,
        replace(usual, cpu_quota=-1),
        replace(usual, cpu_quota=0, cpu_period=0),
        replace(usual, cpu_quota=25_000, cpu_period=10_000),
        Request(),
    )
    assert not any(carries_other_amounts(report, "a", request) for request in same)
    assert not carries_other_amounts(report, "ephemeral", Request(cpu_shares=2))
    others = replace(usual, cpu_quota=100_000), replace(usual, cpu_shares=2), replace(usual, memory_limit=6)
    assert all(carries_other_amounts(report, "a", request) for request in others)


@pytest.mark.parametrize("milli", [1, 2, 5, 100, 1001, 2000, 262_144_000])
@pytest.mark.parametrize("period", [100_000, 33_333, 5000])
def test_a_container_of_which_only_the_memory_was_resized_requests_the_same_cpus(
    milli: int, period: int
) -> None:
    for cpus in ({}, {"cpu": milli}):
        former, resized = (
            ContainerResources("a", requests={**cpus, "memory": size}, limits={**cpus, "memory": size})
            for size in (5, 7)
        )
        create = replace(cri_request(resized), cpu_quota=quota(cpus.get("cpu", 0), period), cpu_period=period)
        for guaranteed in (True, False):
            report = PodRequests("u", (former,), guaranteed)
            (after,) = with_amounts_of_create(report, "a", create).containers
            assert (after.requests.get("cpu", 0), after.limits.get("cpu", 0)) == (cpus.get("cpu", 0),) * 2
            assert after.limits["memory"] == 7


@pytest.mark.parametrize("period", [100_000, 33_333, 5000])
def test_the_limit_of_a_resized_container_equals_its_request_again(period: int) -> None:
    """A quota is rounded; an LSR pod whose limits differ from its requests may not own CPUs."""
    former, resized = (ContainerResources("a", requests={"cpu": m}, limits={"cpu": m}) for m in (1500, 2001))
    report = PodRequests("u", (former,), guaranteed=False)
    create = replace(cri_request(resized), cpu_quota=quota(2001, period), cpu_period=period)
    assert with_amounts_of_create(report, "a", create).containers == (resized,)


def test_a_scaled_quota_of_a_guaranteed_container_is_no_resize() -> None:
    """Koordinator's CPU normalization scales the quota of LS pods."""
    report = PodRequests("u", (ContainerResources("a", requests=amounts(2000, 5), limits=amounts(2000, 5)),))
    usual = cri_request(report.containers[0])
    assert not carries_other_amounts(report, "a", replace(usual, cpu_quota=150_000))
    without_shares = Request(cpu_quota=300_000, cpu_period=100_000)
    assert carries_other_amounts(report, "a", without_shares)
    (after,) = with_amounts_of_create(report, "a", without_shares).containers
    assert (after.requests["cpu"], after.limits["cpu"]) == (3000, 3000)


def test_more_cpus_than_shares_can_express_follow_the_limit() -> None:
    former, resized = (
        ContainerResources("a", requests=amounts(m, 5), limits=amounts(m, 5)) for m in (300_000, 400_000)
    )
    after = with_amounts_of_create(PodRequests("u", (former,)), "a", cri_request(resized))
    assert after.containers == (resized,)


def test_a_container_of_a_pod_with_its_own_limits_is_compared_with_those() -> None:
    report = PodRequests(
        "u",
        (ContainerResources("a"),),
        pod_level_requests=amounts(4000, 5),
        pod_level_limits=amounts(4000, 5),
    )
    assert not carries_other_amounts(report, "a", Request(4096, 400_000, 100_000, 5))
    larger = Request(8192, 800_000, 100_000, 5)
    assert carries_other_amounts(report, "a", larger)
    assert with_amounts_of_create(report, "a", larger) is report


def test_the_limits_of_a_burstable_container_are_no_requests() -> None:
    container = ContainerResources("a", requests=amounts(1500, 5))
    report = with_amounts_of_create(PodRequests("u", (container,), False), "a", Request(1024, 0, 0, 9))
    assert report.containers[0] == ContainerResources("a", requests=amounts(1000, 5), limits={"memory": 9})
