"""Define which CRI methods are intercepted, and handle their answers and unreadable requests.

A request that is not one plain gRPC message is counted and reported, and the node is compared with the
runtime soon after. No client of the CRI sends one. A create that the runtime might execute without a decision
of ours (compressed, or with trailers behind it) is refused: what it requests cannot be read.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.calls.call_flow import CallFlow
from proxy.calls.held_call import HeldCall
from proxy.engine.enforcement import is_applied_to_all
from proxy.model.grpc_status import GrpcStatus
from proxy.relay.events import RequestAnomaly
from proxy.telemetry import metrics
from proxy.wire.lenient_text import identity

_UNREADABLE = (RequestAnomaly.COMPRESSED, RequestAnomaly.TRAILERS)
"""What a runtime may execute and is not decided on."""


class Interceptors(CallFlow):
    """The handler of all intercepted calls."""

    def anomaly(self, path: str, kind: RequestAnomaly) -> tuple[int, str] | None:
        """A request is not one plain message: report it; gives a refusal or None."""
        executor, method = self.executor, path.rpartition("/")[2]
        executor.telemetry.count(metrics.CALLS_MALFORMED)
        executor.telemetry.problem("a request is not one plain message", method=method, reason=str(kind))
        executor.attention.set()
        if method != "CreateContainer" or kind not in _UNREADABLE:
            return None
        if not is_applied_to_all(executor.state):
            return None  # the pod may be one that is observed
        return GrpcStatus.UNIMPLEMENTED, f"cannot place the container: the request {kind}"

    def response(self, call: HeldCall, message: bytes) -> None:
        """The runtime's answer is about to reach the client."""
        if self.names(call):
            try:
                created = identity(pb.Identity.FromString(message).id)
            except DecodeError as error:  # the runtime's list will show what was created
                self.executor.attention.set()
                self.executor.telemetry.problem("cannot decode an answer", method=call.method, err=str(error))
            else:
                self.answered(call, created)


METHODS = frozenset(
    f"/runtime.{version}.RuntimeService/{method}"
    for version in ("v1", "v1alpha2")
    for method in (
        "RunPodSandbox",
        "StopPodSandbox",
        "RemovePodSandbox",
        "CreateContainer",
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
        "UpdateContainerResources",
    )
)
"""Full paths of the intercepted methods."""
