"""The input of one decision of the topology manager, taken from the state of a node."""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.cpu_request import CPU, MILLI
from proxy.allocation.devices.state import DeviceState
from proxy.allocation.providers.devices import DeviceProvider
from proxy.allocation.providers.provider import ProviderRequest
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import AdmissionContext
from proxy.model.options import Scope
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Pod, Request


def pod_requests(
    pod: Pod, name: str, request: Request, cpus: int, devices: DeviceState | None = None
) -> PodRequests:
    """Return what a container's pod requests: as kubelet reported it, else what the CRI carries.

    Args:
        pod: The pod.
        name: The container; empty for the pod as a whole.
        request: What the CRI says.
        cpus: Exclusive CPUs that it claims.
        devices: What containers hold. Without kubelet's report, a container requests what it holds: the
            CRI does not carry it.
    """
    if pod.asks is not None and (not name or any(ask.name == name for ask in pod.asks.containers)):
        return pod.asks if pod.asks.uid == pod.key else structs.replace(pod.asks, uid=pod.key)
    amounts = {CPU: cpus * MILLI, "memory": request.memory_limit, **dict(request.huge_pages)}
    amounts = {resource: amount for resource, amount in amounts.items() if amount > 0}
    held = devices.held.get(pod.key, {}).get(name, {}) if devices is not None else {}
    limits = {**amounts, **{resource: len(ids) for resource, ids in held.items()}}
    return PodRequests(
        pod.key,
        (ContainerResources(name, ContainerKind.APP, amounts, limits),),
        pod.kube_qos is KubeQos.GUARANTEED,
    )


def asks_for_devices(state: NodeState, pod: Pod, name: str) -> bool:
    """Return whether a container requests devices that topoproxy assigns, or holds some."""
    devices = state.devices
    if not devices.registered and not devices.held:
        return False
    if devices.held.get(pod.key, {}).get(name):
        return True
    if pod.asks is None:
        return False
    for ask in pod.asks.containers:
        if ask.name == name:
            return not devices.registered.keys().isdisjoint(ask.limits)
    return False


def build_context(state: NodeState, request: ProviderRequest) -> AdmissionContext:
    """Prepare every provider for a request.

    Raises:
        AllocationRefusedError: The request contradicts the settings of the node, such as its bind policy.
    """
    providers = tuple(provider.prepare(state, request) for provider in state.providers)
    if state.devices.registered or state.devices.held:
        providers = (DeviceProvider(state.node.nodes, state.devices), *providers)
    return AdmissionContext(state.node, request, providers)


def container_request(request: ProviderRequest, name: str) -> ProviderRequest:
    """Return the request of one container of a pod that is decided as a whole."""
    return structs.replace(request, name=name, scope=Scope.CONTAINER)
