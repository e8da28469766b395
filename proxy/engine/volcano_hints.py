"""Preferences of Volcano's scheduler: a policy and NUMA nodes, tried first and dropped if they fail.

The scheduler relies on its own view of the node, which may be stale. So the policy and NUMA nodes in its
annotations are preferences: the pod is decided under the preferred policy if that is stricter than the
node's, and with the preferred NUMA nodes as one more hint. If that is rejected, the pod is decided without
preferences, and the unmet ones are reported. For a pod that its own annotation aligns, the preferences are
ignored.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from proxy.engine.topology_manager import AdmissionContext, TopologyDecision
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.explanation import AllocationStep
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.koordinator import NumaPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.phrases import numa_nodes_text

VOLCANO = "volcano"
_BY_STRICTNESS = tuple(TopologyPolicy)


def decide_with_preferences(
    context: AdmissionContext, decide: Callable[[AdmissionContext], TopologyDecision]
) -> tuple[TopologyDecision, InputDefect | None]:
    """Decide with the preferences for a pod, and without them if that fails.

    Args:
        context: The request, the rules and the providers.
        decide: The function that decides a request.

    Returns:
        The decision, and the unmet preferences; None if nothing was preferred, or everything was met.
    """
    pod, own = context.request.pod, context.node.policy
    policy = pod.volcano_policy
    if policy is None or _BY_STRICTNESS.index(policy) <= _BY_STRICTNESS.index(own):
        policy = None
    nodes = pod.volcano_nodes
    if pod.aligned is not NumaPolicy.NONE or (policy is None and nodes is None):
        return decide(context), None
    on_machine = nodes & context.node.nodes if nodes is not None else None
    tries: list[tuple[TopologyPolicy | None, Mask | None]] = []
    if on_machine:
        tries.append(
            (policy or (TopologyPolicy.BEST_EFFORT if own is TopologyPolicy.NONE else None), on_machine)
        )
    if policy is not None:
        tries.append((policy, None))
    obstacle = "" if on_machine or nodes is None else f"{numa_nodes_text(nodes)} cannot be found here"
    for tried_policy, tried_nodes in tries:
        hint = TopologyHint(tried_nodes, preferred=True) if tried_nodes else None
        decision = decide(structs.replace(context, policy=tried_policy, volcano_hint=hint))
        if decision.verdict.admitted and (not tried_nodes or _granted_on(context, decision, tried_nodes)):
            return (decision, None) if not obstacle else _noted(decision, _unmet(None, nodes, obstacle))
        obstacle = obstacle or decision.verdict.message or "they have too little"
    return _noted(decide(context), _unmet(policy, nodes, obstacle))


def _noted(decision: TopologyDecision, unmet: InputDefect) -> tuple[TopologyDecision, InputDefect]:
    return structs.replace(decision, steps=(AllocationStep(VOLCANO, unmet), *decision.steps)), unmet


def _unmet(policy: TopologyPolicy | None, nodes: Mask | None, obstacle: str) -> InputDefect:
    preferences = [f"policy {policy}"] if policy else []
    preferences += [numa_nodes_text(nodes)] if nodes else []
    return InputDefect(
        f"cannot meet what Volcano's scheduler prefers ({', '.join(preferences)}): {obstacle}",
        DefectKind.WISH,
    )


def _granted_on(context: AdmissionContext, decision: TopologyDecision, nodes: Mask) -> bool:
    """Return whether all granted CPUs and memory lie on the given NUMA nodes."""
    machine = context.node.machine
    memory = Mask.union_of(block.affinity for block in decision.blocks)
    return machine.nodes_of(decision.cpus) <= nodes and memory <= nodes
