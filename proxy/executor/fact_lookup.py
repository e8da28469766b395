"""Looks up facts that the CRI does not carry, before a decision about a pod or a container.

Only kubelet knows what a pod's containers request. Kubelet or sysfs knows where devices are. Both are queried
in worker threads, with their own deadlines, and only where the answer can change a decision. A fact that
cannot be obtained is left out: the decision is made from what is known.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from msgspec import structs

from proxy.allocation.devices.hints import family
from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.executor.ports import DeviceFacts, Hardware, Kubelet
from proxy.executor.worker import Worker
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy
from proxy.model.workload import KubeQos, LocatedDevice, Pod, Request

THREADS = 4
T = TypeVar("T")


class FactLookup:
    """Queries kubelet and sysfs."""

    def __init__(
        self, kubelet: Kubelet | None, hardware: Hardware | None, failed: Callable[[BaseException], None]
    ) -> None:
        """Query nothing yet.

        Args:
            kubelet: What kubelet knows; None to query nothing.
            hardware: Where devices are; None where there is no source for that.
            failed: Called with faults of our own.
        """
        self._kubelet = kubelet
        self._hardware = hardware
        self._failed = failed
        self.worker = Worker("scout", failed, THREADS)

    def pod_matters(self, state: NodeState, pod: Pod) -> bool:
        """Return whether to query kubelet for what a pod's containers request."""
        kubelet, node = self._kubelet, state.node
        if kubelet is None or not kubelet.knows_pods or pod.asks is not None:
            return False
        if state.devices.registered or pod.key in state.devices.held:
            return True  # devices are in the pod's limits and nowhere in the CRI
        if node.decides_pods and kubelet.knows_devices:
            return True  # the containers' names are needed to request their devices
        counts = node.static or node.memory is not None
        return counts and pod.kube_qos is KubeQos.GUARANTEED

    def devices_matter(self, node: Node, pod: Pod) -> bool:
        """Return whether the location of a container's devices can change the decision about it."""
        owns = (node.static or node.memory is not None) and pod.kube_qos is KubeQos.GUARANTEED
        return owns or node.policy is not TopologyPolicy.NONE

    def knows_devices(self, given: DeviceFacts) -> bool:
        """Return whether there is a source for where a container's devices are."""
        known = self._kubelet is not None and self._kubelet.knows_devices
        return known or (bool(given) and self._hardware is not None)

    async def pod(self, pod: Pod) -> Pod:
        """Look up what a pod's containers request; returns the pod unchanged where that is not known."""
        return await self.worker.run(self._pod, pod)

    async def devices(self, pod: Pod, name: str, given: DeviceFacts, request: Request) -> Request:
        """Look up where the devices of a container are."""
        near = await self.worker.run(self._devices, pod, name, given)
        return structs.replace(request, devices=near) if near else request

    async def pod_devices(self, pod: Pod, total: Request) -> Request:
        """Look up where a whole pod's devices are: kubelet allocates them before it makes the sandbox."""
        near = await self.worker.run(self._pod_devices, pod)
        return structs.replace(total, devices=near) if near else total

    def _pod(self, pod: Pod) -> Pod:
        assert self._kubelet is not None
        kubelet = self._kubelet

        def asked() -> Pod:
            answer = kubelet.asks(pod.uid, pod.namespace, pod.name)
            if answer is None:
                return pod
            asks, source = answer
            # The QoS class by the cgroup parent counts: it is the one that takes effect in the kernel.
            guaranteed = asks.guaranteed and pod.kube_qos is KubeQos.GUARANTEED
            asks = structs.replace(asks, uid=pod.key, guaranteed=guaranteed)
            return structs.replace(pod, asks=asks, source=source)

        return self._try(asked, pod)

    def _devices(self, pod: Pod, name: str, given: DeviceFacts) -> tuple[LocatedDevice, ...]:
        if self._kubelet is not None and self._kubelet.knows_devices:
            answer = self._device_nodes(self._kubelet, pod, (name,))
            if answer:
                return answer
        hardware = self._hardware
        return self._try(lambda: hardware.near(given), ()) if given and hardware is not None else ()

    def _pod_devices(self, pod: Pod) -> tuple[LocatedDevice, ...]:
        if self._kubelet is None or not self._kubelet.knows_devices or pod.asks is None:
            return ()
        return self._device_nodes(self._kubelet, pod, [ask.name for ask in pod.asks.containers])

    def _device_nodes(self, kubelet: Kubelet, pod: Pod, names: Iterable[str]) -> tuple[LocatedDevice, ...]:
        """Query kubelet for the devices of some containers of a pod."""

        def asked() -> tuple[LocatedDevice, ...]:
            found: list[LocatedDevice] = []
            for name in names:
                found += kubelet.devices(pod.namespace, pod.name, name) or ()
            return measured(tuple(found), kubelet.allocatable()) if found else ()

        return self._try(asked, ())

    def _try(self, ask: Callable[[], T], otherwise: T) -> T:
        """Query; an internal error is reported, and the decision only goes without the answer."""
        try:
            return ask()
        except Exception as error:  # noqa: BLE001  a decision is made from what is known
            self._failed(error)
            return otherwise

    def close(self) -> None:
        """End the threads, and close what they hold open."""
        self.worker.close()
        if self._kubelet is not None:
            self._kubelet.close()


def measured(
    near: tuple[LocatedDevice, ...], there: Mapping[str, Mapping[str, Mask | None]]
) -> tuple[LocatedDevice, ...]:
    """Set for each device the smallest number of NUMA nodes that could hold as many devices of its kind.

    See kubernetes v1.36 pkg/kubelet/cm/devicemanager/topology_hints.go, generateDeviceTopologyHints.

    Args:
        near: The devices that a container, or a pod, was given.
        there: All devices: resource to id to NUMA nodes.
    """
    counts = Counter(device.resource for device in near)
    least: dict[str, int] = {}
    for resource, count in counts.items():
        devices = {i: RegisteredDevice(i, nodes) for i, nodes in there.get(resource, {}).items()}
        nodes = Mask.from_bits(
            functools.reduce(operator.or_, (d.nodes.bits for d in devices.values() if d.nodes), 0)
        )
        if len(devices) >= count and nodes:
            least[resource] = family(devices, count, nodes, frozenset(devices)).size
    return tuple(structs.replace(device, least=least.get(device.resource, 0)) for device in near)
