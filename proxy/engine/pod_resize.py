"""Compute what stays set aside for a pod after one of its containers was resized.

Under scope ``pod`` CPUs and memory are set aside for a pod when its sandbox is made, for the life of the
sandbox. These events show that the pod requests other amounts since then:

- A container is created again. If its part is known, the part becomes what the container was granted. If only
  the CRI is known, the create carries the current sum of the pod. The CPUs that containers own stay set aside
  first, then those that ended containers had, then as many others as the sum allows.
- A container of an LSE or LSR pod is created, and its create carries another sum than that for which the
  pod's CPUs were chosen. If all containers of the pod have ended, the CPUs are chosen again; if that is
  rejected, the pod keeps the CPUs that it has.
- The runtime accepts another memory limit for a running container. The memory of a pod that is known as a
  whole changes by the difference; the next create of a container carries the exact sum.

Memory stays on its NUMA nodes, even if they have less than the new amount, because the pod runs already.
"""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.cpu_request import NO_SHARES, container_cpus
from proxy.allocation.packed import take_packed
from proxy.engine.owners import pod_cpu_count
from proxy.engine.pod_admission import admit, with_earlier_decision
from proxy.engine.state import NodeState, grants_of
from proxy.model.grants import Blocks
from proxy.model.idset import CpuSet
from proxy.model.requests import MEMORY
from proxy.model.workload import Container, ContainerPart, Phase, Pod, Request, SetAside
from proxy.pools.claims import whole_cpus


def aside_after_create(state: NodeState, container: Container) -> Pod | None:
    """Return the pod of a container that was placed, with what stays set aside; None if nothing changes.

    Args:
        state: The node with the container.
        container: The container as it is placed; its pod has the requests or the sum that its create carries.
    """
    pod = state.pods.get(container.pod.sandbox_id)
    aside = pod.reserved_for_pod if pod is not None else None
    if pod is None or aside is None or pod.cpuset is not None:
        return None
    after = _with_part(aside, container) if aside.parts else _as_summed(state, aside, container.pod)
    return None if after == aside else structs.replace(pod, reserved_for_pod=after)


def aside_after_update(state: NodeState, before: Container, after: Container) -> Pod | None:
    """Return the pod of an updated container, with what stays set aside; None if nothing changes.

    Args:
        state: The node.
        before: The container before the update.
        after: The container with its new memory limit.
    """
    pod = state.pods.get(after.pod.sandbox_id)
    aside = pod.reserved_for_pod if pod is not None else None
    former, limit = before.request.memory_limit, after.request.memory_limit
    if pod is None or aside is None or not (former and limit):
        return None
    size = sum(block.size for block in aside.blocks if block.resource == MEMORY)
    blocks = _with_memory(aside.blocks, max(size + limit - former, limit))
    if blocks == aside.blocks:
        return None
    return structs.replace(pod, reserved_for_pod=structs.replace(aside, blocks=blocks))


def with_cpus_chosen_again(state: NodeState, pod: Pod) -> Pod:
    """Return a pod that owns CPUs as a whole, with other CPUs if a resize has changed their number.

    Args:
        state: The node.
        pod: The pod with the sum that the create of a container carries.
    """
    total, known = pod.total, state.pods.get(pod.sandbox_id)
    if not pod.cpuset_chosen_locally or total is None or total.cpu_shares <= NO_SHARES:
        return pod
    if known is None or known.total is None or whole_cpus(known.total) == whole_cpus(total):
        return pod
    inside = state.in_sandbox(pod.sandbox_id)
    if pod.key in state.owners or any(c.phase is not Phase.EXITED for c in inside):
        return pod
    if pod_cpu_count(pod, total) == len(pod.cpuset or ()):
        return pod
    undecided = structs.replace(pod, cpuset=None, cpuset_chosen_locally=False, reserved_for_pod=None)
    without = state.changed(drop=[c.id for c in inside]).with_pod(undecided)
    decided = admit(without, undecided, total).pod
    return with_earlier_decision(pod, decided) if decided.cpuset_chosen_locally else pod


def _with_part(aside: SetAside, container: Container) -> SetAside:
    """Return what is set aside by container, with one part as large as the container's current request."""
    part, requests = aside.part(container.name), container.pod.requests
    if part is None or requests is None:
        return aside
    resources = next((each for each in requests.containers if each.name == part.name), None)
    if resources is None or container_cpus(requests, resources) == len(part.cpus):
        return aside
    granted = grants_of(container.placement)
    resized = ContainerPart(part.name, granted.cpus, granted.blocks, granted.shares)
    parts = tuple(resized if each is part else each for each in aside.parts)
    return structs.replace(aside, cpus=CpuSet.union_of(each.cpus for each in parts), parts=parts)


def _as_summed(state: NodeState, aside: SetAside, pod: Pod) -> SetAside:
    """Return what is set aside for a pod as a whole, according to the sum that its create carries."""
    total = pod.total
    if total is None or total.cpu_shares <= NO_SHARES:
        return aside
    blocks = _with_memory(aside.blocks, total.memory_limit) if total.memory_limit > 0 else aside.blocks
    return structs.replace(aside, cpus=_cpus_as_summed(state, aside, pod, total), blocks=blocks)


def _cpus_as_summed(state: NodeState, aside: SetAside, pod: Pod, total: Request) -> CpuSet:
    count = whole_cpus(total)
    if not aside.cpus or count == len(aside.cpus):
        return aside.cpus
    inside = state.in_sandbox(pod.sandbox_id)
    owned = CpuSet.union_of(c.placement.exclusive for c in inside if c.owns_cpus)
    names = {c.name for c in inside if c.owns_cpus}
    ended = CpuSet.union_of(c.placement.exclusive for c in inside if c.name not in names) & aside.cpus - owned
    remaining, topology = owned, state.node.cpu.topo
    for candidates in (ended & topology.cpus, aside.cpus - owned - ended & topology.cpus):
        lacking = max(count - len(remaining), 0)
        remaining |= take_packed(topology, candidates, min(lacking, len(candidates)))
    offline = list(aside.cpus - remaining - topology.cpus)
    return remaining | CpuSet(offline[: max(count - len(remaining), 0)])


def _with_memory(blocks: Blocks, size: int) -> Blocks:
    return tuple(structs.replace(block, size=size) if block.resource == MEMORY else block for block in blocks)
