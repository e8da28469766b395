"""Koordinator's messages: a response keeps all fields and changes only placement and adjustments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as pb
from proxy.frontends.hookserver import messages
from proxy.frontends.hookserver.foreign_call import ContainerCall
from proxy.frontends.hookserver.messages import SandboxReply
from proxy.hooks.answers import CLEAR, NOTHING, Adjustment
from proxy.hooks.facts import Device, Mount
from proxy.hooks.remote.convert import PROTOCOL_NUMBERS
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import ANY_MACHINE
from proxy.model.workload import Pod, Request

TEXT = st.text(max_size=8)
MAP = st.dictionaries(TEXT, TEXT, max_size=4)
NUMBER = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)
UNKNOWN = b"\xfa\x3f\x03abc"
"""Field 1023, which no message declares."""


@st.composite
def resources(draw: Any) -> pb.LinuxContainerResources:
    resources_message = pb.LinuxContainerResources()
    for name in PROTOCOL_NUMBERS.values():
        setattr(resources_message, name, draw(NUMBER))
    resources_message.cpuset_cpus, resources_message.cpuset_mems = draw(TEXT), draw(TEXT)
    resources_message.unified.update(draw(MAP))
    for size, limit in draw(st.dictionaries(TEXT, st.integers(0, 1 << 63), max_size=2)).items():
        resources_message.hugepage_limits.add(page_size=size, limit=limit)
    if draw(st.booleans()):
        resources_message.MergeFromString(UNKNOWN)
    return resources_message


@st.composite
def containers(draw: Any) -> pb.ContainerResourceHookRequest:
    request = pb.ContainerResourceHookRequest(pod_cgroup_parent=draw(TEXT))
    request.pod_meta.name, request.pod_meta.uid, request.pod_meta.namespace = (
        draw(TEXT),
        draw(TEXT),
        draw(TEXT),
    )
    request.container_meta.name, request.container_meta.id = draw(TEXT), draw(TEXT)
    request.container_meta.attempt = draw(st.integers(0, 9))
    request.container_annotations.update(draw(MAP))
    request.container_envs.update(draw(MAP))
    request.pod_annotations.update(draw(MAP))
    request.pod_labels.update(draw(MAP))
    if draw(st.booleans()):
        request.container_resources.CopyFrom(draw(resources()))
    return request


@st.composite
def pods(draw: Any) -> pb.PodSandboxHookRequest:
    request = pb.PodSandboxHookRequest(cgroup_parent=draw(TEXT), runtime_handler=draw(TEXT))
    request.pod_meta.name, request.pod_meta.attempt = draw(TEXT), draw(st.integers(0, 9))
    request.labels.update(draw(MAP))
    request.annotations.update(draw(MAP))
    if draw(st.booleans()):
        request.resources.CopyFrom(draw(resources()))
    return request


@given(containers())
def test_an_unchanged_create_is_echoed(request: pb.ContainerResourceHookRequest) -> None:
    reply = messages.container_reply(request)
    assert reply.adjusted(NOTHING) is reply
    answer = reply.answer
    assert reply.unsupported == ()
    assert answer.container_resources == request.container_resources
    assert answer.HasField("container_resources") == request.HasField("container_resources")
    assert dict(answer.container_envs) == dict(request.container_envs)
    assert dict(answer.container_annotations) == dict(request.container_annotations)
    assert answer.pod_cgroup_parent == request.pod_cgroup_parent


def create_request_of(
    request: pb.ContainerResourceHookRequest, sandbox_id: str, attempt: int
) -> ContainerCall:
    """The create request on which the daemon decides."""

    async def make() -> ContainerCall:
        flow: Any = None
        return ContainerCall(
            flow, "CreateContainer", messages.container_reply(request), (sandbox_id, attempt)
        )

    return asyncio.run(make()).create_request()


@given(containers())
def test_a_create_names_its_pod_and_container(request: pb.ContainerResourceHookRequest) -> None:
    create = create_request_of(request, "s", 3)
    pod = create.pod(ANY_MACHINE)
    meta = request.pod_meta
    assert (create.sandbox_id, pod.sandbox_id, pod.attempt) == ("s", "s", 3)
    assert (pod.uid, pod.namespace, pod.name) == (meta.uid, meta.namespace, meta.name)
    assert (create.name, create.attempt) == (request.container_meta.name, request.container_meta.attempt)
    assert create.resources.cpu_shares == request.container_resources.cpu_shares
    assert create.pod_total() is None


def test_a_create_has_the_total_request_of_its_pod() -> None:
    request = pb.ContainerResourceHookRequest(pod_labels={"koordinator.sh/qosClass": "LSE"})
    request.pod_annotations["scheduling.koordinator.sh/resource-status"] = '{"cpuset": "2-3"}'
    request.pod_resources.cpu_shares, request.pod_resources.memory_limit_in_bytes = 512, 1 << 20
    create = create_request_of(request, "s", 0)
    assert create.pod(ANY_MACHINE).total == create.pod_total() == Request(512)


def test_huge_pages_are_read() -> None:
    resources_message = pb.LinuxContainerResources()
    for size, limit in (("1GB", 0), ("2MB", 4 << 20), ("two", 1)):
        resources_message.hugepage_limits.add(page_size=size, limit=limit)
    assert messages.request_of(resources_message).huge_pages == (("hugepages-2Mi", 4 << 20),)


@given(containers())
def test_a_placed_create_differs_only_in_the_placement(request: pb.ContainerResourceHookRequest) -> None:
    before = messages.container_reply(request)
    after = before.placed(CpuSet.parse("2-3"), Mask((1,)), -1)
    expected = messages.container_echo(request)
    assert before.answer == expected
    expected.container_resources.cpuset_cpus, expected.container_resources.cpuset_mems = "2-3", "1"
    expected.container_resources.cpu_quota = -1
    assert after.answer == expected


@given(containers())
def test_a_cpuset_without_placement_is_cleared(request: pb.ContainerResourceHookRequest) -> None:
    request.container_resources.cpuset_cpus = "0-3"
    for reply in (messages.container_reply(request), messages.update_reply(request, is_client_quota=True)):
        answer = reply.placed(None, None, 0).answer
        assert answer.container_resources.cpuset_cpus == ""
        assert answer.container_resources.cpuset_mems == request.container_resources.cpuset_mems


@given(containers())
def test_an_update_without_decision_is_echoed(request: pb.ContainerResourceHookRequest) -> None:
    reply = messages.update_reply(request, is_client_quota=False)
    assert reply.adjusted(NOTHING).answer == messages.container_echo(request)


@given(pods())
def test_an_unchanged_sandbox_is_echoed(request: pb.PodSandboxHookRequest) -> None:
    answer = messages.pod_echo(request)
    reply = SandboxReply(request, answer)
    assert reply.adjusted(NOTHING) is reply
    assert dict(answer.labels) == dict(request.labels)
    assert answer.resources == request.resources
    assert answer.cgroup_parent == request.cgroup_parent
    pod = reply.read(ANY_MACHINE)
    assert (pod.name, pod.attempt) == (request.pod_meta.name, request.pod_meta.attempt)
    facts, _ = reply.sandbox(pod)
    assert (facts.runtime_handler, facts.labels) == (request.runtime_handler, dict(request.labels))


def test_an_update_omits_values_that_the_daemon_may_have_set() -> None:
    request = pb.ContainerResourceHookRequest()
    request.container_resources.cpuset_cpus, request.container_resources.cpuset_mems = "2-3", "0"
    request.container_resources.cpu_quota = -1
    assert not messages.update_reply(request, is_client_quota=False).resources.ListFields()
    assert messages.update_reply(request, is_client_quota=True).resources.cpu_quota == -1
    request.container_resources.cpu_quota = 5000
    reply = messages.update_reply(request, is_client_quota=False)
    assert reply.resources.cpu_quota == 5000
    assert reply.answer.container_resources.cpuset_cpus == "2-3", (
        "the peer would clear a field that is omitted"
    )


def test_adjustments_of_a_create_are_in_the_response() -> None:
    request = pb.ContainerResourceHookRequest(pod_cgroup_parent="/kubepods/podx")
    request.container_envs["A"] = "1"
    request.container_annotations["c"] = "1"
    request.container_resources.unified.update({"memory.high": "1", "memory.low": "1"})
    request.container_resources.cpuset_cpus = "0-3"
    adjustment = Adjustment(
        cpus=CLEAR,
        oom_score_adj=-5,
        cpu_shares=CLEAR,
        unified={"memory.high": "2", "memory.low": CLEAR, "memory.max": CLEAR},
        annotations={"a": "b", "c": CLEAR, "d": CLEAR},
        labels={"l": "m"},
        envs={"B": "2", "C": "\udcff", "A": CLEAR, "D": CLEAR},
        mounts={"/x": Mount("/x", "/y")},
        devices={"/dev/z": CLEAR},
    )
    reply = messages.container_reply(request).adjusted(adjustment)
    assert reply.unsupported == (
        *("mounts", "devices", "labels", "envs[C]", "envs[A]"),
        *("annotations[c]", "unified[memory.low]"),
    )
    answer = reply.answer
    assert dict(answer.container_envs) == {"A": "1", "B": "2"}, "the peer keeps a variable that a hook clears"
    assert dict(answer.container_annotations) == {"a": "b", "c": "1"}
    assert dict(answer.container_resources.unified) == {"memory.high": "2", "memory.low": "1"}
    assert (answer.container_resources.oom_score_adj, answer.container_resources.cpuset_cpus) == (-5, "")
    assert answer.container_resources == reply.resources
    facts = reply.container()
    assert (facts.envs, facts.resources.oom_score_adj) == ({"A": "1", "B": "2"}, -5)
    other = reply.with_parent("/kubepods/pody")
    assert (other.answer.pod_cgroup_parent, other.unsupported) == ("/kubepods/pody", reply.unsupported)
    assert request.container_resources.cpuset_cpus == "0-3", "the peer's request is not changed"
    unsupported = reply.adjusted(Adjustment(devices={"/d": Device("/d", "/d")})).unsupported
    assert unsupported == (*reply.unsupported, "devices")


def test_adjustments_of_a_sandbox_are_in_the_response() -> None:
    request = pb.PodSandboxHookRequest(cgroup_parent="/a", labels={"m": "1"}, annotations={"b": "2"})
    labels, annotations = {"l": "1", "m": CLEAR}, {"a": "2", "b": CLEAR, "c": CLEAR}
    adjustment = Adjustment(labels=labels, annotations=annotations, cgroup_parent="/b")
    reply = SandboxReply(request, messages.pod_echo(request)).adjusted(adjustment)
    answer = reply.answer
    assert (dict(answer.labels), dict(answer.annotations)) == ({"l": "1", "m": "1"}, {"a": "2", "b": "2"})
    assert reply.unsupported == ("labels[m]", "annotations[b]")
    assert answer.cgroup_parent == "/b"
    pod = reply.read(ANY_MACHINE)
    assert isinstance(pod, Pod)
    assert pod.cgroup_parent == "/b"


@pytest.mark.parametrize("kind", [cri.LinuxContainerResources, pb.LinuxContainerResources])
def test_all_fields_of_resources_are_known(kind: Any) -> None:
    others = {"unified", "hugepage_limits", "cpuset_cpus", "cpuset_mems"}
    assert {*PROTOCOL_NUMBERS.values()} | others == {field.name for field in kind.DESCRIPTOR.fields}
