"""The registered devices, and the containers that hold them.

Source: kubernetes v1.36, pkg/kubelet/cm/devicemanager/pod_devices.go. Plugins register resources and report
their devices: an id, whether it is healthy, and the NUMA nodes it is near to, if any. A device is held by a
container until its pod is gone; containers of one pod may hold the same device one after the other: what an
ordinary init container held can be reused by the containers after it.

kubelet keeps the reusable devices in a table apart from the state. Here they are derived from the state: the
devices of the pod's ordinary init containers, without those that other containers hold. The set is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from proxy.model.devices import AllocateAnswer
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, PodRequests

NO_DEVICES: frozenset[str] = frozenset()


class RegisteredDevice(Struct, frozen=True):
    """One device.

    Attributes:
        id: Unique within its resource.
        nodes: NUMA nodes that it is near to. None if the plugin reports no topology; an empty mask if it
            reports one without nodes. The two differ in the treatment of reusable devices.
        healthy: Whether it may be assigned; an unhealthy device still counts as capacity.
    """

    id: str
    nodes: Mask | None = None
    healthy: bool = True


class DeviceState(Struct, frozen=True):
    """Devices and holders.

    Attributes:
        registered: Resource to device id to device.
        held: Pod uid to container name to resource to device ids.
        answers: Pod uid to container name to resource to the plugin's answer to Allocate. Devices without an
            answer are reserved: the plugin has yet to answer.
    """

    registered: Mapping[str, Mapping[str, RegisteredDevice]] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, Mapping[str, frozenset[str]]]] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, Mapping[str, AllocateAnswer]]] = field(default_factory=dict)

    def register(self, resource: str, devices: Iterable[RegisteredDevice]) -> DeviceState:
        """Return the state with a new list of all devices of a resource."""
        return replace(self, registered={**self.registered, resource: {d.id: d for d in devices}})

    def withdraw(self, resource: str) -> DeviceState:
        """Return the state without a resource; containers that hold devices of it keep them."""
        if resource not in self.registered:
            return self
        return replace(self, registered={k: v for k, v in self.registered.items() if k != resource})

    def has_topology(self, resource: str) -> bool:
        """Return whether any device of a resource is near to a NUMA node."""
        return any(device.nodes for device in self.registered.get(resource, {}).values())

    def healthy(self, resource: str) -> frozenset[str]:
        """Return the healthy devices of a resource."""
        return frozenset(d.id for d in self.registered.get(resource, {}).values() if d.healthy)

    def in_use(self, resource: str) -> frozenset[str]:
        """Return the devices of a resource that some container holds."""
        return NO_DEVICES.union(
            *(c.get(resource, NO_DEVICES) for pod in self.held.values() for c in pod.values())
        )

    def available(self, resource: str) -> frozenset[str]:
        """Return the devices of a resource that are healthy and that no container holds."""
        return self.healthy(resource) - self.in_use(resource)

    def of_container(self, uid: str, name: str, resource: str) -> frozenset[str]:
        """Return the devices that a container holds."""
        return self.held.get(uid, {}).get(name, {}).get(resource, NO_DEVICES)

    def of_pod(self, uid: str, resource: str) -> frozenset[str]:
        """Return the devices that the containers of a pod hold."""
        return NO_DEVICES.union(*(c.get(resource, NO_DEVICES) for c in self.held.get(uid, {}).values()))

    def reusable(self, pod: PodRequests, resource: str) -> frozenset[str]:
        """Return the devices that ordinary init containers of a pod held and no container has taken over."""
        held_by_inits, held_by_others = NO_DEVICES, NO_DEVICES
        for container in pod.containers:
            own = self.of_container(pod.uid, container.name, resource)
            if container.kind is ContainerKind.INIT:
                held_by_inits |= own
            else:
                held_by_others |= own
        return held_by_inits - held_by_others

    def give(self, uid: str, name: str, resource: str, ids: frozenset[str]) -> DeviceState:
        """Return the state in which a container holds these devices of a resource."""
        pod = self.held.get(uid, {})
        container = {**pod.get(name, {}), resource: ids}
        return replace(self, held={**self.held, uid: {**pod, name: container}})

    def unanswered(self, uid: str, name: str) -> dict[str, tuple[str, ...]]:
        """Return the devices of a container for which Allocate has not been called, by resource."""
        answered = self.answers_of(uid, name)
        held = self.held.get(uid, {}).get(name, {})
        return {r: tuple(sorted(ids)) for r, ids in held.items() if ids and r not in answered}

    def answers_of(self, uid: str, name: str) -> Mapping[str, AllocateAnswer]:
        """Return the answers of plugins for a container, by resource."""
        return self.answers.get(uid, {}).get(name, {})

    def answered(self, uid: str, name: str, answers: Mapping[str, AllocateAnswer]) -> DeviceState:
        """Return the state with answers of plugins for devices that a container holds."""
        held = self.held.get(uid, {}).get(name, {})
        known = {**self.answers_of(uid, name), **{r: a for r, a in answers.items() if r in held}}
        return replace(self, answers={**self.answers, uid: {**self.answers.get(uid, {}), name: known}})

    def release_unanswered(self, uid: str, name: str, waiting: Collection[str]) -> DeviceState:
        """Return the state in which a container does not hold these resources, which are only reserved."""
        if not waiting:
            return self
        remaining = {r: ids for r, ids in self.held[uid][name].items() if r not in waiting}
        pod = {k: v for k, v in self.held[uid].items() if k != name} | (
            {name: remaining} if remaining else {}
        )
        others = {k: v for k, v in self.held.items() if k != uid}
        return replace(self, held={**others, uid: pod} if pod else others)

    def release_pod(self, uid: str) -> DeviceState:
        """Return the state in which the containers of a pod hold nothing."""
        if uid not in self.held:
            return self
        held = {k: v for k, v in self.held.items() if k != uid}
        return replace(self, held=held, answers={k: v for k, v in self.answers.items() if k != uid})
