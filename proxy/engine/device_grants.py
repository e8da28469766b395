"""Rules for the devices that topoproxy assigns (``proxy.engine.handle``).

A device plugin registers a resource, and then reports its devices repeatedly. The state holds the
newest list (``NodeState.devices``), separately from the containers that hold devices. A device that is
unhealthy or no longer reported is not assigned to a container; a container that holds it already keeps it.

A create reserves devices when it is decided (``proxy.engine.container_create``). Then the plugin is asked
what the container needs to use them (Allocate). Its answer is kept with the devices, because a container that
starts again gets the same. If the plugin refuses, the reservation ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from proxy.allocation.devices.state import DeviceState
from proxy.engine.container_events import AllocateFailed, DevicesAllocated
from proxy.engine.held_devices import DEVICE_RESOURCE_RECORD, POD_DEVICES_RECORD, PodDevices, record_of
from proxy.engine.node_effects import NodeEffect, NodeEffects, PutRecord
from proxy.engine.node_events import DevicesChanged, DevicesImported
from proxy.engine.state import NodeState

Handled = tuple[NodeState, NodeEffects]


def devices_changed(state: NodeState, event: DevicesChanged) -> Handled:
    """Update the devices of one resource."""
    resource, is_registered = event.resource, event.resource in state.devices.registered
    key = f"{DEVICE_RESOURCE_RECORD}{resource}"
    if event.devices is None:
        record = (PutRecord(key, None),) if is_registered else ()
        return _with(state, state.devices.withdraw(resource)), record
    devices = state.devices.register(resource, event.devices.values())
    return _with(state, devices), () if is_registered else (PutRecord(key, {}),)


def devices_imported(state: NodeState, event: DevicesImported) -> Handled:
    """Record the devices that the former device manager assigned; what containers already hold stays."""
    known_pods, effects = {pod.key for pod in state.pods.values()}, list[NodeEffect]()
    for key, pod in event.pods.items():
        if not event.every and key not in known_pods:
            continue
        devices = state.devices
        for name, container in pod.items():
            record = container.get(event.resource)
            if record is None or record.answer is None or devices.of_container(key, name, event.resource):
                continue
            devices = devices.give(key, name, event.resource, frozenset(record.ids))
            devices = devices.answered(key, name, {event.resource: record.answer})
        state, more = _recorded(state, devices, key)
        effects += more
    return state, tuple(effects)


def devices_allocated(state: NodeState, event: DevicesAllocated) -> Handled:
    """Keep the answers of plugins for devices that a container still holds.

    The pod may have lost its sandbox, and the devices with it, and hold other devices now; the answers do not
    apply to those.
    """
    key, name = event.pod_key, event.name
    waiting = _still_reserved(state, key, name, event.requested)
    answers = {resource: answer for resource, answer in event.answers.items() if resource in waiting}
    if not answers:
        return state, ()
    return _recorded(state, state.devices.answered(key, name, answers), key)


def allocate_failed(state: NodeState, event: AllocateFailed) -> Handled:
    """Free those requested devices of a container that are only reserved."""
    key, name = event.pod_key, event.name
    waiting = _still_reserved(state, key, name, event.requested)
    return _recorded(state, state.devices.release_unanswered(key, name, waiting), key)


def _still_reserved(
    state: NodeState, key: str, name: str, requested: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """Return the resources whose requested devices are still reserved for a container."""
    waiting = state.devices.unanswered(key, name)
    return {resource for resource, ids in requested.items() if waiting.get(resource) == ids}


def unanswered_dropped(state: NodeState, ledger_devices: Mapping[str, PodDevices]) -> NodeEffects:
    """Return the effects that remove reserved devices that were never allocated from the ledger."""
    return tuple(
        PutRecord(f"{POD_DEVICES_RECORD}{key}", record_of(state.devices, key))
        for key, pod in ledger_devices.items()
        if any(record.answer is None for container in pod.values() for record in container.values())
    )


def devices_of_unknown_pods(state: NodeState) -> Handled:
    """Free the devices of pods that the ledger has and the runtime does not."""
    effects: NodeEffects = ()
    if not state.devices.held:
        return state, effects
    known = {pod.key for pod in state.pods.values()}
    for key in state.devices.held.keys() - known:
        state, more = _recorded(state, state.devices.release_pod(key), key)
        effects = (*effects, *more)
    return state, effects


def devices_recorded(before: NodeState, after: NodeState, pod_key: str) -> NodeEffects:
    """Return the record of a pod's devices, if they have changed."""
    if before.devices is after.devices:
        return ()
    old, new = record_of(before.devices, pod_key), record_of(after.devices, pod_key)
    return () if old == new else (PutRecord(f"{POD_DEVICES_RECORD}{pod_key}", new),)


def _with(state: NodeState, devices: DeviceState) -> NodeState:
    return state if devices is state.devices else structs.replace(state, devices=devices)


def _recorded(state: NodeState, devices: DeviceState, pod_key: str) -> Handled:
    after = _with(state, devices)
    return after, devices_recorded(state, after, pod_key)
