"""Apply the adjustment of hooks to a request, and change nothing else in it.

Changes that a suffix can express are appended (``hook_suffix``). A suffix cannot remove a key from a map, nor
replace or remove an entry of a list: a variable, a mount, a device. Usually there is no such entry, because
the bytes of its name are nowhere in the request. Otherwise the request is decoded, changed in place, and
encoded again. So it keeps unknown fields, and the order and bytes of all variables that no hook has changed.
(Koordinator's proxy makes a new list of variables from a map in each create, in any order and without
duplicates: Koordinator v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go, transferToCRIContainerEnvs.)

A variable, mount or device that is replaced stays at its place, and its duplicates are removed; a new one
comes last. Mounts and devices are equal if their paths in the container are equal after normalization. A
mount of the same host path keeps the fields that hooks do not know, such as SELinux relabelling and id
mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSequence
from typing import Any

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri import hook_suffix as suffix
from proxy.hooks.answers import CLEAR, LEAVE, Adjustment, Presence
from proxy.hooks.facts import Device, Mount
from proxy.model.errors import HookError
from proxy.wire.container_path import container_path
from proxy.wire.protobuf import decode_entry, decode_text, encode_field

_LABELS, _ANNOTATIONS, _LINUX = 9, 10, 15
"""Fields of ContainerConfig."""
_NOT_RECURSIVE = b"\x40\x00"
"""``Mount.recursive_read_only``, which the CRI permits only for a private mount that is read-only: false."""


def adjusted_create(body: bytes, adjustment: Adjustment) -> bytes:
    """Change a CreateContainerRequest; its CPUs and memory nodes are left to the engine.

    Args:
        body: The request.
        adjustment: The merged changes of all hooks.

    Raises:
        HookError: A field of the adjustment cannot be written, or the request cannot be read.
    """
    try:
        return _create(body, adjustment)
    except (DecodeError, ValueError) as error:
        raise _failed("CreateContainer", error) from error


def adjusted_run_pod(body: bytes, adjustment: Adjustment) -> bytes:
    """Change a RunPodSandboxRequest: labels, annotations, the cgroup parent; as ``adjusted_create``."""
    try:
        return _run_pod(body, adjustment)
    except (DecodeError, ValueError) as error:
        raise _failed("RunPodSandbox", error) from error


def adjusted_update(body: bytes, adjustment: Adjustment) -> bytes:
    """Change an UpdateContainerResourcesRequest: resources and annotations; as ``adjusted_create``."""
    try:
        return _update(body, adjustment)
    except (DecodeError, ValueError) as error:
        raise _failed("UpdateContainerResources", error) from error


def _failed(method: str, error: Exception) -> HookError:
    return HookError(f"cannot change a {method} request to what hooks want: {error}")


def _create(body: bytes, want: Adjustment) -> bytes:
    mounts = _by_path(want.mounts) if want.mounts else {}
    devices = _by_path(want.devices) if want.devices else {}
    lists = bool(want.envs or mounts or devices)
    in_lists = lists and (
        _may_hold(body, want.envs) or _may_hold_paths(body, mounts) or _may_hold_paths(body, devices)
    )
    cleared = _may_clear(body, want.unified, want.annotations, want.labels)
    if cleared or in_lists:
        request = pb.CreateContainerEntries.FromString(body)
        config = request.config
        if cleared:
            _remove_cleared(config.linux.resources.unified, want.unified)
            _remove_cleared(config.annotations, want.annotations)
            _remove_cleared(config.labels, want.labels)
        if in_lists:
            _set_entries(config.envs, want.envs, _name, _env)
            _set_entries(config.mounts, mounts, _path, _mount)
            _set_entries(config.devices, devices, _path, _device)
        body = request.SerializeToString()
    tail = suffix.lists(want.envs, mounts, devices) if lists and not in_lists else b""
    if want.labels:
        tail += suffix.entries(_LABELS, want.labels)
    if want.annotations:
        tail += suffix.entries(_ANNOTATIONS, want.annotations)
    if resources := suffix.resources(want):
        tail += encode_field(_LINUX, encode_field(1, resources))
    return body + encode_field(2, tail) if tail else body


def _run_pod(body: bytes, want: Adjustment) -> bytes:
    if _may_clear(body, want.labels, want.annotations):
        request = pb.RunPodSandboxEntries.FromString(body)
        _remove_cleared(request.config.labels, want.labels)
        _remove_cleared(request.config.annotations, want.annotations)
        body = request.SerializeToString()
    tail = suffix.entries(6, want.labels) + suffix.entries(7, want.annotations)
    if want.cgroup_parent is not LEAVE:
        parent = "" if want.cgroup_parent is CLEAR else want.cgroup_parent
        tail += encode_field(8, encode_field(1, parent.encode()))
    return body + encode_field(1, tail) if tail else body


def _update(body: bytes, want: Adjustment) -> bytes:
    if _may_clear(body, want.unified, want.annotations):
        request = pb.UpdateContainerResourcesEntries.FromString(body)
        _remove_cleared(request.linux.unified, want.unified)
        _remove_cleared(request.annotations, want.annotations)
        body = request.SerializeToString()
    resources = suffix.resources(want)
    tail = encode_field(2, resources) if resources else b""
    return body + tail + suffix.entries(4, want.annotations)


# -- changes that a suffix cannot express -------------------------------------------------------------------


def _may_clear(body: bytes, *wanted: Mapping[str, str | Presence]) -> bool:
    """Return whether the request may contain a key that must be removed from a map."""
    for each in wanted:
        for key, value in each.items():
            if value is CLEAR and key.encode() in body:
                return True
    return False


def _may_hold(body: bytes, names: Iterable[str]) -> bool:
    """Return whether the request may contain a name."""
    return any(name.encode() in body for name in names)


def _may_hold_paths(body: bytes, paths: Iterable[str]) -> bool:
    """Return whether the request may have an entry for a path, in any spelling.

    Every spelling of a path contains its last name.
    """
    return _may_hold(body, [path.rpartition("/")[2] for path in paths])


def _remove_cleared(entries: MutableSequence[bytes], wanted: Mapping[str, str | Presence]) -> None:
    gone = {key.encode() for key, value in wanted.items() if value is CLEAR}
    for index in reversed(range(len(entries))):
        if (entry := decode_entry(entries[index])) is not None and entry.key in gone:
            del entries[index]


def _set_entries(
    entries: MutableSequence[bytes],
    wanted: Mapping[str, Any],
    name_of: Callable[[bytes], str],
    encode: Callable[[bytes, str, Any], bytes],
) -> None:
    """Set and remove entries of a list, in place.

    Args:
        entries: The list, of a message, with its entries encoded.
        wanted: Name to value, or ``CLEAR``.
        name_of: Returns the name of an encoded entry.
        encode: Takes an encoded entry (empty for a new one), its name and value; returns the entry to store.
    """
    placed: set[str] = set()
    gone: list[int] = []
    for index, entry in enumerate(entries):
        name = name_of(entry)
        if name not in wanted:
            continue
        if wanted[name] is CLEAR or name in placed:
            gone.append(index)
        else:
            entries[index] = encode(entry, name, wanted[name])
            placed.add(name)
    for index in reversed(gone):
        del entries[index]
    for name, value in wanted.items():
        if value is not CLEAR and name not in placed:
            entries.append(encode(b"", name, value))


def _name(raw: bytes) -> str:
    return decode_text(pb.Entry.FromString(raw).key)


def _path(raw: bytes) -> str:
    return container_path(decode_text(pb.PathFacts.FromString(raw).container_path))


def _by_path(wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {container_path(path): value for path, value in wanted.items()}


def _env(raw: bytes, name: str, value: str) -> bytes:
    entry = pb.Entry.FromString(raw)
    entry.key, entry.value = name.encode(), suffix.env_bytes(value)
    return entry.SerializeToString()


def _mount(raw: bytes, path: str, mount: Mount) -> bytes:
    wanted_mount = suffix.mount_of(path, mount)
    if decode_text(pb.PathFacts.FromString(raw).host_path) != mount.host_path:
        return wanted_mount.SerializeToString()
    entry = pb.Mount.FromString(raw)
    entry.container_path, entry.readonly, entry.propagation = (
        path,
        wanted_mount.readonly,
        wanted_mount.propagation,
    )
    recursive = entry.readonly and entry.propagation == pb.PROPAGATION_PRIVATE
    return entry.SerializeToString() + (b"" if recursive else _NOT_RECURSIVE)


def _device(_raw: bytes, path: str, device: Device) -> bytes:
    return suffix.device_of(path, device).SerializeToString()
