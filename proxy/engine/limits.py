"""Check how many CPUs may be owned: the floor of the shared pool, and limits by pod, namespace and node.

A placement is checked against the limits as two states, the one before and the one with it. Only CPUs that it
takes in addition count: an owner keeps what it has, and a running owner is never evicted. CPUs to which an
ended container of another pod may come back, as long as its sandbox lives, are counted as owned; so its
restart keeps the limits. Ended containers of the same pod are not counted, because one that has ended and an
init container look alike where only the CRI is known; so the limits hold for a restart alongside containers
that have come since.

Where CPUs are chosen here and the best choice breaks a floor, the choice is made again without the CPUs that
the floors need (``floor_cpus``). Whatever is chosen from the rest keeps all floors, but the choice may be
worse (another NUMA node, more cores); so this is the second try and not the first.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRule, Breach
from proxy.model.idset import CpuSet, union
from proxy.model.phrases import counted
from proxy.model.workload import Pod


def exceeded_limit(before: NodeState, after: NodeState, pod: Pod, owner: str, taken: CpuSet) -> Breach | None:
    """Return the limit that a placement exceeds; None where it stays within all.

    Args:
        before: The state without the placement.
        after: The state with it.
        pod: The pod that is given CPUs.
        owner: Their owner, as ``Container.owner``; empty for CPUs that are set aside for a pod.
        taken: The CPUs.
    """
    had = _previous_cpus(before, pod, owner) if owner else union_of(_owned_by(before, pod))
    known = before.pods.get(pod.sandbox_id)
    for promised in (pod.reserved_for_pod, known.reserved_for_pod if known is not None else None):
        had |= promised.cpus if promised is not None and owner else CpuSet()
    new = taken - had
    if not new:
        return None
    return _over_count(before, after, pod) or after.node.floors.broken(spare_shared_cpus(after, pod), new)


def _previous_cpus(state: NodeState, pod: Pod, owner: str) -> CpuSet:
    """Return the CPUs that an owner has, or had when it ended if no other container of its pod owns some."""
    held = state.owners.get(owner)
    if held is not None:
        return held.cpus
    return CpuSet() if any(key.startswith(f"{pod.key}/") for key in state.owners) else state.kept_for(owner)


def spare_shared_cpus(state: NodeState, pod: Pod | None) -> CpuSet:
    """Return the part of the shared pool to which no other pod has a claim; None: a new pod."""
    key = "" if pod is None else pod.key
    ended = union(c.placement.exclusive.bits for c in state.ended_owners() if c.pod.key != key)
    return CpuSet.from_bits((state.pools.shared.bits | _unmovable(state)) & ~(state.aside().bits | ended))


def floor_cpus(state: NodeState, pod: Pod) -> CpuSet:
    """Return CPUs that must not be chosen for a pod, so that every choice from the rest keeps the floors."""
    node = state.node
    if not node.floors:
        return CpuSet()
    pool = spare_shared_cpus(state, pod)
    others = state.pools.shared - pool - state.aside()
    return node.floors.kept(pool, node.machine, node.cpu.reserved) | others


def kept_shared(state: NodeState) -> CpuSet:
    """Return CPUs of the shared pool that no new pod may own: what the floors need."""
    node = state.node
    return node.floors.kept(spare_shared_cpus(state, None), node.machine, node.cpu.reserved)


def union_of(sets: Iterable[CpuSet]) -> CpuSet:
    """Join sets of CPUs."""
    return CpuSet.from_bits(union(cpus.bits for cpus in sets))


def _over_count(before: NodeState, after: NodeState, pod: Pod) -> Breach | None:
    rules = after.node.admission
    if rules.pod_limit is None and rules.namespace_limit is None and rules.node_limit is None:
        return None
    theirs = {c.owner: c.pod for c in after.containers.values() if c.owns_cpus}
    by_uid = {each.uid: each for each in after.pods.values()}

    ended = [c for c in after.ended_owners() if c.pod.key != pod.key]

    def in_namespace(state: NodeState) -> int:
        found = [
            each.reserved_for_pod.cpus
            for each in _aside(state)
            if each.namespace == pod.namespace and each.reserved_for_pod
        ]
        found += [c.placement.exclusive for c in ended if c.pod.namespace == pod.namespace]
        for key, held in state.owners.items():
            holder = theirs.get(key) or by_uid.get(key.partition("/")[0])
            if holder is not None and holder.namespace == pod.namespace:
                found.append(held.cpus)
        return len(union_of(found))

    def on_node(state: NodeState) -> int:
        owned = [held.cpus for key, held in state.owners.items() if not key.endswith("/")]
        owned += [container.placement.exclusive for container in ended]
        return len(
            union_of(
                [*owned, *(each.reserved_for_pod.cpus for each in _aside(state) if each.reserved_for_pod)]
            )
        )

    def in_pod(state: NodeState) -> int:
        return len(union_of(_owned_by(state, pod)))

    for rule, key, most, count, claimant in (
        (AdmissionRule.POD_LIMIT, "maxCPUsPerPod", rules.pod_limit, in_pod, "the pod"),
        (
            AdmissionRule.NAMESPACE_LIMIT,
            "maxCPUsPerNamespace",
            rules.namespace_limit,
            in_namespace,
            "its namespace",
        ),
        (AdmissionRule.NODE_LIMIT, "maxCPUsPerNode", rules.node_limit, on_node, "pods of this node"),
    ):
        if most is not None and (owned := count(after)) > most and owned > count(before):
            verb = "would own" if claimant != "pods of this node" else "together would own"
            message = f"{claimant} {verb} {counted(owned, 'CPU')}, and may own {most} (admission.{key})"
            return Breach(rule, message)
    return None


def _owned_by(state: NodeState, pod: Pod) -> list[CpuSet]:
    """Return the CPUs that a pod owns, those of its containers and those that are set aside for it."""
    prefix = f"{pod.key}/"
    found = [held.cpus for key, held in state.owners.items() if key == pod.key or key.startswith(prefix)]
    return [
        *found,
        *(
            each.reserved_for_pod.cpus
            for each in _aside(state)
            if each.key == pod.key and each.reserved_for_pod
        ),
    ]


def _aside(state: NodeState) -> list[Pod]:
    return [pod for pod in state.pods.values() if pod.reserved_for_pod is not None]


def _unmovable(state: NodeState) -> int:
    """Return CPUs that are blocked for a container that cannot be moved, while others are chosen (bits).

    Such an entry has no container name (``decisions``); kubelet's always have one.
    """
    return union(held.cpus.bits for key, held in state.owners.items() if key.endswith("/"))
