"""What kubelet's device manager does when a plugin or a pod has gone."""

from __future__ import annotations

from proxy.allocation.devices.state import DeviceState
from tests.testkit.changed_copy import changed_copy as replace


def unregistered(state: DeviceState, resource: str) -> DeviceState:
    """Return the state without a plugin: the resource stays known, without devices."""
    return state.register(resource, ())


def without_pod(state: DeviceState, uid: str) -> DeviceState:
    """Return the state in which no container of a pod holds anything."""
    return replace(state, held={k: v for k, v in state.held.items() if k != uid})


def without_container(state: DeviceState, uid: str, name: str) -> DeviceState:
    """Return the state in which a container holds nothing; others keep what they share with it."""
    pod = {k: v for k, v in state.held.get(uid, {}).items() if k != name}
    others = {k: v for k, v in state.held.items() if k != uid}
    return replace(state, held={**others, uid: pod} if pod else others)
