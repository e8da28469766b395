"""The hints of devices: the NUMA nodes near to which there are enough of them.

Source: kubernetes v1.36, pkg/kubelet/cm/devicemanager/topology_hints.go ``generateDeviceTopologyHints``. For
each resource of the limits that a plugin has registered:

- no device of it is near to a node: no preference;
- the container (in pod scope: the pod) holds devices already: hints are made from these alone, and there are
  none (impossible) if their number differs from the requested one;
- fewer are available or reusable than requested: impossible;
- otherwise a mask is a hint if enough available or reusable devices are near to one of its nodes, and *all*
  reusable devices with a topology are. It is preferred if no smaller mask could ever do, counting all
  registered devices, healthy or not, held or not.

The nodes considered are those that some device of the resource names and that the machine has. If the machine
has none of them, all its nodes are considered (since 1.36; before, all nodes always were: 2^36 masks on a
machine with 36).

A device counts once for every mask that touches one of its nodes, so "enough" is closed upwards: the hints
are the open part of a ``proxy.allocation.hint_family.Family``. That all reusable devices are near is one more
demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from proxy.allocation.demand import Demand, least_node_count
from proxy.allocation.devices.state import NO_DEVICES, DeviceState, RegisteredDevice
from proxy.allocation.hint_family import Family
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask, union
from proxy.model.requests import PodRequests, peak_request

DeviceHints = dict[str, Sequence[TopologyHint] | None]


def container_device_hints(state: DeviceState, pod: PodRequests, name: str, nodes: Mask) -> DeviceHints:
    """Return the hints for a container.

    Args:
        state: Devices and holders.
        pod: The pod, with all its containers in order.
        name: The container.
        nodes: All NUMA nodes of the machine.

    Raises:
        KeyError: The pod has no container of that name.
    """
    return {
        resource: _hints(
            state,
            resource,
            count,
            nodes,
            held=state.of_container(pod.uid, name, resource),
            reusable=state.reusable(pod, resource),
        )
        for resource, count in pod.named(name).limits.items()
        if resource in state.registered
    }


def pod_device_hints(state: DeviceState, pod: PodRequests, nodes: Mask) -> DeviceHints:
    """Return the hints for a pod, see ``container_device_hints``.

    Its limits are added up by ``peak_request``.
    """
    return {
        resource: _hints(
            state, resource, count, nodes, held=state.of_pod(pod.uid, resource), reusable=NO_DEVICES
        )
        for resource, count in peak_request(pod.containers, lambda container: container.limits).items()
        if resource in state.registered
    }


def _hints(
    state: DeviceState,
    resource: str,
    count: int,
    nodes: Mask,
    *,
    held: frozenset[str],
    reusable: frozenset[str],
) -> Sequence[TopologyHint] | None:
    if not state.has_topology(resource):
        return None
    available = state.available(resource)
    if held:
        available, reusable = held, NO_DEVICES
    if held and len(held) != count:
        return ()
    if held and not held <= state.registered[resource].keys():
        return None  # kubelet decides a pod once; here a restarted container keeps devices that have vanished
    return family(state.registered[resource], count, nodes, available, reusable).listed()


def family(
    devices: Mapping[str, RegisteredDevice],
    count: int,
    nodes: Mask,
    available: frozenset[str],
    reusable: frozenset[str] = NO_DEVICES,
) -> Family:
    """Return the masks near which ``count`` devices are.

    Args:
        devices: All devices of the resource.
        count: How many are requested.
        nodes: All NUMA nodes of the machine.
        available: Ids of available devices; ids that are not registered are near to no NUMA node.
        reusable: Ids of devices that the pod has already, which have to be near.
    """
    named = Mask.from_bits(_bits(devices.values())) & nodes or nodes
    ranged = tuple(named)
    nodes_of_device = {i: device.nodes or Mask() for i, device in devices.items()}
    placed = [nodes_of_device[i] for i in reusable if i in devices and devices[i].nodes is not None]
    near = _demand(count, [*placed, *(nodes_of_device[i] for i in available if i in nodes_of_device)])
    least = least_node_count(ranged, (_demand(count, nodes_of_device.values()),))
    demands = (near, _demand(len(placed), placed)) if placed else (near,)
    return Family((), ranged, 1, demands, len(ranged) if least is None else max(least, 1))


def _bits(devices: Iterable[RegisteredDevice]) -> int:
    return union(device.nodes.bits for device in devices if device.nodes)


def _demand(want: int, places: Iterable[Mask]) -> Demand:
    return Demand(want, tuple(Counter(place.bits for place in places).items()))
