"""A device plugin that a test plays: a real gRPC server on a unix socket, which can misbehave."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from proxy.api.kubelet import deviceplugin_pb2 as pb

SERVICE, REGISTRATION = "v1beta1.DevicePlugin", "/v1beta1.Registration/Register"


def device(name: str, *nodes: int, healthy: bool = True) -> pb.Device:
    """Describe a device; without NUMA nodes it has no topology."""
    made = pb.Device(ID=name, health="Healthy" if healthy else "Unhealthy")
    if nodes:
        made.topology.nodes.extend(pb.NUMANode(ID=node) for node in nodes)
    return made


def allocated(*ids: str) -> pb.AllocateResponse:
    """Answer to Allocate with an environment variable and a device file for each device."""
    answer = pb.ContainerAllocateResponse(envs={"DEVICES": ",".join(ids)})
    for name in ids:
        answer.devices.add(host_path=f"/dev/{name}", container_path=f"/dev/{name}", permissions="rw")
    return pb.AllocateResponse(container_responses=[answer])


class ScriptedPlugin:
    """A plugin of one resource.

    Attributes:
        devices: The devices that it lists to each new client of ListAndWatch.
        allocate: Answers Allocate; gets the ids, and may raise, wait, or return bytes.
        prefer: Answers GetPreferredAllocation; gets the request for the container.
        options: Answers GetDevicePluginOptions.
        pre_start: Called with the ids of PreStartContainer.
        hanging: As long as it is clear, no call is answered.
        calls: The names of the calls that have arrived.
    """

    def __init__(
        self,
        directory: Path,
        devices: Iterable[pb.Device],
        resource: str = "example.com/dev",
        name: str = "plugin.sock",
    ) -> None:
        self.path, self.resource = directory / name, resource
        self.devices = list(devices)
        self.allocate: Callable[[list[str]], Any] = lambda ids: allocated(*ids)
        self.prefer: Callable[[Any], Any] = lambda request: pb.PreferredAllocationResponse()
        self.options: Callable[[], Any] = pb.DevicePluginOptions
        self.pre_start: Callable[[list[str]], Any] = lambda ids: None
        self.hanging = threading.Event()
        self.hanging.set()
        self.calls: list[str] = []
        self._streams: list[queue.SimpleQueue[bytes | None]] = []
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def start(self) -> ScriptedPlugin:
        """Serve on the socket; one that is there is replaced."""
        self.stop()  # gRPC removes the path of a server that ends, even if another one has it by then
        self.path.unlink(missing_ok=True)
        self._server = server = grpc.server(ThreadPoolExecutor(8))
        unary = grpc.unary_unary_rpc_method_handler
        handlers: dict[str, Any] = {
            "GetDevicePluginOptions": unary(self._method("GetDevicePluginOptions", self._options)),
            "GetPreferredAllocation": unary(self._method("GetPreferredAllocation", self._prefer)),
            "Allocate": unary(self._method("Allocate", self._allocate)),
            "PreStartContainer": unary(self._method("PreStartContainer", self._pre_start)),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        assert server.add_insecure_port(f"unix:{self.path}")
        server.start()
        return self

    def stop(self) -> None:
        """End at once, as a killed process does; the socket stays."""
        self.hanging.set()
        self.end_lists()
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def register(
        self, socket: Path, version: str = "v1beta1", endpoint: str | None = None, timeout: float = 30.0
    ) -> None:
        """Register at a server; raises grpc.RpcError."""
        request = pb.RegisterRequest(
            version=version,
            endpoint=self.path.name if endpoint is None else endpoint,
            resource_name=self.resource,
        )
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call: Any = channel.unary_unary(REGISTRATION)
            call(request.SerializeToString(), timeout=timeout, wait_for_ready=True)

    def update(self, *devices: pb.Device) -> None:
        """List other devices from now on."""
        self.devices = list(devices)
        self.send(pb.ListAndWatchResponse(devices=self.devices).SerializeToString())

    def send(self, content: bytes) -> None:
        """Send any message to those that listen."""
        with self._lock:
            for stream in self._streams:
                stream.put(content)

    def end_lists(self) -> None:
        """End the streams of all that listen."""
        with self._lock:
            for stream in self._streams:
                stream.put(None)
            self._streams.clear()

    def _list(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.calls.append("ListAndWatch")
        self.hanging.wait()
        stream: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with self._lock:
            self._streams.append(stream)
        if not context.add_callback(lambda: stream.put(None)):
            return  # the client has left already
        yield pb.ListAndWatchResponse(devices=self.devices).SerializeToString()
        while (content := stream.get()) is not None:
            yield content

    def _method(self, name: str, answer: Callable[[bytes], Any]) -> Callable[[bytes, Any], bytes]:
        def answered(content: bytes, context: grpc.ServicerContext) -> bytes:
            self.calls.append(name)
            self.hanging.wait()
            try:
                found = answer(content)
            except RuntimeError as error:
                context.abort(grpc.StatusCode.UNKNOWN, str(error))
            if found is None:
                return b""
            return found if isinstance(found, bytes) else bytes(found.SerializeToString())

        return answered

    def _options(self, _: bytes) -> Any:
        return self.options()

    def _prefer(self, content: bytes) -> Any:
        return self.prefer(pb.PreferredAllocationRequest.FromString(content).container_requests[0])

    def _allocate(self, content: bytes) -> Any:
        return self.allocate(list(pb.AllocateRequest.FromString(content).container_requests[0].devices_ids))

    def _pre_start(self, content: bytes) -> Any:
        return self.pre_start(list(pb.PreStartContainerRequest.FromString(content).devices_ids))
