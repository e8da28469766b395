"""The gRPC server: a few threads that read and write; the event loop computes the answers.

No part of gRPC runs on the event loop: a thread hands each request over and waits, no longer than the client
waits, and never longer than all hooks of one call may take together. If a client disconnects while its
request is being decided, the decision is cancelled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from proxy.api.koordinator import hook_pb2 as pb
from proxy.executor.background import run_with_restarts
from proxy.executor.context import NodeContext
from proxy.frontends.hookserver.foreign_call import HookCallRefusedError
from proxy.frontends.hookserver.messages import container_echo, pod_echo
from proxy.frontends.hookserver.servicer import Servicer
from proxy.hooks.hook import LONGEST_TIMEOUT_S
from proxy.model.grpc_status import GrpcStatus
from proxy.sockets.grpc_socket import GrpcSocket, cancel_with_call, open_with_retries, refuse_call
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

    from proxy.calls.call_flow import CallFlow
    from proxy.executor.node_executor import NodeExecutor

SERVICE = "runtime.v1alpha1.RuntimeHookService"
THREADS, AT_ONCE = 8, 256
"""Requests that are answered at a time, and requests that may wait; others are refused."""
LARGEST_MESSAGE_BYTES = 16 << 20
"""Largest message in bytes, as kubelet's."""
STOP_S = 1.0
_MARGIN_S = 5.0

AnswerRequest = Callable[[Any], Coroutine[Any, Any, Any]]

UNDECODABLE: Final = "cannot answer: the request cannot be decoded"
CANNOT_LISTEN: Final = "cannot listen as a hook server"


class HookServerRunner:
    """Our engine as a hook server: ``run``, or ``start``, and then ``stop``."""

    def __init__(self, path: Path, executor: NodeExecutor, flow: CallFlow) -> None:
        """Prepare; nothing is opened yet.

        Args:
            path: Where to listen.
            executor: The node.
            flow: Decides calls: the same as for calls that pass through us, so that the same hooks are
                called.
        """
        self.path = path
        self.listening = False
        self.servicer = Servicer(executor, flow)
        self._executor = executor
        self._server = HookServer(path, executor, self.servicer)
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start as soon as the socket can be bound; returns when it is bound."""
        telemetry = self._executor.telemetry
        await open_with_retries(
            self.start, lambda error: telemetry.problem(CANNOT_LISTEN, path=self.path, err=error)
        )

    async def start(self) -> None:
        """Listen.

        Raises:
            CannotCreateError, PermissionDeniedError: The socket cannot be bound; nothing remains open.
        """
        self._server.socket.may_open = True
        await asyncio.to_thread(self._server.socket.open)
        self.listening = True
        polling = run_with_restarts(self.servicer.pending.run, self._executor.restarted)
        self._task = asyncio.get_running_loop().create_task(polling)
        self._executor.telemetry.resolved(CANNOT_LISTEN)
        self._executor.telemetry.event("listening as a hook server", path=self.path)

    async def stop(self) -> None:
        """Stop listening. Calls in progress are found again after a start, as after a crash."""
        # This also stops an attempt to open it that is in progress in a thread.
        self._server.socket.may_open = False
        await asyncio.to_thread(self._server.socket.close)
        self.listening = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


def rpc_methods(servicer: Servicer) -> dict[str, tuple[type[Any], AnswerRequest]]:
    """Return the methods: RPC to the request's class and its handler."""
    pod, container = pb.PodSandboxHookRequest, pb.ContainerResourceHookRequest
    return {
        "PreRunPodSandboxHook": (pod, servicer.pre_run_pod_sandbox),
        "PostStopPodSandboxHook": (pod, servicer.post_stop_pod_sandbox),
        "PreCreateContainerHook": (container, servicer.pre_create_container),
        "PreStartContainerHook": (container, servicer.pre_start_container),
        "PostStartContainerHook": (container, servicer.post_start_container),
        "PostStopContainerHook": (container, servicer.post_stop_container),
        "PreUpdateContainerResourcesHook": (container, servicer.pre_update_container_resources),
    }


class HookServer:
    """Serves the protocol on a socket.

    Attributes:
        socket: Opens and closes it.
    """

    def __init__(self, path: Path, executor: NodeContext, servicer: Servicer) -> None:
        """Prepare; nothing is opened before ``socket.open``.

        Args:
            path: Where to listen.
            executor: Takes faults.
            servicer: Answers the requests.
        """
        self._executor = executor
        self._servicer = servicer
        self._loop = asyncio.get_running_loop()
        self.socket = GrpcSocket(
            path,
            "serve hooks",
            SERVICE,
            self._handlers,
            threads=THREADS,
            max_requests=AT_ONCE,
            options=(
                ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
                ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
            ),
            grace_s=STOP_S,
            close_timeout_s=STOP_S + _MARGIN_S,
        )

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        import grpc

        return {
            name: grpc.unary_unary_rpc_method_handler(
                self._thread_handler(name, kind, answer),
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (kind, answer) in rpc_methods(self._servicer).items()
        }

    # -- one request --------------------------------------------------------------------------------------

    def _thread_handler(
        self, name: str, kind: type[Any], answer: AnswerRequest
    ) -> Callable[[bytes, grpc.ServicerContext], Any]:
        """Return the function that a thread of the server calls with a request."""

        def handle(content: bytes, context: grpc.ServicerContext) -> Any:
            try:
                request = kind.FromString(content)
            except DecodeError as error:
                self._undecodable(name, error)
                refuse_call(context, GrpcStatus.INVALID_ARGUMENT, UNDECODABLE)
            limit = min(context.time_remaining() or LONGEST_TIMEOUT_S, LONGEST_TIMEOUT_S)
            try:
                job = asyncio.run_coroutine_threadsafe(
                    self._answer_in_time(name, answer, request, limit), self._loop
                )
            except RuntimeError:  # the loop is closed
                refuse_call(context, GrpcStatus.UNAVAILABLE, "cannot answer: the daemon stops")
            cancel_with_call(context, job)
            try:
                return job.result(limit + _MARGIN_S)
            except HookCallRefusedError as error:
                refuse_call(context, error.code, str(error))
            except concurrent.futures.CancelledError:
                refuse_call(context, GrpcStatus.CANCELLED, "cannot answer: the client does not wait any more")
            except TimeoutError:
                job.cancel()
                refuse_call(context, GrpcStatus.DEADLINE_EXCEEDED, "cannot answer: the daemon is too busy")

        return handle

    def _undecodable(self, name: str, error: DecodeError) -> None:
        """Count and report a request that cannot be decoded; runs in a thread.

        Unlike elsewhere, strings that are not UTF-8 are not replaced, because the answer repeats the request.
        """
        telemetry = self._executor.telemetry
        telemetry.count(metrics.HOOK_SERVER_REQUESTS)
        telemetry.count(metrics.HOOK_SERVER_REQUESTS_REFUSED)
        telemetry.count(metrics.REQUESTS_UNDECODABLE)
        telemetry.problem("cannot decode a request", method=name, err=str(error))

    async def _answer_in_time(self, name: str, answer: AnswerRequest, request: Any, limit: float) -> Any:
        """Answer a request in time; runs on the loop."""
        executor = self._executor
        executor.telemetry.count(metrics.HOOK_SERVER_REQUESTS)
        try:
            async with asyncio.timeout(limit):
                return await answer(request)
        except HookCallRefusedError:
            executor.telemetry.count(metrics.HOOK_SERVER_REQUESTS_REFUSED)
            raise
        except TimeoutError:
            executor.reconcile_requested.set()
            message = f"cannot answer {name}: it took longer than {limit:.3g} s"
            executor.telemetry.problem(
                "cannot answer a hook request in time", method=name, seconds=round(limit, 3)
            )
            raise HookCallRefusedError(GrpcStatus.DEADLINE_EXCEEDED, message) from None
        except Exception as error:  # noqa: BLE001  an internal error must not affect the node
            executor.report_internal_error(error)
            executor.reconcile_requested.set()
            return self._answer_after_error(name, request, error)

    def _answer_after_error(self, name: str, request: Any, error: Exception) -> Any:
        """Answer after an internal error: without changes, unless the container must not run unplaced."""
        if isinstance(request, pb.PodSandboxHookRequest):
            return pod_echo(request)
        if name == "PreCreateContainerHook" and self._servicer.must_be_placed(request):
            cause = f"{type(error).__name__}: {error}"
            raise HookCallRefusedError(
                GrpcStatus.INTERNAL, f"cannot place the container: internal error: {cause}"
            )
        return container_echo(request)
