"""Which containers and pods own CPUs, and how many CPUs may be owned.

Owners are existing containers, and containers that only kubelet's CPU manager knows of. kubelet assigns CPUs
when it admits a pod, before there is a sandbox, and takes them back when the pod is gone. So CPUs that its
state file holds for a container that does not exist here count as owned: the container may be created at any
moment, with these CPUs in its request, or again after a crash.

An LSE (latency-sensitive exclusive) or LSR (latency-sensitive reserved) pod for which no scheduler chose CPUs
owns CPUs as a whole. Koordinator assigns CPUs to pods, not to containers; LSE and LSR pods request whole
CPUs, and exactly as many as their limits allow (koordinator a7a1b76, apis/extension/qos.go). A pod that
requests otherwise is rejected, because it must not run on shared CPUs. The containers that run at the same
time are counted: app containers and sidecars; init containers run before them. A request of the pod itself
(``spec.resources``) counts in place of theirs. The node chooses CPUs for such pods only if its CPU manager
policy is ``static``; otherwise they share CPUs.

How many CPUs may be owned follows from the floor of the shared pool, and from limits by pod, namespace and
node. To check a placement against them, the states without and with it are compared. Only CPUs that the
placement takes in addition count: an owner keeps what it has, and a running owner is never evicted. CPUs to
which an ended container of another pod may come back, as long as its sandbox exists, count as owned; so its
restart stays within the limits. Ended containers of the same pod are not counted, because without kubelet's
report an init container looks like any container that has ended. So if such a container starts again, the
limits are checked together with the containers that were created since.

If CPUs are chosen here and the best choice breaks a floor, CPUs are chosen again without those that the
floors need (``cpus_to_avoid``). Every choice from the remaining CPUs keeps all floors, but it may be worse
(another NUMA node, more cores), so it is made second and not first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.allocation.cpu_request import CPU, MILLI, NO_SHARES, running_request_milli
from proxy.engine.admission import permitted_claim, requested_cpus
from proxy.engine.node import Node
from proxy.model.admission import AdmissionRule, Breach
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import Held
from proxy.model.phrases import counted
from proxy.model.requests import MEMORY, ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import MOST_CPU_SHARES, Container, KubeQos, Phase, Pod, Pool, QosClass, Request
from proxy.pools.claims import STRICT, may_own, whole_cpus
from proxy.pools.pools import Owner

if TYPE_CHECKING:
    from proxy.engine.state import NodeState


class ReservationCpus(Struct, frozen=True):
    """CPUs that a reservation holds for an owner, and that are not, or no longer, part of a placement.

    Attributes:
        owner: The owner, as ``Container.owner``.
        cpus: The CPUs.
        excludes_be: Whether the BE pool must not use the CPUs either.
    """

    owner: str
    cpus: CpuSet
    excludes_be: bool = True


NEVER_PINNED_BY_KUBELET = (QosClass.LS, QosClass.BE, QosClass.SYSTEM)
"""Classes for which assignments of kubelet's CPU manager are ignored."""


def cpu_owners(
    node: Node,
    containers: Iterable[Container],
    held: Held,
    pods: Iterable[Pod],
    reservation_cpus: Iterable[ReservationCpus] = (),
) -> dict[str, Owner]:
    """Return the owners of CPUs, by ``Container.owner``.

    Args:
        node: The machine and the rules.
        containers: The containers that exist; one that has exited owns nothing.
        held: The CPUs that kubelet's CPU manager holds, by its state file.
        pods: The pods that are known.
        reservation_cpus: CPUs of reservations; they count as owned.
    """
    owners: dict[str, Owner] = {}
    existing: set[tuple[str, str]] = set()
    for container in containers:
        if container.phase is Phase.EXITED:
            continue
        if container.pod.uid in held:
            existing.add((container.pod.uid, container.name))
        placement = container.placement
        if placement.pool is not Pool.OWN:
            continue
        known_owner = owners.get(container.owner)
        cpus = placement.exclusive | placement.replacement if placement.replacement else placement.exclusive
        cpus = cpus | known_owner.cpus if known_owner else cpus
        owners[container.owner] = Owner(
            cpus, placement.excludes_be or (known_owner is not None and known_owner.excludes_be)
        )
    for reserved in reservation_cpus:
        known_owner = owners.get(reserved.owner)
        excludes_be = reserved.excludes_be or (known_owner is not None and known_owner.excludes_be)
        owners[reserved.owner] = Owner(
            reserved.cpus | known_owner.cpus if known_owner else reserved.cpus, excludes_be
        )
    return {**owners, **_owners_known_to_kubelet(node, held, existing, owners, pods)} if held else owners


def _owners_known_to_kubelet(
    node: Node,
    held: Held,
    existing: Collection[tuple[str, str]],
    owners: Mapping[str, Owner],
    pods: Iterable[Pod],
) -> dict[str, Owner]:
    """Return the owners that only kubelet knows of: containers that do not exist here but have CPUs there.

    Pods for which a label or a scheduler decides otherwise are not owners. CPUs that have an owner here, or
    that are set aside for a pod, stay with that owner or pod. The last shared CPU, and the CPUs of the pool's
    floors, never get an owner.
    """
    all_pods = list(pods)
    decided_here = {
        pod.uid
        for pod in all_pods
        if pod.qos in NEVER_PINNED_BY_KUBELET or permitted_claim(node, pod)[0].cpuset
    }
    aside = [pod.reserved_for_pod.cpus for pod in all_pods if pod.reserved_for_pod is not None]
    taken = CpuSet.union_of((*aside, *(owner.cpus for owner in owners.values())))
    kubelet_owners: dict[str, Owner] = {}
    for uid in sorted(held):
        if uid in decided_here:
            continue
        for name, cpus in sorted(held[uid].items()):
            free = cpus & node.machine.online - taken
            if free and (uid, name) not in existing and not node.shareable <= taken | free:
                if node.floors.breach(node.shareable - taken - free, free):
                    continue
                kubelet_owners[f"{uid}/{name}"] = Owner(free, excludes_be=True)
                taken |= free
    return kubelet_owners


def is_undecided(pod: Pod) -> bool:
    """Return whether the node decides where a pod runs: no other party has named its CPUs or NUMA nodes."""
    return (pod.cpuset is None or pod.cpuset_chosen_locally) and pod.nodes is None and not pod.problem


def needs_cpus_for_whole_pod(node: Node, pod: Pod) -> bool:
    """Return whether the node has to choose CPUs for a pod as a whole."""
    return node.static and pod.qos in STRICT and is_undecided(pod)


def request_is_known(pod: Pod, total: Request) -> bool:
    """Return whether the request of the pod is known."""
    return pod.requests is not None or total.cpu_shares > NO_SHARES


def pod_cpu_count(pod: Pod, total: Request) -> int:
    """Return how many CPUs a pod owns."""
    if pod.requests is None:
        return whole_cpus(total)
    return running_request_milli(pod.requests) // MILLI


def pod_as_one_container(pod: Pod, total: Request, count: int) -> PodRequests:
    """Return the request of a pod as that of one container; with memory only if the pod is Guaranteed.

    Devices are not part of the result: ``DeviceProvider`` gives them to the containers of the pod.
    """
    amounts = {CPU: count * MILLI}
    if pod.kube_qos is KubeQos.GUARANTEED:
        amounts |= {MEMORY: total.memory_limit, **dict(total.huge_pages)}
    amounts = {resource: amount for resource, amount in amounts.items() if amount > 0}
    return PodRequests(pod.key, (ContainerResources("", ContainerKind.APP, amounts, amounts),))


def needs_pod_total(node: Node, pod: Pod, request: Request) -> bool:
    """Return whether the sum that a create carries for its pod matters.

    It matters if a container may own CPUs because of its create alone (``why_pod_total_exceeded``), and if
    CPUs or memory were set aside according to the sum (``pod_resize``).
    """
    if pod.cpuset_chosen_locally:
        return True
    if pod.requests is not None or pod.cpuset is not None:
        return False
    if pod.reserved_for_pod is not None:
        return True
    return node.static and may_own(pod) and whole_cpus(request) > 0


def why_pod_total_exceeded(state: NodeState, pod: Pod, name: str, count: int) -> str:
    """Return why a container shares CPUs although its create carries whole ones; empty if it may own them.

    A pod may request resources of its own (``spec.resources``). kubelet then sends the limit of the pod with
    each container that has none (kubernetes v1.36 pkg/kubelet/kuberuntime/kuberuntime_container_linux.go,
    getCPULimit), and only kubelet's report distinguishes such a container from one that requests that amount
    itself. Without a report, the containers of a pod together own no more CPUs than its sandbox requests. A
    container that is created again keeps its CPUs, because a resize of another container may have reduced the
    sum.

    Args:
        state: The node as it is.
        pod: The pod.
        name: The container.
        count: How many CPUs it would own.
    """
    total = pod.total
    if pod.requests is not None or total is None or total.cpu_shares <= NO_SHARES:
        return ""
    if total.cpu_shares == MOST_CPU_SHARES and total.cpu_quota <= 0:
        return ""  # it may request any number above that
    siblings = [c for c in state.in_sandbox(pod.sandbox_id) if c.owns_cpus and c.name != name]
    others = CpuSet.union_of(c.placement.exclusive for c in siblings)
    requested = requested_cpus(pod, total)
    if not others or len(others) + count <= requested:
        return ""
    earlier = state.last_cpus(pod.owner_key(name))
    if len(earlier) == count and earlier.isdisjoint(others):
        return ""
    return (
        f"it owns no CPUs: its create carries {counted(count, 'CPU')}, other containers of its pod own"
        f" {len(others)}, and the pod requests {requested} together; only kubelet reports which containers"
        " request CPUs of their own"
    )


def exceeded_limit(
    before: NodeState, after: NodeState, pod: Pod, owner: str, placed: CpuSet
) -> Breach | None:
    """Return the admission limit that a placement exceeds; None if it stays within all.

    Args:
        before: The state without the placement.
        after: The state with it.
        pod: The pod that is given CPUs.
        owner: Their owner, as ``Container.owner``; empty for CPUs that are set aside for a pod.
        placed: The CPUs.
    """
    before_cpus = _previous_cpus(before, pod, owner) if owner else CpuSet.union_of(_owned_by(before, pod))
    recorded = before.pods.get(pod.sandbox_id)
    for promised in (pod.reserved_for_pod, recorded.reserved_for_pod if recorded is not None else None):
        before_cpus |= promised.cpus if promised is not None and owner else CpuSet()
    added = placed - before_cpus
    if not added:
        return None
    return _over_count(before, after, pod) or after.node.floors.breach(spare_shared_cpus(after, pod), added)


def _previous_cpus(state: NodeState, pod: Pod, owner: str) -> CpuSet:
    """Return the CPUs that an owner has; or had when it ended, if no other container of its pod owns CPUs."""
    held = state.owners.get(owner)
    if held is not None:
        return held.cpus
    if any(key.startswith(f"{pod.key}/") for key in state.owners):
        return CpuSet()
    return state.retained_cpus(owner)


def spare_shared_cpus(state: NodeState, pod: Pod | None) -> CpuSet:
    """Return the part of the shared pool that no other pod claims; None stands for a new pod."""
    key = "" if pod is None else pod.key
    ended = union(c.placement.exclusive.bits for c in state.ended_owners() if c.pod.key != key)
    return CpuSet.from_bits(state.pools.shared.bits & ~(state.cpus_set_aside().bits | ended))


def cpus_to_avoid(state: NodeState, pod: Pod) -> CpuSet:
    """Return CPUs that must not be chosen for a pod, so that every choice from the rest keeps the floors."""
    node = state.node
    if not node.floors:
        return CpuSet()
    pool = spare_shared_cpus(state, pod)
    others = state.pools.shared - pool - state.cpus_set_aside()
    return node.floors.choose(pool, node.machine, node.cpu.reserved) | others


def floor_cpus(state: NodeState) -> CpuSet:
    """Return CPUs of the shared pool that no new pod may own, because the floors need them."""
    node = state.node
    return node.floors.choose(spare_shared_cpus(state, None), node.machine, node.cpu.reserved)


def _over_count(before: NodeState, after: NodeState, pod: Pod) -> Breach | None:
    """Return the limit on the number of owned CPUs that a placement exceeds; None if it exceeds none."""
    rules = after.node.admission
    if rules.pod_limit is None and rules.namespace_limit is None and rules.node_limit is None:
        return None
    ended = [c for c in after.ended_owners() if c.pod.key != pod.key]
    pod_of_owner = {c.owner: c.pod for c in after.containers.values() if c.owns_cpus}
    by_uid = {each.uid: each for each in after.pods.values()}

    def namespace_of(owner: str) -> str | None:
        holder = pod_of_owner.get(owner) or by_uid.get(owner.partition("/")[0])
        return None if holder is None else holder.namespace

    def in_pod(state: NodeState) -> int:
        return len(CpuSet.union_of(_owned_by(state, pod)))

    def in_namespace(state: NodeState) -> int:
        aside = [each for each in _aside(state) if each.namespace == pod.namespace]
        owned = [owner.cpus for key, owner in state.owners.items() if namespace_of(key) == pod.namespace]
        returning = [c.placement.exclusive for c in ended if c.pod.namespace == pod.namespace]
        return len(CpuSet.union_of([*_cpus_aside(aside), *owned, *returning]))

    def on_node(state: NodeState) -> int:
        owned = [owner.cpus for owner in state.owners.values()]
        returning = [c.placement.exclusive for c in ended]
        return len(CpuSet.union_of([*_cpus_aside(_aside(state)), *owned, *returning]))

    limits = (
        (AdmissionRule.POD_LIMIT, "maxCPUsPerPod", rules.pod_limit, in_pod, "the pod would"),
        (
            AdmissionRule.NAMESPACE_LIMIT,
            "maxCPUsPerNamespace",
            rules.namespace_limit,
            in_namespace,
            "its namespace would",
        ),
        (
            AdmissionRule.NODE_LIMIT,
            "maxCPUsPerNode",
            rules.node_limit,
            on_node,
            "pods of this node together would",
        ),
    )
    for rule, key, most, count, would in limits:
        if most is not None and (owned := count(after)) > most and owned > count(before):
            return Breach(rule, f"{would} own {counted(owned, 'CPU')}, and may own {most} (admission.{key})")
    return None


def _owned_by(state: NodeState, pod: Pod) -> list[CpuSet]:
    """Return the CPUs that a pod owns: those of its containers, and those that are set aside for it."""
    prefix = f"{pod.key}/"
    owned = [held.cpus for key, held in state.owners.items() if key == pod.key or key.startswith(prefix)]
    return [*owned, *_cpus_aside(other for other in _aside(state) if other.key == pod.key)]


def _aside(state: NodeState) -> list[Pod]:
    """Return the pods for which CPUs or memory are set aside."""
    return [pod for pod in state.pods.values() if pod.reserved_for_pod is not None]


def _cpus_aside(pods: Iterable[Pod]) -> list[CpuSet]:
    """Return the CPUs that are set aside for pods."""
    return [pod.reserved_for_pod.cpus for pod in pods if pod.reserved_for_pod is not None]
