"""Query kubelet for facts that the CRI does not contain: a pod's requests, and its devices.

Kubelet is queried while one of its own calls waits, so nothing here fails: an unavailable fact is None. Each
cause is reported once, and reported again only after its source has worked in the meantime.

kubelet's pods API (kubelet 1.36, gate PodsAPI; KEP-4188) returns a single pod, whereas the list contains all
pods, and it needs no token. So it is preferred if it exists. Its answer is converted to the form of the JSON
list, and read in the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from proxy.backends.kubelet.channel import UnixChannel
from proxy.backends.kubelet.fetch import fetch_pods
from proxy.backends.kubelet.pod_resources import Devices, PodResources
from proxy.backends.kubelet.pods import PodList
from proxy.backends.kubelet.settings import KubeletError, KubeletSettings
from proxy.model.backoff import RetryTimes
from proxy.model.errors import TopoproxyError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.requests import PodRequests
from proxy.model.workload import LocatedDevice
from proxy.pools.pod_spec import CONFIG_HASH, PodSpec, pod_spec
from proxy.telemetry.port import Report, silent

if TYPE_CHECKING:
    from proxy.api.kubelet import pods_pb2 as pb

PODS_API, POD_LIST, POD_RESOURCES = (
    "kubelet's pods API",
    "kubelet's list of pods",
    "kubelet's pod-resources API",
)
PODS_API_PAUSE_S = 60.0
_MOST_CAUSES = 32
_NEVER = float("-inf")

T = TypeVar("T")

_GET = "/v1alpha1.Pods/GetPod"


class PodsApi:
    """The pods API."""

    def __init__(self, channel: UnixChannel) -> None:
        """Store the channel to kubelet's socket; the caller closes it."""
        self._channel = channel

    def find(self, uid: str) -> PodSpec | None:
        """Find a pod.

        Returns:
            The pod, or None if kubelet does not know it.

        Raises:
            KubeletError: Kubelet does not serve the API, or does not answer; ``code`` distinguishes the two.
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
        metadata = answer.pod.metadata
        if uid not in (metadata.uid, metadata.annotations.get(CONFIG_HASH)):
            raise KubeletError(f"cannot query kubelet for a pod at {self._channel.path}: it gave another one")
        return pod_spec(_pod_json(answer.pod), f"{metadata.namespace}/{metadata.name}", listed=True)


def _pod_json(pod: pb.Pod) -> dict[str, Any]:
    """Return a pod in the form of Kubernetes' JSON."""
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


class KubeletClient:
    """Implements ``proxy.executor.ports.Kubelet``; safe to use from several threads."""

    def __init__(
        self,
        settings: KubeletSettings,
        report_problem: Report,
        clock: Callable[[], float] = time.monotonic,
        report_resolved: Report = silent,
    ) -> None:
        """Prepare the sources; nothing is opened before the first request.

        Args:
            settings: Where and how kubelet is queried.
            report_problem: Takes a message that says why a fact is not available.
            clock: Monotonic seconds.
            report_resolved: Takes the message of such a problem when the source works again.
        """
        self._errors = SourceErrorLog(report_problem, report_resolved)
        self._clock = clock
        self._retry_times = RetryTimes[str](settings.retry_backoff)
        self._no_api_until = _NEVER
        self._list = PodList(lambda: fetch_pods(settings), clock) if settings.pods_url else None
        self._channels: list[UnixChannel] = []
        self._api = PodsApi(self._open(settings.pods_api, settings)) if settings.pods_api else None
        self._resources = (
            PodResources(self._open(settings.pod_resources, settings), clock)
            if settings.pod_resources
            else None
        )

    @property
    def knows_pods(self) -> bool:
        """True if ``pod_requests`` has a source."""
        return self._api is not None or self._list is not None

    @property
    def knows_devices(self) -> bool:
        """True if ``devices`` has a source."""
        return self._resources is not None

    def pod_requests(self, uid: str, namespace: str, name: str) -> tuple[PodRequests, str] | None:
        """Read a pod's requests and limits from kubelet; see ``proxy.executor.ports.Kubelet``."""
        if not uid:
            return None
        spec, source, pods = None, PODS_API, self._list
        if self._api is not None and self._clock() >= self._no_api_until:
            spec = self._query_source(PODS_API, lambda: self._from_api(uid))
        if spec is None and pods is not None:
            spec, source = self._query_source(POD_LIST, lambda: pods.find(uid, namespace, name)), POD_LIST
        return None if spec is None else (replace(spec.requests, uid=uid), source)

    def devices(self, namespace: str, pod: str, container: str) -> tuple[LocatedDevice, ...] | None:
        """Query which devices kubelet assigned to a container; see ``proxy.executor.ports.Kubelet``."""
        resources = self._resources
        if resources is None:
            return None
        return self._query_source(POD_RESOURCES, lambda: resources.of_container(namespace, pod, container))

    def allocatable(self) -> Devices:
        """Read all devices: resource to id to NUMA nodes; empty if kubelet does not answer."""
        resources = self._resources
        if resources is None:
            return {}
        return self._query_source(POD_RESOURCES, resources.allocatable) or {}

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            channel.close()

    def _open(self, path: str, settings: KubeletSettings) -> UnixChannel:
        channel = UnixChannel(path, settings.timeout)
        self._channels.append(channel)
        return channel

    def _from_api(self, uid: str) -> PodSpec | None:
        """Query the pods API; if it does not answer and there is the list, do not retry it for a minute."""
        try:
            return self._api.find(uid) if self._api else None
        except KubeletError as error:
            if self._list is not None and error.code in (
                GrpcStatus.UNIMPLEMENTED,
                GrpcStatus.UNAVAILABLE,
                GrpcStatus.DEADLINE_EXCEEDED,
            ):
                self._no_api_until = self._clock() + PODS_API_PAUSE_S
            raise

    def _query_source(self, source: str, query: Callable[[], T | None]) -> T | None:
        if not self._retry_times.due(source, self._clock()):
            return None
        try:
            answer = query()
        except KubeletError as error:
            if error.code == GrpcStatus.DEADLINE_EXCEEDED:
                self._retry_times.failed(source, self._clock())
            else:
                self._retry_times.succeeded(source)
            self._errors.add(source, str(error))
        except TopoproxyError as error:
            self._errors.add(source, str(error))
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the node
            self._errors.add(source, f"cannot query {source}: {type(error).__name__}: {error}")
        else:
            self._retry_times.succeeded(source)
            self._errors.clear(source)
            return answer
        return None


SOURCE_UNUSABLE = "cannot use a source of kubelet"


class SourceErrorLog:
    """Reports each cause once until its source works again."""

    def __init__(self, report_problem: Report, report_resolved: Report = silent) -> None:
        """Store the functions that report a problem and its end."""
        self._report_problem = report_problem
        self._report_resolved = report_resolved
        self._lock = threading.Lock()
        self._reported: dict[str, set[str]] = {}

    def add(self, source: str, cause: str) -> None:
        """Report a cause if it is new."""
        with self._lock:
            known_causes = self._reported.setdefault(source, set())
            if cause in known_causes:
                return
            if len(known_causes) >= _MOST_CAUSES:  # causes that name pods would fill memory
                known_causes.clear()
            known_causes.add(cause)
        self._report_problem(SOURCE_UNUSABLE, source=source, reason=cause)

    def clear(self, source: str) -> None:
        """Record that a source works."""
        with self._lock:
            known_causes = self._reported.pop(source, None)
        if known_causes:
            self._report_resolved(SOURCE_UNUSABLE, source=source)
