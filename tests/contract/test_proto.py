"""The generated message classes match api.proto and preserve unknown fields."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.api.cri import api_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_committed_classes_are_what_the_proto_file_says(tmp_path: Path) -> None:
    options = ["-I", "proto/cri", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "api.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options], cwd=ROOT, check=True)
    for name in ("api_pb2.py", "api_pb2.pyi"):
        committed = (ROOT / "proxy" / "api" / "cri" / name).read_text()
        assert committed == (tmp_path / name).read_text(), f"{name} is outdated: run `make proto`"


def field(number: int, payload: bytes) -> bytes:
    """Encode a length-delimited field, as any protobuf writer does."""
    key = number << 3 | 2
    head = bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])
    assert len(payload) < 128
    return head + bytes([len(payload)]) + payload


# Fields that api.proto does not declare: working_dir 5, security_context 2 of linux, an unused number 1999.
LINUX = field(1, field(6, b"0-1")) + field(2, b"\x10\x01")
CONFIG = field(1, field(1, b"web")) + field(5, b"/srv") + field(15, LINUX) + field(1999, b"later")
CREATE = field(1, b"pod-1") + field(2, CONFIG) + field(3, field(8, field(1, b"/kubepods/podx")))


def test_known_fields_have_the_numbers_of_the_interface() -> None:
    request = pb.CreateContainerRequest.FromString(CREATE)
    assert request.pod_sandbox_id == "pod-1"
    assert request.config.metadata.name == "web"
    assert request.config.linux.resources.cpuset_cpus == "0-1"
    assert request.sandbox_config.linux.cgroup_parent == "/kubepods/podx"


def test_unknown_fields_survive_a_rewrite() -> None:
    request = pb.CreateContainerRequest.FromString(CREATE)
    request.config.linux.resources.cpuset_cpus = "4"
    again = request.SerializeToString()
    for piece in (field(5, b"/srv"), field(2, b"\x10\x01"), field(1999, b"later")):
        assert again.count(piece) == 1
    assert pb.CreateContainerRequest.FromString(again).config.linux.resources.cpuset_cpus == "4"


def test_a_second_config_behind_the_message_merges_into_the_first() -> None:
    """This allows a rewrite to append bytes instead of encoding the whole message again."""
    patch = pb.CreateContainerRequest()
    patch.config.linux.resources.cpuset_cpus = "7"
    patch.config.linux.resources.cpuset_mems = "1"
    merged = pb.CreateContainerRequest.FromString(CREATE + patch.SerializeToString())
    assert merged.config.metadata.name == "web"
    assert merged.config.linux.resources.cpuset_cpus == "7"
    assert merged.config.linux.resources.cpuset_mems == "1"
    assert merged.pod_sandbox_id == "pod-1"
    assert field(5, b"/srv") in merged.SerializeToString()


def test_environment_values_may_be_any_bytes() -> None:
    wire = field(2, field(6, field(1, b"KEY") + field(2, b"\xff\xfe")))
    request = pb.CreateContainerRequest.FromString(wire)
    assert request.config.envs[0].value == b"\xff\xfe"
    assert request.SerializeToString() == wire


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (pb.LinuxContainerResources, {"cpu_period": 1, "cpu_shares": 3, "cpuset_mems": 7, "unified": 9}),
        (pb.ContainerConfig, {"args": 4, "labels": 9, "annotations": 10, "linux": 15, "CDI_devices": 17}),
        (pb.ContainerFacts, {"mounts": 7, "devices": 8, "annotations": 10, "linux": 15, "CDI_devices": 17}),
        (pb.ResourceFacts, {"cpu_period": 1, "cpu_quota": 2, "cpu_shares": 3, "memory_limit_in_bytes": 4}),
        (pb.ResourceFacts, {"cpuset_cpus": 6, "cpuset_mems": 7, "hugepage_limits": 8}),
        (pb.Mount, {"container_path": 1, "host_path": 2}),
        (pb.Device, {"container_path": 1, "host_path": 2, "permissions": 3}),
        (pb.PodSandboxConfig, {"log_directory": 3, "labels": 6, "annotations": 7, "linux": 8}),
        (pb.LinuxPodSandboxConfig, {"cgroup_parent": 1, "overhead": 4, "resources": 5}),
        (pb.Container, {"id": 1, "pod_sandbox_id": 2, "state": 6, "labels": 8, "annotations": 9}),
        (pb.ContainerStatus, {"labels": 12, "annotations": 13, "resources": 16}),
        (pb.PodSandbox, {"metadata": 2, "state": 3, "labels": 5, "annotations": 6}),
        (pb.UpdateContainerResourcesRequest, {"container_id": 1, "linux": 2, "annotations": 4}),
        (pb.ContainerEventResponse, {"container_event_type": 2, "pod_sandbox_status": 4}),
    ],
)
def test_messages_have_the_field_numbers_of_the_cri(message: type, numbers: dict[str, int]) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: fields[name].number for name in numbers} == numbers
