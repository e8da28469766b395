"""Counts the devices that topoproxy assigns for the cluster: capacity and allocatable by resource.

Two objects carry these counts. ``Node.status`` has one number for the node, against which the scheduler
counts pods; the zones of a NodeResourceTopology have one for each NUMA node.

Node status. kubelet sets ``capacity`` and ``allocatable`` of the resources of its own device plugins. For
all other extended resources it keeps ``capacity``, and writes ``allocatable = capacity`` in each of its
updates (kubernetes v1.36 pkg/kubelet/nodestatus/setters.go, MachineInfo). An ``allocatable`` of topoproxy
below ``capacity`` would last for seconds only, and unhealthy devices would be counted again. So ``capacity``
is the number of healthy devices too. A resource that is no longer served becomes 0, as with kubelet's own
plugins: a pod that requests it waits, and is not admitted without its devices. A kubelet that finds no
checkpoint of its device manager sets all extended resources to 0 when it registers the node
(kubelet_node_status.go, reconcileExtendedResource): so the publisher compares repeatedly, not once.

Zones. Only the publisher writes these, so ``capacity`` counts all devices of the NUMA node, ``allocatable``
the healthy ones, and ``available`` the healthy ones that no container holds. A device that is near to several
NUMA nodes is counted in the zone of each, and one without a NUMA node in none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from proxy.allocation.devices.state import DeviceState
from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.model.quantity import parse_quantity
from proxy.model.schema_ids import DEVICE_CAPACITY

Patch = list[dict[str, object]]


class DeviceCount(Struct, frozen=True):
    """Devices of one resource, on the node or on one of its NUMA nodes.

    Attributes:
        capacity: All devices.
        allocatable: The healthy ones.
        available: The healthy ones that no container holds.
    """

    capacity: int
    allocatable: int
    available: int

    def data(self) -> dict[str, object]:
        """Return the counts as data, with quantities as strings, as in the API of Kubernetes."""
        return {
            "capacity": str(self.capacity),
            "allocatable": str(self.allocatable),
            "available": str(self.available),
        }


def device_counts(devices: DeviceState, numa: int | None = None) -> dict[str, DeviceCount]:
    """Count devices by resource.

    Args:
        devices: The devices that topoproxy assigns.
        numa: Only those near to this NUMA node; None for all of them.

    Returns:
        Resources in ascending order; for a NUMA node, those that have devices there.
    """
    counts: dict[str, DeviceCount] = {}
    for resource, registered in sorted(devices.registered.items()):
        near = {
            i for i, device in registered.items() if numa is None or (device.nodes and numa in device.nodes)
        }
        if near or numa is None:
            healthy, free = devices.healthy(resource), devices.available(resource)
            counts[resource] = DeviceCount(len(near), len(near & healthy), len(near & free))
    return counts


def zone_resources(devices: DeviceState, numa: int) -> list[dict[str, object]]:
    """Return the entries of a NUMA node for ``zones[].resources`` of a NodeResourceTopology."""
    return [{"name": name, **count.data()} for name, count in device_counts(devices, numa).items()]


def capacity_page(state: NodeState) -> dict[str, object]:
    """Return the counts that a publisher writes; empty while the plan is not applied on the node."""
    devices = state.devices if applies_to(state, None) else DeviceState()
    zones = {node.id: zone_resources(devices, node.id) for node in state.node.machine.nodes}
    return {
        "schema": DEVICE_CAPACITY,
        "resources": [{"name": name, **count.data()} for name, count in device_counts(devices).items()],
        "zones": [
            {"name": f"node-{numa}", "resources": resources} for numa, resources in zones.items() if resources
        ],
    }


def node_status_patch(
    healthy: Mapping[str, int],
    capacity: Mapping[str, str],
    allocatable: Mapping[str, str],
    advertised: Collection[str] = (),
) -> Patch:
    """Return a JSON patch (RFC 6902) for the status of a Node; empty if nothing differs.

    Args:
        healthy: Resources that topoproxy assigns, with the number of healthy devices.
        capacity: ``status.capacity`` of the Node as it is.
        allocatable: ``status.allocatable`` of the Node as it is.
        advertised: Resources that topoproxy has advertised before; those not in ``healthy`` become 0.
    """
    target = {**dict.fromkeys(sorted(advertised), 0), **healthy}
    return [
        {"op": "add", "path": f"/status/{part}/{_escaped(resource)}", "value": str(target[resource])}
        for resource in sorted(target)
        for part, current in (("capacity", capacity), ("allocatable", allocatable))
        if not _equals(current.get(resource), target[resource])
    ]


def _equals(amount: str | None, count: int) -> bool:
    """Return whether an amount at the API server is a count, in any notation of a quantity."""
    try:
        return amount is not None and parse_quantity(amount, milli=True) == 1000 * count
    except ValueError:
        return False


def healthy_devices(resources: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Return the argument ``healthy`` of ``node_status_patch``, from ``resources`` of ``capacity_page``."""
    return {resource["name"]: int(resource["allocatable"]) for resource in resources}


def _escaped(key: str) -> str:
    """Write a key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
