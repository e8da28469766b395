"""A small CRI runtime, on a unix socket, that behaves as containerd with runc does.

``topoproxy demo`` and many tests run it behind the real proxy. Pods and containers are records, and a running
container is a cgroup in the given tree; see ``runtime_service`` for the calls and ``runc`` for their effect
on the tree. The records belong to the object, so they outlive ``stop`` and ``kill``, as containers outlive
containerd.

For tests it keeps a log of the calls, and a call can be delayed or made to fail::

    runtime.before("CreateContainer", lambda request: time.sleep(0.1))
    runtime.fail_next_create("no space left on device")
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.client import METHODS, CallRefused
from proxy.demo.runc import Runc
from proxy.demo.runtime_records import ContainerRecord, PodRecord
from proxy.demo.runtime_service import StandInService

RUNTIME_SERVICES = ("runtime.v1.RuntimeService", "runtime.v1alpha2.RuntimeService")
IMAGE_SERVICES = ("runtime.v1.ImageService", "runtime.v1alpha2.ImageService")
MESSAGE_LIMIT_BYTES = 16 << 20
"""Largest message in bytes, as containerd's."""

BeforeCall = Callable[[Any], None]


@dataclass(slots=True)
class RuntimeCall:
    """One call as it arrived.

    Attributes:
        service: The service's full name.
        metadata: The client's metadata, lower-case keys.
        done: True once the answer was made.
        code: The status that it ended with; meaningful when done.
    """

    method: str
    request: Any
    service: str
    metadata: dict[str, str | bytes] = field(default_factory=dict)
    done: bool = False
    code: grpc.StatusCode = grpc.StatusCode.OK


class StandInRuntime:
    """The runtime: ``start()``, use the socket, ``stop()``. Inspection is safe from any thread.

    Args:
        socket_path: Where to listen; an existing file is replaced.
        cgroups: The tree in which containers get their cgroups.
        alpha: Serve ``runtime.v1alpha2`` too, as containerd 1.x does.
        events: Answer GetContainerEvents (containerd 1.7 and later); otherwise it is UNIMPLEMENTED.
    """

    def __init__(
        self, socket_path: Path | str, cgroups: FakeCgroups, *, alpha: bool = True, events: bool = True
    ) -> None:
        self.socket_path = Path(socket_path)
        self._service = StandInService(Runc(cgroups))
        self._services = RUNTIME_SERVICES if alpha else RUNTIME_SERVICES[:1]
        self._events = events
        self._server: grpc.Server | None = None
        self._lock = threading.Lock()
        self._calls: list[RuntimeCall] = []
        self._hooks: dict[str, list[BeforeCall]] = {}

    # Start and stop.

    def start(self) -> Self:
        """Listen.

        Returns:
            This object, for ``with StandInRuntime(...).start() as runtime:``.

        Raises:
            RuntimeError: The socket cannot be bound.
        """
        self.socket_path.unlink(missing_ok=True)
        sizes = [
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
        ]
        pool = ThreadPoolExecutor(64, thread_name_prefix="standin")
        self._server = grpc.server(pool, options=sizes)
        self._server.add_generic_rpc_handlers([self._runtime_service(name) for name in self._services])
        self._server.add_generic_rpc_handlers(
            [_image_service(name) for name in IMAGE_SERVICES[: len(self._services)]]
        )
        self._server.add_insecure_port(f"unix:{self.socket_path}")
        self._server.start()
        return self

    def stop(self, grace: float = 1.0) -> None:
        """Let calls in flight end (at most ``grace`` seconds), then close; the records stay."""
        if self._server is not None:
            self._server.stop(grace).wait()
            self._server = None

    def kill(self) -> None:
        """Close at once, as kill -9 would: calls in flight break off, and a dead socket file is left."""
        self.stop(0)
        self.socket_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(self.socket_path))

    def __enter__(self) -> Self:
        return self if self._server is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop(0)

    # Inspection.

    @property
    def pods(self) -> dict[str, PodRecord]:
        """All sandboxes by id (a copy)."""
        with self._service.lock:
            return dict(self._service.pods)

    @property
    def containers(self) -> dict[str, ContainerRecord]:
        """All containers by id (a copy; the records are live)."""
        with self._service.lock:
            return dict(self._service.containers)

    @property
    def calls(self) -> list[RuntimeCall]:
        """All RuntimeService calls in the order of their arrival (a copy)."""
        with self._lock:
            return list(self._calls)

    # Used by tests and demonstrations.

    def before(self, method: str, hook: BeforeCall) -> Callable[[], None]:
        """Run something before each call of a method: sleep to delay it, raise CallRefused to fail it.

        The hook runs in the call's own thread without any lock, so other calls continue.

        Returns:
            A function that removes the hook.
        """
        with self._lock:
            self._hooks.setdefault(method, []).append(hook)

        def remove() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._hooks[method].remove(hook)

        return remove

    def fail_next(self, method: str, text: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        """Refuse the next call of a method with a status."""

        def refuse(_: object) -> None:
            remove()
            raise CallRefused(code, text)

        remove = self.before(method, refuse)

    def fail_next_create(
        self, text: str = "failed to create containerd container: no space left on device",
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
    ) -> None:  # fmt: skip
        """Refuse the next CreateContainer."""
        self.fail_next("CreateContainer", text, code)

    def exit(self, container_id: str, exit_code: int = 1) -> None:
        """Let a running container's process end by itself, as a crash does.

        Raises:
            CallRefused: The id is unknown.
        """
        self._service.exited(container_id, exit_code)

    # gRPC.

    def _runtime_service(self, service: str) -> grpc.GenericRpcHandler:
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(service, name), classes[0].FromString, classes[1].SerializeToString
            )
            for name, classes in METHODS.items()
        }
        if self._events:
            handlers["GetContainerEvents"] = grpc.unary_stream_rpc_method_handler(
                self._service.events.stream,
                pb.GetEventsRequest.FromString,
                pb.ContainerEventResponse.SerializeToString,
            )
        return grpc.method_handlers_generic_handler(service, handlers)

    def _unary(self, service: str, method: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        handler = self._service.handlers[method]

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            call = RuntimeCall(method, request, service, dict(context.invocation_metadata()))
            with self._lock:
                self._calls.append(call)
                hooks: Iterable[BeforeCall] = tuple(self._hooks.get(method, ()))
            try:
                for hook in hooks:
                    hook(request)
                with self._service.lock:
                    return handler(request)
            except CallRefused as refused:
                call.code = refused.code
                context.abort(refused.code, refused.text)
            finally:
                call.done = True

        return answer


def _image_service(service: str) -> grpc.GenericRpcHandler:
    """Return a service that has any image: lists are empty, a pull answers at once."""

    def pull(_: bytes, __: grpc.ServicerContext) -> bytes:
        # PullImageResponse.image_ref has ImageSpec.image's number and type.
        return pb.ImageSpec(image="sha256:" + "0" * 64).SerializeToString()

    def nothing(_: bytes, __: grpc.ServicerContext) -> bytes:
        return b""

    handlers = dict.fromkeys(("ListImages", "ImageStatus", "RemoveImage", "ImageFsInfo"), nothing)
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(handler)
            for name, handler in {**handlers, "PullImage": pull}.items()
        },
    )
