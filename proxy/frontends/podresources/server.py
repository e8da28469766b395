"""The gRPC server of the pod-resources API. A few threads answer, without the event loop.

A thread reads the newest state of the node, which is an immutable value, and queries kubelet if that is
configured. So a slow kubelet delays these answers, but no CRI call. If kubelet does not answer, the request
fails: an answer without devices would claim that no container has any.

The rules of the answers are kubelet's (kubernetes v1.35 pkg/kubelet/apis/podresources/server_v1.go and
pkg/kubelet/cm/container_manager_linux.go):

- All pods are listed whose sandbox exists, with app containers and sidecars. Init containers are left out if
  kubelet reports which containers they are.
- Of several pods with one namespace and name, the newest is listed: the others were deleted and are ending.
- ``cpu_ids`` are exclusive CPUs; a container of a pool has none. ``memory`` are blocks of the static memory
  manager.
- Allocatable resources are those that can be assigned, whether free or not: all CPUs except reserved ones.

Only placements that are applied are reported as ours. For a pod to which the plan is not applied, and for the
whole node in mode ``observe`` and after a release, kubelet's own answer is passed on unchanged; without such
an answer, the pod has neither CPUs nor memory. Claims, and fields that our messages do not declare, are
always those of kubelet's answer.

The devices are those of kubelet and those of plugins that registered with topoproxy: each manager has its
own resources. As in kubelet, there is one entry for each device and NUMA node. The devices that a container
holds are listed in every mode, because the container has them. As in kubelet, they are listed from admission
until the pod is gone, even before the container is created and between two attempts of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from google.protobuf.message import DecodeError, Message

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.model.errors import TopoproxyError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet, Mask
from proxy.model.requests import ContainerKind
from proxy.model.workload import Container, Phase, Placement, Pod, Pool
from proxy.sockets.grpc_socket import GrpcSocket, refuse_call
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

    from proxy.telemetry.port import Telemetry


SERVICE: Final = "v1.PodResourcesLister"
THREADS, AT_ONCE = 4, 64
"""Requests that are answered at a time, and requests that may wait; others are refused."""
STOP_S: Final = 0.5

_Name = tuple[str, str]
"""Namespace and name of a pod."""


def pods_answer(state: NodeState, kubelet: pb.ListPodResourcesResponse | None) -> pb.ListPodResourcesResponse:
    """Return the answer to ``List``.

    Args:
        state: The node.
        kubelet: kubelet's answer, which is not changed; None if kubelet is not queried.
    """
    answer = pb.ListPodResourcesResponse()
    if kubelet is not None:
        answer.CopyFrom(kubelet)
    pods, placed = _pods(state), _containers(state)
    listed = {(pod.namespace, pod.name) for pod in answer.pod_resources}
    for key, pod in sorted(pods.items()):
        if key not in listed:
            holders = (
                name for name, held in state.devices.held.get(pod.key, {}).items() if any(held.values())
            )
            names = _listed_names(pod, {*placed.get(pod.key, ()), *holders})
            containers = [pb.ContainerResources(name=name) for name in names]
            answer.pod_resources.add(name=pod.name, namespace=pod.namespace, containers=containers)
    for entry in answer.pod_resources:
        known = pods.get((entry.namespace, entry.name))
        if known is None:
            continue
        for container in entry.containers:
            existing = placed.get(known.key, {}).get(container.name)
            if existing is not None and _is_applied(state, existing):
                _fill(container, state, existing.placement)
            _add_devices(container, state, state.devices.held.get(known.key, {}).get(container.name, {}))
    return answer


def allocatable_answer(
    state: NodeState, kubelet: pb.AllocatableResourcesResponse | None
) -> pb.AllocatableResourcesResponse:
    """Return the answer to ``GetAllocatableResources``; the arguments are as for ``pods_answer``."""
    answer = pb.AllocatableResourcesResponse()
    if kubelet is not None:
        answer.CopyFrom(kubelet)
    if not applies_to(state, None):
        return answer
    node = state.node
    for resource in sorted(state.devices.registered):
        answer.devices.extend(_devices(state, resource, state.devices.healthy(resource)))
    answer.cpu_ids[:] = node.topology.cpus - node.cpu.reserved
    if state.memory is not None:
        del answer.memory[:]
        answer.memory.extend(
            _memory(resource, table.allocatable, Mask((number,)))
            for number, numa in state.memory.nodes.items()
            for resource, table in sorted(numa.tables.items())
            if table.allocatable
        )
    return answer


def _pods(state: NodeState) -> dict[_Name, Pod]:
    """Return the pod of each name: the newest one that has a sandbox, with its newest sandbox."""
    superseded = state.runtime.superseded
    oldest_first = sorted(
        state.pods.values(), key=lambda pod: (pod.key not in superseded, pod.attempt, pod.sandbox_id)
    )
    return {(pod.namespace, pod.name): pod for pod in oldest_first}


def _containers(state: NodeState) -> dict[str, dict[str, Container]]:
    """Return the containers that have not ended, by the key of their pod and their name.

    Of several with the same name, the one with the newest attempt counts.
    """
    found: dict[str, dict[str, Container]] = {}
    for container in sorted(state.containers.values(), key=lambda each: (each.attempt, each.id)):
        if container.phase is not Phase.EXITED:
            found.setdefault(container.pod.key, {})[container.name] = container
    return found


def _listed_names(pod: Pod, existing: Iterable[str]) -> Iterable[str]:
    """Return the containers of a pod that are listed: those of its spec, if it is known."""
    if pod.requests is None:
        return sorted(existing)
    return [container.name for container in pod.requests.of_kinds(ContainerKind.SIDECAR, ContainerKind.APP)]


def _is_applied(state: NodeState, container: Container) -> bool:
    """Return whether the plan is applied to a container."""
    return applies_to(state, state.current_pod(container.pod))


def _fill(entry: pb.ContainerResources, state: NodeState, placement: Placement) -> None:
    """Set the CPUs of a container, and its memory if we account for it."""
    entry.cpu_ids[:] = _exclusive(state, placement)
    if state.memory is not None:
        del entry.memory[:]
        entry.memory.extend(_blocks(placement))


def _add_devices(entry: pb.ContainerResources, state: NodeState, held: Mapping[str, frozenset[str]]) -> None:
    """Add the devices that a container holds here; they replace those of kubelet for the same resource.

    kubelet still lists those that were read from its checkpoint.

    Args:
        entry: The container.
        state: The node.
        held: The devices, by resource.
    """
    held = {resource: ids for resource, ids in held.items() if ids}
    if any(group.resource_name in held for group in entry.devices):
        others = [group for group in entry.devices if group.resource_name not in held]
        del entry.devices[:]
        entry.devices.extend(others)
    for resource, ids in sorted(held.items()):
        entry.devices.extend(_devices(state, resource, ids))


def _exclusive(state: NodeState, placement: Placement) -> CpuSet:
    """Return the CPUs that a container owns and that are online."""
    if placement.pool is not Pool.OWN:
        return CpuSet()
    return (placement.exclusive | placement.replacement) & state.node.machine.online


def _blocks(placement: Placement) -> Iterator[pb.ContainerMemory]:
    for block in placement.blocks:
        yield _memory(block.resource, block.size, block.affinity)


def _devices(state: NodeState, resource: str, ids: Iterable[str]) -> Iterator[pb.ContainerDevices]:
    known = state.devices.registered.get(resource, {})
    for name in sorted(ids):
        device = known.get(name)
        if device is None or not device.nodes:
            yield pb.ContainerDevices(resource_name=resource, device_ids=[name])
            continue
        for node in device.nodes:
            topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)])
            yield pb.ContainerDevices(resource_name=resource, device_ids=[name], topology=topology)


def _memory(resource: str, size: int, nodes: Mask) -> pb.ContainerMemory:
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes])
    return pb.ContainerMemory(memory_type=resource, size=size, topology=topology)


class KubeletAnswers(Protocol):
    """kubelet's own pod-resources API; for several threads. Answers are shared, and never changed."""

    def pods(self) -> pb.ListPodResourcesResponse:
        """Return the answer to ``List``.

        Raises:
            TopoproxyError: kubelet does not answer.
        """

    def allocatable_resources(self) -> pb.AllocatableResourcesResponse:
        """Return the answer to ``GetAllocatableResources``.

        Raises:
            TopoproxyError: kubelet does not answer.
        """

    def close(self) -> None:
        """Close the connection; later calls fail."""


class ListerRefusedError(TopoproxyError):
    """A request is answered with a status.

    Attributes:
        code: The gRPC status code.
    """

    def __init__(self, code: GrpcStatus, message: str) -> None:
        super().__init__(message)
        self.code = code


class PodResourcesServer:
    """Serves the API on a socket.

    Attributes:
        socket: Opens it, and closes it for ``close``.
    """

    def __init__(
        self,
        path: Path,
        state: Callable[[], NodeState | None],
        kubelet: KubeletAnswers | None,
        telemetry: Telemetry,
    ) -> None:
        """Prepare; nothing is opened before ``socket.open``.

        Args:
            path: Where to listen.
            state: Returns the current state; None as long as the containers of the node are unknown.
            kubelet: kubelet's own API; None if it is not queried.
            telemetry: Counts requests.
        """
        self._state = state
        self._kubelet = kubelet
        self._telemetry = telemetry
        self._request_limit = RequestLimit(time.monotonic)
        self._last_list: tuple[NodeState, object, pb.ListPodResourcesResponse] | None = None
        self.socket = GrpcSocket(
            path,
            "serve the pod-resources API",
            SERVICE,
            self._handlers,
            threads=THREADS,
            max_requests=AT_ONCE,
            grace_s=STOP_S,
            close_timeout_s=2 * STOP_S,
        )

    def close(self) -> None:
        """Close the socket and the connection to kubelet; runs in a thread."""
        self.socket.close()
        if self._kubelet is not None:
            self._kubelet.close()

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        import grpc

        methods: dict[str, tuple[type[Message], Callable[[Any], Message]]] = {
            "List": (pb.ListPodResourcesRequest, self._list),
            "GetAllocatableResources": (pb.AllocatableResourcesRequest, self._allocatable),
            "Get": (pb.GetPodResourcesRequest, self._get),
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(self._thread_handler(name, kind, answer))
            for name, (kind, answer) in methods.items()
        }

    # -- one request --------------------------------------------------------------------------------------

    def _thread_handler(
        self, name: str, kind: type[Message], answer: Callable[[Any], Message]
    ) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        """Return the function that a thread calls with a request: from bytes to bytes."""

        def handle(content: bytes, context: grpc.ServicerContext) -> bytes:
            self._telemetry.count(metrics.POD_RESOURCES_REQUESTS, method=name)
            try:
                if not self._request_limit.allows():
                    raise ListerRefusedError(GrpcStatus.RESOURCE_EXHAUSTED, "rejected by rate limit")
                return answer(_decoded(kind, content)).SerializeToString()
            except TopoproxyError as error:
                self._telemetry.count(metrics.POD_RESOURCES_REQUESTS_REFUSED, method=name)
                code = error.code if isinstance(error, ListerRefusedError) else GrpcStatus.UNAVAILABLE
                refuse_call(context, code, str(error))
                raise

        return handle

    def _list(self, _: pb.ListPodResourcesRequest) -> pb.ListPodResourcesResponse:
        """Return all pods. As long as neither the state nor kubelet's answer changes, the list is reused.

        Making a list of hundreds of pods takes milliseconds, during which the event loop may have to wait.
        """
        self._known_state()  # before kubelet is queried, which may take long; the state is read after it
        kubelet = self._kubelet.pods() if self._kubelet else None
        state = self._known_state()
        latest = self._last_list
        if latest is None or latest[0] is not state or latest[1] is not kubelet:
            latest = self._last_list = (state, kubelet, pods_answer(state, kubelet))
        return latest[2]

    def _get(self, request: pb.GetPodResourcesRequest) -> pb.GetPodResourcesResponse:
        for pod in self._list(pb.ListPodResourcesRequest()).pod_resources:
            if (pod.namespace, pod.name) == (request.pod_namespace, request.pod_name):
                return pb.GetPodResourcesResponse(pod_resources=pod)
        # kubelet's text, and its code: an error of Go without a status is UNKNOWN.
        message = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        raise ListerRefusedError(GrpcStatus.UNKNOWN, message)

    def _allocatable(self, _: pb.AllocatableResourcesRequest) -> pb.AllocatableResourcesResponse:
        self._known_state()  # as in ``_list``
        kubelet = self._kubelet.allocatable_resources() if self._kubelet else None
        return allocatable_answer(self._known_state(), kubelet)

    def _known_state(self) -> NodeState:
        state = self._state()
        if state is None:
            message = "cannot list pods: the containers of the runtime are not known yet"
            raise ListerRefusedError(GrpcStatus.UNAVAILABLE, message)
        return state


def _decoded(kind: type[Message], content: bytes) -> Message:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise ListerRefusedError(
            GrpcStatus.INTERNAL, f"cannot read the request: {kind.DESCRIPTOR.name} expected"
        ) from error


REQUESTS_PER_SECOND: Final = 100
BURST_REQUESTS: Final = 10
"""kubelet's ``DefaultQPS`` and ``DefaultBurstTokens`` (pkg/kubelet/apis/podresources/constants.go)."""


class RequestLimit:
    """A token bucket; safe to use from several threads.

    The bucket starts full. A request takes one token, and is refused if there is none; nothing waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with a full bucket.

        Args:
            clock: Seconds that only grow.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens, self._filled = float(BURST_REQUESTS), clock()

    def allows(self) -> bool:
        """Take a token; return False if there is none."""
        with self._lock:
            now = self._clock()
            self._tokens = min(BURST_REQUESTS, self._tokens + (now - self._filled) * REQUESTS_PER_SECOND)
            self._filled = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True
