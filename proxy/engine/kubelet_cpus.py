"""Find CPUs that kubelet's CPU manager assigned and that its containers cannot have.

CPUs that had an owner here first stay with it. kubelet does not know that, and may have assigned them all the
same. Two containers cannot have them, so both are named.
"""

from __future__ import annotations

from proxy.engine.enforcement import applies_to
from proxy.engine.owners import NEVER_PINNED_BY_KUBELET
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import Held
from proxy.model.workload import Pool


def clashes(state: NodeState) -> list[str]:
    """Name the containers to which kubelet gave CPUs that they cannot have here, and why."""
    if not state.kubelet:
        return []
    pods = {pod.uid: pod for pod in state.pods.values()}
    here = {(c.pod.uid, c.name) for c in state.containers.values() if c.pod.uid in state.kubelet}
    has, online, present = _has(state), state.node.machine.online, state.node.machine.present
    taken = union(cpus.bits for _, _, cpus in has)
    would = "" if applies_to(state, None) else "would "
    found: list[str] = []
    for uid, containers in sorted(state.kubelet.items()):
        pod = pods.get(uid)
        if pod is not None and (pod.qos in NEVER_PINNED_BY_KUBELET or pod.cpuset):
            continue
        # Containers of one pod may have CPUs in common: those of an init container are used again.
        its = union(
            o.cpus.bits for name in containers if (o := state.owners.get(f"{uid}/{name}")) is not None
        )
        for name, cpus in sorted(containers.items()):
            reasons: list[str] = []
            if cpus.bits & taken & ~its:
                others = [(at, cpus & other_cpus) for other, at, other_cpus in has if other != uid]
                reasons = [f"{clash} {would}belong to {at}" for at, clash in others if clash]
            if gone := cpus - present:
                reasons.append(f"this machine has no CPUs {gone}")
            own = state.owners.get(f"{uid}/{name}")
            if not reasons and own is not None and not own.cpus <= cpus:
                reasons.append(f"it would have {own.cpus}" if would else f"it has {own.cpus} already")
            lacks = cpus.bits & online.bits & ~its
            if lacks and not reasons and (uid, name) not in here:
                reasons.append("the shared pool would be left empty")
            ref = f"{pod.ref if pod else uid}/{name}"
            gave = f"cannot let {ref} have CPUs {cpus} of kubelet's CPU manager"
            found += [f"{gave}: {cause}" for cause in reasons]
    return found


def _has(state: NodeState) -> list[tuple[str, str, CpuSet]]:
    """Return the owners that are here, and pods with CPUs set aside: uid, name and CPUs of each."""
    owners: dict[str, tuple[str, str, CpuSet]] = {}
    for container in state.containers.values():
        owner = state.owners.get(container.owner) if container.placement.pool is Pool.OWN else None
        if owner is not None:
            owners[container.owner] = (container.pod.uid, container.ref, owner.cpus)
    aside = [
        (pod.uid, pod.ref, pod.reserved_for_pod.cpus)
        for pod in state.pods.values()
        if pod.reserved_for_pod is not None
    ]
    return [*sorted(owners.values(), key=lambda item: item[1]), *aside]


def changed_cpus(before: Held, after: Held) -> tuple[CpuSet, CpuSet]:
    """Return the CPUs that kubelet has assigned and had not before, and the other way round."""
    return _all(after) - _all(before), _all(before) - _all(after)


def _all(held: Held) -> CpuSet:
    return CpuSet.from_bits(union(cpus.bits for containers in held.values() for cpus in containers.values()))
