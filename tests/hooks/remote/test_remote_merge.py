"""Koordinator's merge rules, field by field (v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go)."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.api.koordinator import hook_pb2 as pb
from proxy.hooks.remote.merge import merge_answer, merge_resources, merge_update
from proxy.model.errors import HookError

R = pb.LinuxContainerResources
PRESENT: dict[str, Any] = {
    "cpu_period": 100_000,
    "cpu_quota": 200_000,
    "cpu_shares": 1024,
    "memory_limit_in_bytes": 1 << 30,
    "memory_swap_limit_in_bytes": 1 << 31,
    "oom_score_adj": 900,
    "cpuset_cpus": "0-3",
    "cpuset_mems": "0",
    "unified": {"memory.high": "1"},
    "hugepage_limits": [pb.HugepageLimit(page_size="2MB", limit=4)],
}
POSITIVE = ("cpu_period", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes")


def merged(**changes: Any) -> R:
    """Merge an answer that echoes all fields except the given ones."""
    after = merge_resources(R(**PRESENT), R(**{**PRESENT, **changes}))
    assert after is not None
    return after


def updated(**changes: Any) -> R:
    after = merge_update(R(**PRESENT), R(**changes))
    assert after is not None
    return after


@pytest.mark.parametrize("name", POSITIVE)
def test_only_values_above_zero_are_merged(name: str) -> None:
    for value, kept in ((7, 7), (0, PRESENT[name]), (-1, PRESENT[name])):
        assert getattr(merged(**{name: value}), name) == kept
        assert getattr(updated(**{name: value}), name) == kept


@pytest.mark.parametrize(("quota", "kept"), [(7, 7), (-1, -1), (0, 200_000)])
def test_a_quota_is_merged_unless_it_is_zero(quota: int, kept: int) -> None:
    assert merged(cpu_quota=quota).cpu_quota == kept
    assert updated(cpu_quota=quota).cpu_quota == kept


@pytest.mark.parametrize(("score", "kept"), [(-1000, -1000), (1000, 1000), (0, 0), (-1001, 900), (1001, 900)])
def test_a_valid_oom_score_is_merged_from_answers_only(score: int, kept: int) -> None:
    assert merged(oom_score_adj=score).oom_score_adj == kept
    assert updated(oom_score_adj=score).oom_score_adj == 900


def test_empty_cpusets_are_merged_from_answers_and_not_from_updates() -> None:
    both = merged(cpuset_cpus="", cpuset_mems="")
    assert (both.cpuset_cpus, both.cpuset_mems) == ("", "")
    both = merged(cpuset_cpus="5", cpuset_mems="1")
    assert (both.cpuset_cpus, both.cpuset_mems) == ("5", "1")
    both = updated()
    assert (both.cpuset_cpus, both.cpuset_mems) == ("0-3", "0")
    both = updated(cpuset_cpus="5", cpuset_mems="1")
    assert (both.cpuset_cpus, both.cpuset_mems) == ("5", "1")


def test_maps_are_merged_and_huge_pages_kept() -> None:
    pages = [pb.HugepageLimit(page_size="1GB", limit=9)]
    more = {"memory.high": "2", "memory.low": "3"}
    for after in (
        merged(unified=more, hugepage_limits=pages),
        updated(unified=more, hugepage_limits=pages),
    ):
        assert dict(after.unified) == more
        assert [(page.page_size, page.limit) for page in after.hugepage_limits] == [("2MB", 4)]
    assert dict(merged(unified={}).unified) == PRESENT["unified"]


def test_missing_resources_on_one_side_change_nothing() -> None:
    assert merge_resources(None, R(cpu_shares=5)) is None
    assert merge_update(None, R(cpu_shares=5)) is None
    for merge in (merge_resources, merge_update):
        kept = merge(R(**PRESENT), None)
        assert kept == R(**PRESENT)


def test_merging_does_not_change_its_inputs() -> None:
    present, changes = R(**PRESENT), R(cpu_shares=5, unified={"a": "b"})
    merge_resources(present, changes)
    merge_update(present, changes)
    assert present == R(**PRESENT)
    reported = pb.ContainerResourceHookRequest(container_envs={"A": "1"}, container_resources=present)
    merge_answer(
        reported, pb.ContainerResourceHookResponse(container_envs={"B": "1"}, container_resources=changes)
    )
    assert dict(reported.container_envs) == {"A": "1"}
    assert reported.container_resources == R(**PRESENT)


def test_an_answer_for_a_sandbox_is_merged() -> None:
    reported = pb.PodSandboxHookRequest(
        labels={"a": "1", "b": "1"}, annotations={"a": "1"}, cgroup_parent="/old", runtime_handler="kata"
    )
    answer = pb.PodSandboxHookResponse(
        labels={"b": "2"}, annotations={"c": "3"}, cgroup_parent="/new", resources=R(cpu_shares=5)
    )
    assert merge_answer(reported, answer) == pb.PodSandboxHookRequest(
        labels={"a": "1", "b": "2"}, annotations={"a": "1", "c": "3"}, cgroup_parent="/new",
        runtime_handler="kata",
    )  # fmt: skip
    assert merge_answer(reported, pb.PodSandboxHookResponse()) == reported


def test_an_answer_for_a_container_is_merged() -> None:
    reported = pb.ContainerResourceHookRequest(
        container_annotations={"a": "1"}, container_envs={"A": "1", "B": "1"}, pod_cgroup_parent="/old",
        container_resources=R(cpu_shares=5),
    )  # fmt: skip
    answer = pb.ContainerResourceHookResponse(
        container_annotations={"b": "2"}, container_envs={"B": "2"}, pod_cgroup_parent="/new",
        container_resources=R(cpu_shares=6),
    )  # fmt: skip
    assert merge_answer(reported, answer) == pb.ContainerResourceHookRequest(
        container_annotations={"a": "1", "b": "2"}, container_envs={"B": "2"}, pod_cgroup_parent="/new",
        container_resources=R(cpu_shares=6),
    )  # fmt: skip
    assert merge_answer(reported, pb.ContainerResourceHookResponse()) == reported
    reported.ClearField("container_resources")
    assert not merge_answer(reported, answer).HasField("container_resources")


def test_an_answer_of_another_type_is_an_error() -> None:
    message = "a PodSandboxHookResponse does not answer a ContainerResourceHookRequest"
    with pytest.raises(HookError, match=message):
        merge_answer(pb.ContainerResourceHookRequest(), pb.PodSandboxHookResponse())
    with pytest.raises(HookError):
        merge_answer(pb.PodSandboxHookRequest(), pb.ContainerResourceHookResponse())
