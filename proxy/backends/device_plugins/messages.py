"""Messages of device plugins as values: accepted as kubelet accepts them, but within limits.

Messages of a plugin are untrusted input. kubelet accepts nearly all of them (kubernetes v1.36
pkg/kubelet/cm/devicemanager/manager.go). Values that kubelet accepts silently, but that cannot be intended,
are refused here, with the reason: ids that contradict each other, answers for another number of containers,
devices that were not offered, paths that are not absolute, and messages of a size that no honest plugin
needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from proxy.allocation.devices.state import RegisteredDevice
from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.model.devices import AllocateAnswer, DeviceMount, DeviceNode
from proxy.model.idset import Mask
from proxy.model.quoting import quoted

if TYPE_CHECKING:
    M = TypeVar("M", bound=Message)

MESSAGE_LIMIT_BYTES: Final = 4 << 20
"""The most bytes of a message, as in kubelet's client (the default of grpc-go)."""
ANSWER_LIMIT_BYTES: Final = 256 << 10
"""The most bytes of an answer; the answer to Allocate becomes a part of a request, and is kept."""
DEVICES_LIMIT: Final = 16_384
"""The most devices of a resource."""
ID_LIMIT: Final = 256
"""The most characters of a device's id. The interface specifies 63, which kubelet does not check."""
ENTRIES_LIMIT: Final = 1024
"""The most entries of one kind in an answer to Allocate."""
_HEALTHY = "Healthy"
_HIGHEST_NODE = 1023


class PluginAnswerError(ValueError):
    """A plugin has sent an answer that cannot be used; the text names the reason."""


def read_devices(content: bytes) -> dict[str, RegisteredDevice]:
    """Read a list of ListAndWatch: device id to device.

    Raises:
        PluginAnswerError: The list cannot be used.
    """
    listed = _decoded(pb.ListAndWatchResponse, content).devices
    if len(listed) > DEVICES_LIMIT:
        raise PluginAnswerError(f"it lists {len(listed)} devices (the most is {DEVICES_LIMIT})")
    devices: dict[str, RegisteredDevice] = {}
    for entry in listed:
        name = entry.ID
        if not 0 < len(name) <= ID_LIMIT:
            raise PluginAnswerError(f"it lists a device whose id has {len(name)} characters")
        device = RegisteredDevice(name, _nodes(entry), entry.health == _HEALTHY)
        if devices.setdefault(name, device) != device:
            raise PluginAnswerError(f"it lists the device {quoted(name)} twice, with different values")
    return devices


def _nodes(device: pb.Device) -> Mask | None:
    """Return the NUMA nodes; None if there is no topology. -1, sysfs' value for no node, is left out."""
    if not device.HasField("topology"):
        return None
    return Mask(node.ID for node in device.topology.nodes if 0 <= node.ID <= _HIGHEST_NODE)


def read_options(content: bytes) -> tuple[bool, bool]:
    """Read the options of a plugin: whether it has preferences, and whether it is called before starts.

    Raises:
        PluginAnswerError: The answer is too large, or cannot be decoded.
    """
    _check_size(content, ANSWER_LIMIT_BYTES)
    options = _decoded(pb.DevicePluginOptions, content)
    return options.get_preferred_allocation_available, options.pre_start_required


def preference_request(available: Collection[str], must_include: Collection[str], size: int) -> bytes:
    """Write a request for the preference of a plugin."""
    requested = pb.ContainerPreferredAllocationRequest(
        available_deviceIDs=sorted(available),
        must_include_deviceIDs=sorted(must_include),
        allocation_size=size,
    )
    return pb.PreferredAllocationRequest(container_requests=[requested]).SerializeToString()


def read_preference(content: bytes, available: Collection[str], size: int) -> tuple[str, ...]:
    """Read the preference of a plugin; empty if it has none.

    Raises:
        PluginAnswerError: The answer is too large, or names a device that was not offered, or the same device
            twice, or too many devices.
    """
    _check_size(content, max(ANSWER_LIMIT_BYTES, 4 * ID_LIMIT * size))  # a character has up to 4 bytes
    answers = _decoded(pb.PreferredAllocationResponse, content).container_responses
    if len(answers) > 1:
        raise PluginAnswerError(f"it answers for {len(answers)} containers, and one was requested")
    ids = tuple(answers[0].deviceIDs) if answers else ()
    if len(ids) > size:
        raise PluginAnswerError(f"it prefers {len(ids)} devices, and {size} were requested")
    if len(set(ids)) < len(ids):
        raise PluginAnswerError("it prefers a device twice")
    if strange := next((name for name in ids if name not in available), None):
        raise PluginAnswerError(f"it prefers {quoted(strange)}, which was not offered")
    return ids


def allocate_request(ids: Iterable[str]) -> bytes:
    """Write a request for the settings that one container needs to use devices."""
    requested = pb.ContainerAllocateRequest(devices_ids=ids)
    return pb.AllocateRequest(container_requests=[requested]).SerializeToString()


def pre_start_request(ids: Iterable[str]) -> bytes:
    """Write a request to prepare the devices of a container."""
    return pb.PreStartContainerRequest(devices_ids=ids).SerializeToString()


def read_allocation(content: bytes) -> AllocateAnswer:
    """Read the settings that a container needs to use its devices.

    Raises:
        PluginAnswerError: The answer is not for one container, is too large, or contains impossible values.
    """
    _check_size(content, ANSWER_LIMIT_BYTES)
    answers = _decoded(pb.AllocateResponse, content).container_responses
    if len(answers) != 1:
        raise PluginAnswerError(f"it answers for {len(answers)} containers, and one was requested")
    return _container_answer(answers[0])


def read_container_answer(content: bytes) -> AllocateAnswer:
    """Read the answer for one container, in the form of kubelet's checkpoint.

    Raises:
        PluginAnswerError: The answer cannot be decoded, or contains impossible values.
    """
    return _container_answer(_decoded(pb.ContainerAllocateResponse, content))


def _container_answer(answer: pb.ContainerAllocateResponse) -> AllocateAnswer:
    for kind in ("envs", "annotations", "mounts", "devices", "cdi_devices"):
        if (count := len(getattr(answer, kind))) > ENTRIES_LIMIT:
            raise PluginAnswerError(f"its answer has {count} {kind} (the most is {ENTRIES_LIMIT})")
    return AllocateAnswer(
        envs=_pairs("environment variable", answer.envs, "="),
        annotations=_pairs("annotation", answer.annotations),
        mounts=tuple(
            DeviceMount(_path("mount", m.host_path), _path("mount", m.container_path), m.read_only)
            for m in answer.mounts
        ),
        devices=tuple(map(_device_file, answer.devices)),
        cdi=tuple(_cdi_name(device.name) for device in answer.cdi_devices),
    )


def _pairs(kind: str, pairs: Mapping[str, str], barred: str = "") -> dict[str, str]:
    for name, value in pairs.items():
        if not name or "\0" in name or "\0" in value or (barred and barred in name):
            raise PluginAnswerError(f"its answer has an impossible {kind}, {quoted(name)}")
    return dict(pairs)


def _path(kind: str, path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise PluginAnswerError(f"its answer has a {kind} at {quoted(path)}, which is not an absolute path")
    return path


def _device_file(device: pb.DeviceSpec) -> DeviceNode:
    if not set(device.permissions) <= set("rwm"):
        raise PluginAnswerError(f"its answer has the permissions {quoted(device.permissions)} (r, w and m)")
    host, container = _path("device", device.host_path), _path("device", device.container_path)
    return DeviceNode(host, container, device.permissions)


def _cdi_name(name: str) -> str:
    kind, _, device = name.partition("=")
    if "/" not in kind or not device or "\0" in name:
        raise PluginAnswerError(
            f"its answer has the CDI name {quoted(name)}, not one as vendor.com/class=name"
        )
    return name


def _check_size(content: bytes, most: int) -> None:
    """Refuse an answer that would take long to decode."""
    if len(content) > most:
        raise PluginAnswerError(f"its answer has {len(content)} bytes (the most is {most})")


def _decoded(kind: type[M], content: bytes) -> M:
    message: Any = kind
    try:
        decoded: M = message.FromString(content)
    except DecodeError:
        raise PluginAnswerError(f"its message cannot be decoded as {kind.__name__}") from None
    return decoded
