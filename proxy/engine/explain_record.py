"""The record of a decision: the known facts, the alternatives considered, and the outcome."""

from __future__ import annotations

from proxy.allocation.cpu_request import CPU, MILLI, NO_SHARES
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import ANYWHERE, TopologyDecision
from proxy.model.explanation import CREATE, Explanation, Fact, MovedContainer, Shortfall
from proxy.model.idset import CpuSet
from proxy.model.phrases import counted, listed, numa_nodes_text
from proxy.model.quantity import show_quantity
from proxy.model.quoting import printable
from proxy.model.requests import ContainerResources, in_bytes
from proxy.model.workload import Container, Placement, Pod, Pool, QosClass, Request, Verdict
from proxy.pools.claims import STRICT, whole_cpus
from proxy.pools.pools import pool_cpus

MAX_MOVED = 20
"""How many of the containers that had to move a record names at most."""


def explain(
    event: str,
    pod: Pod,
    name: str,
    attempt: int,
    request: Request,
    verdict: Verdict,
    decision: TopologyDecision | None = None,
    placement: Placement | None = None,
    after: NodeState | None = None,
    shortfalls: tuple[Shortfall, ...] = (),
) -> Explanation:
    """Write the record of a decision.

    Args:
        event: The event, as named in the record.
        pod: The pod.
        name: The container; empty for the pod as a whole.
        attempt: Its attempt.
        request: The container's resources in the CRI call.
        verdict: Admit or reject.
        decision: The decision of the topology manager; None if it was not queried.
        placement: The placement; None on a rejection.
        after: The state afterwards.
        shortfalls: The resources that were missing, on a rejection.
    """
    considered = decision or TopologyDecision(verdict, ANYWHERE)
    cpus = considered.cpus if verdict.admitted else CpuSet()
    if placement is not None and after is not None:
        own = placement.exclusive & after.node.machine.online  # offline CPUs may come back
        cpus = own if placement.pool is Pool.OWN else pool_cpus(after.node.machine, after.pools, placement)
    return Explanation(
        event,
        pod.ref,
        pod.uid,
        name,
        attempt,
        facts_of(pod, name, request),
        considered.answers,
        considered.merge,
        considered.steps,
        verdict,
        placement.pool.value if placement else "",
        cpus,
        placement.mems if placement else None,
        tuple(f"{resource}={i}" for resource, ids in considered.devices for i in ids if verdict.admitted)
        or tuple(f"{near.resource}={near.name}" if near.resource else near.name for near in request.devices),
        placement.reasons if placement else considered.reasons,
        shortfalls=shortfalls,
    )


def moved_containers(
    before: NodeState, after: NodeState, shrink: tuple[str, ...]
) -> tuple[tuple[MovedContainer, ...], int]:
    """Return the containers that had to leave CPUs: the first of them, and how many more there are."""
    named: list[MovedContainer] = []
    for key in shrink[:MAX_MOVED]:
        old, new = before.containers[key], after.containers[key]
        named.append(MovedContainer(new.ref, before.desired_cpus(old), after.desired_cpus(new)))
    return tuple(named), max(0, len(shrink) - MAX_MOVED)


def explain_pooled(container: Container, cpus: CpuSet, event: str = CREATE) -> Explanation:
    """Write the record of a container that could only go to a pool.

    Args:
        container: The container as placed.
        cpus: The CPUs that it runs on.
        event: Why it was placed.
    """
    pod, placement = container.pod, container.placement
    return Explanation(
        event,
        pod.ref,
        pod.uid,
        container.name,
        container.attempt,
        facts=facts_of(pod, container.name, container.request),
        pool=placement.pool.value,
        cpus=cpus,
        mems=placement.mems,
        reasons=placement.reasons,
    )


def facts_of(pod: Pod, name: str, request: Request) -> tuple[Fact, ...]:
    """Return the known facts about a request, with their sources."""
    facts = [_class(pod)]
    reported = next((a for a in pod.requests.containers if a.name == name), None) if pod.requests else None
    if reported is not None:
        facts += _requests(reported, pod.source)
    elif pod.requests is not None:
        names = printable(", ".join(a.name for a in pod.requests.containers))
        facts.append(Fact("containers", names, pod.source))
    else:
        facts += _from_cri(request)
    if pod.cpuset is not None:
        where = (
            "the decision for the pod as a whole"
            if pod.cpuset_chosen_locally
            else "its resource-status annotation"
        )
        facts.append(Fact("the pod's CPUs:", listed(pod.cpuset), where))
    if request.cpuset_cpus:
        facts.append(Fact("CPUs named", printable(request.cpuset_cpus), "cpuset_cpus of the CRI request"))
    if request.cpuset_mems:
        facts.append(
            Fact("memory nodes named", printable(request.cpuset_mems), "cpuset_mems of the CRI request")
        )
    for device in request.devices:
        label = f"{device.resource} {device.name}" if device.resource else device.name
        label = printable(label)
        where = f"near {numa_nodes_text(device.nodes)}" if device.nodes else "near no NUMA node"
        facts.append(Fact(f"device {label}", where, device.source))
    facts += _preferences(pod)
    for defect in pod.defects:
        is_rejected = pod.qos in STRICT and defect.decisive
        facts.append(Fact("cannot be used:" if is_rejected else "ignored:", defect, ""))
    return tuple(facts)


def _preferences(pod: Pod) -> list[Fact]:
    """Return the preferences of the pod, or of a scheduler for it, besides amounts of resources."""
    preferences = (
        ("bind policy, required", pod.bind_required, "annotation resource-spec"),
        ("bind policy, preferred", pod.bind_preferred, "annotation resource-spec"),
        ("exclusive policy", pod.exclusive, "annotation resource-spec"),
        ("NUMA topology policy", pod.aligned, "annotation numa-topology-spec"),
        ("NUMA exclusivity", pod.numa_exclusive, "annotation numa-topology-spec"),
        ("preferred topology policy", pod.volcano_policy, "Volcano's annotation"),
        ("preferred NUMA nodes", pod.volcano_nodes, "Volcano's annotation"),
    )
    return [Fact(label, str(value), source) for label, value, source in preferences if value]


def _class(pod: Pod) -> Fact:
    if pod.qos is not QosClass.NONE:
        return Fact("QoS class", pod.qos.value, "the pod's label")
    return Fact("QoS class", pod.kube_qos.value, "the pod's cgroup parent")


def _requests(container: ContainerResources, source: str) -> list[Fact]:
    facts = [Fact("kind of container", container.kind.value, source)]
    for name, amounts in (("request", container.requests), ("limit", container.limits)):
        facts += [
            Fact(f"{printable(resource, 63)} {name}", _amount(resource, n), source)
            for resource, n in amounts.items()
        ]
    return facts


def _from_cri(request: Request) -> list[Fact]:
    facts = []
    if request.cpu_shares > NO_SHARES:
        count = whole_cpus(request)
        milli = counted(count, "CPU") if count else f"about {request.requested_milli}m"
        facts.append(Fact("cpu request", milli, f"cpu_shares {request.cpu_shares} of the CRI request"))
    if request.cpu_quota > 0:
        limit = _amount(CPU, request.limit_milli)
        facts.append(Fact("cpu limit", limit, "cpu_quota and cpu_period of the CRI request"))
    if request.memory_limit:
        facts.append(Fact("memory limit", _amount("memory", request.memory_limit), "the CRI request"))
    facts += [
        Fact(f"{resource} limit", _amount(resource, size), "the CRI request")
        for resource, size in request.huge_pages
    ]
    return facts


def _amount(resource: str, amount: int) -> str:
    if resource == CPU:
        return f"{amount}m" if amount % MILLI else counted(amount // MILLI, "CPU")
    return show_quantity(amount) if in_bytes(resource) else str(amount)
