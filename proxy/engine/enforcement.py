"""Decide to which pods the plan is applied.

The plan covers all pods; only this module decides for which of them it takes effect. A pod to which the plan
is not applied is *observed*: its containers are placed in the state, but its calls pass unchanged, none of
its cgroups is written, and it is never rejected. In the plan, observed owners keep the CPUs that the plan
gives them, so applying the plan to more pods never changes the plan. How a change of mode or selection
reaches running pods is in ``proxy.engine.staging``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.engine.enforcement_state import APPLIED_TO_ALL
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase, Pod

if TYPE_CHECKING:
    from proxy.engine.state import NodeState


def applies_to(state: NodeState, pod: Pod | None) -> bool:
    """Return whether the plan is applied to a pod.

    Args:
        state: The node as it is.
        pod: The pod; with None, the result is whether there may be any pod to which the plan is applied.
    """
    enforcement = state.enforcement
    if enforcement is APPLIED_TO_ALL:
        return state.mode is NodeMode.ENFORCE
    if pod is None:
        return state.mode is NodeMode.ENFORCE or bool(enforcement.lagging and not state.mode.in_release)
    return was_applied_to(state, pod) and not state.mode.in_release


def was_applied_to(state: NodeState, pod: Pod) -> bool:
    """Return whether the plan is applied to a pod, or was before the node began to be released."""
    return is_selected(state, pod) is not (pod.key in state.enforcement.lagging)


def plan_may_be_in_effect(state: NodeState, pod: Pod) -> bool:
    """Return whether CPUs, memory nodes or quotas of the plan may still be in effect for a pod."""
    return pod.key in state.enforcement.moving or was_applied_to(state, pod)


def is_selected(state: NodeState, pod: Pod) -> bool:
    """Return whether mode and selection require the plan to be applied to a pod: the pod's target."""
    if state.mode is NodeMode.OBSERVE or state.mode is NodeMode.PASSTHROUGH:
        return False
    selection = state.enforcement.selection
    if selection.all:
        return True
    labels = pod.labels
    if not selection.labels.all and (known := state.pods.get(pod.sandbox_id)) is not None:
        labels = known.labels  # a container has the labels that its pod had; the ledger records none
    return selection.selects(pod.key, pod.namespace, labels)


def is_applied_to_all(state: NodeState) -> bool:
    """Return whether the plan is applied to every pod, including unknown ones."""
    return (
        state.mode is NodeMode.ENFORCE and state.enforcement.selection.all and not state.enforcement.lagging
    )


def observes_any(state: NodeState, pods: Iterable[Pod]) -> bool:
    """Return whether any of the pods is observed; if so, their common cgroups are not written either."""
    if state.enforcement is APPLIED_TO_ALL:
        return state.mode is not NodeMode.ENFORCE
    return any(not applies_to(state, pod) for pod in pods)


def live_pods(state: NodeState) -> dict[str, Pod]:
    """Return the pods with at least one container that has not exited, by key."""
    return {c.pod.key: c.pod for c in state.containers.values() if c.phase is not Phase.EXITED}


class EnforcementCounts(Struct, frozen=True):
    """To how many pods the plan is applied.

    Attributes:
        applied, observed: Pods with live containers.
        to_apply, to_give_back: Lagging pods whose next step applies the plan, or gives back their CPUs.
        moving: Pods of the step under way.
        observed_containers: Live containers of observed pods; these may use CPUs that have owners.
    """

    applied: int
    observed: int
    to_apply: int
    to_give_back: int
    moving: int
    observed_containers: int


def counts(state: NodeState) -> EnforcementCounts:
    """Count the pods to which the plan is applied, and the others."""
    live, lagging = live_pods(state), state.enforcement.lagging
    applied = {key for key, pod in live.items() if applies_to(state, pod)}
    containers = (c for c in state.containers.values() if c.phase is not Phase.EXITED)
    return EnforcementCounts(
        len(applied),
        len(live) - len(applied),
        sum(key not in applied for key in lagging & live.keys()),
        len(lagging & applied),
        len(state.enforcement.moving & live.keys()),
        sum(container.pod.key not in applied for container in containers),
    )
