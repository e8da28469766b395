"""The CPU time that BE (best effort) suppression reads: the counters, and the rates between two readings.

A pod counts as BE by its label or by its Kubernetes QoS class. Pods that share a cgroup parent (a sandbox
that was recreated; clients that give all pods one parent) count as one pod, and as BE only if all of them are
BE.

A rate is the growth of a counter divided by the time between two readings. In that time cgroups may come and
go:

* A group that is new, or whose counter has gone backwards (the group was removed and recreated), has counted
  from zero. If its counter shows more than the machine could do in that time, the group is older than the
  first reading, and its rate is unknown for one round.
* The CPU time that a group used before it was removed is only in the counters of the groups above it. So the
  group above all BestEffort pods is read too. The part of its CPU time that no existing pod has used was used
  by removed pods, and counts as BE. Otherwise it would look like the system's usage, and the remaining BE
  pods would be narrowed because of it.

If the node's counter goes backwards, or the two readings are at the same moment, there are no rates at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.model.workload import KubeQos
from proxy.pools.be_suppression import Usage, is_be

if TYPE_CHECKING:
    from proxy.engine.state import NodeState

ABOVE = "above BE"
_REMOVED_BE = "gone BE"
LEAST_NS = 10_000_000
"""Readings closer together than this carry no information: the node's counter moves in steps of this size."""


class UsageGroup(Struct, frozen=True):
    """A pod or group whose CPU time is read.

    Attributes:
        parent: ``cgroup_parent`` as the CRI gives it; empty if the client gave none.
        containers: Ids of the containers, for a pod without a group of its own.
    """

    parent: str
    containers: tuple[str, ...] = ()


class UsageReading(Struct, frozen=True):
    """The kernel's counters of CPU time at one moment.

    Attributes:
        at: Nanoseconds of a monotonic clock.
        node: CPU time of the whole node, in nanoseconds.
        groups: For each key of the query, the paths of its cgroups with their CPU time in nanoseconds.
    """

    at: int
    node: int
    groups: Mapping[str, Mapping[str, int]]


class UsageQuery(Struct, frozen=True):
    """The counters to read.

    Attributes:
        groups: The pods or cgroups to read, by key.
        be: Keys of BE pods.
        inside: Keys of pods below the group of all BestEffort pods.
        parents: ``cgroup_parent`` of the pods in ``inside``, to find that group.
    """

    groups: Mapping[str, UsageGroup]
    be: frozenset[str]
    inside: frozenset[str]
    parents: tuple[str, ...]


class Rates(Struct, frozen=True):
    """CPUs in use between two readings.

    Attributes:
        node: The rate of the whole node.
        groups: The rates by key of the query; unknown rates are left out.
    """

    node: float
    groups: Mapping[str, float]


class Shares(Struct, frozen=True):
    """CPUs in use by BE pods, by other pods and by the system, as messages show them."""

    node: float
    be: float
    others: float
    system: float


def usage_query(state: NodeState) -> UsageQuery:
    """Return the counters to read for the pods of a node."""
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


def rates(before: UsageReading, after: UsageReading, cpus: int) -> Rates | None:
    """Compute the CPUs in use.

    Args:
        before: The earlier reading.
        after: The later one.
        cpus: The number of online CPUs, the upper limit of every rate.

    Returns:
        The rates; None if the readings carry no information.
    """
    elapsed = after.at - before.at
    if elapsed < LEAST_NS or after.node < before.node:
        return None
    most_ns = elapsed * cpus
    cpus_by_group: dict[str, float] = {}
    for key, counters in after.groups.items():
        earlier = before.groups.get(key, {})
        growths = [_growth(earlier.get(path), current, most_ns) for path, current in counters.items()]
        known_growths = [growth for growth in growths if growth is not None]
        if known_growths:
            cpus_by_group[key] = min(sum(known_growths), most_ns) / elapsed
    return Rates(min(after.node - before.node, most_ns) / elapsed, cpus_by_group)


def _growth(before: int | None, current: int, most_ns: int) -> int | None:
    if before is not None and current >= before:
        return current - before
    return current if current <= most_ns else None


def usage_of_removed(above: float | None, inside: Collection[str], groups: Mapping[str, float]) -> float:
    """Return the CPUs that removed pods used.

    Args:
        above: CPUs in use in the group above all BestEffort pods; None if that is unknown.
        inside: Keys of the existing pods below that group.
        groups: CPUs in use by key.
    """
    return 0.0 if above is None else max(0.0, above - sum(groups.get(key, 0.0) for key in inside))


def usage_of(state: NodeState, query: UsageQuery, rates: Rates) -> Usage:
    """Return the CPUs that the node has and uses: the input from which the budget of BE pods is computed."""
    node = state.node
    online = node.machine.online
    pods = {key: used for key, used in rates.groups.items() if key != ABOVE}
    be = query.be
    removed_usage = usage_of_removed(rates.groups.get(ABOVE), query.inside, rates.groups)
    if removed_usage:
        pods[_REMOVED_BE] = removed_usage
        be |= {_REMOVED_BE}
    return Usage(
        capacity=1000 * len(online),
        allocatable=1000 * (len(online) - len(node.reserved & online)),
        node=rates.node,
        reservation=1000 * len(node.node_reservation & online),
        pods=pods,
        be_pods=be,
    )


def shares_of(usage: Usage) -> Shares:
    """Return how much BE pods, other pods and the system use."""
    be = sum(used for key, used in usage.pods.items() if key in usage.be_pods)
    pods = sum(usage.pods.values())
    return Shares(usage.node, be, pods - be, max(0.0, usage.node - pods))
