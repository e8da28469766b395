"""A stand-in runtime and a client that accept any bytes as a string, as gogo-protobuf in containerd does.

Both are derived from the ones that check UTF-8. On the wire ``ODD`` replaces ``MARK`` in their messages.
It has the same length, so every length in a message stays right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import METHODS
from proxy.demo.runtime import StandInRuntime

MARK = "~odd~"
ODD = b"\xff\xfe\xc3\x28\xed"
assert len(MARK) == len(ODD)


def on_wire(message: Any) -> bytes:
    """Encode a message with ``ODD`` for each ``MARK``."""
    return bytes(message.SerializeToString().replace(MARK.encode(), ODD))


class GoRuntime(StandInRuntime):
    """The stand-in runtime."""

    def _runtime_service(self, service: str) -> grpc.GenericRpcHandler:
        def handler(name: str, request: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(service, name),
                lambda raw: request.FromString(raw.replace(ODD, MARK.encode())),
                on_wire,
            )

        handlers = {name: handler(name, classes[0]) for name, classes in METHODS.items()}
        return grpc.method_handlers_generic_handler(service, handlers)


class GoClient:
    """Makes calls as kubelet up to 1.33 does."""

    def __init__(self, path: Path | str) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}")

    def call(self, method: str, request: Any, answer: Any) -> Any:
        call: Any = self._channel.unary_unary(
            f"/runtime.v1.RuntimeService/{method}", request_serializer=on_wire, response_deserializer=None
        )
        raw = call(request, timeout=60, wait_for_ready=True)
        return answer.FromString(raw.replace(ODD, MARK.encode()))

    def run_pod(self, name: str, labels: dict[str, str], annotations: dict[str, str]) -> Any:
        """Run a sandbox; return its id and its configuration."""
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=f"uid-{name}", namespace="ns"),
            labels=labels,
            annotations=annotations,
            linux=pb.LinuxPodSandboxConfig(cgroup_parent=f"/kubepods/poduid-{name}"),
        )
        request = pb.RunPodSandboxRequest(config=config)
        return self.call("RunPodSandbox", request, pb.RunPodSandboxResponse).pod_sandbox_id, config

    def run(self, name: str, qos: str = "", **annotations: str) -> str:
        """Run a pod with one container; ``_`` in front of an annotation stands for Koordinator's prefix."""
        prefix = "scheduling.koordinator.sh/"
        pod, config = self.run_pod(
            name,
            {"koordinator.sh/qosClass": qos} if qos else {},
            {key.replace("_", prefix, 1).replace("_", "-"): value for key, value in annotations.items()},
        )
        request = pb.CreateContainerRequest(pod_sandbox_id=pod, sandbox_config=config)
        request.config.metadata.name = "main"
        request.config.linux.resources.cpu_shares = 2048
        container = self.call("CreateContainer", request, pb.CreateContainerResponse).container_id
        started = pb.StartContainerRequest(container_id=container)
        self.call("StartContainer", started, pb.StartContainerResponse)
        return str(container)

    def close(self) -> None:
        self._channel.close()
