from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.hook_adjust import adjusted_create
from proxy.frontends.cri.hook_view import CriHookView, KeptConfig
from proxy.frontends.cri.messages import create_suffix
from proxy.frontends.hook_bridge.facts import existing_facts, remembered_pod_facts
from proxy.frontends.hook_bridge.object_cache import (
    CONTAINER_BYTES,
    POD_BYTES,
    ObjectCache,
    PackedTexts,
    RememberedContainer,
)
from proxy.frontends.hook_bridge.resources import resources_of
from proxy.hooks.answers import Adjustment
from proxy.hooks.facts import ContainerFacts, PodFacts, Resources
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from tests.testkit.hook_facts import remember, remember_pod

POD = Pod("s1", "u1", "ns", "web")


def facts(memory: ObjectCache, container_id: str = "c1") -> ContainerFacts:
    placement = Placement(Pool.SHARED, CpuSet(), Mask())
    container = Container(container_id, "app", POD, Request(), placement, Phase.RUNNING)
    return existing_facts(container, memory.container(container_id))


def pod(memory: ObjectCache) -> PodFacts:
    return remembered_pod_facts(POD, memory.pod("s1"))


def create(**more: object) -> pb.CreateContainerRequest:
    config = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="app"),
        image=pb.ImageSpec(image="i"),
        labels={"l": "1"},
        annotations={"a": "2"},
        args=["-v"],
        linux=pb.LinuxContainerConfig(
            resources=pb.LinuxContainerResources(cpu_shares=512, oom_score_adj=-997)
        ),
        **more,
    )
    config.envs.add(key="A", value=b"\xff")
    return pb.CreateContainerRequest(pod_sandbox_id="s1", config=config)


def created(**more: object) -> ObjectCache:
    memory = ObjectCache()
    remember(memory, "c1", create(**more).SerializeToString())
    return memory


def test_an_unknown_container_is_not_cached() -> None:
    memory = ObjectCache()
    assert memory.pod("s1") is None
    assert memory.container("c1") is None
    memory.update_container("c1", Resources(cpu_shares=2))
    memory.forget("s1", "c1")
    assert memory.container("c1") is None


def test_a_sandbox_is_cached_as_sent_to_the_runtime() -> None:
    config = pb.PodSandboxConfig(labels={"l": "1"}, annotations={"a": "2"}, hostname="h")
    config.linux.cgroup_parent = "/kubepods/podu1"
    memory = ObjectCache()
    remember_pod(memory, POD, config, "kata")
    reported = pod(memory)
    assert (reported.labels, reported.annotations, reported.runtime_handler) == (
        {"l": "1"},
        {"a": "2"},
        "kata",
    )
    cached = memory.pod("s1")
    assert cached is not None
    assert b"h" not in cached.texts.raw, "fields that hooks do not receive are not cached"


def test_a_container_is_cached_with_the_data_appended_to_its_request() -> None:
    body = adjusted_create(create().SerializeToString(), Adjustment(envs={"NEW": "1"}, cpu_shares=2))
    memory = ObjectCache()
    remember(memory, "c1", body)
    reported = facts(memory)
    assert (reported.envs, reported.args, reported.image) == ({"A": "\udcff", "NEW": "1"}, ("-v",), "i")
    assert reported.resources == Resources(cpu_shares=2, oom_score_adj=-997)


def test_updates_are_accumulated() -> None:
    memory = created()
    memory.update_container(
        "c1", resources_of(pb.LinuxContainerResources(cpu_quota=5000, memory_limit_in_bytes=1 << 30))
    )
    memory.update_container("c1", Resources(cpu_quota=-1, unified={"memory.high": "1"}))
    update = pb.LinuxContainerResources(memory_limit_in_bytes=-1, unified={"cpu.max": "max"})
    memory.update_container("c1", resources_of(update))
    unified = {"memory.high": "1", "cpu.max": "max"}
    assert facts(memory).resources == Resources(0, -1, 512, -1, 0, -997, unified=unified)


def test_returned_facts_do_not_change_with_an_update() -> None:
    """Koordinator's proxy changes an object while other threads read it."""
    memory = created()
    before = facts(memory).resources
    memory.update_container("c1", Resources(cpu_shares=2, unified={"a": "1"}))
    assert (before.cpu_shares, before.unified) == (512, {})


def test_lists_describe_containers_from_before() -> None:
    memory = created()
    sandbox = pb.PodSandbox(id="s1", labels={"l": "1"}, annotations={"a": "2"}, runtime_handler="kata")
    old = pb.Container(id="c0", labels={"l": "0"}, annotations={"a": "0"}, image=pb.ImageSpec(image="old"))
    memory.add_listed([sandbox], [old, pb.Container(id="c1", labels={"l": "other"})])
    assert (pod(memory).labels, pod(memory).runtime_handler) == ({"l": "1"}, "kata")
    reported = facts(memory, "c0")
    assert (reported.labels, reported.annotations, reported.image) == ({"l": "0"}, {"a": "0"}, "old")
    assert facts(memory).envs, "a list has fewer fields than a create"
    assert facts(memory).labels == {"l": "1"}
    memory.add_listed([pb.PodSandbox(id="s1", labels={"l": "2"})], ())
    assert pod(memory).labels == {"l": "1"}


def test_a_removed_container_is_forgotten() -> None:
    """Koordinator's proxy never forgets containers that exited by themselves."""
    memory = created()
    remember(memory, "c2", create().SerializeToString())
    memory.add_pod("s1", PodFacts())
    memory.add_pod("s2", PodFacts())
    memory.forget("c1", "s1")
    assert memory.container("c1") is memory.pod("s1") is None
    assert memory.container("c2") is not None
    remember(memory, "c1", create().SerializeToString())
    memory.keep_only({"s1"}, {"c1"})
    assert memory.container("c2") is memory.pod("s2") is None
    assert memory.container("c1") is not None
    memory.keep_only({"s1", "s2"}, {"c1"})
    assert memory.container("c1") is not None


def kept_bytes(memory: ObjectCache, container_id: str = "c1") -> int:
    found = memory.container(container_id)
    assert found is not None
    assert isinstance(found.details, KeptConfig | PackedTexts)
    return len(found.details.raw)


def test_a_large_container_keeps_labels_and_annotations() -> None:
    memory = created(command=["x" * CONTAINER_BYTES])
    reported = facts(memory)
    assert (reported.labels, reported.annotations, reported.image) == ({"l": "1"}, {"a": "2"}, "i")
    assert (reported.envs, reported.command, reported.args) == ({}, (), ())
    assert reported.resources.cpu_shares == 512
    assert kept_bytes(memory) < 100


def test_the_largest_annotations_are_dropped_first() -> None:
    notes = {"small": "1", "large": "x" * POD_BYTES, "larger": "y" * (POD_BYTES + 1), "fits": "z" * 1000}
    memory = ObjectCache()
    memory.add_pod("s1", PodFacts(labels={"l": "1"}, annotations=notes))
    assert (pod(memory).labels, {*pod(memory).annotations}) == ({"l": "1"}, {"small", "fits"})
    del notes["larger"]
    notes["large"] = "x" * (POD_BYTES - 2000)
    memory.add_pod("s1", PodFacts(annotations=notes))
    assert pod(memory).annotations == notes, "all annotations are kept while they fit"


def test_the_environment_is_dropped_first_and_as_a_whole() -> None:
    texts = {"l": "1"}, {"a": "2"}, {"SMALL": "3", "LARGE": "x" * 100}
    identity = "c1", "app", 0, "running"
    found = PackedTexts.of(200, *texts).facts(identity, "i", Resources())
    assert (found.labels, found.annotations, found.envs) == texts
    assert (found.id, found.image) == ("c1", "i")
    cut = PackedTexts.of(100, *texts)
    found = cut.facts(identity, "i", Resources())
    assert (found.labels, found.annotations, found.envs) == ({"l": "1"}, {"a": "2"}, {})
    assert len(cut.raw) <= 100


def test_labels_are_dropped_last() -> None:
    container = pb.Container(
        id="c1", labels={"l": "1", "large": "x" * CONTAINER_BYTES}, annotations={"a": "2"}
    )
    memory = ObjectCache()
    memory.add_listed((), [container])
    assert facts(memory).labels == {"l": "1"}
    assert kept_bytes(memory) <= CONTAINER_BYTES


@pytest.mark.parametrize("size", [1, 5000, CONTAINER_BYTES, 1 << 20])
def test_the_cached_size_of_a_container_is_limited(size: int) -> None:
    notes = {f"a{number}": "x" * size for number in range(8)}
    memory = created(command=["x" * size])
    memory.add_listed((), [pb.Container(id="c2", labels=notes, annotations=notes)])
    body = (
        create().SerializeToString()
        + pb.CreateContainerRequest(config=pb.ContainerConfig(annotations=notes)).SerializeToString()
    )
    remember(memory, "c3", body)
    for each in ("c1", "c2", "c3"):
        assert kept_bytes(memory, each) <= CONTAINER_BYTES


def test_the_engines_own_placement_is_not_a_request_of_the_client() -> None:
    """The placement is appended to the request, and must not be cached as the client's request."""
    memory = created()
    assert facts(memory).resources.cpuset_cpus == ""
    remember(memory, "c1", create().SerializeToString() + create_suffix(CpuSet((1,)), None))
    assert facts(memory).resources.cpuset_cpus == "1"


def test_a_create_that_cannot_be_read_is_not_cached() -> None:
    memory = ObjectCache()
    for body in (b"\xff\xff\xff", b"\xff" * 2 * CONTAINER_BYTES):
        remember(memory, "c1", body)
        assert memory.knows("c1")
        assert memory.container("c1") == RememberedContainer(
            "", KeptConfig(b""), Resources(), includes_create=False
        )


def test_an_invalid_sandbox_is_an_error() -> None:
    with pytest.raises(DecodeError):
        CriHookView("RunPodSandbox", b"\xff\xff\xff").sandbox(POD)
