"""The providers of devices: those that topoproxy assigns itself, and those that kubelet has assigned.

kubelet's device manager assigns devices before the container reaches the CRI. There is nothing left to
choose: the NUMA nodes near to them are one hint by resource (``AssignedDevices``). Devices of plugins that
are registered with topoproxy, and those of a simulation, are assigned here as kubelet's device manager would
assign its own (``DeviceProvider``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from proxy.allocation.devices.allocate import Prefer, allocate, answered_preference
from proxy.allocation.devices.hints import container_device_hints, pod_device_hints
from proxy.allocation.devices.state import DeviceState
from proxy.allocation.providers.provider import Allocation, Provider, ProviderRequest
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask, union
from proxy.model.options import Scope
from proxy.model.requests import PodRequests
from proxy.model.workload import LocatedDevice

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

    def wants(self, request: ProviderRequest) -> bool:
        """Return whether a registered resource is among the limits."""
        return bool(self.hints(request))

    def hints(self, request: ProviderRequest) -> Hints:
        """Return hints for the registered resources among the limits."""
        if request.scope is Scope.POD:
            return pod_device_hints(self.state, _known_requests(request), self.nodes)
        return container_device_hints(self.state, request.requests, request.name, self.nodes)

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Assign devices, near to the NUMA nodes of the hint if enough are there.

        A container that represents its pod gets no devices itself. Under a hint each container of the pod
        gets its own devices; otherwise the containers get them when they are created, near to the CPUs of the
        pod.

        Raises:
            DeviceRejectedError: There are not enough devices.
            PreferenceMissing: The preference of the plugin has to be read first.
        """
        requests, state = _known_requests(request), self.state
        if requests is request.requests:
            grant = allocate(
                state, requests, request.name, hint, _preferences(request, request.name), keeps_held=True
            )
            devices = tuple((resource, ids) for resource, ids in grant.devices.items() if ids)
            after = dataclasses.replace(self, state=grant.state)
            return Allocation(after, structs.replace(grants, devices=devices), grant.reasons)
        steps: list[str] = []
        for container in requests.containers if hint.affinity is not None else ():
            name = container.name
            grant = allocate(state, requests, name, hint, _preferences(request, name), keeps_held=True)
            state = grant.state
            steps += [f"{name}: {reason}" for reason in grant.reasons]
        return Allocation(dataclasses.replace(self, state=state), grants, steps)

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return how many free devices near to a NUMA node are missing."""
        if request.whole:
            return ()
        shortfalls: list[Shortfall] = []
        for resource, count in request.requests.named(request.name).limits.items():
            if not self.state.has_topology(resource):
                continue
            devices = self.state.registered[resource]
            near = {i for i, device in devices.items() if device.nodes and node in device.nodes}
            if len(near) < count:
                return None
            free = len(self.state.available(resource) & near)
            if free < count:
                shortfalls.append(Shortfall(resource, Mask((node,)), count, free))
        return tuple(shortfalls)


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
        return bool(request.assigned_devices) and bool(self.hints(request))

    def hints(self, request: ProviderRequest) -> Hints:
        """Return one hint by resource of the assigned devices."""
        return assigned_hints(request.assigned_devices, self.nodes) if request.assigned_devices else None

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Return the grants as they are: kubelet has assigned the devices."""
        return Allocation(self, grants)

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return None for a NUMA node that the assigned devices are not near to."""
        near = nodes_of_devices(request.assigned_devices)
        return () if near is None or near == Mask((node,)) else None


def _known_requests(request: ProviderRequest) -> PodRequests:
    """Return what the pod's containers request: by kubelet's report if one container represents them."""
    requests, known = request.requests, request.pod.requests
    if known is None or requests.containers[0].name:
        return requests
    return structs.replace(known, uid=requests.uid)


def _preferences(request: ProviderRequest, name: str) -> dict[str, Prefer]:
    """Return the preferences of plugins for a container, by resource."""
    return {
        resource: partial(answered_preference, named, resource, preferred)
        for (named, resource), preferred in request.preferred.items()
        if named == name
    }


def nodes_of_devices(near: Iterable[LocatedDevice]) -> Mask | None:
    """Return the NUMA nodes near to assigned devices; None if they are near to none."""
    bits = union(device.nodes.bits for device in near if device.nodes)
    return Mask.from_bits(bits) if bits else None


def assigned_hints(near: Iterable[LocatedDevice], nodes: Mask) -> Hints:
    """Return one hint by resource for devices that are assigned already.

    A hint is preferred unless the devices are known to lie on more NUMA nodes than necessary.
    """
    bits_of: dict[str, int] = {}
    least: dict[str, int] = {}
    for device in near:
        if device.nodes:
            resource = device.resource or DEVICES
            bits_of[resource] = bits_of.get(resource, 0) | device.nodes.bits & nodes.bits
            least[resource] = device.fewest_numa_nodes or len(nodes)
    return {
        resource: (TopologyHint(Mask.from_bits(bits), bits.bit_count() <= least[resource]),)
        for resource, bits in bits_of.items()
        if bits
    }
