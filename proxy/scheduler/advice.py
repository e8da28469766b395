"""Find pods that prevent a placement: victims of a pod of higher priority, and moves that would free CPUs.

Theory. A pod that is refused for its topology needs room on one NUMA node, not anywhere. So for each NUMA
node the pods that hold CPUs of it are taken away, the least important and largest first, until the node would
admit the pod; what need not have gone comes back. Of the NUMA nodes the one with the least important and
fewest victims counts. What kube-scheduler itself proposes is kept where it suffices.

A move is the same with one pod: the pod that waits would fit if this one went to another node, which would
admit it. Moving it is left to people or to a descheduler: pods are not moved here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from proxy.model.idset import CpuSet, union
from proxy.scheduler.decision import evaluate, expect
from proxy.scheduler.node_facts import SchedulableNode
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.pod_demand import PodDemand

MOST_NODES = 64
"""Nodes that one question looks at."""


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


def without_pods(node: SchedulableNode, gone: Collection[str]) -> SchedulableNode:
    """Return a node after pods have gone, as far as its object says what they hold."""
    back = union(node.shown[pod].bits for pod in gone if pod in node.shown)
    shown = {pod: cpus for pod, cpus in node.shown.items() if pod not in gone}
    return replace(node, free=node.free | CpuSet.from_bits(back) - node.reserved, shown=shown)


def choose_victims(
    node: SchedulableNode,
    demand: PodDemand,
    pods: Sequence[PodDemand],
    proposed: Collection[str],
    pending: Collection[str] = (),
) -> tuple[str, ...] | None:
    """Choose the pods that have to go so that a pod fits.

    Args:
        node: The node as its objects show it.
        demand: The pod.
        pods: Pods that hold CPUs of the node, in the order of their binds.
        proposed: Uids of the pods that kube-scheduler would end.
        pending: Uids of those that the object does not show yet.

    Returns:
        Uids, with the proposed ones; None where no pods of lower priority make room.
    """

    def fits(gone: Collection[str]) -> bool:
        waiting = [each for each in pods if each.key in pending and each.key not in gone]
        return evaluate(demand, expect(without_pods(node, gone), waiting)).fits

    first = tuple(proposed)
    if fits(first):
        return first
    lower = [each for each in pods if each.priority < demand.priority and each.key not in first]
    best: tuple[tuple[int, int], tuple[str, ...]] | None = None
    for numa in node.rules.machine.nodes:
        existing = [each for each in lower if not _held(node, each).isdisjoint(numa.cpus)]
        existing.sort(key=lambda each: (each.priority, -len(_held(node, each))))
        chosen = _fewest(first, existing, fits)
        if chosen is None:
            continue
        worth = max((each.priority for each in existing if each.key in chosen), default=0), len(chosen)
        if best is None or worth < best[0]:
            best = worth, chosen
    return best[1] if best else None


def find_moves(table: NodeTable, demand: PodDemand, names: Iterable[str]) -> list[Move]:
    """Return moves of one pod that would make room for a pod, at most one for each node."""
    found: list[Move] = []
    every = list(names)
    for name in every[:MOST_NODES]:
        node = table.node(name)
        if node is None:
            continue
        pending = [each.demand for each in table.pending(name)]
        for other in table.pods(name):
            if other.key not in node.shown or len(node.shown[other.key]) == 0:
                continue
            if not evaluate(demand, expect(without_pods(node, (other.key,)), pending)).fits:
                continue
            elsewhere = [each for each in every if each != name]
            targets = table.filter(unbound(other), elsewhere).fits
            if targets:
                found.append(Move(demand.ref, name, other.ref, targets[0]))
                break
    return found


def unbound(demand: PodDemand) -> PodDemand:
    """Return the demand of a pod as if it were bound to no node."""
    return replace(demand, node="", pod=replace(demand.pod, cpuset=None))


def _held(node: SchedulableNode, pod: PodDemand) -> CpuSet:
    return node.shown.get(pod.key, CpuSet())


def _fewest(
    first: tuple[str, ...], candidates: Sequence[PodDemand], fits: Callable[[Collection[str]], bool]
) -> tuple[str, ...] | None:
    """Remove pods one by one until there is room, then restore those that need not be removed."""
    gone = list(first)
    for each in candidates:
        gone.append(each.key)
        if fits(gone):
            break
    else:
        return None
    for key in gone[len(first) : -1]:
        fewer = [each for each in gone if each != key]
        if fits(fewer):
            gone = fewer
    return tuple(gone)
