"""Build the facts for hooks from remembered objects and from the state.

Data is decoded only when a hook reads it, except for values that must be plain at once: image and resources
of an existing container. Everything is created on the event loop and may be read from any thread. The front
end reads the data of a held call (``proxy.frontends.hook_bridge.view``).
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.engine.adoption import parse_cpus
from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.frontends.hook_bridge.object_cache import RememberedContainer, RememberedPod
from proxy.frontends.hook_bridge.resources import merged, recorded
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Pools
from proxy.model.idset import CpuSet, union
from proxy.model.workload import Container, Phase, Placement, Pod, Pool

_NO_CPUS = CpuSet()
_OBSERVED = "the plan is not applied to its pod"


def hook_pod_facts(
    pod: Pod, labels: Mapping[str, str], annotations: Mapping[str, str], handler: str = ""
) -> PodFacts:
    """Return the facts of a pod.

    Args:
        pod: The pod as the engine knows it.
        labels: The labels of the sandbox.
        annotations: The annotations of the sandbox.
        handler: Its runtime handler.
    """
    return PodFacts(
        pod.sandbox_id,
        pod.uid,
        pod.namespace,
        pod.name,
        pod.attempt,
        pod.qos._value_,  # ``value`` is a property, and several times as slow
        pod.kube_qos._value_,
        handler,
        pod.cgroup_parent,
        labels,
        annotations,
    )


def remembered_pod_facts(pod: Pod, known: RememberedPod | None) -> PodFacts:
    """Return the facts of a pod whose sandbox exists.

    Args:
        pod: The pod as the engine knows it.
        known: The remembered facts, including the fields that hooks set when its sandbox was created; None if
            there are none.
    """
    if known is None:
        return hook_pod_facts(pod, {}, {})
    return hook_pod_facts(pod, *known.texts.of_pod(), known.handler)


def existing_facts(container: Container, known: RememberedContainer | None) -> ContainerFacts:
    """Return the facts of a container that has been created.

    Args:
        container: The container as the engine knows it.
        known: The remembered facts; None if there are none.
    """
    container_id = "" if container.phase is Phase.CREATING else container.id
    identity = container_id, container.name, container.attempt, container.phase.value
    requested = recorded(container.request)
    if known is None:
        return ContainerFacts(*identity, resources=requested)
    requested = known.requested if known.includes_create else merged(requested, known.requested)
    return known.details.facts(identity, known.image, requested)


def decision_of(state: NodeState, container: Container, owned_cpus: bool = False) -> Decision:
    """Return the decision for a container.

    Args:
        state: The node.
        container: The container; it need not be in the state. A container that is only observed owns nothing.
        owned_cpus: Hooks may assign CPUs that have owners: they choose from all CPUs that are online and not
            reserved for the node.
    """
    placement, machine = container.placement, state.node.machine
    if not applies_to(state, container.pod):
        has = parse_cpus(container.request.cpuset_cpus) or machine.online
        return Decision("shared", has, reasons=(_OBSERVED,), allowed=has, allowed_mems=machine.memory_nodes)
    cpus = state.desired_cpus(container)
    offered = cpus if placement.hook_cpus is None else state.cpus_without_hooks(container)
    own = _own(placement, cpus) if placement.pool is Pool.OWN else _NO_CPUS
    mems = state.desired_mems(container) if placement.mems else None
    return Decision(
        placement.pool._value_,
        cpus,
        own,
        mems,
        placement.cfs_quota_off,
        placement.reasons,
        offered | machine.online - state.node.reserved - state.node.withheld if owned_cpus else offered,
        mems if mems is not None and placement.blocks else machine.memory_nodes,
    )


def hook_pools(state: NodeState) -> Pools:
    """Return the pools. A container that is being created has no id yet: its CPUs are owned."""
    holders = [c for c in state.containers.values() if c.placement.pool is Pool.OWN]
    observed = {c.owner for c in holders if not applies_to(state, c.pod)}
    owners = {
        container.id: _own(container.placement, state.desired_cpus(container))
        for container in holders
        if container.phase not in (Phase.CREATING, Phase.EXITED) and container.owner not in observed
    }
    owned = union(owner.cpus.bits for key, owner in state.owners.items() if key not in observed)
    return Pools(state.pools.shared, state.pools.cpus_of(Pool.BE), CpuSet.from_bits(owned), owners)


def _own(placement: Placement, cpus: CpuSet) -> CpuSet:
    """Return the CPUs of an owner that it runs on: without those that are offline or that hooks left out."""
    return cpus & (
        placement.exclusive | placement.replacement if placement.replacement else placement.exclusive
    )
