"""From the state of a node to what one decision of the topology manager looks at.

What somebody holds is never offered: CPUs of other owners, CPUs set aside for other pods, and, where the
pod's containers are known, what its own containers keep. CPUs that others merely count on (an owner that has
ended and may come back) are left out as long as enough are left without them.

An ordinary init container that has ended leaves its CPUs to the containers after it (kubelet 1.36, reference
C.6). Where the pod's containers are not known, nobody can tell an init container from one that crashed, so
the CPUs of a sibling that has ended are simply free.
"""

from __future__ import annotations

import dataclasses

from proxy.model.asks import Ask, Kind, PodAsk
from proxy.model.idset import CpuSet, union
from proxy.model.workload import KubeQos, Phase, Pod, Request
from proxy.place.cpu_policy import CpuState
from proxy.place.cpu_request import CPU, MILLI
from proxy.plan.binding import binding_of
from proxy.plan.desk import Case
from proxy.plan.state import NodeState


def asks_of(pod: Pod, name: str, request: Request, cpus: int) -> PodAsk:
    """Give what a container's pod asks for: as kubelet told, else made of what the CRI carries.

    Args:
        pod: The pod.
        name: The container; empty for the pod as a whole.
        request: What the CRI says.
        cpus: Exclusive CPUs that it claims.
    """
    if pod.asks is not None and (not name or any(ask.name == name for ask in pod.asks.containers)):
        return pod.asks if pod.asks.uid == pod.key else dataclasses.replace(pod.asks, uid=pod.key)
    amounts = {CPU: cpus * MILLI, "memory": request.memory_limit, **dict(request.huge_pages)}
    amounts = {resource: amount for resource, amount in amounts.items() if amount > 0}
    return PodAsk(pod.key, (Ask(name, Kind.APP, amounts, amounts),), pod.kube_qos is KubeQos.GUARANTEED)


def case_of(
    state: NodeState,
    pod: Pod,
    asks: PodAsk,
    name: str,
    wanted: int,
    request: Request,
    *,
    owns: bool,
    avoid: CpuSet | None = None,
) -> Case:
    """Gather what a decision about a container looks at.

    Args:
        state: The node as it is.
        pod: The pod.
        asks: What the pod asks for.
        name: The container; empty for the pod as a whole.
        wanted: Exclusive CPUs that are wanted.
        request: What the CRI says.
        owns: True where CPUs may be given to it alone.
        avoid: CPUs that are not to be chosen; None where all may be.

    Raises:
        PolicyConflictError: Pod and node require different bind policies.
    """
    cpu = _cpus(state, pod, asks, name, wanted, avoid or CpuSet()) if owns else CpuState(CpuSet())
    # Memory that the pod was given as a whole is divided by nobody: its containers use it together.
    bound = bool(request.cpuset_mems) or (pod.aside is not None and bool(pod.aside.blocks))
    return Case(
        state.node,
        asks,
        cpu,
        state.memory,
        state.devices(),
        request.devices,
        owns=owns,
        binds=not bound,
        binding=binding_of(state.node, pod, state.containers.values()) if owns else None,
    )


def _cpus(state: NodeState, pod: Pod, asks: PodAsk, name: str, wanted: int, avoid: CpuSet) -> CpuState:
    node, key = state.node, pod.key
    mine, others = _owned(state, key)
    if [ask.name for ask in asks.containers] == [""]:
        mine = _as_one(state, pod, mine)
    reusable = CpuSet()
    if pod.asks is not None:
        reusable = _ended(state, pod, asks, mine) & node.topology.cpus
    reusable = CpuSet.from_bits(reusable.bits & ~others & ~avoid.bits)
    part = pod.aside.part(name) if pod.aside is not None else None
    had = mine.pop(name, None) or (part.cpus if part else state.had(f"{key}/{name}"))
    taken = others
    for cpus in mine.values():
        reusable -= cpus
        taken |= cpus.bits
    free = node.topology.cpus.bits & ~taken & ~avoid.bits
    if len(had) == wanted and not had.bits & ~free:
        default = CpuSet.from_bits(free & ~had.bits & ~reusable.bits)
        return CpuState(default, {key: {**mine, name: had}}, reusing=key, reusable=reusable - had)
    default = CpuSet.from_bits(free & ~reusable.bits)
    spare = default - state.promised(f"{key}/{name}")
    if pod.aside is not None and len(default & pod.aside.cpus) >= wanted:
        default &= pod.aside.cpus
    elif len(spare - node.cpu.reserved) + len(reusable) >= wanted:
        default = spare
    return CpuState(default, {key: mine}, reusing=key, reusable=reusable)


def _owned(state: NodeState, key: str) -> tuple[dict[str, CpuSet], int]:
    """Give the CPUs of the pod's containers by name, and those that are others' (bits)."""
    mine: dict[str, CpuSet] = {}
    others, prefix = state.aside(key).bits, f"{key}/"
    for owner, held in state.owners.items():
        if owner.startswith(prefix):
            mine[owner.removeprefix(prefix)] = held.cpus
        else:
            others |= held.cpus.bits
    return mine, others


def _as_one(state: NodeState, pod: Pod, mine: dict[str, CpuSet]) -> dict[str, CpuSet]:
    """Give the same for a pod that is decided as one: what only kubelet holds for it belongs to all of it."""
    here = {c.name for c in state.containers.values() if c.pod.uid == pod.uid and c.phase is not Phase.EXITED}
    coming = (state.kubelet.get(pod.uid, {}).keys() & mine.keys()) - here
    if not coming:
        return mine
    whole = CpuSet.from_bits(union(mine[name].bits for name in coming))
    return {name: cpus for name, cpus in mine.items() if name not in coming} | {"": whole}


def _ended(state: NodeState, pod: Pod, asks: PodAsk, mine: dict[str, CpuSet]) -> CpuSet:
    """Give the CPUs of init containers that have ended; those of others that have are counted as theirs."""
    kinds = {ask.name: ask.kind for ask in asks.containers}
    free = CpuSet()
    for container in sorted(state.in_sandbox(pod.sandbox_id), key=lambda c: -c.attempt):
        if container.phase is not Phase.EXITED or not container.placement.own:
            continue
        if kinds.get(container.name) is Kind.INIT:
            free |= container.placement.own
        else:
            mine.setdefault(container.name, container.placement.own)
    return free
