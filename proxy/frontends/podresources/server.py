"""The gRPC server of the pod-resources API. A few threads answer; the event loop has no part in it.

A thread reads the newest state of the node, which is a value, and queries kubelet where that is configured.
So a slow kubelet delays these answers and no call of the CRI. Where kubelet does not answer, the request
fails: an answer without devices would claim that no container has any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from google.protobuf.message import DecodeError, Message

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.frontends.podresources.messages import allocatable_answer, pods_answer
from proxy.model.errors import TopoproxyError
from proxy.model.grpc_status import GrpcStatus
from proxy.sockets.grpc_socket import GrpcSocket, refuse_call
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

    from proxy.engine.state import NodeState
    from proxy.telemetry.port import Telemetry


SERVICE: Final = "v1.PodResourcesLister"
THREADS, AT_ONCE = 4, 64
"""Requests that are answered at a time, and those that may wait with them; others are refused."""
STOP_S: Final = 0.5


class KubeletAnswers(Protocol):
    """kubelet's own pod-resources API; for several threads. Answers are shared, and never changed."""

    def pods(self) -> pb.ListPodResourcesResponse:
        """Return the answer to ``List``.

        Raises:
            TopoproxyError: kubelet does not answer.
        """

    def devices(self) -> pb.AllocatableResourcesResponse:
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

    def __init__(self, code: GrpcStatus, words: str) -> None:
        super().__init__(words)
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is opened before ``socket.open``.

        Args:
            path: Where to listen.
            state: Returns the node as it is; None as long as its containers are not known.
            kubelet: kubelet's own API; None where it is not queried.
            telemetry: Counts requests.
            clock: Seconds that only grow.
        """
        self._state = state
        self._kubelet = kubelet
        self._telemetry = telemetry
        self._limit = RequestLimit(clock)
        self._listed: tuple[NodeState, object, pb.ListPodResourcesResponse] | None = None
        self.socket = GrpcSocket(
            path,
            "serve the pod-resources API",
            SERVICE,
            self._handlers,
            threads=THREADS,
            at_once=AT_ONCE,
            stop_s=STOP_S,
            end_s=2 * STOP_S,
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
            name: grpc.unary_unary_rpc_method_handler(self._answering(name, kind, answer))
            for name, (kind, answer) in methods.items()
        }

    # -- one request --------------------------------------------------------------------------------------

    def _answering(
        self, name: str, kind: type[Message], answer: Callable[[Any], Message]
    ) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        """Return what a thread does with a request: from bytes to bytes."""

        def answered(content: bytes, context: grpc.ServicerContext) -> bytes:
            self._telemetry.count(metrics.POD_RESOURCES_REQUESTS, method=name)
            try:
                if not self._limit.allows():
                    raise ListerRefusedError(GrpcStatus.RESOURCE_EXHAUSTED, "rejected by rate limit")
                return answer(_decoded(kind, content)).SerializeToString()
            except TopoproxyError as error:
                self._telemetry.count(metrics.POD_RESOURCES_REQUESTS_REFUSED, method=name)
                code = error.code if isinstance(error, ListerRefusedError) else GrpcStatus.UNAVAILABLE
                refuse_call(context, code, str(error))
                raise

        return answered

    def _list(self, _: pb.ListPodResourcesRequest) -> pb.ListPodResourcesResponse:
        """Return all pods. As long as neither the state nor kubelet's answer changes, the list is the same.

        Making a list of hundreds of pods takes milliseconds, during which the event loop may have to wait.
        """
        state, kubelet = self._known(), self._kubelet.pods() if self._kubelet else None
        latest = self._listed
        if latest is None or latest[0] is not state or latest[1] is not kubelet:
            latest = self._listed = (state, kubelet, pods_answer(state, kubelet))
        return latest[2]

    def _get(self, asked: pb.GetPodResourcesRequest) -> pb.GetPodResourcesResponse:

        for pod in self._list(pb.ListPodResourcesRequest()).pod_resources:
            if (pod.namespace, pod.name) == (asked.pod_namespace, asked.pod_name):
                return pb.GetPodResourcesResponse(pod_resources=pod)
        # kubelet's words, and its code: an error of Go without a status is UNKNOWN.
        message = f"pod {asked.pod_name} in namespace {asked.pod_namespace} not found"
        raise ListerRefusedError(GrpcStatus.UNKNOWN, message)

    def _allocatable(self, _: pb.AllocatableResourcesRequest) -> pb.AllocatableResourcesResponse:
        return allocatable_answer(self._known(), self._kubelet.devices() if self._kubelet else None)

    def _known(self) -> NodeState:
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


# It starts full. A request takes one token and is rejected where there is none; nothing waits.


PER_SECOND: Final = 100
BURST: Final = 10
"""kubelet's ``DefaultQPS`` and ``DefaultBurstTokens`` (pkg/kubelet/apis/podresources/constants.go)."""


class RequestLimit:
    """A token bucket; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with a full bucket.

        Args:
            clock: Seconds that only grow.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens, self._filled = float(BURST), clock()

    def allows(self) -> bool:
        """Take a token; False where there is none."""
        with self._lock:
            now = self._clock()
            self._tokens = min(BURST, self._tokens + (now - self._filled) * PER_SECOND)
            self._filled = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True
