"""One pod from kubelet's pods API (kubelet 1.36, gate PodsAPI; KEP-4188).

It returns one pod where the list has all of them, and needs no token, so it is preferred where it exists. The
answer is converted to the form of the JSON list, and read as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from proxy.backends.kubelet.pod_spec import CONFIG_HASH, PodSpec, pod_spec
from proxy.backends.kubelet.settings import KubeletError
from proxy.model.grpc_status import GrpcStatus

if TYPE_CHECKING:
    from proxy.api.kubelet import pods_pb2 as pb
    from proxy.backends.kubelet.channel import UnixChannel

_GET = "/v1alpha1.Pods/GetPod"


class PodsApi:
    """The pods API."""

    def __init__(self, channel: UnixChannel) -> None:
        """Take the channel to kubelet's socket; the caller closes it."""
        self._channel = channel

    def find(self, uid: str) -> PodSpec | None:
        """Find a pod.

        Returns:
            The pod, or None where kubelet does not know it.

        Raises:
            KubeletError: Kubelet does not serve the API, or does not answer; ``code`` says which.
            InputError: The pod is malformed.
        """
        from proxy.api.kubelet import pods_pb2 as pb

        try:
            answer = self._channel.call(
                "query kubelet for a pod", _GET, pb.GetPodRequest(pod_uid=uid), pb.GetPodResponse
            )
        except KubeletError as error:
            if error.code == GrpcStatus.NOT_FOUND:
                return None
            raise
        reported = answer.pod.metadata
        if uid not in (reported.uid, reported.annotations.get(CONFIG_HASH)):
            raise KubeletError(f"cannot query kubelet for a pod at {self._channel.path}: it gave another one")
        return pod_spec(_plain(answer.pod), f"{reported.namespace}/{reported.name}", listed=True)


def _plain(pod: pb.Pod) -> dict[str, Any]:
    """Return a pod as JSON would hold it."""
    metadata = {
        "name": pod.metadata.name,
        "namespace": pod.metadata.namespace,
        "uid": pod.metadata.uid,
        "labels": dict(pod.metadata.labels),
        "annotations": dict(pod.metadata.annotations),
    }
    spec = {
        "containers": [_container(c) for c in pod.spec.containers],
        "initContainers": [_container(c) for c in pod.spec.init_containers],
        "overhead": _amounts(pod.spec.overhead),
        "resources": _resources(pod.spec.resources),
    }
    return {"metadata": metadata, "spec": spec, "status": {"qosClass": pod.status.qos_class}}


def _container(raw: pb.Container) -> dict[str, Any]:
    return {"name": raw.name, "restartPolicy": raw.restart_policy, "resources": _resources(raw.resources)}


def _resources(raw: pb.ResourceRequirements) -> dict[str, Any]:
    return {"requests": _amounts(raw.requests), "limits": _amounts(raw.limits)}


def _amounts(raw: Mapping[str, pb.Quantity]) -> dict[str, str]:
    return {name: amount.string for name, amount in raw.items()}
