"""The server without a socket: a list is rebuilt only after a change."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.api.kubelet import podresources_pb2 as pb
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.frontends.podresources.server import PodResourcesServer
from proxy.model.mode import NodeMode
from proxy.topology.regular_machine import regular_machine
from tests.testkit.captured_log import telemetry

MACHINE = regular_machine(1, 1, 2, 1)


class Kubelet:
    """kubelet's answers, the same as long as ``listed`` is."""

    def __init__(self) -> None:
        self.listed = pb.ListPodResourcesResponse()

    def pods(self) -> pb.ListPodResourcesResponse:
        return self.listed

    def allocatable_resources(self) -> pb.AllocatableResourcesResponse:
        return pb.AllocatableResourcesResponse()

    def close(self) -> None:
        pass


def test_a_list_is_rebuilt_only_if_the_state_or_kubelets_answer_has_changed() -> None:
    states, kubelet = [NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))], Kubelet()
    server = PodResourcesServer(Path("/none"), lambda: states[-1], kubelet, telemetry())
    request = pb.ListPodResourcesRequest()
    first = server._list(request)
    assert server._list(request) is first
    states.append(structs.replace(states[0], mode=NodeMode.OBSERVE))
    second = server._list(request)
    assert second is not first
    kubelet.listed = pb.ListPodResourcesResponse(pod_resources=[pb.PodResources(name="web")])
    assert [pod.name for pod in server._list(request).pod_resources] == ["web"]
    assert second == pb.ListPodResourcesResponse()
