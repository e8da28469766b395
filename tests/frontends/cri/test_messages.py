from __future__ import annotations

from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri import messages
from proxy.frontends.cri.messages import create_suffix, update_suffix
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Bounds
from proxy.model.workload import Pod, Request

GIB = 1 << 30


def request_of(resources: pb.LinuxContainerResources) -> Request:
    return messages.request_of(pb.ResourceFacts.FromString(resources.SerializeToString()))


def pod_of(config: pb.PodSandboxConfig, sandbox_id: str, *bounds: Bounds) -> Pod:
    return messages.pod_of(pb.SandboxFacts.FromString(config.SerializeToString()), sandbox_id, *bounds)


def total_of(config: pb.PodSandboxConfig) -> Request:
    return messages.request_of(pb.SandboxFacts.FromString(config.SerializeToString()).linux.resources)


def with_pages(*limits: tuple[str, int]) -> pb.LinuxContainerResources:
    pages = [pb.HugepageLimit(page_size=size, limit=limit) for size, limit in limits]
    return pb.LinuxContainerResources(hugepage_limits=pages)


def test_all_fields_of_a_request_are_read() -> None:
    resources = with_pages(("2MB", 4 << 20), ("1GB", 2 * GIB))
    resources.cpu_shares, resources.cpu_quota, resources.cpu_period = 2048, 200_000, 100_000
    resources.memory_limit_in_bytes = GIB
    resources.cpuset_cpus, resources.cpuset_mems = "0-3", "1"
    pages = (("hugepages-1Gi", 2 * GIB), ("hugepages-2Mi", 4 << 20))
    assert request_of(resources) == Request(2048, 200_000, 100_000, GIB, "0-3", "1", pages)


def test_page_sizes_without_a_limit_are_ignored() -> None:
    """Kubelet sends every size that the machine has, with a limit of 0 for those not requested."""
    assert request_of(with_pages(("2MB", 0), ("1GB", 0))).huge_pages == ()
    assert request_of(with_pages(("2MB", 0), ("1GB", GIB))).huge_pages == (("hugepages-1Gi", GIB),)


@pytest.mark.parametrize(
    "limits", [(), (("2MB", 0), ("1GB", 0)), (("2MB", 16), ("1GB", 0)), (("1GB", 1 << 60),)]
)
def test_facts_equal_those_of_the_whole_message(limits: tuple[tuple[str, int], ...]) -> None:
    """A create is read by classes with fewer fields; they keep strings and huge pages as bytes."""
    resources = with_pages(*limits)
    resources.cpu_shares, resources.cpu_quota, resources.cpu_period = 2048, -1, 100_000
    resources.memory_limit_in_bytes, resources.oom_score_adj = GIB, -997
    resources.cpuset_cpus, resources.cpuset_mems = "0-3", "1"
    resources.unified["memory.oom.group"] = "1"
    config = pb.ContainerConfig(linux=pb.LinuxContainerConfig(resources=resources))
    facts = pb.ContainerFacts.FromString(config.SerializeToString())
    assert messages.request_of(facts.linux.resources) == request_of(resources)
    assert len(request_of(resources).huge_pages) == sum(1 for _, limit in limits if limit)


@pytest.mark.parametrize(
    ("size", "resource"),
    [
        ("64KB", "hugepages-64Ki"),
        ("2048KB", "hugepages-2Mi"),
        ("16MB", "hugepages-16Mi"),
        ("16GB", "hugepages-16Gi"),
        ("1TB", "hugepages-1Ti"),
        ("2MiB", "hugepages-2Mi"),
    ],
)
def test_page_sizes_are_converted_to_resources(size: str, resource: str) -> None:
    assert request_of(with_pages((size, 5))).huge_pages == ((resource, 5),)


@pytest.mark.parametrize(
    "size", ["", "2", "MB", "0MB", "-2MB", "2 MB", "2mb", "2MB\n", "\u0662MB", "9" * 30 + "KB"]
)
def test_an_invalid_page_size_is_ignored(size: str) -> None:
    assert request_of(with_pages((size, 5), ("2MB", 6))).huge_pages == (("hugepages-2Mi", 6),)


def test_the_last_of_two_limits_of_a_page_size_is_used_as_by_the_runtime() -> None:
    assert request_of(with_pages(("2MB", 5), ("2MB", 6))).huge_pages == (("hugepages-2Mi", 6),)


def test_the_total_request_of_a_pod_is_read() -> None:
    config = pb.PodSandboxConfig()
    assert total_of(config) == Request()
    config.linux.resources.cpu_shares = 3072
    config.linux.overhead.cpu_shares = 100
    config.linux.resources.hugepage_limits.add(page_size="2MB", limit=7)
    assert total_of(config) == Request(cpu_shares=3072, huge_pages=(("hugepages-2Mi", 7),))


def test_cpu_lists_that_are_invalid_for_the_kernel_are_ignored() -> None:
    sparse = ",".join(map(str, range(0, 8192, 2)))
    for text in (sparse, "0-3", "not a list"):
        assert request_of(pb.LinuxContainerResources(cpuset_cpus=text)).cpuset_cpus == text
    for text in (sparse * 4, "0-3\u202e"):
        resources = pb.LinuxContainerResources(cpuset_cpus=text, cpuset_mems=text)
        assert request_of(resources) == Request()


def test_the_number_of_page_sizes_is_limited() -> None:
    assert len(request_of(with_pages(*((f"{1 << i}KB", 1) for i in range(20)))).huge_pages) == 20
    assert len(request_of(with_pages(*((f"{i}KB", 1) for i in range(1, 5000)))).huge_pages) == 64
    assert request_of(with_pages(("2" + "M" * 10**6 + "B", 1))).huge_pages == ()


def test_a_pod_has_only_cpus_and_nodes_of_the_machine() -> None:
    config = pb.PodSandboxConfig()
    config.annotations["scheduling.koordinator.sh/resource-status"] = '{"cpuset":"6-9"}'
    assert pod_of(config, "s").cpuset == CpuSet([6, 7, 8, 9])
    small = pod_of(config, "s", Bounds(CpuSet(range(8)), Mask([0])))
    assert small.cpuset is None
    assert "CPU 9 is not on this machine (0-7)" in small.problem


WIDE = CpuSet(range(0, 1024, 2))
"""As a list longer than 127 and than 255 bytes."""


def resources() -> pb.LinuxContainerResources:
    return pb.LinuxContainerResources(
        cpu_period=100_000, cpu_quota=200_000, cpu_shares=2048, cpuset_cpus="0-63", cpuset_mems="0-3"
    )


def create() -> tuple[Any, Any]:
    request = pb.CreateContainerRequest(pod_sandbox_id="p")
    request.config.metadata.name = "c"
    request.config.linux.resources.CopyFrom(resources())
    return request, request.config.linux.resources


def update() -> tuple[Any, Any]:
    request = pb.UpdateContainerResourcesRequest(container_id="c", linux=resources())
    request.annotations["a"] = "b"
    return request, request.linux


@pytest.mark.parametrize(("make", "suffix"), [(create, create_suffix), (update, update_suffix)])
@pytest.mark.parametrize("cpus", [CpuSet([3]), WIDE], ids=["few", "wide"])
@pytest.mark.parametrize("mems", [None, Mask([1])])
@pytest.mark.parametrize("quota", [0, -1, 1000, 150_000, 1 << 40])
def test_appended_values_override_the_request(
    make: Any, suffix: Any, cpus: CpuSet, mems: Mask | None, quota: int
) -> None:
    request, inside = make()
    body = request.SerializeToString()
    merged = type(request).FromString(body + suffix(cpus, mems, quota))
    inside.cpuset_cpus = str(cpus)
    if mems is not None:
        inside.cpuset_mems = str(mems)
    if quota:
        inside.cpu_quota = quota
    assert merged == request


def test_a_quota_is_part_of_the_cached_suffix() -> None:
    assert create_suffix(CpuSet([1]), None, -1) != create_suffix(CpuSet([1]), None)
    assert create_suffix(CpuSet([1]), None) == create_suffix(CpuSet([1]), None, 0)
    assert len(update_suffix(CpuSet([1]), None, -1)) == len(update_suffix(CpuSet([1]), None)) + 11


def test_a_missing_cpuset_is_not_an_empty_one() -> None:
    create_suffix(None, None)
    with pytest.raises(AssertionError, match="an empty set means all CPUs"):
        create_suffix(CpuSet(), None)
