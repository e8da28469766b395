"""Reads the checkpoint of kubelet's device manager: the devices that kubelet assigned to containers.

The file ``device-plugins/kubelet_internal_checkpoint`` has one entry for each pod, container and resource:
the device ids by NUMA node (-1: no node; a device of two nodes is listed under both), and the plugin's
answer to Allocate as protobuf (kubernetes v1.36 pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go).
Before Kubernetes 1.20 the ids were a plain list. The checksum is computed as in kubelet's other files
(``checkpoints``), but only over the inner structure, which is passed by value.

A resource moves from kubelet to topoproxy when its plugin registers here. Containers that run at that time
keep the devices that kubelet has assigned to them, so this file is read once for each resource. kubelet keeps
the entries of a pod until the pod is gone, and replaces the file by renaming. While the entries of a resource
cannot be read, the resource is not taken over: otherwise devices that kubelet's containers use would be free
here. A checksum that does not match is only reported, because an edited file may still be correct.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from proxy.backends.device_plugins.messages import PluginAnswerError, read_container_answer
from proxy.backends.kubelet.checkpoints import CheckpointError, fnv1a, lower_case_keys
from proxy.backends.kubelet.small_file import read_small_file
from proxy.engine.held_devices import DeviceRecord, PodDevices
from proxy.executor.device_ports import DevicePluginError
from proxy.model.errors import TopoproxyError
from proxy.pools.go_json import load
from proxy.telemetry.port import Telemetry

DEVICE_STATE_FILE = "device-plugins/kubelet_internal_checkpoint"
FILE_LIMIT_BYTES = 32 << 20
"""The most bytes that the file may have; answers to Allocate are part of it."""
PROBLEM = "cannot take over devices that kubelet has assigned"
_NIL = "<nil>"


class DeviceCheckpoint(Struct, frozen=True):
    """The contents of the file.

    Attributes:
        pods: The devices of the containers of each pod, by uid, container name and resource.
        unread: Why entries cannot be used, one text for each such entry.
        unread_resources: The resources of unusable entries with devices; ``""`` if an entry has no resource.
        has_correct_checksum: Whether the checksum in the file matches its content.
    """

    pods: Mapping[str, PodDevices]
    unread: tuple[str, ...]
    unread_resources: frozenset[str]
    has_correct_checksum: bool


class KubeletDevicesReader:
    """Reads the checkpoint; call it in a thread."""

    def __init__(self, state_dir: str, telemetry: Telemetry) -> None:
        """Set the path; nothing is read yet.

        Args:
            state_dir: kubelet's root directory.
            telemetry: Takes the problems with the file.
        """
        self._path = f"{state_dir}/{DEVICE_STATE_FILE}"
        self._telemetry = telemetry

    def read(self, resource: str) -> Mapping[str, PodDevices]:
        """Return the devices of the containers of each pod; none if there is no file.

        Raises:
            DevicePluginError: The assigned devices of this resource cannot be read.
        """
        try:
            content, _ = read_small_file(self._path, FILE_LIMIT_BYTES)
            checkpoint = read_device_checkpoint(content.decode("utf-8", "replace"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TopoproxyError) as error:
            raise self._unknown(resource, error) from None
        for reason in checkpoint.unread:
            self._telemetry.problem(PROBLEM, path=self._path, err=reason)
        if not checkpoint.has_correct_checksum:
            self._telemetry.problem(
                "took devices over from a checkpoint whose checksum does not match", path=self._path
            )
        if not checkpoint.unread_resources.isdisjoint((resource, "")):
            raise self._unknown(resource, "an entry cannot be read")
        return checkpoint.pods

    def _unknown(self, resource: str, cause: object) -> DevicePluginError:
        self._telemetry.problem(PROBLEM, path=self._path, err=cause)
        message = f"cannot take over {resource}: kubelet's record of its devices cannot be read: {cause}"
        return DevicePluginError(resource, message)


def read_device_checkpoint(content: str) -> DeviceCheckpoint:
    """Read the file.

    Raises:
        CheckpointError: The text is not that of such a file.
    """
    try:
        raw: Any = load(content, largest=None)
        fields = lower_case_keys(raw)
        data = lower_case_keys(fields["data"])
        entries = [lower_case_keys(entry) for entry in data.get("poddeviceentries") or ()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read kubelet's {DEVICE_STATE_FILE}: {error!r}") from None
    pods: dict[str, dict[str, dict[str, DeviceRecord]]] = {}
    unread: list[str] = []
    unread_resources: set[str] = set()
    for entry in entries:
        try:
            uid, name, resource = (str(entry[key]) for key in ("poduid", "containername", "resourcename"))
            record = DeviceRecord(_ids(entry["deviceids"]), read_container_answer(_bytes(entry)))
        except (AttributeError, KeyError, TypeError, ValueError, PluginAnswerError) as error:
            unread.append(f"an entry cannot be read: {error}")
            if entry.get("deviceids"):
                unread_resources.add(str(entry.get("resourcename") or ""))
            continue
        pods.setdefault(uid, {}).setdefault(name, {})[resource] = record
    try:
        has_correct_checksum = fields.get("checksum") == fnv1a(device_checksum_text(data))
    except (AttributeError, KeyError, TypeError, ValueError):
        has_correct_checksum = False
    return DeviceCheckpoint(pods, tuple(unread), frozenset(unread_resources), has_correct_checksum)


def device_checksum_text(data: Mapping[str, Any]) -> str:
    """Return the text whose hash is the checksum.

    Args:
        data: The inner structure, with its keys in lower case.
    """
    entries = data.get("poddeviceentries")
    shown = _NIL if entries is None else f"[{' '.join(_entry(lower_case_keys(each)) for each in entries)}]"
    registered = data.get("registereddevices")
    devices = _NIL if registered is None else _lists(sorted(registered.items()))
    return (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){shown}"
        f" RegisteredDevices:(map[string][]string){devices}}}"
    )


def _entry(entry: Mapping[str, Any]) -> str:
    ids, answer = entry["deviceids"], entry.get("allocresp")
    if isinstance(ids, list):
        raise TypeError("the ids are not by NUMA node")
    nodes = _NIL if ids is None else _lists((node, ids[node]) for node in sorted(ids, key=int))
    content = _NIL if answer is None else f"[{' '.join(map(str, _bytes(entry)))}]"
    return (
        f"{{PodUID:(string){entry['poduid']} ContainerName:(string){entry['containername']}"
        f" ResourceName:(string){entry['resourcename']} DeviceIDs:(checkpoint.DevicesPerNUMA){nodes}"
        f" AllocResp:([]uint8){content}}}"
    )


def _lists(items: Iterable[tuple[object, Iterable[str] | None]]) -> str:
    """Return a map of lists as Go prints it."""
    shown = (f"{key}:{_NIL if each is None else '[' + ' '.join(each) + ']'}" for key, each in items)
    return f"map[{' '.join(shown)}]"


def _ids(raw: Mapping[str, list[str] | None] | list[str]) -> tuple[str, ...]:
    lists = raw.values() if isinstance(raw, Mapping) else (raw,)
    ids = {str(device) for each in lists for device in each or ()}
    if not ids:
        raise ValueError("it has no devices")
    return tuple(sorted(ids))


def _bytes(entry: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(entry.get("allocresp") or "", validate=True)
    except binascii.Error as error:
        raise ValueError(f"its answer is not base64: {error}") from None
