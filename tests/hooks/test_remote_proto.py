"""The generated classes of Koordinator's protocol: they match hook.proto, the protocol, and the CRI."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_committed_classes_match_the_proto_file(tmp_path: Path) -> None:
    options = ["-I", "proto/koordinator", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "hook.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options], cwd=ROOT, check=True)
    for name in ("hook_pb2.py", "hook_pb2.pyi"):
        committed = (ROOT / "proxy" / "api" / "koordinator" / name).read_text()
        assert committed == (tmp_path / name).read_text(), f"{name} is outdated: run `make proto`"


# Every message's fields in the order of their numbers, from 1 and without a gap.
NAMES: dict[type[Message], str] = {
    pb.PodSandboxMetadata: "name uid namespace attempt",
    pb.ContainerMetadata: "name attempt id",
    pb.HugepageLimit: "page_size limit",
    pb.LinuxContainerResources: """
        cpu_period cpu_quota cpu_shares memory_limit_in_bytes oom_score_adj cpuset_cpus cpuset_mems
        hugepage_limits unified memory_swap_limit_in_bytes""",
    pb.PodSandboxHookRequest: """
        pod_meta runtime_handler labels annotations cgroup_parent overhead resources""",
    pb.PodSandboxHookResponse: "labels annotations cgroup_parent resources",
    pb.ContainerResourceHookRequest: """
        pod_meta container_meta container_annotations container_resources pod_resources pod_annotations
        pod_labels pod_cgroup_parent container_envs""",
    pb.ContainerResourceHookResponse: """
        container_annotations container_resources pod_cgroup_parent container_envs""",
}


@pytest.mark.parametrize("message", NAMES, ids=lambda message: message.DESCRIPTOR.name)
def test_fields_are_numbered_as_in_the_protocol(message: type[Message]) -> None:
    numbers = {name: field.number for name, field in message.DESCRIPTOR.fields_by_name.items()}
    assert numbers == {name: number for number, name in enumerate(NAMES[message].split(), 1)}


def test_methods_are_called_as_in_the_protocol() -> None:
    service = pb.DESCRIPTOR.services_by_name["RuntimeHookService"]
    assert service.full_name == "runtime.v1alpha1.RuntimeHookService"
    assert {method.name: method.input_type.name for method in service.methods} == {
        "PreRunPodSandboxHook": "PodSandboxHookRequest",
        "PostStopPodSandboxHook": "PodSandboxHookRequest",
        "PreCreateContainerHook": "ContainerResourceHookRequest",
        "PreStartContainerHook": "ContainerResourceHookRequest",
        "PostStartContainerHook": "ContainerResourceHookRequest",
        "PostStopContainerHook": "ContainerResourceHookRequest",
        "PreUpdateContainerResourcesHook": "ContainerResourceHookRequest",
    }
    for method in service.methods:
        assert method.output_type.name == method.input_type.name.replace("Request", "Response")


def test_resources_are_encoded_as_in_the_cri() -> None:
    resources = cri.LinuxContainerResources(
        cpu_period=100_000, cpu_quota=-1, cpu_shares=2, memory_limit_in_bytes=1 << 40, oom_score_adj=-997,
        cpuset_cpus="0-3,7", cpuset_mems="0", unified={"memory.high": "max"}, memory_swap_limit_in_bytes=5,
        hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=1 << 63)],
    )  # fmt: skip
    wire = resources.SerializeToString(deterministic=True)
    assert pb.LinuxContainerResources.FromString(wire).SerializeToString(deterministic=True) == wire
    ours, kubernetes = (
        {f.name: (f.number, f.type, f.is_repeated) for f in message.DESCRIPTOR.fields}
        for message in (pb.LinuxContainerResources, cri.LinuxContainerResources)
    )
    assert ours == kubernetes
