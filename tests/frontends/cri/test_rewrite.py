"""What is appended overrides what it holds, and leaves everything else as it came."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.rewrite import create_suffix, update_suffix
from proxy.model.idset import CpuSet, Mask

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
def test_what_is_appended_wins(make: Any, suffix: Any, cpus: CpuSet, mems: Mask | None, quota: int) -> None:
    request, inside = make()
    body = request.SerializeToString()
    got = type(request).FromString(body + suffix(cpus, mems, quota))
    inside.cpuset_cpus = str(cpus)
    if mems is not None:
        inside.cpuset_mems = str(mems)
    if quota:
        inside.cpu_quota = quota
    assert got == request


def test_a_quota_is_part_of_what_is_remembered() -> None:
    assert create_suffix(CpuSet([1]), None, -1) != create_suffix(CpuSet([1]), None)
    assert create_suffix(CpuSet([1]), None) == create_suffix(CpuSet([1]), None, 0)
    assert len(update_suffix(CpuSet([1]), None, -1)) == len(update_suffix(CpuSet([1]), None)) + 11


def test_no_set_is_never_taken_for_the_wish_to_erase_one() -> None:
    create_suffix(None, None)
    with pytest.raises(AssertionError, match="an empty set means all CPUs"):
        create_suffix(CpuSet(), None)
