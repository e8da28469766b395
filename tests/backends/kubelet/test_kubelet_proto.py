"""The generated classes of kubelet's APIs: they match the .proto files and the interfaces."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proxy.api.kubelet import deviceplugin_pb2, podresources_pb2, pods_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_committed_classes_match_the_proto_files(tmp_path: Path) -> None:
    options = ["-I", "proto/kubelet", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    names = ("deviceplugin", "pods", "podresources")
    protoc = [sys.executable, "-m", "grpc_tools.protoc", *options, *(f"{name}.proto" for name in names)]
    subprocess.run(protoc, cwd=ROOT, check=True)
    for file in (f"{name}_pb2.{end}" for name in names for end in ("py", "pyi")):
        committed = (ROOT / "proxy" / "api" / "kubelet" / file).read_text()
        assert committed == (tmp_path / file).read_text(), f"{file} is outdated: run `make proto`"


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (pods_pb2.GetPodRequest, {"pod_uid": 1}),
        (pods_pb2.GetPodResponse, {"pod": 1}),
        (pods_pb2.Pod, {"metadata": 1, "spec": 2, "status": 3}),
        (pods_pb2.ObjectMeta, {"name": 1, "namespace": 3, "uid": 5, "labels": 11, "annotations": 12}),
        (pods_pb2.PodSpec, {"containers": 2, "init_containers": 20, "overhead": 32, "resources": 40}),
        (pods_pb2.Container, {"name": 1, "resources": 8, "restart_policy": 24}),
        (pods_pb2.ResourceRequirements, {"limits": 1, "requests": 2}),
        (pods_pb2.Quantity, {"string": 1}),
        (pods_pb2.PodStatus, {"qos_class": 9}),
        (podresources_pb2.GetPodResourcesRequest, {"pod_name": 1, "pod_namespace": 2}),
        (podresources_pb2.GetPodResourcesResponse, {"pod_resources": 1}),
        (podresources_pb2.ListPodResourcesResponse, {"pod_resources": 1}),
        (podresources_pb2.AllocatableResourcesResponse, {"devices": 1, "cpu_ids": 2, "memory": 3}),
        (podresources_pb2.PodResources, {"name": 1, "namespace": 2, "containers": 3}),
        (
            podresources_pb2.ContainerResources,
            {"name": 1, "devices": 2, "cpu_ids": 3, "memory": 4, "dynamic_resources": 5},
        ),
        (podresources_pb2.ContainerMemory, {"memory_type": 1, "size": 2, "topology": 3}),
        (podresources_pb2.ContainerDevices, {"resource_name": 1, "device_ids": 2, "topology": 3}),
        (podresources_pb2.NUMANode, {"ID": 1}),
        (podresources_pb2.DynamicResource, {"claim_name": 2, "claim_namespace": 3, "claim_resources": 4}),
        (
            podresources_pb2.ClaimResource,
            {"cdi_devices": 1, "driver_name": 2, "pool_name": 3, "device_name": 4},
        ),
        (podresources_pb2.CDIDevice, {"name": 1}),
        (deviceplugin_pb2.RegisterRequest, {"version": 1, "endpoint": 2, "resource_name": 3}),
        (
            deviceplugin_pb2.DevicePluginOptions,
            {"pre_start_required": 1, "get_preferred_allocation_available": 2},
        ),
        (deviceplugin_pb2.ListAndWatchResponse, {"devices": 1}),
        (deviceplugin_pb2.Device, {"ID": 1, "health": 2, "topology": 3}),
        (deviceplugin_pb2.TopologyInfo, {"nodes": 1}),
        (deviceplugin_pb2.NUMANode, {"ID": 1}),
        (deviceplugin_pb2.PreferredAllocationRequest, {"container_requests": 1}),
        (
            deviceplugin_pb2.ContainerPreferredAllocationRequest,
            {"available_deviceIDs": 1, "must_include_deviceIDs": 2, "allocation_size": 3},
        ),
        (deviceplugin_pb2.PreferredAllocationResponse, {"container_responses": 1}),
        (deviceplugin_pb2.ContainerPreferredAllocationResponse, {"deviceIDs": 1}),
        (deviceplugin_pb2.AllocateRequest, {"container_requests": 1}),
        (deviceplugin_pb2.ContainerAllocateRequest, {"devices_ids": 1}),
        (deviceplugin_pb2.AllocateResponse, {"container_responses": 1}),
        (
            deviceplugin_pb2.ContainerAllocateResponse,
            {"envs": 1, "mounts": 2, "devices": 3, "annotations": 4, "cdi_devices": 5},
        ),
        (deviceplugin_pb2.Mount, {"container_path": 1, "host_path": 2, "read_only": 3}),
        (deviceplugin_pb2.DeviceSpec, {"container_path": 1, "host_path": 2, "permissions": 3}),
        (deviceplugin_pb2.CDIDevice, {"name": 1}),
        (deviceplugin_pb2.PreStartContainerRequest, {"devices_ids": 1}),
    ],
)
def test_messages_have_the_field_numbers_of_kubelet(message: type[Message], numbers: dict[str, int]) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: field.number for name, field in fields.items()} == numbers
