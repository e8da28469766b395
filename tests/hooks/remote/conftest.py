"""A real hook server on a unix socket, for the tests of its client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.api.koordinator import hook_pb2 as pb
from proxy.config.hooks import HooksConfig
from proxy.hooks.hook import Hook
from proxy.hooks.remote.servers import server_of
from tests.testkit.captured_log import of_hooks

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["RuntimeHookService"].methods}
LONGEST = 64 << 20


def echo(request: Any) -> Any:
    """Answer with all fields of the request, as koordlet does."""
    if isinstance(request, pb.PodSandboxHookRequest):
        return pb.PodSandboxHookResponse(
            labels=request.labels,
            annotations=request.annotations,
            cgroup_parent=request.cgroup_parent,
            resources=request.resources,
        )
    return pb.ContainerResourceHookResponse(
        container_annotations=request.container_annotations,
        container_resources=request.container_resources,
        pod_cgroup_parent=request.pod_cgroup_parent,
        container_envs=request.container_envs,
    )


class HookServer:
    """A server with answers that a test sets; ``answer`` returns a message, or arbitrary bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answer: Callable[[Any], Any] = echo
        self.received: list[tuple[str, Any]] = []
        self.let_go = threading.Event()  # ends the wait of hang()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        options = (("grpc.max_receive_message_length", LONGEST), ("grpc.max_send_message_length", LONGEST))
        self._server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(self._handle(name)) for name in METHODS
        }
        generic = grpc.method_handlers_generic_handler("runtime.v1alpha1.RuntimeHookService", handlers)
        self._server.add_generic_rpc_handlers((generic,))
        assert self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def stop(self) -> None:
        self.let_go.set()
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        self.path.unlink(missing_ok=True)

    def hang(self, _request: Any) -> Any:
        self.let_go.wait(60)
        return b""

    def _handle(self, name: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        kind = pb.PodSandboxHookRequest if "PodSandbox" in name else pb.ContainerResourceHookRequest

        def handle(content: bytes, context: grpc.ServicerContext) -> bytes:
            request = kind.FromString(content)
            self.received.append((name, request))
            try:
                answer = self.answer(request)
            except PermissionError as error:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            return answer if isinstance(answer, bytes) else answer.SerializeToString()

        return handle


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HookServer]:
    server = HookServer(tmp_path / "hook.sock")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[[str], HookServer]]:
    """Start more servers, each on its own named socket."""
    started: list[HookServer] = []

    def start(name: str) -> HookServer:
        started.append(HookServer(tmp_path / f"{name}.sock"))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def hook_of(tmp_path: Path) -> Iterator[Callable[..., Hook]]:
    """Make a hook for the server at a socket, and shut all hooks down at the end."""
    made: list[Hook] = []

    def make(
        path: Path,
        name: str = "koordlet",
        *,
        reported: list[str] | None = None,
        timeout: float = 5,
        **more: Any,
    ) -> Hook:
        stages = [method.removesuffix("Hook") for method in METHODS]
        text = json.dumps({"remote-endpoint": str(path), "runtime-hooks": stages})
        sentences: list[str] = [] if reported is None else reported
        file = tmp_path / f"{name}.json"
        hook = server_of(name, file, text.encode(), HooksConfig(timeout=timeout, **more), of_hooks(sentences))
        made.append(hook)
        return hook

    yield make
    for hook in made:
        hook.handlers["shutdown"](None)
