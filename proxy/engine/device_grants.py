"""The devices that topoproxy assigns: rules of ``proxy.engine.handle``.

A device plug-in registers a resource and reports its devices, again and again. The state holds the newest
list (``NodeState.devices``) beside the containers that hold devices. A device that becomes unhealthy or is no
longer reported is not given out; a container that holds it keeps it.
"""

from __future__ import annotations

from msgspec import structs

from proxy.engine.node_effects import NodeEffects
from proxy.engine.node_events import DevicesChanged
from proxy.engine.state import NodeState


def devices_changed(state: NodeState, event: DevicesChanged) -> tuple[NodeState, NodeEffects]:
    """Take in the devices of one resource."""
    if event.devices is None:
        devices = state.devices.withdraw(event.resource)
    else:
        devices = state.devices.register(event.resource, event.devices.values())
    return (state if devices is state.devices else structs.replace(state, devices=devices)), ()
