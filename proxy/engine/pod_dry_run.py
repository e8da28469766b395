"""A pod's whole life on a node, as pure calls: the requests of kubelet, one after the other.

kubelet asks for the sandbox, then for each ordinary init container, which has ended when the next one is
asked for, then for what stays. This runs that sequence through the code that decides on a node. A pod of
which one container is refused does not run at all, so it leaves nothing behind.
"""

from __future__ import annotations

from msgspec import Struct

from proxy.engine.admit import admit
from proxy.engine.create import place
from proxy.engine.explain_record import explain_pooled
from proxy.engine.state import NodeState
from proxy.model.explanation import Explanation
from proxy.model.requests import ContainerKind
from proxy.model.workload import Container, Phase, Pod, Request, Verdict


class ArrivingPod(Struct, frozen=True):
    """A pod as it arrives at a node.

    Attributes:
        pod: The pod; ``sandbox_id`` and ``uid`` are its own on this node, ``asks`` says what it asks for.
        total: The request of its sandbox: the sum over its containers.
        requests: The requests of CreateContainer, by container name.
    """

    pod: Pod
    total: Request
    requests: tuple[tuple[str, Request], ...]


class DryRunOutcome(Struct, frozen=True):
    """The outcome for a pod.

    Attributes:
        verdict: Admit or refuse.
        state: The node afterwards; on a refusal the node before.
        containers: Its containers as placed, in their order, init containers included.
        refused: The container that was refused; empty where none was, or the pod as a whole.
        explanations: Why, one record a decision, in their order; the last one is of the refusal if any.
    """

    verdict: Verdict
    state: NodeState
    containers: tuple[Container, ...] = ()
    refused: str = ""
    explanations: tuple[Explanation, ...] = ()


def dry_run(state: NodeState, arrival: ArrivingPod) -> DryRunOutcome:
    """Run a pod on a node, with all its containers in their order."""
    admission = admit(state, arrival.pod, arrival.total)
    explanations = [admission.explanation] if admission.explanation else []
    if not admission.verdict.admitted:
        return DryRunOutcome(admission.verdict, state, explanations=tuple(explanations))
    pod = admission.pod
    kinds = {ask.name: ask.kind for ask in pod.asks.containers} if pod.asks else {}
    after = admission.state.with_pod(pod)
    placed: list[Container] = []
    for name, request in arrival.requests:
        pod = after.pods[pod.sandbox_id]
        plan = place(after, pod, name, 0, request, f"{pod.sandbox_id}/{name}")
        if plan.container is None:
            explanations += [plan.explanation] if plan.explanation else []
            return DryRunOutcome(plan.verdict, state, tuple(placed), name, tuple(explanations))
        explanations.append(
            plan.explanation or explain_pooled(plan.container, plan.state.wanted(plan.container))
        )
        ends = kinds.get(name) is ContainerKind.INIT
        container = plan.container.in_phase(Phase.RUNNING)
        after = plan.state.changed(put=(container,)).started(container)
        if ends:
            container = container.in_phase(Phase.EXITED)
            after = after.changed(put=(container,))
        placed.append(container)
    return DryRunOutcome(Verdict(), after, tuple(placed), explanations=tuple(explanations))
