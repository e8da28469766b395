"""Find pods that prevent a placement: victims of a pod of higher priority, and moves that would free CPUs.

Theory. A pod that is rejected for its topology needs room on one NUMA node, not anywhere. So the search takes
each NUMA node in turn and removes the pods that hold CPUs of it, the least important and largest first, until
the node would admit the pod. It then restores the pods that need not be removed, the most important ones
first. It chooses the NUMA node with the least important and fewest victims. The victims that kube-scheduler
proposes are kept if they suffice.

A move is the same with one pod: the waiting pod would fit if that pod went to another node that would admit
it. This module only proposes the move; an operator or a descheduler moves the pod.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from proxy.allocation.memory.request import pod_amounts
from proxy.model.idset import CpuSet, union
from proxy.model.machine import Machine
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import in_bytes
from proxy.scheduler.decision import evaluate, expected_node
from proxy.scheduler.node_facts import SchedulableNode, most_free_cpus
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.pod_demand import PodDemand

MOST_NODES = 64
"""The most nodes that one search for moves examines, and the most targets that one of its steps considers."""
MOST_RESTORED = 16
"""The most victims on one NUMA node for which the search tries whether they can stay."""


class Move(Struct, frozen=True):
    """A pod that would fit if another pod moved.

    Attributes:
        pod: The pod that waits.
        node: Where it would fit.
        moved: The pod to move.
        target: A node that would admit that pod.
    """

    pod: str
    node: str
    moved: str
    target: str


def without_pods(
    node: SchedulableNode, removed: Collection[str], counted: Sequence[PodDemand]
) -> SchedulableNode:
    """Return a node without some pods.

    If the objects list pods, they show which CPUs a pod holds, but not which devices or memory. The devices
    and memory are given back to each NUMA node where the pod may hold them. So the node may be given more
    than becomes free; the decision for the pod is made again when the victims have ended.

    Args:
        node: The node as its objects show it.
        removed: Uids of the pods.
        counted: Those of the removed pods that the objects count.
    """
    rules = node.rules
    shown = {pod: cpus for pod, cpus in node.shown.items() if pod not in removed}
    unknown = rules.machine.online - node.free - node.reserved
    unknown -= CpuSet.union_of(node.shown.values())
    back = union(cpus.bits for pod, cpus in node.shown.items() if pod in removed)
    count = sum(pod.lasting_cpus for pod in counted if pod.key not in node.shown and node.gives_cpus(pod))
    for numa in rules.machine.nodes if count else ():
        back |= CpuSet(_by_core(rules.machine, unknown & numa.cpus)[:count]).bits

    def more(resource: str, numa: int) -> int:
        return sum(_amount(pod, resource) for pod in counted if _may_hold(node, pod, numa))

    devices = {
        resource: {
            numa: (total, min(total, free + more(resource, numa))) for numa, (total, free) in zones.items()
        }
        for resource, zones in node.devices.items()
    }
    memory = tuple(
        (numa, resource, most, min(most, free + more(resource, numa)))
        for numa, resource, most, free in node.memory
    )
    free = node.free | CpuSet.from_bits(back) - node.reserved
    return replace(node, free=free, devices=devices, memory=memory, shown=shown)


def _by_core(machine: Machine, cpus: CpuSet) -> list[int]:
    """Return CPUs core by core, so that whole cores become free if possible."""
    return sorted(cpus, key=lambda cpu: (machine.by_id[cpu].core, cpu))


def _may_hold(node: SchedulableNode, pod: PodDemand, numa: int) -> bool:
    """Return whether a pod may hold devices and memory of a NUMA node.

    If the node places the whole pod on a single NUMA node, its devices and memory are on the NUMA node of its
    CPUs.
    """
    rules, cpus = node.rules, _shown_cpus(node, pod)
    is_whole = rules.scope is Scope.POD or len(pod.spec.requests.containers) == 1
    if not cpus or not is_whole or rules.policy is not TopologyPolicy.SINGLE_NUMA_NODE:
        return True
    return numa in rules.machine.nodes_of(cpus)


def _amount(pod: PodDemand, resource: str) -> int:
    """Return how many devices, or bytes of memory that the memory manager gives, a pod holds."""
    if not in_bytes(resource):
        return pod.devices.get(resource, 0)
    return pod_amounts(pod.spec.requests).get(resource, 0) if pod.holds_memory else 0


def choose_victims(
    node: SchedulableNode,
    demand: PodDemand,
    pods: Sequence[PodDemand],
    proposed: Collection[str],
    pending: Collection[str] = (),
) -> tuple[str, ...] | None:
    """Choose the pods that have to be removed so that a pod fits.

    Args:
        node: The node as its objects show it.
        demand: The pod.
        pods: Pods that hold CPUs, devices or memory of the node, in the order of their binds.
        proposed: Uids of the pods that kube-scheduler would end.
        pending: Uids of the pods that the object does not show yet.

    Returns:
        Uids, with the proposed ones; None if no pods of lower priority make room.
    """

    def fits(removed: Collection[str]) -> bool:
        waiting = [pod for pod in pods if pod.key in pending and pod.key not in removed]
        counted = [pod for pod in pods if pod.key in removed and pod.key not in pending]
        without = without_pods(node, removed, counted)
        return not _lacks_cpus(without, demand) and evaluate(demand, expected_node(without, waiting)).fits

    first = tuple(proposed)
    if fits(first):
        return first
    lower = [pod for pod in pods if pod.priority < demand.priority and pod.key not in first]
    best: tuple[tuple[int, int], tuple[str, ...]] | None = None
    for numa in node.rules.machine.nodes:
        existing = [pod for pod in lower if not _shown_cpus(node, pod).isdisjoint(numa.cpus)]
        existing.sort(key=lambda pod: (pod.priority, -len(_shown_cpus(node, pod))))
        victims = _fewest_victims(first, existing, fits)
        if victims is None:
            continue
        worth = max((pod.priority for pod in existing if pod.key in victims), default=0), len(victims)
        if best is None or worth < best[0]:
            best = worth, victims
    return best[1] if best else None


def find_moves(table: NodeTable, demand: PodDemand, names: Iterable[str]) -> Iterator[Move | None]:
    """Yield moves of one pod that would make room for a pod, at most one for each node.

    Yields None after each step without a move, so that a caller can do other work, or end the search. The
    table may change in between.
    """
    all_names = list(names)
    for name in all_names[:MOST_NODES]:
        for candidate in table.pods(name):
            node = table.node(name)
            if node is not None and _makes_room(table, node, demand, candidate):
                elsewhere = [other for other in all_names if other != name]
                for start in range(0, len(elsewhere), MOST_NODES):
                    yield None
                    if fits := table.filter(unbound(candidate), elsewhere[start : start + MOST_NODES]).fits:
                        yield Move(demand.ref, name, candidate.ref, fits[0])
                        break
                else:
                    continue
                break
            yield None


def _makes_room(table: NodeTable, node: SchedulableNode, demand: PodDemand, moved: PodDemand) -> bool:
    """Return whether a node would admit a pod if another one left it."""
    if not _shown_cpus(node, moved):
        return False
    pending = [assumed.demand for assumed in table.pending(node.name)]
    without = without_pods(node, (moved.key,), () if moved in pending else (moved,))
    return evaluate(demand, expected_node(without, [pod for pod in pending if pod != moved])).fits


def unbound(demand: PodDemand) -> PodDemand:
    """Return the demand of a pod as if it were bound to no node."""
    return replace(demand, node="", pod=replace(demand.pod, cpuset=None))


def _lacks_cpus(node: SchedulableNode, demand: PodDemand) -> bool:
    """Return whether the counts of free CPUs alone exclude a pod (``NodeTable.known_verdict``)."""
    if not node.gives_cpus(demand):
        return False
    return demand.exclusive_cpus > len(node.free) or demand.largest_container_cpus > most_free_cpus(node)


def _shown_cpus(node: SchedulableNode, pod: PodDemand) -> CpuSet:
    return node.shown.get(pod.key, CpuSet())


def _fewest_victims(
    first: tuple[str, ...], candidates: Sequence[PodDemand], fits: Callable[[Collection[str]], bool]
) -> tuple[str, ...] | None:
    """Remove pods in their order until there is room, then restore those that need not be removed.

    A binary search finds how many have to be removed. Then the most important ``MOST_RESTORED`` are restored
    one by one if they can be. This keeps the steps few: each step runs the engine, and a node may have
    hundreds of pods.
    """
    keys = [pod.key for pod in candidates]
    if not keys or not fits([*first, *keys]):
        return None
    too_few, enough = 0, len(keys)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits([*first, *keys[:middle]]):
            enough = middle
        else:
            too_few = middle
    removed = [*first, *keys[:enough]]
    for key in reversed(removed[len(first) : -1][-MOST_RESTORED:]):
        fewer = [pod for pod in removed if pod != key]
        if fits(fewer):
            removed = fewer
    return tuple(removed)
