"""From the state of a node to the answers of the pod-resources API.

The rules are kubelet's (kubernetes v1.35 pkg/kubelet/apis/podresources/server_v1.go and
pkg/kubelet/cm/container_manager_linux.go):

- All pods are listed whose sandbox exists, with app containers and sidecars. Init containers are left out
  where kubelet reports which they are.
- ``cpu_ids`` are exclusive CPUs; a container of a pool has none. ``memory`` are blocks of the static memory
  manager.
- Allocatable is what can be assigned at all, not what is free: all CPUs without the reserved ones.

Only what is applied is reported as ours. For a pod to which the plan is not applied, and for the whole node
in mode ``observe`` and after a release, kubelet's own answer is passed on as it is; without one, such a pod
has neither CPUs nor memory. Claims and fields that our messages do not declare are always those of kubelet's
answer.

Devices are kubelet's and those of plug-ins that registered with topoproxy: each manager has its own
resources. As at kubelet there is one entry for each device and NUMA node. Those that a container holds are
listed in any mode, as the container has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.requests import ContainerKind
from proxy.model.workload import Container, Phase, Placement, Pod, Pool

_Named = dict[tuple[str, str], dict[str, Container]]


def pods_answer(state: NodeState, kubelet: pb.ListPodResourcesResponse | None) -> pb.ListPodResourcesResponse:
    """Return the answer to ``List``.

    Args:
        state: The node.
        kubelet: What kubelet answers; None where it is not queried. It is not changed.
    """
    answer = pb.ListPodResourcesResponse()
    if kubelet is not None:
        answer.CopyFrom(kubelet)
    placed = _containers(state)
    listed = {(pod.namespace, pod.name) for pod in answer.pod_resources}
    for pod in sorted(state.pods.values(), key=lambda pod: (pod.namespace, pod.name)):
        if (key := (pod.namespace, pod.name)) not in listed:
            listed.add(key)
            names = _listed_names(pod, placed.get(key, {}))
            containers = [pb.ContainerResources(name=name) for name in names]
            answer.pod_resources.add(name=pod.name, namespace=pod.namespace, containers=containers)
    for entry in answer.pod_resources:
        known = placed.get((entry.namespace, entry.name), {})
        for container in entry.containers:
            ours = known.get(container.name)
            if ours is None:
                continue
            if _is_applied(state, ours):
                _fill(container, state, ours.placement)
            if held := state.devices.held.get(ours.pod.key, {}).get(container.name):
                for resource, ids in sorted(held.items()):
                    container.devices.extend(_devices(state, resource, ids))
    return answer


def allocatable_answer(
    state: NodeState, kubelet: pb.AllocatableResourcesResponse | None
) -> pb.AllocatableResourcesResponse:
    """Return the answer to ``GetAllocatableResources``; the arguments are as for ``pods_answer``."""
    answer = pb.AllocatableResourcesResponse()
    if kubelet is not None:
        answer.CopyFrom(kubelet)
    if not applies_to(state, None):
        return answer
    node = state.node
    for resource in sorted(state.devices.registered):
        answer.devices.extend(_devices(state, resource, state.devices.healthy(resource)))
    answer.cpu_ids[:] = node.topology.cpus - node.cpu.reserved
    if state.memory is not None:
        del answer.memory[:]
        answer.memory.extend(
            _memory(resource, table.allocatable, Mask((number,)))
            for number, numa in state.memory.nodes.items()
            for resource, table in sorted(numa.tables.items())
            if table.allocatable
        )
    return answer


def _containers(state: NodeState) -> _Named:
    """Return the containers that have not ended, by their pod (namespace and name) and their name.

    Of several with the same names, the one with the newest attempt counts.
    """
    found: _Named = {}
    for container in sorted(state.containers.values(), key=lambda each: (each.attempt, each.id)):
        if container.phase is not Phase.EXITED:
            pod = container.pod
            found.setdefault((pod.namespace, pod.name), {})[container.name] = container
    return found


def _listed_names(pod: Pod, there: Iterable[str]) -> Iterable[str]:
    """Return the containers of a pod that are listed: those of its spec, where it is known."""
    if pod.asks is None:
        return sorted(there)
    return [ask.name for ask in pod.asks.of(ContainerKind.SIDECAR, ContainerKind.APP)]


def _is_applied(state: NodeState, container: Container) -> bool:
    """Return whether the plan is applied to a container."""
    return applies_to(state, state.pods.get(container.pod.sandbox_id) or container.pod)


def _fill(entry: pb.ContainerResources, state: NodeState, placement: Placement) -> None:
    """Set the CPUs of a container, and its memory where we count it."""
    entry.cpu_ids[:] = _exclusive(state, placement)
    if state.memory is not None:
        del entry.memory[:]
        entry.memory.extend(_blocks(placement))


def _exclusive(state: NodeState, placement: Placement) -> CpuSet:
    """Return the CPUs that a container owns and that are online."""
    if placement.pool is not Pool.OWN:
        return CpuSet()
    return (placement.exclusive | placement.replacement) & state.node.machine.online


def _blocks(placement: Placement) -> Iterator[pb.ContainerMemory]:
    for block in placement.blocks:
        yield _memory(block.resource, block.size, block.affinity)


def _devices(state: NodeState, resource: str, ids: Iterable[str]) -> Iterator[pb.ContainerDevices]:
    known = state.devices.registered.get(resource, {})
    for name in sorted(ids):
        device = known.get(name)
        if device is None or not device.nodes:
            yield pb.ContainerDevices(resource_name=resource, device_ids=[name])
            continue
        for node in device.nodes:
            topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)])
            yield pb.ContainerDevices(resource_name=resource, device_ids=[name], topology=topology)


def _memory(resource: str, size: int, nodes: Mask) -> pb.ContainerMemory:
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes])
    return pb.ContainerMemory(memory_type=resource, size=size, topology=topology)
