"""Encode the bytes to append to a request to apply the adjustment of hooks.

As in ``proxy.frontends.cri.messages``: if a message occurs twice, the later scalar wins, even if it is
explicitly 0 or empty. The later entry of a map wins too, and lists grow. So a suffix can set every scalar,
set every key of a map, and add to a list, and the original bytes stay unchanged. It cannot remove entries of
a map or a list, nor replace entries of a list: ``hook_adjust`` does that.

Field numbers (CRI v1 and v1alpha2 alike) are in proto/cri/api.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_

from proxy.api.cri import api_pb2 as pb
from proxy.hooks.answers import CLEAR, LEAVE, Adjustment, Presence, Update
from proxy.hooks.facts import Device, Mount
from proxy.wire.protobuf import ONE_BYTE_VARINT_LIMIT, encode_field, encode_varint

_SCALARS = {
    "cpu_period": 1,
    "cpu_quota": 2,
    "cpu_shares": 3,
    "memory_limit": 4,
    "oom_score_adj": 5,
    "memory_swap_limit": 10,
}
_scalars_of = attrgetter(*_SCALARS)
_NO_SCALARS = (LEAVE,) * len(_SCALARS)
_CPUS, _MEMS, _UNIFIED = 6, 7, 9
_ENVS, _MOUNTS, _DEVICES = 6, 7, 8


def resources(wanted: Adjustment | Update) -> bytes:
    """Encode LinuxContainerResources with the fields that are set.

    The client's CPUs and memory nodes can only be erased here: the engine decides which ones the container
    gets, and they are written after this.
    """
    encoded = b""
    scalars = _scalars_of(wanted)
    if not all(map(is_, scalars, _NO_SCALARS)):
        for number, value in zip(_SCALARS.values(), scalars, strict=True):
            if value is not LEAVE:
                # A negative int64 is encoded as the 64 bits of its two's complement.
                encoded += bytes((number << 3,)) + encode_varint(0 if value is CLEAR else value % (1 << 64))
    if wanted.cpus is CLEAR:
        encoded += encode_field(_CPUS, b"")
    if isinstance(wanted, Adjustment) and wanted.mems is CLEAR:
        encoded += encode_field(_MEMS, b"")
    return encoded + entries(_UNIFIED, wanted.unified) if wanted.unified else encoded


def entries(number: int, wanted: Mapping[str, str] | Mapping[str, str | Presence]) -> bytes:
    """Encode the entries of a map that are set; a field of this number for each."""
    encoded = b""
    for key, value in wanted.items():
        if isinstance(value, str):
            encoded += encode_field(number, _entry(key.encode(), value.encode()))
    return encoded


def _entry(key: bytes, value: bytes) -> bytes:
    """Encode an entry of a map or a list of pairs: the key is field 1, the value field 2."""
    if len(key) < ONE_BYTE_VARINT_LIMIT and len(value) < ONE_BYTE_VARINT_LIMIT:  # most entries are
        return b"\x0a%c%b\x12%c%b" % (len(key), key, len(value), value)
    return encode_field(1, key) + encode_field(2, value)


def lists(
    envs: Mapping[str, str | Presence],
    mounts: Mapping[str, Mount | Presence],
    devices: Mapping[str, Device | Presence],
) -> bytes:
    """Encode entries of ContainerConfig's lists, for those that are set."""
    encoded = b""
    for name, value in envs.items():
        if isinstance(value, str):
            encoded += encode_field(_ENVS, _entry(name.encode(), env_bytes(value)))
    for path, mount in mounts.items():
        if isinstance(mount, Mount):
            encoded += encode_field(_MOUNTS, mount_of(path, mount).SerializeToString())
    for path, device in devices.items():
        if isinstance(device, Device):
            encoded += encode_field(_DEVICES, device_of(path, device).SerializeToString())
    return encoded


def env_bytes(value: str) -> bytes:
    """Encode the value of a variable; surrogates become the original bytes that are not UTF-8."""
    return value.encode("utf-8", "surrogateescape")


def mount_of(path: str, mount: Mount) -> pb.Mount:
    """Make the message of a mount.

    Raises:
        ValueError: There is no such propagation.
    """
    return pb.Mount(
        container_path=path,
        host_path=mount.host_path,
        readonly=mount.readonly,
        propagation=f"PROPAGATION_{mount.propagation.upper()}",
    )


def device_of(path: str, device: Device) -> pb.Device:
    """Make the message of a device."""
    return pb.Device(container_path=path, host_path=device.host_path, permissions=device.permissions)
