"""Check the invariants of a node's state. Used by tests, status and the demo."""

from __future__ import annotations

import itertools

from proxy.engine.admission import permitted_claim
from proxy.engine.owners import cpu_owners
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, union
from proxy.model.workload import Container, Phase, Pool, QosClass
from proxy.pools.claims import STRICT
from proxy.pools.pools import CpuPools, pools_of


def violations(state: NodeState) -> list[str]:
    """Return the invariants that a state violates, one sentence each; empty if it violates none.

    Checked: every container has CPUs, all of them online; no CPU has two owners; no container without CPUs of
    its own runs on owned CPUs (exceptions: BE containers may run on those of LSR pods, and a container on
    those that a hook was allowed to give it); an LSE (latency-sensitive exclusive) or LSR (latency-sensitive
    reserved) pod that owns CPUs owns exactly those that were named or chosen for it; the owners and pools
    that a state carries along follow from its containers; no entries are left of containers that are gone; no
    device is held by two pods. The check of a thousand containers takes milliseconds.
    """
    live = [c for c in state.containers.values() if c.phase is not Phase.EXITED]
    return [
        *_shared_exclusive_cpus(state),
        *_stale_derived_values(state),
        *_shared_devices(state),
        *_stale_knowledge(state),
        *itertools.chain.from_iterable(_container_problems(state, live)),
    ]


def _shared_exclusive_cpus(state: NodeState) -> list[str]:
    """Return CPUs that have two owners."""
    owners = state.owners
    if union(o.cpus.bits for o in owners.values()).bit_count() == sum(len(o.cpus) for o in owners.values()):
        return []
    return [
        f"CPUs {both} are owned by {key} and by {other}"
        for key, other in itertools.combinations(sorted(owners), 2)
        if (both := owners[key].cpus & owners[other].cpus)
    ]


def _shared_devices(state: NodeState) -> list[str]:
    """Return devices that two pods hold, and those of pods without a sandbox."""
    problems, holders = list[str](), dict[tuple[str, str], str]()
    known = {pod.key for pod in state.pods.values()} if state.devices.held else set()
    for key, containers in state.devices.held.items():
        if key not in known:
            problems.append(f"pod {key} holds devices and has no sandbox")
        pod_devices = {
            (resource, i) for held in containers.values() for resource, ids in held.items() for i in ids
        }
        for resource, i in pod_devices:
            other = holders.setdefault((resource, i), key)
            if other != key:
                problems.append(f"{resource} {i} is held by pods {other} and {key}")
    return problems


def _stale_derived_values(state: NodeState) -> list[str]:
    """Compare the owners and pools of a state with those that follow from its containers."""
    node, problems = state.node, []
    containers, pods = state.containers.values(), state.pods.values()
    owners = cpu_owners(node, containers, state.kubelet_cpus, pods, state.reservation_cpus.values())
    if owners != state.owners:
        wrong = sorted(key for key in {*owners, *state.owners} if owners.get(key) != state.owners.get(key))
        keys = ", ".join(wrong)
        problems.append(f"the recorded owners differ from those that follow from the containers: {keys}")
    system = node.system & node.machine.online
    pools = pools_of(node.shareable, state.owners.values(), system, state.be_limit)
    if pools != state.pools:
        problems.append(f"the recorded pools are {_words(state.pools)}; the owners leave {_words(pools)}")
    return problems


def _stale_knowledge(state: NodeState) -> list[str]:
    """Return entries about containers that no longer exist, and about calls that have completed."""
    problems = [
        f"a saved cpuset is recorded for container {container_id}, which does not exist"
        for container_id in state.runtime.saved
        if container_id not in state.containers
    ]
    confined = {i for i in state.inflight.calls if any(call.confined for call in state.inflight.of(i))}
    if confined != state.inflight.confined:
        problems.append(
            "the recorded confined containers differ from those of the calls: "
            + ", ".join(sorted(confined ^ state.inflight.confined))
        )
    return problems


def _words(pools: CpuPools) -> str:
    parts = {"shared": pools.shared, "BE": pools.cpus_of(Pool.BE)}
    if pools.system:
        parts["SYSTEM"] = pools.system
    return ", ".join(f"{name} {cpus or 'nothing'}" for name, cpus in parts.items())


def _container_problems(state: NodeState, live: list[Container]) -> list[list[str]]:
    """Return the problems of each container."""
    owned = union(o.cpus.bits for o in state.owners.values())
    outside_be = union(o.cpus.bits for o in state.owners.values() if o.excludes_be)
    return [_problems_of(state, container, owned, outside_be) for container in live]


def _problems_of(state: NodeState, container: Container, owned: int, outside_be: int) -> list[str]:
    placement, online, problems = container.placement, state.node.machine.online, []
    planned = state.desired_cpus(container)
    if not planned:
        problems.append(f"{container.ref} has no CPU")
    elif not planned <= online:
        problems.append(f"{container.ref} has CPUs {planned - online} that are not online")
    if placement.pool is Pool.OWN and not placement.exclusive:
        problems.append(f"{container.ref} owns CPUs, and none are known")
    elif state.uses_shared_cpus(
        container
    ):  # an owner that has lost all of its CPUs does, too; ``executor.machine.hotplug`` reports that
        is_be = placement.pool is Pool.BE or container.pod.qos is QosClass.BE
        if shared := (planned - placement.hook_extra_cpus).bits & (outside_be if is_be else owned):
            problems.append(f"{container.ref} shares owned CPUs {CpuSet.from_bits(shared)}")
    elif foreign := planned - placement.exclusive - placement.replacement - placement.hook_extra_cpus:
        problems.append(f"{container.ref} has CPUs {foreign} that are not its own")
    assigned = permitted_claim(state.node, container.pod)[0].cpuset
    if (
        assigned
        and placement.pool is Pool.OWN
        and container.pod.qos in STRICT
        and placement.exclusive != assigned
    ):
        problems.append(f"{container.ref} owns CPUs {placement.exclusive} instead of {assigned}")
    return problems
