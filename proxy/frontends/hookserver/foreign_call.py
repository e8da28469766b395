"""A call that another proxy makes to the runtime, held while it is decided."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from proxy.api.koordinator import hook_pb2 as pb
from proxy.calls.call_flow import CallFlow
from proxy.calls.held_call import HeldCall, ResourceUpdate
from proxy.frontends.hookserver.messages import (
    ContainerReply,
    KoordinatorCreateRequest,
    placed,
    pod_echo,
    request_of,
    sandbox_pod,
    with_parent,
)
from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Bounds
from proxy.model.workload import Pod, Request

if TYPE_CHECKING:
    from proxy.frontends.hookserver.hook_view import ContainerHookView, SandboxHookView


class HookCallRefusedError(TopoproxyError):
    """The call is refused; ``code`` is a gRPC status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ForeignCall:
    """One call. Its body is the answer so far; what else it carries, its subclasses know.

    Releasing it answers the peer, which then makes the call; ``answered``, ``over`` and ``lost`` are set by
    what happened to it at the runtime.
    """

    __slots__ = ("_flow", "_outcome", "body", "decided", "done", "method", "state")
    unreadable: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, flow: CallFlow, method: str, body: Any) -> None:
        self._flow = flow
        self.method = method
        self.body = body
        self.state: object | None = None
        self.decided = False
        self.done = False
        self._outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def decide(self) -> Any:
        """Have the call decided.

        Returns:
            The answer.

        Raises:
            HookCallRefusedError: The call is not to be made.
        """
        try:
            self._flow.request(self._held())
            return await self._outcome
        except asyncio.CancelledError:
            self.lost()  # the peer does not wait any more
            raise

    def _held(self) -> HeldCall:
        return cast("HeldCall", self)  # of the methods that read, only those of the call's method are called

    # -- called by the code that decides ------------------------------------------------------------------

    def change(self, body: Any) -> None:
        """Have another answer from now on."""
        self.body = body

    def release(self) -> None:
        """Let the call go on; once decided nothing happens."""
        self._answer(self.body)

    def _answer(self, body: Any) -> None:
        if not self.decided:
            self.decided = True
            self._outcome.set_result(body)

    def refuse(self, code: int, message: str) -> None:
        """Have the call not be made."""
        if not self.decided:
            self._end(None)
            self._outcome.set_exception(HookCallRefusedError(code, message))

    # -- the outcome -------------------------------------------------------------------------------------

    def answered(self, created: str) -> None:
        """The runtime has created what the call is about, under this id."""
        if not self.done:
            self._flow.answered(self._held(), created)
            self._end(0)

    def over(self, status: int) -> None:
        """The runtime has done it (0), or not."""
        self._end(status)

    def lost(self) -> None:
        """The outcome of the call will never be known."""
        self._end(None)

    @contextlib.contextmanager
    def or_lost(self) -> Iterator[None]:
        """Lose the call if what is done with its decision fails."""
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
    """RunPodSandbox; see ``proxy.calls.held_call.HeldCall``."""

    __slots__ = ("_asked",)

    def __init__(self, flow: CallFlow, asked: pb.PodSandboxHookRequest) -> None:
        super().__init__(flow, "RunPodSandbox", pod_echo(asked))
        self._asked = asked

    def sandbox(self, bounds: Bounds) -> Pod:
        """Read the pod."""
        return sandbox_pod(self._asked, self.body, bounds)

    def sandbox_total(self) -> Request:
        """Read what the containers of the pod ask for together."""
        return request_of(self._asked.resources)

    def pod_of(self, known: Mapping[str, Pod], bounds: Bounds) -> Pod | None:
        """Read the pod."""
        return self.sandbox(bounds)

    def seen_by_hooks(self) -> SandboxHookView:
        """Give the message as hooks see it."""
        from proxy.frontends.hookserver.hook_view import SandboxHookView  # only where there are hooks

        return SandboxHookView(self._asked, self.body)


class ContainerCall(ForeignCall):
    """CreateContainer, StartContainer or UpdateContainerResources; see ``HeldCall``."""

    __slots__ = ("_asked", "_sandbox")
    body: ContainerReply

    def __init__(
        self,
        flow: CallFlow,
        method: str,
        asked: pb.ContainerResourceHookRequest,
        reply: ContainerReply,
        sandbox: tuple[str, int] = ("", 0),
    ) -> None:
        """Prepare to have a call decided.

        Args:
            flow: Decides calls.
            method: The CRI method.
            asked: The request.
            reply: The answer so far.
            sandbox: Id and attempt of the pod's sandbox, for a create.
        """
        super().__init__(flow, method, reply)
        self._asked = asked
        self._sandbox = sandbox

    def target(self) -> str:
        """Read the id of the container."""
        return self._asked.container_meta.id

    def create_request(self) -> KoordinatorCreateRequest:
        """Read a create."""
        return KoordinatorCreateRequest(self._asked, self.body.asked, *self._sandbox)

    def resource_update(self) -> ResourceUpdate:
        """Read an update."""
        asked = self.body.asked
        return ResourceUpdate(self.target(), asked.cpuset_cpus, asked.cpuset_mems, asked.cpu_quota)

    def pod_of(self, known: Mapping[str, Pod], bounds: Bounds) -> Pod | None:
        """Read the pod."""
        return self.create_request().pod(bounds)

    def seen_by_hooks(self) -> ContainerHookView:
        """Give the message as hooks see it."""
        from proxy.frontends.hookserver.hook_view import ContainerHookView  # only where there are hooks

        return ContainerHookView(self._asked, self.body)

    def set_cgroup_parent(self, parent: str) -> None:
        """Name another cgroup of the pod."""
        self.change(with_parent(self.body, parent))

    def place(self, cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> None:
        """Let the call go on with a decision."""
        self._answer(placed(self.body, cpus, mems, quota))
