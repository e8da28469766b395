"""For tests of device plugins: a stand-in for the device manager that plugins register with.

A test needs no node, no root and no kubelet. A whole test::

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> from proxy.device_kit.api import AllocateAnswer, FunctionPlugin, PluginDevice
    >>> from proxy.device_kit.testing import DeviceManager, running

    >>> def cards():
    ...     return [PluginDevice("card0", numa=(0,)), PluginDevice("card1", healthy=False)]
    >>> def files(ids):
    ...     return AllocateAnswer(envs={"CARDS": ",".join(ids)})
    >>> plugin = FunctionPlugin("example.com/card", cards, files)

    >>> directory = Path(mkdtemp())
    >>> with DeviceManager(directory) as manager, running(plugin, directory):
    ...     devices = manager.wait_for("example.com/card", healthy=1)
    ...     answer = manager.allocate("example.com/card", ["card0"])
    >>> devices["card0"].numa, devices["card1"].healthy
    ((0,), False)
    >>> answer.envs
    {'CARDS': 'card0'}

A call that the plugin refuses raises ``AssertionError`` with the plugin's error text.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.device_kit.service import HEALTHY, DevicePlugin, PluginDevice
from proxy.device_kit.serving import MANAGER_SOCKET, VERSION, PluginServer
from proxy.logs import telemetry
from proxy.model.devices import AllocateAnswer, DeviceMount, DeviceNode
from proxy.sockets.grpc_socket import GrpcSocket

__all__ = ["DeviceManager", "running"]

CALL_S = 10.0
A = TypeVar("A", bound=Message)


@contextlib.contextmanager
def running(plugin: DevicePlugin, directory: Path, *, tick_s: float = 0.05) -> Iterator[None]:
    """Serve a plugin while the context lasts.

    Args:
        plugin: The plugin.
        directory: Where the manager listens.
        tick_s: Seconds between two checks for another manager.
    """
    server = PluginServer(plugin, directory, telemetry(), tick_s=tick_s)
    server.start()
    try:
        yield
    finally:
        server.stop()


class DeviceManager:
    """Listens for plugins and follows the devices of each, as kubelet does.

    Attributes:
        registrations: The resources in the order in which plugins registered them.
        refusal: The text with which registrations are refused; empty: they are accepted.
    """

    def __init__(self, directory: Path) -> None:
        """Open nothing yet.

        Args:
            directory: Where it listens, and where plugins create their sockets.
        """
        self.registrations: list[str] = []
        self.refusal = ""
        self._directory = directory
        self._changed = threading.Condition()
        self._devices: dict[str, dict[str, PluginDevice]] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._socket = self._listener()

    def __enter__(self) -> Self:
        self._socket.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def restart(self) -> None:
        """Forget all plugins, remove their sockets, and listen again."""
        self._forget()
        for path in self._directory.iterdir():
            if path.is_socket():
                path.unlink()
        self._socket = self._listener()
        self._socket.open()

    def wait_for(self, resource: str, *, healthy: int, limit_s: float = CALL_S) -> dict[str, PluginDevice]:
        """Wait until a plugin reports a number of healthy devices, and return all of them by id.

        Args:
            resource: The resource.
            healthy: How many healthy devices.
            limit_s: How long to wait, in seconds.

        Raises:
            AssertionError: There are fewer or more after this time.
        """
        with self._changed:
            reached = self._changed.wait_for(lambda: self._healthy(resource) == healthy, limit_s)
            assert reached, f"{resource}: not {healthy} healthy devices: {self._devices.get(resource)}"
            return dict(self._devices[resource])

    def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str] = (), size: int = 1
    ) -> tuple[str, ...]:
        """Return the devices that a plugin prefers; empty if it has no preference."""
        if not self._options(resource).get_preferred_allocation_available:
            return ()
        request = pb.PreferredAllocationRequest(
            container_requests=[
                pb.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
                )
            ]
        )
        answer = self._call(resource, "GetPreferredAllocation", request, pb.PreferredAllocationResponse)
        return tuple(answer.container_responses[0].deviceIDs)

    def allocate(self, resource: str, ids: Sequence[str]) -> AllocateAnswer:
        """Return the fields that a container needs to use devices.

        Raises:
            AssertionError: The plugin refuses.
        """
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        (answer,) = self._call(resource, "Allocate", request, pb.AllocateResponse).container_responses
        return AllocateAnswer(
            dict(answer.envs),
            dict(answer.annotations),
            tuple(DeviceMount(m.host_path, m.container_path, m.read_only) for m in answer.mounts),
            tuple(DeviceNode(d.host_path, d.container_path, d.permissions) for d in answer.devices),
            tuple(name.name for name in answer.cdi_devices),
        )

    def pre_start(self, resource: str, ids: Sequence[str]) -> bool:
        """Make a plugin prepare devices; return False if it did not request that call.

        Raises:
            AssertionError: The plugin refuses.
        """
        if not self._options(resource).pre_start_required:
            return False
        request = pb.PreStartContainerRequest(devices_ids=ids)
        self._call(resource, "PreStartContainer", request, pb.PreStartContainerResponse)
        return True

    # -- plugins -----------------------------------------------------------------------------------------

    def _healthy(self, resource: str) -> int | None:
        devices = self._devices.get(resource)
        return None if devices is None else sum(device.healthy for device in devices.values())

    def _options(self, resource: str) -> pb.DevicePluginOptions:
        return self._call(resource, "GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions)

    def _call(self, resource: str, method: str, request: Message, answer: type[A]) -> A:
        with self._changed:
            channel = self._channels[resource]
        call: Any = channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        try:
            found: A = call(request, timeout=CALL_S)
        except grpc.RpcError as error:
            raise AssertionError(f"{method}: {getattr(error, 'details', error.__str__)()}") from None
        return found

    def _register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        if self.refusal or request.version != VERSION:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal or "unsupported version")
        resource = request.resource_name
        channel = grpc.insecure_channel(f"unix:{self._directory / request.endpoint}")
        with self._changed:
            old, self._channels[resource] = self._channels.get(resource), channel
            self.registrations.append(resource)
            self._changed.notify_all()
        if old is not None:
            old.close()
        threading.Thread(target=self._follow, args=(resource, channel), daemon=True).start()
        return pb.Empty()

    def _follow(self, resource: str, channel: grpc.Channel) -> None:
        """Record the devices of a plugin until its stream ends."""
        watch: Any = channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        with contextlib.suppress(grpc.RpcError, ValueError):  # the stream ended, or the channel was closed
            for answer in watch(pb.Empty()):
                devices = {
                    device.ID: PluginDevice(
                        device.ID,
                        device.health == HEALTHY,
                        tuple(node.ID for node in device.topology.nodes),
                    )
                    for device in answer.devices
                }
                with self._changed:
                    self._devices[resource] = devices
                    self._changed.notify_all()

    def _listener(self) -> GrpcSocket:
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            self._register,
            request_deserializer=pb.RegisterRequest.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        return GrpcSocket(
            self._directory / MANAGER_SOCKET,
            "register device plugins",
            "v1beta1.Registration",
            lambda: {"Register": handler},
            threads=2,
            max_requests=8,
            grace_s=0,
            close_timeout_s=CALL_S,
        )

    def _forget(self) -> None:
        self._socket.close()
        with self._changed:
            channels, self._channels, self._devices = self._channels, {}, {}
        for channel in channels.values():
            channel.close()
