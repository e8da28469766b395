"""Which containers and pods own CPUs.

Owners are the containers that exist, and those that only kubelet's CPU manager knows of. kubelet assigns CPUs
when it admits a pod, before there is a sandbox, and takes them back when the pod is gone. So what its state
file holds for a container that does not exist here counts as owned: the container may come at any moment,
with these CPUs in its request, or come back after a crash.

LSE and LSR pods for which no scheduler chose CPUs own some as a whole. Koordinator assigns CPUs to pods, not
to containers; LSE and LSR pods request whole CPUs, and exactly as many as their limits allow (koordinator
a7a1b76, apis/extension/qos.go). A pod that requests otherwise is refused, because it would rather not run
than share. What runs together is counted: app containers and sidecars; init containers run before them. The
node decides only where its CPU manager policy is ``static``; else such pods share CPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from proxy.allocation.cpu_request import CPU, MILLI, NO_SHARES
from proxy.engine.admission import permitted_claim
from proxy.engine.node import Node
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import Held
from proxy.model.requests import MEMORY, ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, KubeQos, Phase, Pod, Pool, QosClass, Request
from proxy.pools.claims import STRICT, whole_cpus
from proxy.pools.pools import Owner


class CpuHold(Struct, frozen=True):
    """CPUs that a reservation has taken for an owner, and that are part of no placement yet, or no more.

    Attributes:
        owner: The owner, as ``Container.owner``.
        cpus: The CPUs.
        hard: True when the CPUs are out of the BE pool too.
    """

    owner: str
    cpus: CpuSet
    hard: bool = True


NEVER_PINNED_BY_KUBELET = (QosClass.LS, QosClass.BE, QosClass.SYSTEM)
"""Classes for which assignments of kubelet's CPU manager are ignored."""


def owners_of(
    node: Node,
    containers: Iterable[Container],
    held: Held,
    pods: Iterable[Pod],
    holds: Iterable[CpuHold] = (),
) -> dict[str, Owner]:
    """Return the owners of CPUs, by ``Container.owner``.

    Args:
        node: The machine and the rules.
        containers: The containers that exist; one that has exited owns nothing.
        held: The CPUs that kubelet's CPU manager holds, by its state file.
        pods: The pods that are known.
        holds: What reservations hold; it counts as owned.
    """
    owners: dict[str, Owner] = {}
    there: set[tuple[str, str]] = set()
    for container in containers:
        if container.phase is Phase.EXITED:
            continue
        if container.pod.uid in held:
            there.add((container.pod.uid, container.name))
        placement = container.placement
        if placement.pool is not Pool.OWN:
            continue
        old = owners.get(container.owner)
        cpus = placement.exclusive | placement.replacement if placement.replacement else placement.exclusive
        cpus = cpus | old.cpus if old else cpus
        owners[container.owner] = Owner(cpus, placement.excludes_be or (old is not None and old.hard))
    for hold in holds:
        old = owners.get(hold.owner)
        hard = hold.hard or (old is not None and old.hard)
        owners[hold.owner] = Owner(hold.cpus | old.cpus if old else hold.cpus, hard)
    return {**owners, **_owners_known_to_kubelet(node, held, there, owners, pods)} if held else owners


def _owners_known_to_kubelet(
    node: Node,
    held: Held,
    there: Collection[tuple[str, str]],
    owners: Mapping[str, Owner],
    pods: Iterable[Pod],
) -> dict[str, Owner]:
    """Return the owners that only kubelet knows of: what it holds for containers that do not exist.

    Pods that a label or a scheduler put elsewhere are not owners. CPUs that have an owner here, or that are
    set aside for a pod, stay with it. The last shared CPU, and those of the pool's floors, have no owner.
    """
    known = list(pods)
    ours = {
        pod.uid for pod in known if pod.qos in NEVER_PINNED_BY_KUBELET or permitted_claim(node, pod)[0].cpuset
    }
    aside = [pod.reserved_for_pod.cpus for pod in known if pod.reserved_for_pod is not None]
    taken = CpuSet.from_bits(
        union(cpus.bits for cpus in (*aside, *(owner.cpus for owner in owners.values())))
    )
    found: dict[str, Owner] = {}
    for uid in sorted(held):
        if uid in ours:
            continue
        for name, cpus in sorted(held[uid].items()):
            free = cpus & node.machine.online - taken
            if free and (uid, name) not in there and not node.shareable <= taken | free:
                # An entry without a name only keeps CPUs from being chosen (``decisions``).
                if name and node.floors.broken(node.shareable - taken - free, free):
                    continue
                found[f"{uid}/{name}"] = Owner(free, hard=True)
                taken |= free
    return found


def owns_cpus_as_pod(node: Node, pod: Pod) -> bool:
    """Return whether the node has to choose CPUs for a pod as a whole."""
    undecided = (pod.cpuset is None or pod.cpuset_chosen_locally) and pod.nodes is None and not pod.problem
    return node.static and pod.qos in STRICT and undecided


def request_is_known(pod: Pod, total: Request) -> bool:
    """Return whether it is known what the pod requests."""
    return pod.asks is not None or total.cpu_shares > NO_SHARES


def pod_cpu_count(pod: Pod, total: Request) -> int:
    """Return how many CPUs a pod owns."""
    if pod.asks is None:
        return whole_cpus(total)
    return (
        sum(ask.requests.get(CPU, 0) for ask in pod.asks.of(ContainerKind.APP, ContainerKind.SIDECAR))
        // MILLI
    )


def pod_as_one_container(pod: Pod, total: Request, count: int) -> PodRequests:
    """Return the request of a pod as that of one container; with counted memory only if it is Guaranteed."""
    amounts = {CPU: count * MILLI}
    if pod.kube_qos is KubeQos.GUARANTEED:
        amounts |= {MEMORY: total.memory_limit, **dict(total.huge_pages)}
    amounts = {resource: amount for resource, amount in amounts.items() if amount > 0}
    return PodRequests(pod.key, (ContainerResources("", ContainerKind.APP, amounts, amounts),))
