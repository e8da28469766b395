"""Queries to kubelet's pods API: a Pod message reads as its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.api.kubelet import pods_pb2 as pb
from proxy.backends.kubelet.channel import UnixChannel
from proxy.backends.kubelet.client import PodsApi
from proxy.backends.kubelet.settings import KubeletError
from proxy.model.errors import InputError
from proxy.model.grpc_status import GrpcStatus
from proxy.pools.pod_spec import pod_spec

PODS = "v1alpha1.Pods"
JSON: dict[str, Any] = {
    "metadata": {
        "name": "web",
        "namespace": "shop",
        "uid": "u-1",
        "labels": {"a": "b"},
        "annotations": {"c": "d"},
    },
    "spec": {
        "initContainers": [
            {"name": "i", "resources": {"requests": {"cpu": "3"}}},
            {
                "name": "s",
                "restartPolicy": "Always",
                "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}},
            },
        ],
        "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "2"}}}, {"name": "d"}],
        "overhead": {"cpu": "250m"},
        "resources": {"requests": {"cpu": "5"}, "limits": {"cpu": "6", "memory": "2Gi"}},
    },
    "status": {"qosClass": "Burstable"},
}


def resources(raw: dict[str, Any]) -> pb.ResourceRequirements:
    parts = {part: {n: pb.Quantity(string=v) for n, v in amounts.items()} for part, amounts in raw.items()}
    return pb.ResourceRequirements(**parts)


def message(raw: dict[str, Any]) -> pb.Pod:
    def containers(key: str) -> list[pb.Container]:
        return [
            pb.Container(
                name=c["name"],
                restart_policy=c.get("restartPolicy", ""),
                resources=resources(c.get("resources", {})),
            )
            for c in raw["spec"][key]
        ]

    spec = pb.PodSpec(
        containers=containers("containers"),
        init_containers=containers("initContainers"),
        overhead={n: pb.Quantity(string=v) for n, v in raw["spec"]["overhead"].items()},
        resources=resources(raw["spec"]["resources"]),
    )
    status = pb.PodStatus(qos_class=raw["status"]["qosClass"])
    return pb.Pod(metadata=pb.ObjectMeta(**raw["metadata"]), spec=spec, status=status)


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "pods api.sock"


@pytest.fixture
def api(socket_path: Path) -> Iterator[PodsApi]:
    channel = UnixChannel(f"unix://{socket_path}", 60.0)
    yield PodsApi(channel)
    channel.close()


def answering(pod: pb.Pod) -> Callable[[bytes, Any], bytes]:
    return lambda *_: pb.GetPodResponse(pod=pod).SerializeToString()


def test_a_pod_message_reads_as_its_json(api: PodsApi, socket_path: Path, serve: Any) -> None:
    requested: list[str] = []

    def get(request: bytes, _: Any) -> bytes:
        requested.append(pb.GetPodRequest.FromString(request).pod_uid)
        return pb.GetPodResponse(pod=message(JSON)).SerializeToString()

    serve(socket_path, PODS, GetPod=get)
    assert api.find("u-1") == pod_spec(JSON, listed=True)
    assert requested == ["u-1"]


def test_a_static_pod(api: PodsApi, socket_path: Path, serve: Any) -> None:
    pod = message(JSON)
    pod.metadata.annotations["kubernetes.io/config.hash"] = "h-1"
    serve(socket_path, PODS, GetPod=answering(pod))
    found = api.find("h-1")
    assert found is not None
    assert found.name == "web"


def test_a_pod_other_than_the_requested_one_is_refused(api: PodsApi, socket_path: Path, serve: Any) -> None:
    serve(socket_path, PODS, GetPod=answering(message(JSON)))
    with pytest.raises(KubeletError, match="it gave another one"):
        api.find("u-2")


def test_an_unknown_pod_is_none(api: PodsApi, socket_path: Path, serve: Any) -> None:
    serve(socket_path, PODS, GetPod=lambda _, context: context.abort(grpc.StatusCode.NOT_FOUND, "no pod"))
    assert api.find("u-1") is None


def test_a_pod_that_is_not_a_valid_one(api: PodsApi, socket_path: Path, serve: Any) -> None:
    serve(
        socket_path,
        PODS,
        GetPod=answering(pb.Pod(metadata=pb.ObjectMeta(name="web", namespace="shop", uid="u-1"))),
    )
    with pytest.raises(InputError, match=r"^cannot read the pod shop/web: .*needs at least one container"):
        api.find("u-1")


def test_an_answer_that_cannot_be_decoded_is_an_error_of_kubelet(
    api: PodsApi, socket_path: Path, serve: Any
) -> None:
    serve(socket_path, PODS, GetPod=lambda *_: b"\xff\xff\xff")
    with pytest.raises(KubeletError, match="the answer cannot be decoded"):
        api.find("u-1")


def test_errors_carry_their_code(api: PodsApi, socket_path: Path, serve: Any) -> None:
    with pytest.raises(KubeletError) as caught:
        api.find("u-1")
    assert caught.value.code == GrpcStatus.UNAVAILABLE
    assert str(caught.value).startswith(f"cannot query kubelet for a pod at {socket_path}: ")
    serve(socket_path, "v1.Other", GetPod=answering(pb.Pod()))
    other = PodsApi(UnixChannel(str(socket_path), 60.0))
    with pytest.raises(KubeletError) as caught:
        other.find("u-1")
    assert caught.value.code == GrpcStatus.UNIMPLEMENTED


def test_a_closed_channel(socket_path: Path) -> None:
    channel = UnixChannel(str(socket_path), 60.0)
    channel.close()
    with pytest.raises(KubeletError, match="the channel is closed"):
        PodsApi(channel).find("u-1")
