"""A small synchronous CRI client that makes kubelet's calls."""

from __future__ import annotations

import itertools
import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from proxy.api.cri import api_pb2 as pb
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos

NAMESPACE = "demo"
QOS_LABEL = "koordinator.sh/qosClass"
STATUS_ANNOTATION = "scheduling.koordinator.sh/resource-status"

# LinuxPodSandboxConfig{security_context{namespace_options{network: NODE}}}, as of a pod with hostNetwork: it
# needs no CNI. Our messages do not declare these fields, so they carry them as unknown fields.
_HOST_NETWORK = b"\x12\x04\x0a\x02\x08\x02"

_QOS_GROUP = {KubeQos.GUARANTEED: "", KubeQos.BURSTABLE: "/burstable", KubeQos.BEST_EFFORT: "/besteffort"}

METHODS = {
    name: (getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response"))
    for name in (
        "Version",
        "Status",
        "RunPodSandbox",
        "StopPodSandbox",
        "RemovePodSandbox",
        "PodSandboxStatus",
        "ListPodSandbox",
        "CreateContainer",
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
        "UpdateContainerResources",
        "ContainerStatus",
        "ListContainers",
    )
}
"""The unary calls of the RuntimeService that are answered, with their request and answer classes."""


class CallRefused(Exception):  # noqa: N818 - it is an answer, not a failure of the client
    """A call that ends with a gRPC status.

    Attributes:
        code: The status code.
        text: The status message.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class DemoPod:
    """A pod with one container, as a user would request it.

    Attributes:
        name: Name of the pod; its container is ``main``.
        qos: Koordinator's class for the label; empty for no label.
        kube_qos: Decides the cgroup parent.
        cpuset: CPUs for the resource-status annotation; empty for no annotation.
        cpus: CPU limit and request in CPUs; 0 for as many as ``cpuset`` names.
        shares: ``cpu_shares``; 0: from the request.
        labels: More labels.
    """

    name: str
    qos: str = ""
    kube_qos: KubeQos = KubeQos.BURSTABLE
    cpuset: str = ""
    cpus: int = 0
    shares: int = 0
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The QoS class that decides, as it is shown: Koordinator's, or Kubernetes' if there is no label."""
        return self.qos or self.kube_qos.value

    @property
    def requested(self) -> int:
        """Whole CPUs that it requests and that limit it; 0 for none."""
        try:
            return self.cpus or len(CpuSet.parse(self.cpuset))
        except ValueError:
            return 0

    @property
    def owns(self) -> bool:
        """Whether its container must get exclusive CPUs."""
        return self.qos in ("LSE", "LSR") or (self.label == KubeQos.GUARANTEED and self.cpus > 0)

    @property
    def uses_be_pool(self) -> bool:
        """Whether its container belongs to the BE (best effort) pool."""
        return self.label in ("BE", KubeQos.BEST_EFFORT)


@dataclass(slots=True)
class StartedPod:
    """A pod that was run, with the data to create its container again."""

    spec: DemoPod
    pod_id: str
    config: pb.PodSandboxConfig
    container_id: str = ""
    attempts: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def ref(self) -> str:
        """``namespace/pod/container``."""
        return f"{self.config.metadata.namespace}/{self.spec.name}/main"


def resources(spec: DemoPod) -> pb.LinuxContainerResources:
    """Return the resources that kubelet would put into CreateContainer: no cpuset, shares and quota."""
    return pb.LinuxContainerResources(
        cpu_period=100_000,
        cpu_quota=100_000 * spec.requested,
        cpu_shares=spec.shares or 1024 * spec.requested or 2,
        memory_limit_in_bytes=64 << 20,
    )


class CriClient:
    """Calls of the RuntimeService over a unix socket, each with a deadline.

    Args:
        socket_path: The endpoint, without ``unix://``.
        root: Cgroup above ``kubepods``, without slashes at its ends.
        image: Image reference of every container.
        timeout: Deadline of one call in seconds.
    """

    def __init__(
        self, socket_path: str, *, root: str = "", image: str = "localhost/busybox:1", timeout: float = 30.0
    ) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket_path}")
        self._root = f"/{root}/kubepods" if root else "/kubepods"
        self._image = image
        self._timeout = timeout
        self._calls: dict[str, Any] = {
            name: self._channel.unary_unary(
                f"/runtime.v1.RuntimeService/{name}",
                request_serializer=classes[0].SerializeToString,
                response_deserializer=classes[1].FromString,
            )
            for name, classes in METHODS.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def call(self, method: str, request: Any) -> Any:
        """Make one call.

        Raises:
            UnavailableError: The server does not answer in time.
            RuntimeCallError: The answer is an error; code and text are the server's.
        """
        try:
            return self._calls[method](request, timeout=self._timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnavailableError(f"cannot call {method}: {text}") from error
            raise RuntimeCallError(str(text), code.value[0]) from error

    def version(self) -> str:
        """Read the runtime's name and version."""
        answer = self.call("Version", pb.VersionRequest())
        return f"{answer.runtime_name} {answer.runtime_version}"

    def run_pod(self, spec: DemoPod) -> StartedPod:
        """Run the sandbox of a pod."""
        uid = str(uuid.uuid4())
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=spec.name, uid=uid, namespace=NAMESPACE),
            labels={
                "io.kubernetes.pod.name": spec.name,
                "io.kubernetes.pod.namespace": NAMESPACE,
                "io.kubernetes.pod.uid": uid,
                **({QOS_LABEL: spec.qos} if spec.qos else {}),
                **dict(spec.labels),
            },
            annotations={STATUS_ANNOTATION: json.dumps({"cpuset": spec.cpuset})} if spec.cpuset else {},
            linux=pb.LinuxPodSandboxConfig.FromString(_HOST_NETWORK),
        )
        config.linux.resources.CopyFrom(resources(spec))
        config.linux.cgroup_parent = f"{self._root}{_QOS_GROUP[spec.kube_qos]}/pod{uid}"
        answer = self.call("RunPodSandbox", pb.RunPodSandboxRequest(config=config))
        return StartedPod(spec, answer.pod_sandbox_id, config)

    def create(self, pod: StartedPod, image: str = "") -> str:
        """Create the pod's container, each time as its next attempt; ``image`` replaces the default image."""
        attempt = next(pod.attempts)
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name="main", attempt=attempt),
            image=pb.ImageSpec(image=image or self._image),
            command=["/bin/sleep", "86400"],
            labels={
                "io.kubernetes.container.name": "main",
                "io.kubernetes.pod.name": pod.config.metadata.name,
                "io.kubernetes.pod.namespace": pod.config.metadata.namespace,
                "io.kubernetes.pod.uid": pod.config.metadata.uid,
            },
            annotations={"io.kubernetes.container.restartCount": str(attempt)},
            linux=pb.LinuxContainerConfig(resources=resources(pod.spec)),
        )
        request = pb.CreateContainerRequest(
            pod_sandbox_id=pod.pod_id, config=config, sandbox_config=pod.config
        )
        pod.container_id = self.call("CreateContainer", request).container_id
        return pod.container_id

    def start(self, container_id: str) -> None:
        """Start a created container."""
        self.call("StartContainer", pb.StartContainerRequest(container_id=container_id))

    def stop(self, container_id: str, timeout: int = 0) -> None:
        """Stop a container, with ``timeout`` seconds for it to exit by itself."""
        self.call("StopContainer", pb.StopContainerRequest(container_id=container_id, timeout=timeout))

    def remove(self, container_id: str) -> None:
        """Remove a container."""
        self.call("RemoveContainer", pb.RemoveContainerRequest(container_id=container_id))

    def update(self, container_id: str, linux: pb.LinuxContainerResources) -> None:
        """Update a container's resources."""
        self.call(
            "UpdateContainerResources",
            pb.UpdateContainerResourcesRequest(container_id=container_id, linux=linux),
        )

    def status(self, container_id: str) -> pb.ContainerStatusResponse:
        """Query a container's verbose status."""
        answer: pb.ContainerStatusResponse = self.call(
            "ContainerStatus", pb.ContainerStatusRequest(container_id=container_id, verbose=True)
        )
        return answer

    def list_pods(self) -> list[pb.PodSandbox]:
        """List all sandboxes."""
        return list(self.call("ListPodSandbox", pb.ListPodSandboxRequest()).items)

    def launch(self, spec: DemoPod) -> StartedPod:
        """Run a pod, create its container and start it."""
        pod = self.run_pod(spec)
        self.create(pod)
        self.start(pod.container_id)
        return pod

    def end_pod(self, pod: StartedPod | str) -> None:
        """Stop and remove a pod with everything in it."""
        pod_id = pod if isinstance(pod, str) else pod.pod_id
        self.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=pod_id))
        self.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=pod_id))
