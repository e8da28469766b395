"""Queries for the devices of a container: groups, node 0, kubelets without Get, and call limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.backends.kubelet.channel import UnixChannel
from proxy.backends.kubelet.pod_resources import SOURCE, PodResources
from proxy.backends.kubelet.settings import KubeletError
from proxy.model.idset import Mask
from proxy.model.workload import LocatedDevice

LISTER = "v1.PodResourcesLister"


class Kubelet:
    """The answers of a kubelet, which may refuse calls."""

    def __init__(self) -> None:
        self.pods: list[pb.PodResources] = []
        self.all: list[pb.ContainerDevices] = []
        self.calls: list[str] = []
        self.refuse: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.turned_away = 0

    def methods(self) -> dict[str, Any]:
        return {"Get": self.get, "List": self.list, "GetAllocatableResources": self.allocatable}

    def called(self, method: str, context: Any) -> None:
        self.calls.append(method)
        if self.turned_away:
            self.turned_away -= 1
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        if method in self.refuse:
            context.abort(*self.refuse[method])

    def get(self, request: bytes, context: Any) -> bytes:
        self.called("Get", context)
        wanted = pb.GetPodResourcesRequest.FromString(request)
        for pod in self.pods:
            if (pod.name, pod.namespace) == (wanted.pod_name, wanted.pod_namespace):
                return pb.GetPodResourcesResponse(pod_resources=pod).SerializeToString()
        message = f"pod {wanted.pod_name} in namespace {wanted.pod_namespace} not found"
        context.abort(grpc.StatusCode.UNKNOWN, message)
        raise AssertionError

    def list(self, _: bytes, context: Any) -> bytes:
        self.called("List", context)
        return pb.ListPodResourcesResponse(pod_resources=self.pods).SerializeToString()

    def allocatable(self, _: bytes, context: Any) -> bytes:
        self.called("GetAllocatableResources", context)
        return pb.AllocatableResourcesResponse(devices=self.all).SerializeToString()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def group(resource: str, *ids: str, nodes: tuple[int, ...] | None = None) -> pb.ContainerDevices:
    made = pb.ContainerDevices(resource_name=resource, device_ids=ids)
    if nodes is not None:
        made.topology.nodes.extend(pb.NUMANode(ID=node) for node in nodes)
    return made


def pod(name: str, *containers: pb.ContainerResources, namespace: str = "shop") -> pb.PodResources:
    return pb.PodResources(name=name, namespace=namespace, containers=containers)


def gpu(name: str, *groups: pb.ContainerDevices) -> pb.ContainerResources:
    return pb.ContainerResources(name=name, devices=groups)


def claim(*names: str) -> pb.DynamicResource:
    devices = [pb.CDIDevice(name=name) for name in names]
    return pb.DynamicResource(claim_name="c", claim_resources=[pb.ClaimResource(cdi_devices=devices)])


@pytest.fixture
def kubelet(tmp_path: Path, serve: Any) -> Kubelet:
    made = Kubelet()
    serve(tmp_path / "kubelet.sock", LISTER, **made.methods())
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def resources(tmp_path: Path, clock: Clock) -> Iterator[PodResources]:
    channel = UnixChannel(str(tmp_path / "kubelet.sock"), 60.0)
    yield PodResources(channel, clock)
    channel.close()


def test_devices_of_a_container(kubelet: Kubelet, resources: PodResources) -> None:
    main = pb.ContainerResources(
        name="main",
        devices=[
            group("nvidia.com/gpu", "GPU-0", "GPU-1", nodes=(1,)),
            group("nvidia.com/gpu", "GPU-2", nodes=(0,)),
            group("nvidia.com/gpu", "GPU-1", nodes=(2,)),
            group("x/nic", "GPU-0", nodes=(-1,)),
            group("x/fuse", "f"),
            group("x/none", "n", nodes=()),
        ],
        dynamic_resources=[claim("v.com/gpu=a", "v.com/gpu=b"), claim("v.com/gpu=a")],
    )
    kubelet.pods = [pod("web", gpu("other"), namespace="else"), pod("web", gpu("side"), main)]
    assert resources.of_container("shop", "web", "main") == (
        LocatedDevice("GPU-0", "nvidia.com/gpu", Mask([1]), SOURCE),
        LocatedDevice("GPU-1", "nvidia.com/gpu", Mask([1, 2]), SOURCE),
        LocatedDevice("GPU-2", "nvidia.com/gpu", Mask([0]), SOURCE),
        LocatedDevice("GPU-0", "x/nic"),
        LocatedDevice("f", "x/fuse"),
        LocatedDevice("n", "x/none"),
        LocatedDevice("v.com/gpu=a"),
        LocatedDevice("v.com/gpu=b"),
    )
    assert kubelet.calls == ["Get"]


def test_node_0_is_an_empty_message_on_the_wire() -> None:
    """As gogo writes it: topology (3) with one node (1) and nothing in it."""
    wire = b"\x0a\x01r" + b"\x12\x01d" + b"\x1a\x02\x0a\x00"
    assert group("r", "d", nodes=(0,)).SerializeToString() == wire
    assert [node.ID for node in pb.ContainerDevices.FromString(wire).topology.nodes] == [0]
    assert not pb.ContainerDevices.FromString(wire[:6] + b"\x1a\x00").topology.nodes


def test_a_container_without_devices_is_known(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.pods = [pod("web", gpu("main"))]
    assert resources.of_container("shop", "web", "main") == ()
    assert resources.of_container("shop", "web", "init") is None
    assert resources.of_container("shop", "db", "main") is None
    assert resources.of_container("else", "web", "main") is None
    assert set(kubelet.calls) == {"Get"}


@pytest.mark.parametrize(
    "refusal",
    [
        (grpc.StatusCode.UNIMPLEMENTED, "unknown method Get"),
        (grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled"),
    ],
)
def test_without_get_the_list_is_queried_and_get_is_tried_again_after_a_minute(
    kubelet: Kubelet, resources: PodResources, clock: Clock, refusal: tuple[grpc.StatusCode, str]
) -> None:
    kubelet.refuse["Get"] = refusal
    kubelet.pods = [pod("web", gpu("main"), namespace="else"), pod("web", gpu("main", group("r", "d")))]
    for _ in range(2):
        assert resources.of_container("shop", "web", "main") == (LocatedDevice("d", "r"),)
    assert resources.of_container("shop", "db", "main") is None
    assert kubelet.calls == ["Get", "List", "List", "List"]
    kubelet.refuse.clear()
    clock.now += 60
    assert resources.of_container("shop", "web", "main") == (LocatedDevice("d", "r"),)
    assert kubelet.calls[4:] == ["Get"]


def test_other_errors_are_reported(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.refuse["Get"] = (grpc.StatusCode.PERMISSION_DENIED, "go away")
    with pytest.raises(
        KubeletError, match=r"cannot query kubelet for devices at .*: go away \(PERMISSION_DENIED"
    ):
        resources.of_container("shop", "web", "main")
    assert kubelet.calls == ["Get"]


def test_a_refused_request_is_repeated_a_few_times(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.pods = [pod("web", gpu("main"))]
    kubelet.turned_away = 3
    assert resources.of_container("shop", "web", "main") == ()
    kubelet.turned_away = 4
    with pytest.raises(KubeletError, match="rejected by rate limit"):
        resources.of_container("shop", "web", "main")
    assert kubelet.calls == ["Get"] * 8


def test_all_devices_are_queried_every_ten_seconds(
    kubelet: Kubelet, resources: PodResources, clock: Clock
) -> None:
    kubelet.all = [group("r", "a", nodes=(0, 1)), group("r", "b"), group("q", "c", nodes=(1,))]
    reported = {"r": {"a": Mask([0, 1]), "b": None}, "q": {"c": Mask([1])}}
    assert resources.allocatable() == reported
    kubelet.all = []
    clock.now += 9.9
    assert resources.allocatable() == reported
    assert kubelet.calls == ["GetAllocatableResources"]
    clock.now += 0.1
    assert resources.allocatable() == {}


def test_a_kubelet_that_fails_slowly_is_not_queried_for_all_devices(
    kubelet: Kubelet, resources: PodResources, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.all = [group("r", "a")]
    resources.allocatable()
    clock.now += 10

    def slow(*_: Any) -> None:
        clock.now += 0.5
        raise KubeletError("too late")

    with monkeypatch.context() as patched:
        patched.setattr(UnixChannel, "call", slow)
        with pytest.raises(KubeletError):
            resources.allocatable()
        clock.now += 4.9
        assert resources.allocatable() == {"r": {"a": None}}
    kubelet.all = []
    clock.now += 0.1
    assert resources.allocatable() == {}
