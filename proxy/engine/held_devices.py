"""Record which container holds which devices, in the state and in the ledger.

Devices are held under the pod's key and the container's name, so that a container that starts again, and the
containers after an init container, find them. They are held until the pod has no sandbox any more. A device
that is held without an answer of the plugin is reserved: no other container gets it, and the reservation
ends with the call that made it. Only pods to which the plan is applied hold devices; for other pods, the
placement shows the devices that they would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from proxy.allocation.devices.state import DeviceState
from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.model.devices import AllocateAnswer
from proxy.model.workload import Container

POD_DEVICES_RECORD, DEVICE_RESOURCE_RECORD = "d/", "dr/"
"""Prefixes of the ledger's keys: of the devices of a pod, and of the registered resources."""


class DeviceRecord(Struct, frozen=True):
    """The devices of one resource that one container holds, as the ledger records them.

    Attributes:
        ids: The devices.
        answer: The plugin's answer to Allocate; None if it has not answered.
    """

    ids: tuple[str, ...]
    answer: AllocateAnswer | None = None


PodDevices = Mapping[str, Mapping[str, DeviceRecord]]
"""The devices that the containers of a pod hold, by container name and resource."""


def granted(state: NodeState, container: Container) -> NodeState:
    """Return the state in which a container holds the devices of its placement.

    The state is unchanged if the plan is not applied to the pod, or if the sandbox was removed while the
    plugin was queried for its preference.
    """
    devices, assigned = state.devices, container.placement.devices
    if not assigned or container.pod.sandbox_id not in state.pods or not applies_to(state, container.pod):
        return state
    key, name = container.pod.key, container.name
    for resource, ids in assigned:
        if devices.of_container(key, name, resource) != frozenset(ids):
            devices = devices.give(key, name, resource, frozenset(ids))
    return state if devices is state.devices else structs.replace(state, devices=devices)


def holds_all(state: NodeState, container: Container) -> bool:
    """Return whether a container holds the devices of its placement, and their plugins have answered."""
    key, name = container.pod.key, container.name
    answered = state.devices.answers_of(key, name)
    return all(
        resource in answered and state.devices.of_container(key, name, resource) == frozenset(ids)
        for resource, ids in container.placement.devices
    )


def record_of(devices: DeviceState, pod_key: str) -> dict[str, object] | None:
    """Return the ledger's record of a pod's devices; None if the pod holds none."""
    held = devices.held.get(pod_key)
    if not held:
        return None
    pod = {
        name: {
            resource: DeviceRecord(tuple(sorted(ids)), devices.answers_of(pod_key, name).get(resource))
            for resource, ids in container.items()
        }
        for name, container in held.items()
    }
    plain: dict[str, object] = msgspec.to_builtins(pod)
    return plain


def load_record(record: Mapping[str, Any]) -> PodDevices:
    """Read a record.

    Raises:
        ValueError: It is not such a record.
    """
    try:
        return msgspec.convert(record, dict[str, dict[str, DeviceRecord]])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def salvaged(record: Mapping[str, Any]) -> tuple[PodDevices, bool]:
    """Read the readable parts of a record that ``load_record`` rejects.

    A damaged answer of a plugin does not make the devices of a running container free.

    Returns:
        The devices, with an empty answer in place of an unreadable one, and whether all devices could be
        read.
    """
    records, complete = dict[str, dict[str, DeviceRecord]](), True
    for name, container in record.items():
        if not isinstance(container, Mapping):
            complete = False
            continue
        for resource, raw in container.items():
            try:
                ids = msgspec.convert(raw["ids"], tuple[str, ...])
            except (TypeError, LookupError, msgspec.ValidationError):
                complete = False
                continue
            try:
                grant = msgspec.convert(raw, DeviceRecord)
            except msgspec.ValidationError:
                grant = DeviceRecord(ids, AllocateAnswer())
            records.setdefault(name, {})[resource] = grant
    return records, complete


def restored(devices: DeviceState, pods: Mapping[str, PodDevices], resources: tuple[str, ...]) -> DeviceState:
    """Return the device state with the devices that an earlier run of the daemon recorded.

    Devices that were reserved without an answer are free, because their container was never created. A
    resource that was registered has no devices until its plugin reports them again.

    Args:
        devices: The device state of this run.
        pods: The devices that the containers of each pod hold, by key of the pod.
        resources: The resources that were registered.
    """
    for key, pod in pods.items():
        for name, container in pod.items():
            answers = {r: record.answer for r, record in container.items() if record.answer is not None}
            for resource in answers:
                devices = devices.give(key, name, resource, frozenset(container[resource].ids))
            if answers:
                devices = devices.answered(key, name, answers)
    for resource in resources:
        if resource not in devices.registered:
            devices = devices.register(resource, ())
    return devices
