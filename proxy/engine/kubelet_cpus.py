"""Find CPUs that kubelet's CPU manager has assigned to containers, and that these cannot have here.

CPUs that already had an owner here stay with it. kubelet does not know that owner, and may have assigned the
same CPUs. Two containers cannot have the same CPUs, so the messages name both.
"""

from __future__ import annotations

from proxy.engine.admission import EMPTY_SHARED_POOL, permitted_claim
from proxy.engine.enforcement import applies_to
from proxy.engine.owners import NEVER_PINNED_BY_KUBELET
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import Held
from proxy.model.workload import Phase, Pool


def clashes(state: NodeState) -> list[str]:
    """Return messages about containers to which kubelet assigned CPUs that they cannot have here, and why."""
    if not state.kubelet_cpus:
        return []
    pods = {pod.uid: pod for pod in state.pods.values()}
    existing = {
        (c.pod.uid, c.name)
        for c in state.containers.values()
        if c.pod.uid in state.kubelet_cpus and c.phase is not Phase.EXITED
    }
    in_use, online, present = _cpus_in_use(state), state.node.machine.online, state.node.machine.present
    taken = union(cpus.bits for _, _, cpus in in_use)
    would = "" if applies_to(state, None) else "would "
    messages: list[str] = []
    for uid, containers in sorted(state.kubelet_cpus.items()):
        pod = pods.get(uid)
        if pod is not None and (
            pod.qos in NEVER_PINNED_BY_KUBELET or permitted_claim(state.node, pod)[0].cpuset
        ):
            continue
        # Containers of one pod may have CPUs in common: the CPUs of an init container are used again.
        own_cpus = union(
            o.cpus.bits for name in containers if (o := state.owners.get(f"{uid}/{name}")) is not None
        )
        for name, cpus in sorted(containers.items()):
            reasons: list[str] = []
            if cpus.bits & taken & ~own_cpus:
                others = [
                    (ref_in_use, cpus & other_cpus)
                    for other, ref_in_use, other_cpus in in_use
                    if other != uid
                ]
                reasons = [f"{clash} {would}belong to {ref_in_use}" for ref_in_use, clash in others if clash]
            if absent := cpus - present:
                reasons.append(f"this machine has no CPUs {absent}")
            own = state.owners.get(f"{uid}/{name}")
            if not reasons and own is not None and not own.cpus <= cpus:
                reasons.append(f"it would have {own.cpus}" if would else f"it has {own.cpus} already")
            without_owner = cpus.bits & online.bits & ~own_cpus
            if without_owner and not reasons and (uid, name) not in existing:
                reasons.append(_why_shared(state, CpuSet.from_bits(without_owner)))
            ref = f"{pod.ref if pod else uid}/{name}"
            problem = f"cannot let {ref} have CPUs {cpus} of kubelet's CPU manager"
            messages += [f"{problem}: {cause}" for cause in reasons]
    return messages


def _why_shared(state: NodeState, cpus: CpuSet) -> str:
    """Return why CPUs without an owner stay in the shared pool (``owners._owners_known_to_kubelet``)."""
    breach = state.node.floors.breach(state.pools.shared - cpus, cpus)
    return breach.message if breach is not None else EMPTY_SHARED_POOL


def _cpus_in_use(state: NodeState) -> list[tuple[str, str, CpuSet]]:
    """Return the existing owners, and the pods with CPUs set aside: uid, name and CPUs of each."""
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
    """Return the CPUs that kubelet has assigned since, and those that it has taken back."""
    return _all_cpus(after) - _all_cpus(before), _all_cpus(before) - _all_cpus(after)


def _all_cpus(held: Held) -> CpuSet:
    return CpuSet.union_of(cpus for containers in held.values() for cpus in containers.values())
