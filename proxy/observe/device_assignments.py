"""Reports which container has which device, if the daemon knows it: the page for ``topoproxy devices``.

There are four sources. kubelet's pod-resources API lists all devices of its plugins that can be assigned
(healthy ones), and all containers with their devices and claims. The state has the devices of plugins that
registered with topoproxy, and their containers. The requests of containers name device files and CDI devices;
they are queried only if that can change a decision, so the page lists only some of these devices. The history
has the same for containers of the past.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from proxy.model.schema_ids import DEVICE_ASSIGNMENTS
from proxy.model.workload import Phase

if TYPE_CHECKING:
    from proxy.api.kubelet import podresources_pb2 as pb
    from proxy.engine.state import NodeState
    from proxy.executor.decision_records import RememberedDecision


class KubeletDevices:
    """kubelet's answers.

    Attributes:
        is_queried: Whether kubelet is queried at all.
        problem: Why there is no answer; empty if there is one.
        pods: kubelet's list of pods; None if there is no answer.
        allocatable: The devices that kubelet can assign; None if there is no answer.
    """

    def __init__(
        self,
        *,
        is_queried: bool,
        problem: str = "",
        pods: pb.ListPodResourcesResponse | None = None,
        allocatable: pb.AllocatableResourcesResponse | None = None,
    ) -> None:
        self.is_queried, self.problem, self.pods, self.allocatable = is_queried, problem, pods, allocatable


def assignments_page(
    kubelet: KubeletDevices,
    state: NodeState | None,
    history: Iterable[RememberedDecision],
    refused: Sequence[object] = (),
) -> dict[str, object]:
    """Return the page.

    Args:
        kubelet: The answers of kubelet.
        state: The node; None if the daemon decides nothing.
        history: Decisions about containers with devices, oldest first.
        refused: Resources that topoproxy does not manage because another manager has them, with the reasons.
    """
    return {
        "schema": DEVICE_ASSIGNMENTS,
        "kubelet": {"asked": kubelet.is_queried, "problem": kubelet.problem},
        "allocatable": list(_devices(kubelet.allocatable.devices)) if kubelet.allocatable else [],
        "assigned": list(_assigned(kubelet.pods)) if kubelet.pods else [],
        "claims": list(_claims(kubelet.pods)) if kubelet.pods else [],
        "managed": list(_managed(state)) if state is not None else [],
        "refused": list(refused),
        "requested": list(_requested(state)) if state is not None else [],
        "history": [
            {"time": each.when, "container": each.explanation.ref, "device": device, "exists": each.exists}
            for each in history
            for device in each.explanation.devices
        ],
    }


def _containers(pods: pb.ListPodResourcesResponse) -> Iterator[tuple[str, pb.ContainerResources]]:
    for pod in pods.pod_resources:
        for container in pod.containers:
            yield f"{pod.namespace}/{pod.name}/{container.name}", container


def _devices(groups: Iterable[pb.ContainerDevices]) -> Iterator[dict[str, object]]:
    """Yield each device once: kubelet repeats a device that is near to several NUMA nodes."""
    nodes_of: dict[tuple[str, str], set[int]] = {}
    for group in groups:
        nodes = {node.ID for node in group.topology.nodes if node.ID >= 0}
        for device in group.device_ids:
            nodes_of.setdefault((group.resource_name, device), set()).update(nodes)
    for (resource, device), nodes in nodes_of.items():
        yield {"resource": resource, "id": device, "numa": sorted(nodes) or None}


def _assigned(pods: pb.ListPodResourcesResponse) -> Iterator[dict[str, object]]:
    for ref, container in _containers(pods):
        for device in _devices(container.devices):
            yield {"container": ref, **device}


def _claims(pods: pb.ListPodResourcesResponse) -> Iterator[dict[str, object]]:
    for ref, container in _containers(pods):
        for claim in container.dynamic_resources:
            for device in claim.claim_resources:
                yield {
                    "container": ref,
                    "claim": f"{claim.claim_namespace}/{claim.claim_name}",
                    "driver": device.driver_name,
                    "pool": device.pool_name,
                    "device": device.device_name,
                    "cdi": [name.name for name in device.cdi_devices],
                }


def _managed(state: NodeState) -> Iterator[dict[str, object]]:
    """Return the devices that topoproxy assigns; held ones even if their plugin has gone."""
    refs = {pod.key: pod.ref for pod in state.pods.values()}
    holders: dict[tuple[str, str], list[str]] = {}
    for uid, containers in state.devices.held.items():
        for name, resources in containers.items():
            for resource, ids in resources.items():
                for device in ids:
                    holders.setdefault((resource, device), []).append(f"{refs.get(uid, uid)}/{name}")
    registered = state.devices.registered
    managed = {(resource, device) for resource, devices in registered.items() for device in devices}
    for resource, device in sorted(managed | holders.keys()):
        known_device = registered.get(resource, {}).get(device)
        yield {
            "resource": resource,
            "id": device,
            "numa": list(known_device.nodes) if known_device is not None and known_device.nodes else None,
            "healthy": known_device is not None and known_device.healthy,
            "containers": sorted(holders.get((resource, device), ())),
        }


def _requested(state: NodeState) -> Iterator[dict[str, object]]:
    for container in sorted(state.containers.values(), key=lambda item: (item.ref, item.id)):
        if container.phase is not Phase.EXITED:
            for device in container.request.devices:
                nodes = None if device.nodes is None else list(device.nodes)
                yield {
                    "container": container.ref,
                    "resource": device.resource,
                    "device": device.name,
                    "numa": nodes,
                    "source": device.source,
                }
