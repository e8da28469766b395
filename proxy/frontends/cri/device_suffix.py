"""Encode the bytes to append to a CreateContainerRequest so that the container can use its devices.

Theory. Each variable, annotation, mount and device file has one owner, as with hooks
(``proxy.hooks.engine.claims``): the first that sets it. The request comes first, then the plugins in the
order of their resources. Another plugin may set it only to the same value; otherwise the create is refused.
kubelet logs such a conflict and takes one of the values (kubernetes v1.36,
pkg/kubelet/cm/devicemanager/pod_devices.go ``deviceRunContainerOptions``), so the container runs with only
half of the settings that two plugins want. CDI names are a set: a name that is present is not added.

Mounts and device files are equal if their paths in the container are equal after normalization.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from proxy.api.cri import api_pb2 as pb
from proxy.model.devices import AllocateAnswer, DeviceField
from proxy.model.errors import DeviceConflictError
from proxy.wire.container_path import container_path
from proxy.wire.protobuf import decode_entry, decode_message, decode_text, encode_field

_REQUEST = "the request"
Value = tuple[object, ...]


class AddedDevices(Struct, frozen=True):
    """The additions of device plugins to a request.

    Attributes:
        suffix: The bytes to append to the request.
        fields: The fields that plugins have set, by the names of ``FieldClaims``.
    """

    suffix: bytes
    fields: Mapping[str, DeviceField]


def plugin_name(resource: str) -> str:
    """Return the name of a plugin in messages."""
    return f"the device plugin of {resource}"


def device_suffix(body: bytes, answers: Mapping[str, AllocateAnswer]) -> AddedDevices:
    """Return the additions of plugins to a request.

    Args:
        body: The request.
        answers: The answers of the plugins to Allocate, by resource.

    Raises:
        DeviceConflictError: Two plugins, or a plugin and the request, set different values; both are named.
        DecodeError: The request cannot be read.
    """
    config = pb.CreateContainerFacts.FromString(body).config
    entries = pb.CreateContainerEntries.FromString(body).config
    known: dict[str, tuple[str, Value]] = {}
    for name, value in _requested(entries):
        known[name] = (_REQUEST, value)
    cdi = {decode_text(pb.CDIDeviceFacts.FromString(raw).name) for raw in config.CDI_devices}
    added, fields = pb.ContainerConfig(), dict[str, DeviceField]()
    for resource, answer in answers.items():
        owner = plugin_name(resource)
        for name, value in _wanted(answer):
            owned, known_value = known.setdefault(name, (owner, value))
            if known_value != value:
                raise DeviceConflictError(f"{owned} and {owner} set {name} differently")
            if owned == owner and name not in fields:
                fields[name] = DeviceField(owner, value)
                _add(added, name, value)
        for device in answer.cdi:
            if device not in cdi:
                cdi.add(device)
                added.CDI_devices.add(name=device)
    suffix = added.SerializeToString()
    return AddedDevices(encode_field(2, suffix) if suffix else b"", fields)


def path_field(kind: str, path: str) -> str:
    """Return the name of a mount or a device file as a field, with its path as the runtimes spell it."""
    return f"{kind}[{container_path(path)}]"


def _requested(entries: pb.ContainerEntries) -> Iterator[tuple[str, Value]]:
    """Yield the fields of the request; of two entries in a list the last counts, as at the runtime."""
    yield from _pairs("envs", entries.envs)
    yield from _pairs("annotations", entries.annotations)
    for raw in entries.mounts:
        mount = decode_message(pb.Mount, raw)
        yield path_field("mounts", mount.container_path), (mount.host_path, mount.readonly)
    for raw in entries.devices:
        device = decode_message(pb.Device, raw)
        yield path_field("devices", device.container_path), (device.host_path, device.permissions)


def _pairs(kind: str, raw: Iterable[bytes]) -> Iterator[tuple[str, Value]]:
    for each in raw:
        if (entry := decode_entry(each)) is not None:
            yield f"{kind}[{decode_text(entry.key)}]", (decode_text(entry.value),)


def _wanted(answer: AllocateAnswer) -> Iterator[tuple[str, Value]]:
    """Yield the fields that a plugin sets."""
    for name, value in answer.envs.items():
        yield f"envs[{name}]", (value,)
    for key, value in answer.annotations.items():
        yield f"annotations[{key}]", (value,)
    for mount in answer.mounts:
        yield path_field("mounts", mount.container_path), (mount.host_path, mount.read_only)
    for device in answer.devices:
        yield path_field("devices", device.container_path), (device.host_path, device.permissions)


def _add(config: pb.ContainerConfig, name: str, value: Value) -> None:
    """Add a field that is not set yet."""
    kind, _, key = name[:-1].partition("[")
    if kind == "envs":
        config.envs.add(key=key, value=str(value[0]).encode("utf-8", "surrogateescape"))
    elif kind == "annotations":
        config.annotations[key] = str(value[0])
    elif kind == "mounts":
        config.mounts.add(container_path=key, host_path=str(value[0]), readonly=bool(value[1]))
    else:
        config.devices.add(container_path=key, host_path=str(value[0]), permissions=str(value[1]))
