"""A container's devices and their NUMA nodes, from kubelet's pod-resources API v1.

kubelet assigns devices when a pod is admitted, before the first call to the runtime (kubernetes v1.36
pkg/kubelet/apis/podresources/server_v1.go). ``Get`` returns one pod, ``List`` all pods. kubelets before 1.27
have no ``Get``, and up to 1.33 it is disabled and answers an unspecific error; in both cases ``List`` is
used, and ``Get`` is tried again after a minute. This API identifies pods by namespace and name, and has no
uid. App containers and sidecars are listed, init containers are not. A device can be in several groups, each
with its NUMA nodes; node 0 is an empty message, which is not the same as no message. Kubelet answers bursts
of 10 calls and 100 calls a second; a refused call is repeated a little later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from proxy.backends.kubelet.settings import KubeletError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import Mask
from proxy.model.workload import LocatedDevice

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from proxy.api.kubelet import podresources_pb2 as pb
    from proxy.backends.kubelet.channel import UnixChannel

    Answer = TypeVar("Answer", bound=Message)

SOURCE = "kubelet's pod-resources API"
GET_PAUSE_S = 60.0
FRESH_S = 10.0
PAUSE_FACTOR = 10
_SERVICE = "/v1.PodResourcesLister"
_TRIES, _WAIT_S = 4, 0.02
_HIGHEST_NODE = 63
_NEVER = float("-inf")

Devices = Mapping[str, Mapping[str, Mask | None]]


class PodResources:
    """The pod-resources API; safe to use from several threads."""

    def __init__(self, channel: UnixChannel, clock: Callable[[], float] = time.monotonic) -> None:
        """Store the channel to kubelet's socket; the caller closes it.

        Args:
            channel: The channel to kubelet's socket.
            clock: A monotonic clock, in seconds.
        """
        self._channel = channel
        self._clock = clock
        self._list_until = _NEVER
        self._lock = threading.Lock()
        self._allocatable: Devices = {}
        self._fresh_until = _NEVER

    def of_container(self, namespace: str, pod: str, container: str) -> tuple[LocatedDevice, ...] | None:
        """Return the devices of a container.

        Returns:
            One entry for each device, with ``nodes`` None if kubelet reports no NUMA nodes; None if kubelet
            does not list the pod or the container.

        Raises:
            KubeletError: Kubelet does not answer.
        """
        entry = self._pod(namespace, pod)
        for listed in entry.containers if entry else ():
            if listed.name == container:
                return _located_devices(listed)
        return None

    def allocatable(self) -> Devices:
        """Return all devices: resource to id to NUMA nodes (None if kubelet reports none).

        An answer is used for 10 s. After a call that failed slowly, the last answer is used for a while
        longer.

        Raises:
            KubeletError: Kubelet does not answer.
        """
        with self._lock:
            if (now := self._clock()) < self._fresh_until:
                return self._allocatable
            try:
                answer = self.allocatable_resources()
            except KubeletError:
                # The last answer is used for a while, which is longer if this attempt took longer.
                ended = self._clock()
                self._fresh_until = ended + min(PAUSE_FACTOR * (ended - now), FRESH_S)
                raise
            self._allocatable, self._fresh_until = _devices(answer.devices), now + FRESH_S
            return self._allocatable

    def pods(self) -> pb.ListPodResourcesResponse:
        """Return kubelet's list of all pods.

        Raises:
            KubeletError: Kubelet does not answer.
        """
        from proxy.api.kubelet import podresources_pb2 as pb

        return self._call("List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)

    def allocatable_resources(self) -> pb.AllocatableResourcesResponse:
        """Return the resources that kubelet can assign; of its devices, only the healthy ones.

        Raises:
            KubeletError: Kubelet does not answer.
        """
        from proxy.api.kubelet import podresources_pb2 as pb

        request = pb.AllocatableResourcesRequest()
        return self._call("GetAllocatableResources", request, pb.AllocatableResourcesResponse)

    def _pod(self, namespace: str, pod: str) -> pb.PodResources | None:
        from proxy.api.kubelet import podresources_pb2 as pb

        if self._clock() >= self._list_until:
            try:
                request = pb.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
                return self._call("Get", request, pb.GetPodResourcesResponse).pod_resources
            except KubeletError as error:
                if error.code == GrpcStatus.NOT_FOUND or (
                    error.code == GrpcStatus.UNKNOWN and "not found" in error.details
                ):
                    return None
                if error.code not in (GrpcStatus.UNKNOWN, GrpcStatus.UNIMPLEMENTED):
                    raise
                self._list_until = self._clock() + GET_PAUSE_S
        for item in self.pods().pod_resources:
            if (item.namespace, item.name) == (namespace, pod):
                return item
        return None

    def _call(self, method: str, request: Message, answer: type[Answer]) -> Answer:
        action, path = "query kubelet for devices", f"{_SERVICE}/{method}"
        for _ in range(_TRIES - 1):
            try:
                return self._channel.call(action, path, request, answer)
            except KubeletError as error:
                if error.code != GrpcStatus.RESOURCE_EXHAUSTED:
                    raise
            time.sleep(_WAIT_S)  # this runs in a worker; kubelet permits 100 requests a second
        return self._channel.call(action, path, request, answer)


def _located_devices(listed: pb.ContainerResources) -> tuple[LocatedDevice, ...]:
    plugged = [
        LocatedDevice(name, resource, nodes, SOURCE if nodes else "")
        for resource, ids in _devices(listed.devices).items()
        for name, nodes in ids.items()
    ]
    claimed = dict.fromkeys(
        device.name
        for dynamic in listed.dynamic_resources
        for claim in dynamic.claim_resources
        for device in claim.cdi_devices
    )
    return (*plugged, *(LocatedDevice(name) for name in claimed))


def _devices(listed: Iterable[pb.ContainerDevices]) -> dict[str, dict[str, Mask | None]]:
    """Return devices by resource and id; the NUMA nodes of all groups of a device are merged."""
    devices: dict[str, dict[str, Mask | None]] = {}
    for group in listed:
        # A plugin forwards the value from sysfs, in which -1 means no node.
        nodes = Mask(node.ID for node in group.topology.nodes if 0 <= node.ID <= _HIGHEST_NODE)
        ids = devices.setdefault(group.resource_name, {})
        for name in group.device_ids:
            ids[name] = ((ids.get(name) or Mask()) | nodes) or None
    return devices
