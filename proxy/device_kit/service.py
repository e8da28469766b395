"""A device plugin: the class that its author writes, and its gRPC service (v1beta1.DevicePlugin).

``devices`` of the plugin is called on a timer. If the list differs from the last one, it is sent to the
stream of ListAndWatch. There is one stream: when a manager connects again, the new stream replaces the
previous one, which may not have been closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
from msgspec import Struct
from msgspec.structs import replace

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.model.devices import AllocateAnswer
from proxy.telemetry.port import Telemetry

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"

ACCESS = "rw"
"""The access to a device file if the author names none."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class PluginDevice(Struct, frozen=True):
    """A device that a plugin reports.

    Attributes:
        id: Unique within the resource.
        healthy: An unhealthy device is not assigned to a container; a container that has it keeps it.
        numa: The NUMA nodes near the device; empty if they are unknown.
    """

    id: str
    healthy: bool = True
    numa: tuple[int, ...] = ()


class DevicePlugin:
    """A device plugin: a subclass sets ``resource`` and defines ``devices``; everything else is optional.

    The methods run in threads of the kit, several of them at a time. An exception is logged and answered as
    an error, and the plugin continues.

    Attributes:
        resource: The resource, with a domain: ``example.com/vf``.
        period_s: How often ``devices`` is called, in seconds.
    """

    resource: str = ""
    period_s: float = 5.0

    def devices(self) -> Iterable[PluginDevice]:
        """Return all devices, healthy or not. While this raises, all known devices are reported unhealthy."""
        raise NotImplementedError

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        """Return the fields that a container needs to use these devices, which are known and healthy."""
        del ids
        return AllocateAnswer()

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """Return the devices that fit together best; a plugin without this method has no preference.

        Args:
            available: Ids to choose from.
            must_include: Ids that must be in the answer.
            size: How many ids to return.
        """
        raise NotImplementedError

    def pre_start(self, ids: Sequence[str]) -> None:
        """Prepare devices before each start of the container that has them; optional."""
        raise NotImplementedError

    @property
    def offers_preference(self) -> bool:
        """Whether the plugin defines ``preferred``."""
        return type(self).preferred is not DevicePlugin.preferred

    @property
    def needs_pre_start(self) -> bool:
        """Whether the plugin defines ``pre_start``."""
        return type(self).pre_start is not DevicePlugin.pre_start


class FunctionPlugin(DevicePlugin):
    """A device plugin made of two functions, if it needs no preference and no preparation."""

    def __init__(
        self,
        resource: str,
        devices: Callable[[], Iterable[PluginDevice]],
        allocate: Callable[[Sequence[str]], AllocateAnswer] | None = None,
    ) -> None:
        """Make a plugin of functions.

        Args:
            resource: The resource, with a domain.
            devices: Returns all devices.
            allocate: Returns the fields that a container needs to use devices; None if it needs none.
        """
        self.resource = resource
        self._devices = devices
        self._allocate = allocate

    def devices(self) -> Iterable[PluginDevice]:
        """Return the devices that the function returns."""
        return self._devices()

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        """Return the answer of the function."""
        return AllocateAnswer() if self._allocate is None else self._allocate(ids)


class DeviceUnavailableError(Exception):
    """A manager requests a device that the plugin does not have, or that is unhealthy."""


class PluginService:
    """Answers a device manager for one plugin; safe to use from several threads."""

    def __init__(self, plugin: DevicePlugin, telemetry: Telemetry) -> None:
        """Start without devices.

        Args:
            plugin: The plugin of the author.
            telemetry: Reports faults of the plugin.
        """
        self._plugin = plugin
        self._telemetry = telemetry
        self._changed = threading.Condition()
        self._devices: dict[str, PluginDevice] = {}
        self._version = 0
        self._stream = 0
        self._watched = False
        self._quiet_since = time.monotonic()

    def refresh(self) -> None:
        """Call the plugin's ``devices``; a list that differs from the last one is sent to the manager."""
        problem = {"resource": self._plugin.resource}
        try:
            devices = _by_id(self._plugin.devices())
        except Exception as error:  # noqa: BLE001  # the author's code may raise anything
            self._telemetry.problem("cannot list devices", **problem, err=error)
            devices = {name: replace(device, healthy=False) for name, device in self._devices.items()}
        else:
            self._telemetry.resolved("cannot list devices", **problem)
        with self._changed:
            if devices != self._devices or not self._version:
                self._devices = devices
                self._version += 1
                self._changed.notify_all()

    def unwatched_s(self) -> float:
        """Return for how many seconds no manager has followed the devices; 0 while one does."""
        with self._changed:
            return 0.0 if self._watched else time.monotonic() - self._quiet_since

    def handlers(self) -> Mapping[str, Handler]:
        """Return the methods of the service by name."""
        answers: dict[str, tuple[Callable[[Any], Any], Any]] = {
            "GetDevicePluginOptions": (self._options, pb.Empty),
            "GetPreferredAllocation": (self._preferred, pb.PreferredAllocationRequest),
            "Allocate": (self._allocate, pb.AllocateRequest),
            "PreStartContainer": (self._pre_start, pb.PreStartContainerRequest),
        }
        methods: dict[str, Handler] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, answer),
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (answer, request) in answers.items()
        }
        methods["ListAndWatch"] = grpc.unary_stream_rpc_method_handler(self._watch)
        return methods

    # -- ListAndWatch -------------------------------------------------------------------------------------

    def _watch(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._changed:
            self._stream += 1
            stream_id, sent, self._watched = self._stream, 0, True
            self._changed.notify_all()
        context.add_callback(self._wake)
        try:
            while True:
                with self._changed:
                    while self._version == sent and self._stream == stream_id and context.is_active():
                        self._changed.wait()
                    if self._stream != stream_id or not context.is_active():
                        return
                    sent, devices = self._version, list(self._devices.values())
                yield _listed(devices).SerializeToString()
        finally:
            with self._changed:
                if self._stream == stream_id:
                    self._watched, self._quiet_since = False, time.monotonic()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- calls --------------------------------------------------------------------------------------------

    def _guarded(
        self, method: str, answer: Callable[[Any], Any]
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answered(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return answer(request)
            except DeviceUnavailableError as error:
                code, message = grpc.StatusCode.FAILED_PRECONDITION, str(error)
            except Exception as error:  # noqa: BLE001  # the author's code may raise anything
                code, message = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
            resource = self._plugin.resource
            self._telemetry.warning("cannot answer a call", method=method, resource=resource, err=message)
            context.abort(code, f"device plugin of {resource}: {message}")
            raise AssertionError("abort raises")

        return answered

    def _options(self, _: pb.Empty) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(
            pre_start_required=self._plugin.needs_pre_start,
            get_preferred_allocation_available=self._plugin.offers_preference,
        )

    def _preferred(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        chosen = [
            self._plugin.preferred(
                tuple(each.available_deviceIDs), tuple(each.must_include_deviceIDs), each.allocation_size
            )
            for each in request.container_requests
        ]
        responses = [pb.ContainerPreferredAllocationResponse(deviceIDs=ids) for ids in chosen]
        return pb.PreferredAllocationResponse(container_responses=responses)

    def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        requests = [tuple(container.devices_ids) for container in request.container_requests]
        for ids in requests:
            self._require(ids)
        answers = [_allocated(self._plugin.allocate(ids)) for ids in requests]
        return pb.AllocateResponse(container_responses=answers)

    def _pre_start(self, request: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        self._plugin.pre_start(tuple(request.devices_ids))
        return pb.PreStartContainerResponse()

    def _require(self, ids: Sequence[str]) -> None:
        """Check that the devices are known and healthy.

        Raises:
            DeviceUnavailableError: A device is unknown or unhealthy.
        """
        for name in ids:
            device = self._devices.get(name)
            if device is None or not device.healthy:
                state = "there is no such device" if device is None else "it is unhealthy"
                raise DeviceUnavailableError(f"cannot give device {name}: {state}")


def _by_id(devices: Iterable[PluginDevice]) -> dict[str, PluginDevice]:
    """Return devices by id.

    Raises:
        TypeError: One is not a device.
        ValueError: Two devices have the same id, a device has none, or one cannot be sent to a manager.
    """
    listed = list(devices)
    for device in listed:
        _check(device)
    by_id = {device.id: device for device in listed}
    if len(by_id) != len(listed) or "" in by_id:
        raise ValueError("each device needs an id of its own")
    return by_id


def _check(device: PluginDevice) -> None:
    """Check the types of a device that the author's code has made: msgspec does not.

    Raises:
        TypeError: It is not a device.
        ValueError: It cannot be sent to a manager.
    """
    if not isinstance(device, PluginDevice):
        raise TypeError(f"devices() must return PluginDevice objects, not {device!r}")
    numa: object = device.numa
    if not isinstance(numa, tuple | list) or any(type(node) is not int or node < 0 for node in numa):
        raise ValueError(
            f"numa of device {device.id!r} must be a tuple of numbers such as (0,), not {numa!r}"
        )
    try:
        _message(device)
    except (TypeError, ValueError) as error:
        raise ValueError(f"device {device.id!r} cannot be sent to a manager: {error}") from error


def _message(device: PluginDevice) -> pb.Device:
    nodes = [pb.NUMANode(ID=node) for node in device.numa]
    return pb.Device(
        ID=device.id,
        health=HEALTHY if device.healthy else UNHEALTHY,
        topology=pb.TopologyInfo(nodes=nodes) if nodes else None,
    )


def _listed(devices: Iterable[PluginDevice]) -> pb.ListAndWatchResponse:
    return pb.ListAndWatchResponse(devices=[_message(device) for device in devices])


def _allocated(answer: AllocateAnswer) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(
        envs=answer.envs,
        annotations=answer.annotations,
        mounts=[
            pb.Mount(container_path=m.container_path, host_path=m.host_path, read_only=m.read_only)
            for m in answer.mounts
        ],
        devices=[
            pb.DeviceSpec(
                container_path=d.container_path, host_path=d.host_path, permissions=d.permissions or ACCESS
            )
            for d in answer.devices
        ],
        cdi_devices=[pb.CDIDevice(name=name) for name in answer.cdi],
    )
