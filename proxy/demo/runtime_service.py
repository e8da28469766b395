"""The answers of the stand-in runtime, call by call, as containerd's CRI plugin gives them.

Codes and sentences follow containerd 1.6: an unknown id is NOT_FOUND (but no error if the interface requires
idempotence), a refusal by runc is UNKNOWN with runc's words, a name in use is UNKNOWN.
"""

from __future__ import annotations

import itertools
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import METHODS, CallRefused
from proxy.demo.runc import Runc, RuncError
from proxy.demo.runtime_records import (
    ContainerRecord,
    PodRecord,
    Resources,
    cgroup_names,
    merged_resources,
    new_id,
    oci_resources,
)


def pod_state(pod: PodRecord) -> pb.PodSandboxState:
    """Return the state of a pod: READY until it is stopped."""
    return pb.SANDBOX_READY if pod.ready else pb.SANDBOX_NOTREADY


def pod_status(pod: PodRecord) -> pb.PodSandboxStatus:
    """Return the status of a pod, for PodSandboxStatus and for events."""
    return pb.PodSandboxStatus(
        id=pod.id, metadata=pod.config.metadata, state=pod_state(pod), created_at=pod.created_at,
        labels=pod.config.labels, annotations=pod.config.annotations,
    )  # fmt: skip


def container_status(container: ContainerRecord) -> pb.ContainerStatus:
    """Return the status of a container, for ContainerStatus and for events."""
    config = container.config
    return pb.ContainerStatus(
        id=container.id, metadata=config.metadata, state=container.state, created_at=container.created_at,
        started_at=container.started_at, finished_at=container.finished_at, exit_code=container.exit_code,
        reason=container.reason, image=config.image, image_ref=config.image.image, labels=config.labels,
        annotations=config.annotations, log_path=config.log_path,
        resources=pb.ContainerResources(linux=container.resources),
    )  # fmt: skip


def verbose_info(container: ContainerRecord) -> dict[str, object]:
    """Return the used part of a container's ``info``, as containerd writes it."""
    linux = {"cgroupsPath": container.cgroups_path, "resources": oci_resources(container.resources)}
    return {
        "sandboxID": container.pod_id,
        "pid": container.pid,
        "removing": False,
        "runtimeType": "io.containerd.runc.v2",
        "runtimeSpec": {"ociVersion": "1.0.2", "linux": linux},
    }


def pod_item(pod: PodRecord) -> pb.PodSandbox:
    """Return the entry of a pod for ListPodSandbox."""
    return pb.PodSandbox(
        id=pod.id, metadata=pod.config.metadata, state=pod_state(pod), created_at=pod.created_at,
        labels=pod.config.labels, annotations=pod.config.annotations,
    )  # fmt: skip


def pod_matches(pod: PodRecord, wanted: pb.PodSandboxFilter) -> bool:
    """Return whether a filter lets a pod through; ids may be given by their beginning."""
    return (
        pod.id.startswith(wanted.id)
        and (not wanted.HasField("state") or wanted.state.state == pod_state(pod))
        and dict(wanted.label_selector).items() <= dict(pod.config.labels).items()
    )


def container_item(container: ContainerRecord) -> pb.Container:
    """Return the entry of a container for ListContainers."""
    config = container.config
    return pb.Container(
        id=container.id, pod_sandbox_id=container.pod_id, metadata=config.metadata, image=config.image,
        image_ref=config.image.image, state=container.state, created_at=container.created_at,
        labels=config.labels, annotations=config.annotations,
    )  # fmt: skip


def container_matches(container: ContainerRecord, wanted: pb.ContainerFilter) -> bool:
    """Return whether a filter lets a container through; ids may be given by their beginning."""
    return (
        container.id.startswith(wanted.id)
        and container.pod_id.startswith(wanted.pod_sandbox_id)
        and (not wanted.HasField("state") or wanted.state.state == container.state)
        and dict(wanted.label_selector).items() <= dict(container.config.labels).items()
    )


class StandInService:
    """Pods and containers, and the effect of each call on them. Safe to call from many threads."""

    def __init__(self, runc: Runc) -> None:
        self.lock = threading.RLock()
        self.pods: dict[str, PodRecord] = {}
        self.containers: dict[str, ContainerRecord] = {}
        self.events = EventHub()
        self._runc = runc
        self._pids = itertools.count(1000)
        self.handlers: dict[str, Callable[[Any], Any]] = {
            name: getattr(self, _snake_case(name)) for name in METHODS
        }

    def exited(self, container_id: str, exit_code: int) -> None:
        """Let a container's process end by itself (a crash).

        Raises:
            CallRefused: The id is unknown.
        """
        with self.lock:
            self._end(self._container(container_id), exit_code)

    # The runtime itself.

    def _version(self, _: pb.VersionRequest) -> pb.VersionResponse:
        return pb.VersionResponse(
            version="0.1.0", runtime_name="standin", runtime_version="1.0", runtime_api_version="v1"
        )

    def _status(self, _: pb.StatusRequest) -> pb.StatusResponse:
        ready = [pb.RuntimeCondition(type=kind, status=True) for kind in ("RuntimeReady", "NetworkReady")]
        return pb.StatusResponse(status=pb.RuntimeStatus(conditions=ready))

    # Pods.

    def _run_pod_sandbox(self, request: pb.RunPodSandboxRequest) -> pb.RunPodSandboxResponse:
        meta = request.config.metadata
        name = f"{meta.name}_{meta.namespace}_{meta.uid}_{meta.attempt}"
        for other in self.pods.values():
            if other.config.metadata == meta:
                raise _unknown(
                    f'failed to reserve sandbox name "{name}": name "{name}" is reserved for "{other.id}"'
                )
        pod = PodRecord(new_id(), request.config, "", time.time_ns(), next(self._pids))
        pod.cgroup, _ = cgroup_names(pod.parent, pod.id)
        try:
            self._runc.start(pod.cgroup, Resources(), pod.pid)
        except RuncError as error:
            raise _unknown(f"failed to create containerd task: {error}: unknown") from error
        self.pods[pod.id] = pod
        return pb.RunPodSandboxResponse(pod_sandbox_id=pod.id)

    def _stop_pod_sandbox(self, request: pb.StopPodSandboxRequest) -> pb.StopPodSandboxResponse:
        pod = self.pods.get(request.pod_sandbox_id)
        if pod is not None:
            for container in self._containers_of(pod):
                self._end(container, 137)
            if pod.ready:
                self._runc.remove(pod.cgroup, pod.pid)
            pod.ready = False
        return pb.StopPodSandboxResponse()

    def _remove_pod_sandbox(self, request: pb.RemovePodSandboxRequest) -> pb.RemovePodSandboxResponse:
        self._stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=request.pod_sandbox_id))
        pod = self.pods.pop(request.pod_sandbox_id, None)
        for container in self._containers_of(pod) if pod is not None else []:
            self._forget(container)
        return pb.RemovePodSandboxResponse()

    def _pod_sandbox_status(self, request: pb.PodSandboxStatusRequest) -> pb.PodSandboxStatusResponse:
        pod = self._pod(request.pod_sandbox_id)
        info = {"info": json.dumps({"pid": pod.pid})} if request.verbose else {}
        return pb.PodSandboxStatusResponse(status=pod_status(pod), info=info)

    def _list_pod_sandbox(self, request: pb.ListPodSandboxRequest) -> pb.ListPodSandboxResponse:
        items = [pod_item(pod) for pod in self.pods.values() if pod_matches(pod, request.filter)]
        return pb.ListPodSandboxResponse(items=items)

    # Containers.

    def _create_container(self, request: pb.CreateContainerRequest) -> pb.CreateContainerResponse:
        pod = self.pods.get(request.pod_sandbox_id)
        if pod is None:
            raise _not_found(f'failed to find sandbox id "{request.pod_sandbox_id}": not found')
        meta = request.config.metadata
        for other in self._containers_of(pod):
            if other.config.metadata == meta:
                name = (
                    f"{meta.name}_{pod.config.metadata.name}_{pod.config.metadata.namespace}_{meta.attempt}"
                )
                raise _unknown(f'failed to reserve container name "{name}": it is reserved for "{other.id}"')
        new = new_id()
        cgroup, cgroups_path = cgroup_names(pod.parent, new)
        self.containers[new] = ContainerRecord(
            id=new, pod_id=pod.id, config=request.config, cgroup=cgroup, cgroups_path=cgroups_path,
            resources=request.config.linux.resources, created_at=time.time_ns(),
        )  # fmt: skip
        self._notify(self.containers[new], pb.CONTAINER_CREATED_EVENT)
        return pb.CreateContainerResponse(container_id=new)

    def _start_container(self, request: pb.StartContainerRequest) -> pb.StartContainerResponse:
        container = self._container(request.container_id)
        if container.state != pb.CONTAINER_CREATED:
            raise _unknown(
                f'failed to set starting state for container "{container.id}": it is not in CREATED state'
            )
        pod = self.pods.get(container.pod_id)
        if pod is None or not pod.ready:
            raise _unknown(f'sandbox container "{container.pod_id}" is not running')
        pid = next(self._pids)
        try:
            self._runc.start(container.cgroup, container.resources, pid)
        except RuncError as error:
            container.state, container.exit_code = pb.CONTAINER_EXITED, 128
            container.reason, container.finished_at = "StartError", time.time_ns()
            raise _unknown(
                f"failed to create containerd task: failed to create shim task: {error}: unknown"
            ) from error
        container.state, container.pid, container.started_at = pb.CONTAINER_RUNNING, pid, time.time_ns()
        self._notify(container, pb.CONTAINER_STARTED_EVENT)
        return pb.StartContainerResponse()

    def _stop_container(self, request: pb.StopContainerRequest) -> pb.StopContainerResponse:
        self._end(self._container(request.container_id), 137)
        return pb.StopContainerResponse()

    def _remove_container(self, request: pb.RemoveContainerRequest) -> pb.RemoveContainerResponse:
        container = self.containers.get(request.container_id)
        if container is not None:
            self._end(container, 137)
            self._forget(container)
        return pb.RemoveContainerResponse()

    def _update_container_resources(
        self, request: pb.UpdateContainerResourcesRequest
    ) -> pb.UpdateContainerResourcesResponse:
        container = self._container(request.container_id)
        merged = merged_resources(container.resources, request.linux)
        if container.state == pb.CONTAINER_RUNNING:
            try:
                self._runc.update(container.cgroup, container.resources, merged)
            except RuncError as error:
                raise _unknown(f"failed to update resources: {error}: unknown") from error
        container.resources = merged
        return pb.UpdateContainerResourcesResponse()

    def _container_status(self, request: pb.ContainerStatusRequest) -> pb.ContainerStatusResponse:
        container = self._container(request.container_id)
        info = {"info": json.dumps(verbose_info(container))} if request.verbose else {}
        return pb.ContainerStatusResponse(status=container_status(container), info=info)

    def _list_containers(self, request: pb.ListContainersRequest) -> pb.ListContainersResponse:
        containers = [
            container
            for container in self.containers.values()
            if container_matches(container, request.filter)
        ]
        return pb.ListContainersResponse(containers=[container_item(container) for container in containers])

    # Shared by several calls.

    def _containers_of(self, pod: PodRecord) -> list[ContainerRecord]:
        return [c for c in self.containers.values() if c.pod_id == pod.id]

    def _pod(self, pod_id: str) -> PodRecord:
        if pod_id not in self.pods:
            raise _not_found(f'an error occurred when try to find sandbox "{pod_id}": not found')
        return self.pods[pod_id]

    def _container(self, container_id: str) -> ContainerRecord:
        if container_id not in self.containers:
            raise _not_found(f'an error occurred when try to find container "{container_id}": not found')
        return self.containers[container_id]

    def _end(self, container: ContainerRecord, exit_code: int) -> None:
        """End a running container; a created one stays created, as with containerd."""
        if container.state == pb.CONTAINER_RUNNING:
            self._runc.remove(container.cgroup, container.pid)
            container.state, container.exit_code = pb.CONTAINER_EXITED, exit_code
            container.reason, container.finished_at = (
                "Completed" if exit_code == 0 else "Error",
                time.time_ns(),
            )
            self._notify(container, pb.CONTAINER_STOPPED_EVENT)

    def _forget(self, container: ContainerRecord) -> None:
        del self.containers[container.id]
        self._notify(container, pb.CONTAINER_DELETED_EVENT)

    def _notify(self, container: ContainerRecord, kind: pb.ContainerEventType) -> None:
        pod = self.pods.get(container.pod_id)
        self.events.emit(
            pb.ContainerEventResponse(
                container_id=container.id,
                container_event_type=kind,
                created_at=time.time_ns(),
                pod_sandbox_status=pod_status(pod) if pod is not None else None,
                containers_statuses=[container_status(container)],
            )
        )


def _unknown(text: str) -> CallRefused:
    return CallRefused(grpc.StatusCode.UNKNOWN, text)


def _not_found(text: str) -> CallRefused:
    return CallRefused(grpc.StatusCode.NOT_FOUND, text)


def _snake_case(method: str) -> str:
    return re.sub("([A-Z])", r"_\1", method).lower()


class EventHub:
    """Fans events out to the streams that are open at the time; nothing is kept for later ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[queue.SimpleQueue[pb.ContainerEventResponse | None]] = []

    def emit(self, event: pb.ContainerEventResponse) -> None:
        """Hand an event to all open streams."""
        with self._lock:
            for queue in self._queues:
                queue.put(event)

    def stream(
        self, _: pb.GetEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ContainerEventResponse]:
        """Answer GetContainerEvents until the client leaves or the server ends."""
        events: queue.SimpleQueue[pb.ContainerEventResponse | None] = queue.SimpleQueue()
        with self._lock:
            self._queues.append(events)
        try:
            # A call that ended before the callback could be set gets no event to wake it.
            if context.add_callback(lambda: events.put(None)):
                while (event := events.get()) is not None:
                    yield event
        finally:
            with self._lock:
                self._queues.remove(events)
