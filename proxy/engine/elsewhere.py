"""Another placement for a create whose CPUs cannot be freed."""

from __future__ import annotations

from msgspec import structs

from proxy.engine.admission import assigned_cpus
from proxy.engine.create import Plan, place
from proxy.engine.effects import AbortReason
from proxy.engine.state import NodeState
from proxy.model.phrases import listed
from proxy.model.workload import Container, Pool

STUCK = "cannot be freed"
"""In place of the pod that is on CPUs that cannot be freed, while others are chosen."""


def place_elsewhere(state: NodeState, container: Container, reason: AbortReason, token: str) -> Plan | None:
    """Decide a container again, without CPUs that cannot be freed.

    Args:
        state: The node without the container.
        container: What is to be placed, as it was placed.
        reason: The CPUs, and why they cannot be freed.
        token: Its id until the runtime names it.

    Returns:
        A plan that gives it CPUs of its own; None where its CPUs were named by another party or set aside for
        its pod, or where there are no others.
    """
    pod = state.pods.get(container.pod.sandbox_id) or container.pod
    if assigned_cpus(state.node, pod) or pod.reserved_for_pod is not None:
        return None
    walled = state.with_kubelet_cpus({**state.kubelet, STUCK: {"": reason.cpus}})
    plan = place(walled, pod, container.name, container.attempt, container.request, token)
    new = plan.container
    if new is None or new.placement.pool is not Pool.OWN or new.placement.exclusive & reason.cpus:
        return None
    words = f"not on CPUs {listed(reason.cpus)}, which could not be freed: {reason.message}"
    placement = structs.replace(new.placement, reasons=(*new.placement.reasons, words))
    new = structs.replace(new, placement=placement)
    why = plan.explanation
    if why is not None:
        why = structs.replace(why, reasons=(*why.reasons, words))
    after = plan.state.with_kubelet_cpus(state.kubelet).changed(put=(new,))
    return structs.replace(plan, state=after, container=new, explanation=why)
