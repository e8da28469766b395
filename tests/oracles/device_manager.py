"""What kubelet's device manager does when a plugin or a pod has gone."""

from __future__ import annotations

from proxy.allocation.devices.state import DeviceState
from tests.testkit.changed_copy import changed_copy as replace


def unregistered(state: DeviceState, resource: str) -> DeviceState:
    """Give the state without a plugin: the resource stays known, without devices."""
    return state.register(resource, ())


def without_pod(state: DeviceState, uid: str) -> DeviceState:
    """Give the state in which no container of a pod holds anything."""
    return replace(state, held={k: v for k, v in state.held.items() if k != uid})
