"""The providers of devices: those that topoproxy assigns itself, and those that kubelet has assigned.

On a running node kubelet's device manager assigns devices before the container reaches the CRI. They are no
longer to be chosen: the NUMA nodes near to them are one preferred hint by resource (``AssignedDevices``). A
simulation has no kubelet, so it assigns devices as kubelet's device manager would (``DeviceProvider``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import structs

from proxy.allocation.devices.allocate import allocate
from proxy.allocation.devices.hints import container_hints, pod_hints
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.allocation.providers.provider import Allocation, NodeView, Provider, ProviderRequest, Serves
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask, union
from proxy.model.options import Scope
from proxy.model.workload import Container, Near, Phase, Pod

DEVICES = "devices"


@dataclass(frozen=True, slots=True)
class DeviceProvider(Provider):
    """Assigns registered devices.

    Attributes:
        nodes: All NUMA nodes of the machine.
        state: The devices, and which containers hold them.
    """

    nodes: Mask
    state: DeviceState

    @property
    def name(self) -> str:
        """The name in records."""
        return DEVICES

    @property
    def serves(self) -> Serves:
        """Any container may ask for devices."""
        return Serves.ALL

    def prepare(self, view: NodeView, request: ProviderRequest) -> DeviceProvider:
        """Return the provider with the devices that containers hold now."""
        held = devices_held(self.state.registered, view.pods.values(), view.containers.values())
        return dataclasses.replace(self, state=held)

    def wants(self, request: ProviderRequest) -> bool:
        """Return whether a registered resource is among the limits."""
        return bool(self.hints(request))

    def hints(self, request: ProviderRequest) -> Hints:
        """Return hints for the registered resources among the limits."""
        if request.scope is Scope.POD:
            return pod_hints(self.state, request.asks, self.nodes)
        return container_hints(self.state, request.asks, request.name, self.nodes)

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Assign devices, near to the NUMA nodes of the hint where there are enough."""
        given = allocate(self.state, request.asks, request.name, hint)
        after = dataclasses.replace(self, state=given.state)
        return Allocation(after, structs.replace(grants, devices=tuple(given.devices.items())), given.reasons)

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return how many free devices near to a NUMA node are missing."""
        if request.whole:
            return ()
        found: list[Shortfall] = []
        for resource, count in request.asks.named(request.name).limits.items():
            if not self.state.has_topology(resource):
                continue
            devices = self.state.registered[resource]
            near = {i for i, device in devices.items() if device.nodes and node in device.nodes}
            if len(near) < count:
                return None
            free = len(self.state.available(resource) & near)
            if free < count:
                found.append(Shortfall(resource, Mask((node,)), count, free))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class AssignedDevices(Provider):
    """Hints of the devices that kubelet has assigned; there is nothing left to allocate.

    Attributes:
        nodes: All NUMA nodes of the machine.
    """

    nodes: Mask

    @property
    def name(self) -> str:
        """The name in records, the same as that of ``DeviceProvider``."""
        return DEVICES

    def wants(self, request: ProviderRequest) -> bool:
        """Return whether assigned devices are near to NUMA nodes."""
        return bool(request.near) and bool(self.hints(request))

    def hints(self, request: ProviderRequest) -> Hints:
        """Return one hint by resource of the assigned devices."""
        return assigned_hints(request.near, self.nodes) if request.near else None

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Return the grants as they are: kubelet has assigned the devices."""
        return Allocation(self, grants)

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return None for a NUMA node that the assigned devices are not near to."""
        near = nodes_of_devices(request.near)
        return () if near is None or near == Mask((node,)) else None


def devices_held(
    registered: Mapping[str, Mapping[str, RegisteredDevice]],
    pods: Iterable[Pod],
    containers: Iterable[Container],
) -> DeviceState:
    """Return which containers hold the registered devices; they do until their pod goes."""
    state = DeviceState(registered)
    present = {pod.key for pod in pods}
    for container in containers:
        if container.phase is Phase.EXITED and container.pod.key not in present:
            continue
        for resource, ids in container.placement.devices:
            state = state.give(container.pod.key, container.name, resource, frozenset(ids))
    return state


def nodes_of_devices(near: Iterable[Near]) -> Mask | None:
    """Return the NUMA nodes near to assigned devices; None where they are near to none."""
    bits = union(device.nodes.bits for device in near if device.nodes)
    return Mask.from_bits(bits) if bits else None


def assigned_hints(near: Iterable[Near], nodes: Mask) -> Hints:
    """Return one hint by resource for devices that are assigned already.

    It is preferred unless the devices are known to lie on more NUMA nodes than they would have to.
    """
    found: dict[str, int] = {}
    least: dict[str, int] = {}
    for device in near:
        if device.nodes:
            resource = device.resource or DEVICES
            found[resource] = found.get(resource, 0) | device.nodes.bits & nodes.bits
            least[resource] = device.least or len(nodes)
    return {
        resource: (TopologyHint(Mask.from_bits(bits), bits.bit_count() <= least[resource]),)
        for resource, bits in found.items()
        if bits
    }
