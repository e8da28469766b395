from __future__ import annotations

from typing import Any

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.backends.kubelet.managed_elsewhere import PROBLEM, OtherManagersReader
from proxy.backends.kubelet.settings import KubeletError
from proxy.executor.device_manager_conflicts import ManagedElsewhere
from proxy.logs import telemetry
from proxy.telemetry.port import Telemetry

FUNCTIONS = {"gpu.example.com/gpu=0": ("0000:3B:00.0",), "gpu.example.com/gpu=both": ("a", "b")}


class Kubelet:
    """kubelet's lists."""

    def __init__(self) -> None:
        self.refuses = False
        self.allocatable = pb.AllocatableResourcesResponse(
            devices=[
                pb.ContainerDevices(resource_name="example.com/vf", device_ids=["a"]),
                pb.ContainerDevices(resource_name="example.com/vf", device_ids=["a", "b"]),
                pb.ContainerDevices(resource_name="example.com/empty"),
            ]
        )
        claimed = pb.ClaimResource(
            driver_name="gpu.example.com",
            cdi_devices=[pb.CDIDevice(name=name) for name in (*FUNCTIONS, "gpu.example.com/gpu=lost")],
        )
        claim = pb.DynamicResource(claim_name="train", claim_namespace="ml", claim_resources=[claimed])
        container = pb.ContainerResources(
            name="main",
            devices=[pb.ContainerDevices(resource_name="example.com/gone", device_ids=["z"])],
            dynamic_resources=[claim],
        )
        pod = pb.PodResources(name="train", namespace="ml", containers=[container])
        self.listed = pb.ListPodResourcesResponse(pod_resources=[pod])

    def allocatable_resources(self) -> pb.AllocatableResourcesResponse:
        if self.refuses:
            raise KubeletError("kubelet does not answer")
        return self.allocatable

    def pods(self) -> pb.ListPodResourcesResponse:
        return self.listed


def reader(kubelet: Kubelet, reported: Telemetry) -> OtherManagersReader:
    lists: Any = kubelet
    return OtherManagersReader(lists, lambda name: FUNCTIONS.get(name, ()), reported)


def test_devices_of_kubelet_and_of_claims_are_managed_elsewhere() -> None:
    claim = "claim ml/train, driver gpu.example.com"
    assert reader(Kubelet(), telemetry()).read() == ManagedElsewhere(
        {"example.com/vf": {"a", "b"}}, {"0000:3b:00.0": claim, "a": claim, "b": claim}
    )


def test_a_kubelet_that_does_not_answer_is_reported_and_gives_nothing() -> None:
    kubelet, reported = Kubelet(), telemetry()
    kubelet.refuses = True
    source = reader(kubelet, reported)
    assert source.read() is None
    assert [each["message"] for each in reported.problems()] == [PROBLEM]
    kubelet.refuses = False
    found = source.read()
    assert found is not None
    assert found.plugged
    assert reported.problems() == []
