"""Whose CPU time matters to BE suppression, and what follows from it. Pure.

A pod counts as BE by its label or by Kubernetes' class. Pods that share a cgroup parent (a sandbox that was
made anew; clients that give all pods one parent) are one here, and BE only if all of them are. What BE pods
used that went meanwhile is seen in the group above all BestEffort pods, and counts as BE: else it would look
like the system's, and those that stay would be narrowed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.controller.be.rates import Rates, gone
from proxy.controller.kernel_ports import UsageGroup
from proxy.engine.state import NodeState
from proxy.model.workload import KubeQos
from proxy.pools.be_suppression import Usage, is_be

ABOVE = "above BE"
_GONE = "gone BE"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Whose CPU time is asked for.

    Attributes:
        groups: By key.
        be: Keys of BE pods.
        inside: Keys of pods below the group of BestEffort pods.
        parents: ``cgroup_parent`` of the latter, for finding that group.
    """

    groups: Mapping[str, UsageGroup]
    be: frozenset[str]
    inside: frozenset[str]
    parents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """Who uses how much, in CPUs: for people."""

    node: float
    be: float
    others: float
    system: float


def asked_of(state: NodeState) -> UsageQuery:
    """Tell whose CPU time is asked for."""
    groups: dict[str, UsageGroup] = {}
    be: set[str] = set()
    others: set[str] = set()
    inside: set[str] = set()
    for pod in state.pods.values():
        key = pod.cgroup_parent or pod.sandbox_id
        if pod.cgroup_parent:
            groups[key] = UsageGroup(pod.cgroup_parent)
        else:
            groups[key] = UsageGroup("", tuple(c.id for c in state.in_sandbox(pod.sandbox_id)))
        (be if is_be(pod.qos, pod.kube_qos) else others).add(key)
        if pod.cgroup_parent and pod.kube_qos is KubeQos.BEST_EFFORT:
            inside.add(key)
    return UsageQuery(groups, frozenset(be - others), frozenset(inside), tuple(sorted(inside)))


def usage_of(state: NodeState, asked: UsageQuery, rates: Rates) -> Usage:
    """Give what the node has and uses, as the budget wants it."""
    node = state.node
    online = node.machine.online
    pods = {key: used for key, used in rates.groups.items() if key != ABOVE}
    be = asked.be
    lost = gone(rates.groups.get(ABOVE), asked.inside, rates.groups)
    if lost:
        pods[_GONE] = lost
        be |= {_GONE}
    return Usage(
        capacity=1000 * len(online),
        allocatable=1000 * (len(online) - len(node.reserved & online)),
        node=rates.node,
        reservation=1000 * len(node.reservation & online),
        pods=pods,
        be_pods=be,
    )


def shares_of(usage: Usage) -> Shares:
    """Give who uses how much."""
    be = sum(used for key, used in usage.pods.items() if key in usage.be_pods)
    pods = sum(usage.pods.values())
    return Shares(usage.node, be, pods - be, max(0.0, usage.node - pods))
