"""Intercepted calls: which CRI methods are held, how their messages are read, and how a decision is written.

The code that decides knows an ``InterceptedCall`` only as a ``proxy.calls.undecided_call.UndecidedCall``.

A request that is not one plain gRPC message is counted and reported, and the node is reconciled with the
runtime soon after. No client of the CRI sends such a request. A create that the runtime might execute without
a decision of topoproxy (compressed, or with trailers behind it) is refused, because it cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.calls.call_flow import CallFlow
from proxy.calls.undecided_call import UndecidedCall
from proxy.engine.call_events import UpdateRequested
from proxy.engine.enforcement import is_applied_to_all
from proxy.frontends.cri.messages import (
    CriCreateRequest,
    cgroup_parent_suffix,
    create_suffix,
    pod_of,
    request_of,
    update_suffix,
)
from proxy.model.devices import AllocateAnswer, DeviceField
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Bounds
from proxy.model.quoting import message as escaped_message
from proxy.model.workload import Pod, Request
from proxy.relay.events import RequestAnomaly
from proxy.telemetry import metrics
from proxy.wire.protobuf import decode_name, decode_text

if TYPE_CHECKING:
    from proxy.frontends.cri.hook_view import CriHookView
    from proxy.frontends.cri.link import Link


@cache  # the import statement takes longer than making a view
def _hook_view() -> type[CriHookView]:
    from proxy.frontends.cri.hook_view import CriHookView  # in memory only if there are hooks

    return CriHookView


class InterceptedCall:
    """One intercepted call.

    Attributes:
        path: The full path, ``/runtime.v1.RuntimeService/CreateContainer``, perhaps without its first slash.
        method: The part behind the last slash.
        body: The request message as the client sent it, or the changed one.
        context: For the interceptor's own use.
        done: The call has ended.
    """

    __slots__ = (
        "_changed", "_link", "_stream", "body", "context", "decided", "done", "method", "path",
    )  # fmt: skip

    decode_errors: ClassVar[tuple[type[Exception], ...]] = (DecodeError,)

    def __init__(self, link: Link, stream: int, path: str, body: bytes) -> None:
        self._link = link
        self._stream = stream
        self.path = path
        self.method = path.rpartition("/")[2]
        self.body = body
        self._changed = False
        self.context: object | None = None
        self.decided = False
        self.done = False

    def __repr__(self) -> str:
        return f"Call({self.path}, stream {self._stream}, {len(self.body)} bytes)"

    def replace_body(self, body: bytes) -> None:
        """Replace the message."""
        self.body, self._changed = body, True

    def release(self, body: bytes | None = None, suffix: bytes = b"") -> None:
        """Let the call continue to the runtime, from the loop's thread; do nothing if it is decided already.

        Args:
            body: The message instead of the call's own; None: its own, byte for byte the original one unless
                it was changed.
            suffix: Bytes to append to the message.
        """
        if not self.decided:
            self.decided = True
            if body is None and self._changed:
                body = self.body
            self._link.release(self._stream, body, suffix)
            if self.method == "CreateContainer":
                self.body = b""  # creates are long, and no code reads a create after it was sent

    def refuse(self, code: int, message: str) -> None:
        """Answer the call with a gRPC status; from the loop's thread.

        ``finished`` is called before this method returns. If the call is refused within ``request``,
        ``finished`` is called after ``request`` has returned.

        Args:
            code: The status.
            message: Its text, which may quote input: it is escaped, and cut to 2,000 bytes.
        """
        if not self.decided:
            self.decided = True
            self._link.refuse(self._stream, code, escaped_message(message))

    # -- reading; see ``UndecidedCall`` ------------------------------------------------------------------

    def target(self) -> str:
        """Read the id of the container or sandbox that the call is about."""
        return decode_text(pb.Identity.FromString(self.body).id)

    def sandbox(self, bounds: Bounds) -> Pod:
        """Read the pod of a RunPodSandbox."""
        return pod_of(pb.RunPodSandboxFacts.FromString(self.body).config, bounds=bounds)

    def sandbox_total(self) -> Request:
        """Read the sum of the requests of a RunPodSandbox's containers, without overhead."""
        return request_of(pb.RunPodSandboxFacts.FromString(self.body).config.linux.resources)

    def create_request(self) -> CriCreateRequest:
        """Read a CreateContainer."""
        return CriCreateRequest(self.body)

    def resource_update(self) -> UpdateRequested:
        """Read an UpdateContainerResources."""
        facts = pb.UpdateContainerResourcesFacts.FromString(self.body)
        requested = facts.linux
        return UpdateRequested(
            decode_text(facts.container_id),
            decode_text(requested.cpuset_cpus),
            decode_text(requested.cpuset_mems),
            requested.cpu_quota,
            requested.memory_limit_in_bytes,
        )

    def pod_of(self, known: Mapping[str, Pod], bounds: Bounds) -> Pod | None:
        """Read the pod of a RunPodSandbox or a CreateContainer; decode as little of it as possible."""
        sandbox_id = ""
        try:
            if self.method == "RunPodSandbox":
                return self.sandbox(bounds)
            pieces = pb.CreateContainerPieces.FromString(self.body)
            sandbox_id = decode_text(pieces.pod_sandbox_id)
            config = pb.SandboxFacts.FromString(b"".join(pieces.sandbox_config))
        except DecodeError:
            return known.get(sandbox_id)
        if not pieces.sandbox_config:
            return known.get(sandbox_id)
        return pod_of(config, sandbox_id, bounds)

    def hook_view(self) -> CriHookView:
        """Return the message as hooks see it."""
        return _hook_view()(self.method, self.body)

    # -- rewriting ----------------------------------------------------------------------------------------

    def set_cgroup_parent(self, parent: str) -> None:
        """Name another cgroup of the pod in a CreateContainer."""
        self.replace_body(self.body + cgroup_parent_suffix(parent))

    def add_devices(self, answers: Mapping[str, AllocateAnswer]) -> Mapping[str, DeviceField]:
        """Add the answers of device plugins to a CreateContainer."""
        from proxy.frontends.cri.device_suffix import device_suffix  # in memory only if there are plugins

        added = device_suffix(self.body, answers)
        if added.suffix:
            self.replace_body(self.body + added.suffix)
        return added.fields

    def place(self, cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> None:
        """Let a CreateContainer or an UpdateContainerResources continue with a decision."""
        if not self.decided:
            suffix = create_suffix if self.method == "CreateContainer" else update_suffix
            self.release(None, suffix(cpus, mems, quota))


class Interceptor(Protocol):
    """Decides on intercepted calls. An exception that it raises is logged, and the call passes unchanged."""

    def request(self, call: InterceptedCall) -> None:
        """Handle a call, which waits for ``release`` or ``refuse``."""

    def anomaly(self, path: str, kind: RequestAnomaly) -> tuple[int, str] | None:
        """Handle a request that is not one plain message; return a refusal or None (``Handler.anomaly``)."""

    def response(self, call: InterceptedCall, message: bytes) -> None:
        """Handle the first message of the answer, which is being sent; nothing more has been read since."""

    def finished(self, call: InterceptedCall, status: int | None) -> None:
        """Handle the end of a call; called once for every ``request``.

        Args:
            call: The call.
            status: grpc-status of the runtime, or None if none came (refused by us, cancelled, connection
                lost).
        """


_UNREADABLE = (RequestAnomaly.COMPRESSED, RequestAnomaly.TRAILERS)
"""Anomalies of requests that a runtime may execute although they cannot be decided."""


class CriCallFlow(CallFlow):
    """The handler of all intercepted calls."""

    def anomaly(self, path: str, kind: RequestAnomaly) -> tuple[int, str] | None:
        """Report a request that is not one plain message; return a refusal or None."""
        executor, method = self.executor, path.rpartition("/")[2]
        executor.telemetry.count(metrics.CALLS_MALFORMED)
        executor.telemetry.problem("a request is not one plain message", method=method, reason=str(kind))
        executor.reconcile_requested.set()
        if method != "CreateContainer" or kind not in _UNREADABLE:
            return None
        if not is_applied_to_all(executor.state):
            return None  # the pod may be an observed one
        return GrpcStatus.UNIMPLEMENTED, f"cannot place the container: the request {kind}"

    def response(self, call: UndecidedCall, message: bytes) -> None:
        """The runtime's answer is about to reach the client."""
        if self.needs_created_id(call):
            try:
                created = decode_name(pb.Identity.FromString(message).id)
            except DecodeError as error:  # the runtime's list will show what was created
                self.executor.reconcile_requested.set()
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
