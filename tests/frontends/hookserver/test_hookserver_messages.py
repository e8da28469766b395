"""Between the two protocols: nothing is lost on the way, and only what was changed comes back changed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as pb
from proxy.frontends.cri.rewrite import create_suffix, update_suffix
from proxy.frontends.hookserver import messages
from proxy.model.idset import CpuSet, Mask

TEXT = st.text(max_size=8)
MAP = st.dictionaries(TEXT, TEXT, max_size=4)
NUMBER = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)
UNKNOWN = b"\xfa\x3f\x03abc"
"""Field 1023, which nobody declares."""


@st.composite
def resources(draw: Any) -> pb.LinuxContainerResources:
    found = pb.LinuxContainerResources()
    for name in messages.NUMBERS:
        setattr(found, name, draw(TEXT if name.startswith("cpuset") else NUMBER))
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
    sent = messages.create_request(asked, "s", 3)
    assert (sent.pod_sandbox_id, sent.sandbox_config.metadata.attempt) == ("s", 3)
    assert sent.sandbox_config.metadata.uid == asked.pod_meta.uid
    assert dict(sent.sandbox_config.labels) == dict(asked.pod_labels)
    assert {e.key: e.value.decode() for e in sent.config.envs} == dict(asked.container_envs)
    body = sent.SerializeToString()
    answer, lost = messages.create_answer(asked, body, body)
    assert answer == messages.container_echo(asked)
    assert lost == []
    assert answer.container_resources == asked.container_resources
    assert answer.HasField("container_resources") == asked.HasField("container_resources")
    assert dict(answer.container_envs) == dict(asked.container_envs)
    assert dict(answer.container_annotations) == dict(asked.container_annotations)
    assert answer.pod_cgroup_parent == asked.pod_cgroup_parent


@given(containers())
def test_a_decided_create_differs_in_what_was_decided(asked: pb.ContainerResourceHookRequest) -> None:
    body = messages.create_request(asked, "s", 0).SerializeToString()
    decided = body + create_suffix(CpuSet.parse("2-3"), Mask((1,)), -1)
    answer, _ = messages.create_answer(asked, body, decided)
    want = messages.container_echo(asked)
    want.container_resources.cpuset_cpus, want.container_resources.cpuset_mems = "2-3", "1"
    want.container_resources.cpu_quota = -1
    assert answer == want


@given(containers())
def test_an_erased_set_is_erased(asked: pb.ContainerResourceHookRequest) -> None:
    asked.container_resources.cpuset_cpus = "0-3"
    body = messages.create_request(asked, "s", 0).SerializeToString()
    answer, _ = messages.create_answer(asked, body, body + create_suffix(None, None))
    assert answer.container_resources.cpuset_cpus == ""
    body = messages.update_request(asked, quota=True).SerializeToString()
    changed = messages.update_answer(asked, body, body + update_suffix(None, None))
    assert changed.container_resources.cpuset_cpus == ""


@given(containers())
def test_an_undecided_update_is_echoed(asked: pb.ContainerResourceHookRequest) -> None:
    body = messages.update_request(asked, quota=False).SerializeToString()
    assert messages.update_answer(asked, body, body) == messages.container_echo(asked)


@given(pods())
def test_an_unchanged_sandbox_is_echoed(asked: pb.PodSandboxHookRequest) -> None:
    sent = messages.run_request(asked)
    assert (sent.runtime_handler, sent.config.metadata.attempt) == (
        asked.runtime_handler,
        asked.pod_meta.attempt,
    )
    body = sent.SerializeToString()
    answer = messages.run_answer(asked, body, body)
    assert answer == messages.pod_echo(asked)
    assert dict(answer.labels) == dict(asked.labels)
    assert answer.resources == asked.resources
    assert answer.cgroup_parent == asked.cgroup_parent


def test_an_update_leaves_out_what_may_be_ours() -> None:
    asked = pb.ContainerResourceHookRequest()
    asked.container_resources.cpuset_cpus, asked.container_resources.cpuset_mems = "2-3", "0"
    asked.container_resources.cpu_quota = -1
    assert not messages.update_request(asked, quota=False).linux.ListFields()
    assert messages.update_request(asked, quota=True).linux.cpu_quota == -1
    asked.container_resources.cpu_quota = 5000
    assert messages.update_request(asked, quota=False).linux.cpu_quota == 5000


def test_what_hooks_have_changed_comes_back() -> None:
    asked = pb.ContainerResourceHookRequest(pod_cgroup_parent="/kubepods/podx")
    asked.container_envs["A"] = "1"
    asked.container_resources.unified["memory.high"] = "1"
    sent = messages.create_request(asked, "s", 0)
    body = sent.SerializeToString()
    sent.config.envs.add(key="B", value=b"2")
    sent.config.envs.add(key="C", value=b"\xff")
    sent.config.annotations["a"] = "b"
    sent.config.mounts.add(container_path="/x", host_path="/y")
    sent.config.labels["l"] = "m"
    sent.config.linux.resources.unified["memory.high"] = "2"
    sent.config.linux.resources.oom_score_adj = -5
    sent.sandbox_config.linux.cgroup_parent = "/kubepods/pody"
    answer, lost = messages.create_answer(asked, body, sent.SerializeToString())
    assert lost == ["mounts", "labels", "envs[C]"]
    assert dict(answer.container_envs) == {"A": "1", "B": "2"}
    assert dict(answer.container_annotations) == {"a": "b"}
    assert dict(answer.container_resources.unified) == {"memory.high": "2"}
    assert answer.container_resources.oom_score_adj == -5
    assert answer.pod_cgroup_parent == "/kubepods/pody"


def test_what_hooks_have_changed_of_a_sandbox_comes_back() -> None:
    asked = pb.PodSandboxHookRequest(cgroup_parent="/a")
    sent = messages.run_request(asked)
    body = sent.SerializeToString()
    sent.config.labels["l"], sent.config.annotations["a"] = "1", "2"
    sent.config.linux.cgroup_parent = "/b"
    answer = messages.run_answer(asked, body, sent.SerializeToString())
    assert (dict(answer.labels), dict(answer.annotations)) == ({"l": "1"}, {"a": "2"})
    assert answer.cgroup_parent == "/b"


@pytest.mark.parametrize("kind", [cri.LinuxContainerResources, pb.LinuxContainerResources])
def test_all_values_of_resources_are_compared(kind: Any) -> None:
    maps = {"unified", "hugepage_limits"}
    assert set(messages.NUMBERS) | maps == {field.name for field in kind.DESCRIPTOR.fields}
