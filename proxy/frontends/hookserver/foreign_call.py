"""A call that another proxy makes to the runtime, held while it is decided."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

from proxy.calls.call_flow import CallFlow
from proxy.calls.undecided_call import NO_DEVICES, UndecidedCall
from proxy.engine.call_events import UpdateRequested
from proxy.executor.ports import DeviceFacts
from proxy.frontends.hookserver.messages import ContainerReply, SandboxReply, pod_of, request_of, total_of
from proxy.model.devices import AllocateAnswer, DeviceField
from proxy.model.errors import DeviceConflictError, TopoproxyError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Bounds
from proxy.model.workload import Pod, Request


class HookCallRefusedError(TopoproxyError):
    """The call is refused; ``code`` is a gRPC status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ForeignCall:
    """A call that a peer will make after our answer. The body is the answer so far; subclasses add the rest.

    A release answers the peer, which then makes the call. ``answered``, ``ended`` and ``lost`` report
    what happened to the call at the runtime.
    """

    __slots__ = ("_flow", "_outcome", "body", "context", "decided", "done", "method")
    decode_errors: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, flow: CallFlow, method: str, body: Any) -> None:
        self._flow = flow
        self.method = method
        self.body = body
        self.context: object | None = None
        self.decided = False
        self.done = False
        self._outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def decide(self) -> Any:
        """Decide the call.

        Returns:
            The answer.

        Raises:
            HookCallRefusedError: The call is refused.
        """
        try:
            self._flow.request(self._held())
            return await self._outcome
        except asyncio.CancelledError:
            self.lost()  # the peer does not wait any more
            raise

    def _held(self) -> UndecidedCall:
        # Of the methods that read, only those for the call's CRI method are called.
        return cast("UndecidedCall", self)

    # -- called by the code that decides ------------------------------------------------------------------

    def replace_body(self, body: Any) -> None:
        """Replace the answer."""
        self.body = body

    def hook_view(self) -> Any:
        """Return the message as hooks see it."""
        return self.body

    def release(self) -> None:
        """Let the call continue; do nothing if it is decided already."""
        self._answer(self.body)

    def _answer(self, body: Any) -> None:
        if not self.decided:
            self.decided = True
            if not self._outcome.done():  # otherwise it was cancelled in this turn, and ``lost`` follows
                self._outcome.set_result(body)

    def refuse(self, code: int, message: str) -> None:
        """Answer so that the peer does not make the call."""
        if not self.decided:
            self._end(None)
            if not self._outcome.done():
                self._outcome.set_exception(HookCallRefusedError(code, message))

    # -- the outcome -------------------------------------------------------------------------------------

    def answered(self, created: str) -> None:
        """The runtime has created the sandbox or container of the call, with this id."""
        if not self.done:
            self._flow.answered(self._held(), created)
            self._end(0)

    def ended(self, status: int) -> None:
        """The call has ended with a gRPC status; 0 for success."""
        self._end(status)

    def lost(self) -> None:
        """The outcome of the call will never be known."""
        self._end(None)

    @contextlib.contextmanager
    def or_lost(self) -> Iterator[None]:
        """Mark the call as lost if the block raises."""
        try:
            yield
        except BaseException:
            self.lost()
            raise

    def _end(self, status: int | None) -> None:
        if not self.done:
            self.decided = self.done = True
            self._flow.finished(self._held(), status)


class SandboxCall(ForeignCall):
    """RunPodSandbox; see ``proxy.calls.undecided_call.UndecidedCall``."""

    __slots__ = ()
    body: SandboxReply

    def sandbox(self, bounds: Bounds) -> Pod:
        """Read the pod."""
        return self.body.read(bounds)

    def sandbox_total(self) -> Request:
        """Read the sum of the requests of the pod's containers."""
        return request_of(self.body.request.resources)

    def pod_of(self, known: Mapping[str, Pod], bounds: Bounds) -> Pod | None:
        """Read the pod."""
        return self.body.read(bounds)


class ContainerCall(ForeignCall):
    """CreateContainer, StartContainer or UpdateContainerResources.

    See ``UndecidedCall`` and ``CreateRequest``.
    """

    __slots__ = ("_sandbox_attempt", "attempt", "name", "resources", "sandbox_id")
    body: ContainerReply

    def __init__(
        self, flow: CallFlow, method: str, reply: ContainerReply, sandbox: tuple[str, int] = ("", 0)
    ) -> None:
        """Prepare to decide a call.

        Args:
            flow: Decides calls.
            method: The CRI method.
            reply: The answer so far.
            sandbox: Id and attempt of the pod's sandbox, for a create.
        """
        super().__init__(flow, method, reply)
        self.sandbox_id, self._sandbox_attempt = sandbox
        self.name = reply.request.container_meta.name
        self.attempt = reply.request.container_meta.attempt
        self.resources = request_of(reply.resources)

    def target(self) -> str:
        """Read the id of the container."""
        return self.body.request.container_meta.id

    def create_request(self) -> ContainerCall:
        """Read a create: the call itself has its parts."""
        return self

    def pod(self, bounds: Bounds) -> Pod:
        """Read the pod of a create."""
        return pod_of(self.body.request, self.sandbox_id, self._sandbox_attempt, bounds)

    def pod_total(self) -> Request | None:
        """Read the sum of the requests of the pod's containers."""
        requested = self.body.request
        return total_of(requested.pod_resources) if requested.HasField("pod_resources") else None

    def devices(self) -> DeviceFacts:
        """Return no devices: the protocol does not carry them."""
        return NO_DEVICES

    def add_devices(self, answers: Mapping[str, AllocateAnswer]) -> Mapping[str, DeviceField]:
        """Refuse: the protocol carries no device files and no mounts.

        Raises:
            DeviceConflictError: Always.
        """
        named = ", ".join(answers)
        raise DeviceConflictError(f"devices of {named} cannot be given through Koordinator's hook protocol")

    def pod_of(self, known: Mapping[str, Pod], bounds: Bounds) -> Pod | None:
        """Read the pod of a create."""
        return self.pod(bounds)

    def resource_update(self) -> UpdateRequested:
        """Read an update."""
        requested = self.body.resources
        return UpdateRequested(
            self.target(),
            requested.cpuset_cpus,
            requested.cpuset_mems,
            requested.cpu_quota,
            requested.memory_limit_in_bytes,
        )

    def set_cgroup_parent(self, parent: str) -> None:
        """Name another cgroup of the pod."""
        self.replace_body(self.body.with_parent(parent))

    def place(self, cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> None:
        """Let the call continue with a decision."""
        self._answer(self.body.placed(cpus, mems, quota))
