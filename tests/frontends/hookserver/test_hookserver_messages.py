"""Koordinator's messages: nothing is lost in an answer, and only what was decided or wanted is changed."""

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
from proxy.hooks.remote.convert import NUMBERS
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
    found = pb.LinuxContainerResources()
    for name in NUMBERS.values():
        setattr(found, name, draw(NUMBER))
    found.cpuset_cpus, found.cpuset_mems = draw(TEXT), draw(TEXT)
    found.unified.update(draw(MAP))
    for size, limit in draw(st.dictionaries(TEXT, st.integers(0, 1 << 63), max_size=2)).items():
        found.hugepage_limits.add(page_size=size, limit=limit)
    if draw(st.booleans()):
        found.MergeFromString(UNKNOWN)
    return found


@st.composite
def containers(draw: Any) -> pb.ContainerResourceHookRequest:
    asked = pb.ContainerResourceHookRequest(pod_cgroup_parent=draw(TEXT))
    asked.pod_meta.name, asked.pod_meta.uid, asked.pod_meta.namespace = draw(TEXT), draw(TEXT), draw(TEXT)
    asked.container_meta.name, asked.container_meta.id = draw(TEXT), draw(TEXT)
    asked.container_meta.attempt = draw(st.integers(0, 9))
    asked.container_annotations.update(draw(MAP))
    asked.container_envs.update(draw(MAP))
    asked.pod_annotations.update(draw(MAP))
    asked.pod_labels.update(draw(MAP))
    if draw(st.booleans()):
        asked.container_resources.CopyFrom(draw(resources()))
    return asked


@st.composite
def pods(draw: Any) -> pb.PodSandboxHookRequest:
    asked = pb.PodSandboxHookRequest(cgroup_parent=draw(TEXT), runtime_handler=draw(TEXT))
    asked.pod_meta.name, asked.pod_meta.attempt = draw(TEXT), draw(st.integers(0, 9))
    asked.labels.update(draw(MAP))
    asked.annotations.update(draw(MAP))
    if draw(st.booleans()):
        asked.resources.CopyFrom(draw(resources()))
    return asked


@given(containers())
def test_an_unchanged_create_is_echoed(asked: pb.ContainerResourceHookRequest) -> None:
    reply = messages.container_reply(asked)
    assert reply.adjusted(NOTHING) is reply
    answer = reply.answer
    assert reply.lost == ()
    assert answer.container_resources == asked.container_resources
    assert answer.HasField("container_resources") == asked.HasField("container_resources")
    assert dict(answer.container_envs) == dict(asked.container_envs)
    assert dict(answer.container_annotations) == dict(asked.container_annotations)
    assert answer.pod_cgroup_parent == asked.pod_cgroup_parent


def made_of(asked: pb.ContainerResourceHookRequest, sandbox_id: str, attempt: int) -> ContainerCall:
    """A create as it is decided on."""

    async def make() -> ContainerCall:
        flow: Any = None
        return ContainerCall(flow, "CreateContainer", messages.container_reply(asked), (sandbox_id, attempt))

    return asyncio.run(make()).create_request()


@given(containers())
def test_a_create_names_its_pod_and_container(asked: pb.ContainerResourceHookRequest) -> None:
    made = made_of(asked, "s", 3)
    pod = made.pod(ANY_MACHINE)
    meta = asked.pod_meta
    assert (made.sandbox_id, pod.sandbox_id, pod.attempt) == ("s", "s", 3)
    assert (pod.uid, pod.namespace, pod.name) == (meta.uid, meta.namespace, meta.name)
    assert (made.name, made.attempt) == (asked.container_meta.name, asked.container_meta.attempt)
    assert made.resources.cpu_shares == asked.container_resources.cpu_shares
    assert made.pod_total() is None


def test_a_create_says_what_its_pod_asks_for_together() -> None:
    asked = pb.ContainerResourceHookRequest(pod_labels={"koordinator.sh/qosClass": "LSE"})
    asked.pod_annotations["scheduling.koordinator.sh/resource-status"] = '{"cpuset": "2-3"}'
    asked.pod_resources.cpu_shares, asked.pod_resources.memory_limit_in_bytes = 512, 1 << 20
    made = made_of(asked, "s", 0)
    assert made.pod(ANY_MACHINE).total == made.pod_total() == Request(512)


def test_huge_pages_are_read() -> None:
    found = pb.LinuxContainerResources()
    for size, limit in (("1GB", 0), ("2MB", 4 << 20), ("two", 1)):
        found.hugepage_limits.add(page_size=size, limit=limit)
    assert messages.request_of(found).huge_pages == (("hugepages-2Mi", 4 << 20),)


@given(containers())
def test_a_decided_create_differs_in_what_was_decided(asked: pb.ContainerResourceHookRequest) -> None:
    before = messages.container_reply(asked)
    after = before.placed(CpuSet.parse("2-3"), Mask((1,)), -1)
    want = messages.container_echo(asked)
    assert before.answer == want
    want.container_resources.cpuset_cpus, want.container_resources.cpuset_mems = "2-3", "1"
    want.container_resources.cpu_quota = -1
    assert after.answer == want


@given(containers())
def test_an_erased_set_is_erased(asked: pb.ContainerResourceHookRequest) -> None:
    asked.container_resources.cpuset_cpus = "0-3"
    for reply in (messages.container_reply(asked), messages.update_reply(asked, quota=True)):
        answer = reply.placed(None, None, 0).answer
        assert answer.container_resources.cpuset_cpus == ""
        assert answer.container_resources.cpuset_mems == asked.container_resources.cpuset_mems


@given(containers())
def test_an_undecided_update_is_echoed(asked: pb.ContainerResourceHookRequest) -> None:
    reply = messages.update_reply(asked, quota=False)
    assert reply.adjusted(NOTHING).answer == messages.container_echo(asked)


@given(pods())
def test_an_unchanged_sandbox_is_echoed(asked: pb.PodSandboxHookRequest) -> None:
    answer = messages.pod_echo(asked)
    reply = SandboxReply(asked, answer)
    assert reply.adjusted(NOTHING) is reply
    assert dict(answer.labels) == dict(asked.labels)
    assert answer.resources == asked.resources
    assert answer.cgroup_parent == asked.cgroup_parent
    pod = reply.read(ANY_MACHINE)
    assert (pod.name, pod.attempt) == (asked.pod_meta.name, asked.pod_meta.attempt)
    facts, _ = reply.sandbox(pod)
    assert (facts.runtime_handler, facts.labels) == (asked.runtime_handler, dict(asked.labels))


def test_an_update_leaves_out_what_may_be_ours() -> None:
    asked = pb.ContainerResourceHookRequest()
    asked.container_resources.cpuset_cpus, asked.container_resources.cpuset_mems = "2-3", "0"
    asked.container_resources.cpu_quota = -1
    assert not messages.update_reply(asked, quota=False).resources.ListFields()
    assert messages.update_reply(asked, quota=True).resources.cpu_quota == -1
    asked.container_resources.cpu_quota = 5000
    reply = messages.update_reply(asked, quota=False)
    assert reply.resources.cpu_quota == 5000
    assert reply.answer.container_resources.cpuset_cpus == "2-3", "the peer would erase what is left out"


def test_what_hooks_want_of_a_create_is_in_the_answer() -> None:
    asked = pb.ContainerResourceHookRequest(pod_cgroup_parent="/kubepods/podx")
    asked.container_envs["A"] = "1"
    asked.container_resources.unified["memory.high"] = "1"
    asked.container_resources.cpuset_cpus = "0-3"
    want = Adjustment(
        cpus=CLEAR,
        oom_score_adj=-5,
        cpu_shares=CLEAR,
        unified={"memory.high": "2"},
        annotations={"a": "b"},
        labels={"l": "m"},
        envs={"B": "2", "C": "\udcff", "A": CLEAR},
        mounts={"/x": Mount("/x", "/y")},
        devices={"/dev/z": CLEAR},
    )
    reply = messages.container_reply(asked).adjusted(want)
    assert reply.lost == ("mounts", "labels", "envs[C]")
    answer = reply.answer
    assert dict(answer.container_envs) == {"A": "1", "B": "2"}, "the peer keeps what it has"
    assert dict(answer.container_annotations) == {"a": "b"}
    assert dict(answer.container_resources.unified) == {"memory.high": "2"}
    assert (answer.container_resources.oom_score_adj, answer.container_resources.cpuset_cpus) == (-5, "")
    assert answer.container_resources == reply.resources
    facts = reply.container()
    assert (facts.envs, facts.resources.oom_score_adj) == ({"A": "1", "B": "2"}, -5)
    other = reply.with_parent("/kubepods/pody")
    assert (other.answer.pod_cgroup_parent, other.lost) == ("/kubepods/pody", reply.lost)
    assert asked.container_resources.cpuset_cpus == "0-3", "what the peer has sent stays as it was"
    lost = reply.adjusted(Adjustment(devices={"/d": Device("/d", "/d")})).lost
    assert lost == (*reply.lost, "devices")


def test_what_hooks_want_of_a_sandbox_is_in_the_answer() -> None:
    asked = pb.PodSandboxHookRequest(cgroup_parent="/a")
    want = Adjustment(labels={"l": "1"}, annotations={"a": "2"}, cgroup_parent="/b")
    reply = SandboxReply(asked, messages.pod_echo(asked)).adjusted(want)
    answer = reply.answer
    assert (dict(answer.labels), dict(answer.annotations)) == ({"l": "1"}, {"a": "2"})
    assert answer.cgroup_parent == "/b"
    pod = reply.read(ANY_MACHINE)
    assert isinstance(pod, Pod)
    assert pod.cgroup_parent == "/b"


@pytest.mark.parametrize("kind", [cri.LinuxContainerResources, pb.LinuxContainerResources])
def test_all_values_of_resources_are_known(kind: Any) -> None:
    others = {"unified", "hugepage_limits", "cpuset_cpus", "cpuset_mems"}
    assert {*NUMBERS.values()} | others == {field.name for field in kind.DESCRIPTOR.fields}
