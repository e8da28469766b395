"""Requests to servers: the resulting values, with earlier hooks' changes, and only valid text."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.hooks.answers import CLEAR, Adjustment
from proxy.hooks.events import PreCreateContainer, PreRunPodSandbox, PreUpdateContainerResources
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Resources
from proxy.hooks.remote.convert import container_request, sandbox_request
from proxy.model.idset import CpuSet, Mask
from tests.testkit.changed_copy import changed_copy

POD = PodFacts(
    sandbox_id="s1",
    uid="u1",
    namespace="shop",
    name="db",
    attempt=3,
    runtime_handler="kata",
    cgroup_parent="/kubepods/pod1",
    labels={"app": "db"},
    annotations={"note": "x"},
)
REQUESTED = Resources(
    cpu_period=100_000,
    cpu_quota=200_000,
    cpu_shares=1024,
    memory_limit=1 << 30,
    memory_swap_limit=1 << 31,
    oom_score_adj=900,
    cpuset_cpus="0-1",
    cpuset_mems="1",
    hugepage_limits={"2MB": 5},
    unified={"memory.high": "9"},
)
CONTAINER = ContainerFacts(
    id="c1", name="main", attempt=2, annotations={"a": "1"}, envs={"PATH": "/bin"}, resources=REQUESTED
)
DECIDED = Decision(cpus=CpuSet.parse("4-5"), mems=Mask((0,)), unlimited=True, allowed=CpuSet.parse("4-5"))


def resources(event: Any, so_far: Adjustment | None = None) -> Any:
    request = container_request(event) if so_far is None else container_request(event, so_far)
    return request.container_resources


def test_a_sandbox_request_has_the_pod_and_its_resources() -> None:
    reported = sandbox_request(PreRunPodSandbox(POD))
    meta = reported.pod_meta
    assert (meta.name, meta.namespace, meta.uid, meta.attempt) == ("db", "shop", "u1", 3)
    assert (reported.runtime_handler, reported.cgroup_parent) == ("kata", "/kubepods/pod1")
    assert (dict(reported.labels), dict(reported.annotations)) == ({"app": "db"}, {"note": "x"})
    assert not reported.HasField("resources")
    assert sandbox_request(PreRunPodSandbox(POD, REQUESTED)).resources.cpu_shares == 1024


def test_a_sandbox_request_has_the_changes_of_earlier_hooks() -> None:
    so_far = Adjustment(labels={"app": CLEAR, "b": "2"}, annotations={"note": "y"}, cgroup_parent="/else")
    reported = sandbox_request(PreRunPodSandbox(POD), so_far)
    assert (dict(reported.labels), dict(reported.annotations)) == ({"b": "2"}, {"note": "y"})
    assert reported.cgroup_parent == "/else"
    assert sandbox_request(PreRunPodSandbox(POD), Adjustment(cgroup_parent=CLEAR)).cgroup_parent == ""


def test_a_container_request_before_a_decision_has_the_clients_values() -> None:
    reported = container_request(PreCreateContainer(POD, CONTAINER, Decision()))
    assert (reported.pod_meta.uid, reported.pod_cgroup_parent) == ("u1", "/kubepods/pod1")
    meta = reported.container_meta
    assert (meta.name, meta.attempt, meta.id) == ("main", 2, "c1")
    assert (dict(reported.pod_labels), dict(reported.pod_annotations)) == ({"app": "db"}, {"note": "x"})
    assert dict(reported.container_annotations) == {"a": "1"}
    assert dict(reported.container_envs) == {"PATH": "/bin"}
    requested = reported.container_resources
    numbers = requested.cpu_period, requested.cpu_quota, requested.cpu_shares, requested.oom_score_adj
    assert numbers == (100_000, 200_000, 1024, 900)
    assert (requested.memory_limit_in_bytes, requested.memory_swap_limit_in_bytes) == (1 << 30, 1 << 31)
    assert (requested.cpuset_cpus, requested.cpuset_mems) == ("0-1", "1")
    assert [(page.page_size, page.limit) for page in requested.hugepage_limits] == [("2MB", 5)]
    assert dict(requested.unified) == {"memory.high": "9"}


def test_a_container_request_has_the_decided_cpus() -> None:
    reported = resources(PreCreateContainer(POD, CONTAINER, DECIDED))
    assert (reported.cpuset_cpus, reported.cpuset_mems, reported.cpu_quota) == ("4-5", "0", -1)


def test_a_container_request_has_the_changes_of_earlier_hooks() -> None:
    so_far = Adjustment(
        cpus=CpuSet.parse("5"),
        mems=Mask((1,)),
        cpu_quota=7000,
        cpu_shares=CLEAR,
        memory_limit=11,
        memory_swap_limit=12,
        cpu_period=13,
        oom_score_adj=14,
        unified={"memory.high": CLEAR, "memory.low": "1"},
        annotations={"a": CLEAR, "b": "2"},
        envs={"PATH": CLEAR, "HOME": "/"},
    )
    event = PreCreateContainer(POD, CONTAINER, DECIDED)
    reported = container_request(event, so_far)
    has = reported.container_resources
    assert (has.cpuset_cpus, has.cpuset_mems, has.cpu_quota, has.cpu_shares) == ("5", "1", 7000, 0)
    assert (has.memory_limit_in_bytes, has.memory_swap_limit_in_bytes) == (11, 12)
    assert (has.cpu_period, has.oom_score_adj, dict(has.unified)) == (13, 14, {"memory.low": "1"})
    assert dict(reported.container_annotations) == {"b": "2"}
    assert dict(reported.container_envs) == {"HOME": "/"}
    cleared = resources(event, Adjustment(cpus=CLEAR, mems=CLEAR))
    assert (cleared.cpuset_cpus, cleared.cpuset_mems) == ("", "")


def test_an_update_contains_all_earlier_requests() -> None:
    requested = Resources(cpu_shares=2, cpuset_cpus="7", unified={"memory.low": "1"}, oom_score_adj=5)
    event = PreUpdateContainerResources(POD, CONTAINER, Decision(), requested, {"new": "1"})
    reported = container_request(event)
    has = reported.container_resources
    assert (has.cpu_shares, has.cpu_period, has.cpuset_cpus, has.cpuset_mems) == (2, 100_000, "7", "1")
    assert has.oom_score_adj == 900
    assert dict(has.unified) == {"memory.high": "9", "memory.low": "1"}
    assert dict(reported.container_annotations) == {"a": "1", "new": "1"}
    assert resources(changed_copy(event, decision=DECIDED)).cpuset_cpus == "4-5"


@pytest.mark.parametrize("odd", ["\udcff", "a\udc80b"])
def test_fields_that_are_not_text_are_not_sent(odd: str) -> None:
    envs = {"A": "1", "ODD": odd, "é": "ü", odd: "x", "Z": "2"}
    reported = container_request(
        PreCreateContainer(POD, changed_copy(CONTAINER, envs=envs), Decision()),
        Adjustment(envs={"B": odd, odd: "y", "C": "3"}),
    )
    assert dict(reported.container_envs) == {"A": "1", "é": "ü", "Z": "2", "C": "3"}
    reported.SerializeToString()
