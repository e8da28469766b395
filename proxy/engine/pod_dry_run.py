"""Run a pod on a node without side effects, by the events that follow from kubelet's requests, in order.

kubelet creates the sandbox, then each ordinary init container, which has ended when the next one is created,
then the containers that keep running. These events go through ``proxy.engine.handle``, as on a node. If one
container of a pod is rejected, the pod does not run, and the node is as before.
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.engine.container_events import ContainerCreated, CreateRequested, PhaseChanged
from proxy.engine.explain_record import explain_pooled
from proxy.engine.handle import handle
from proxy.engine.node_effects import PlanDecided, PodDecided
from proxy.engine.pod_events import SandboxRemoved, SandboxRequested, SandboxRunning
from proxy.engine.state import NodeState
from proxy.model.explanation import Explanation
from proxy.model.requests import ContainerKind
from proxy.model.workload import Container, Phase, Pod, Request, Verdict


class ArrivingPod(Struct, frozen=True):
    """A pod as it arrives at a node.

    Attributes:
        pod: The pod; its ``sandbox_id`` and ``uid`` are unique on this node, ``requests`` has its requests.
        total: The request of its sandbox: the sum over its containers.
        requests: The requests of CreateContainer, by container name.
    """

    pod: Pod
    total: Request
    requests: tuple[tuple[str, Request], ...]


class DryRunOutcome(Struct, frozen=True):
    """The outcome for a pod.

    Attributes:
        verdict: Admit or reject.
        state: The node afterwards; if the pod is rejected, the node before.
        containers: Its containers as placed, in their order, init containers included.
        refused: The container that was rejected; empty if none was, or if the pod was rejected as a whole.
        explanations: The records of the decisions, in order; the last one is that of the rejection, if any.
    """

    verdict: Verdict
    state: NodeState
    containers: tuple[Container, ...] = ()
    refused: str = ""
    explanations: tuple[Explanation, ...] = ()


def dry_run(state: NodeState, arrival: ArrivingPod) -> DryRunOutcome:
    """Run a pod on a node, with all its containers in their order."""
    sandbox_id, token = arrival.pod.sandbox_id, f"{arrival.pod.sandbox_id}/"
    arriving = structs.replace(arrival.pod, sandbox_id=token)
    after, (*_, decided) = handle(state, SandboxRequested(arriving, arrival.total))
    assert type(decided) is PodDecided
    admission = decided.admission
    explanations = [admission.explanation] if admission.explanation else []
    if not admission.verdict.admitted:
        return DryRunOutcome(admission.verdict, state, explanations=tuple(explanations))
    pod = structs.replace(admission.pod, sandbox_id=sandbox_id)
    kinds = {container.name: container.kind for container in pod.requests.containers} if pod.requests else {}
    after, _ = handle(after, SandboxRunning(pod, token))
    placed: list[Container] = []
    for name, request in arrival.requests:
        container_id = f"{sandbox_id}/{name}"
        requested = CreateRequested(after.pods[sandbox_id], name, 0, request, f"{container_id}/")
        after, (*_, created) = handle(after, requested)
        assert type(created) is PlanDecided
        plan = created.plan
        if plan.container is None:
            explanations += [plan.explanation] if plan.explanation else []
            return DryRunOutcome(plan.verdict, state, tuple(placed), name, tuple(explanations))
        explanations.append(
            plan.explanation or explain_pooled(plan.container, after.desired_cpus(plan.container))
        )
        after, _ = handle(after, ContainerCreated(plan.container.id, container_id))
        after, _ = handle(after, PhaseChanged(container_id, Phase.RUNNING))
        if kinds.get(name) is ContainerKind.INIT:
            after, _ = handle(after, PhaseChanged(container_id, Phase.EXITED))
        placed.append(after.containers[container_id])
    return DryRunOutcome(Verdict(), after, tuple(placed), explanations=tuple(explanations))


def without_pod(state: NodeState, sandbox_id: str) -> NodeState:
    """Return a node after a pod that ran on it has been removed."""
    after, _ = handle(state, SandboxRemoved(sandbox_id))
    return after
