"""CPUs that a pod owns as a whole, divided among its containers.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``AllocatePod`` (alpha gate
``PodLevelResourceManagers``). A Guaranteed pod that requests whole CPUs for itself gets them as one *bubble*.
Inside it, in the order of the pod:

- an init container with a request of its own gets that many CPUs out of those that no sidecar owns; it ends
  before the next one starts, so the same CPUs are offered again. A sidecar keeps what it gets;
- an init container without one runs on all that no sidecar owns so far;
- an app container with a request gets exclusive CPUs;
- sidecars and app containers without one share what is left in the end. If nothing is left, the pod is
  refused, because they could not run.

The CPUs go back with the pod's last container.
"""

from __future__ import annotations

from proxy.allocation.cpu_policy import CpuPolicy, CpuRejectedError, CpuState, take
from proxy.allocation.cpu_request import container_cpus, pod_level_cpu_count
from proxy.allocation.cpu_static import check_whole_cores, take_under
from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import cpus as named
from proxy.model.requests import ContainerKind, PodRequests
from tests.testkit.changed_copy import changed_copy as replace


class EmptyPodSharedPoolError(CpuRejectedError):
    """A container that shares its pod's CPUs would have none."""

    reason = "EmptyPodSharedPoolError"


def allocate_pod(
    policy: CpuPolicy,
    state: CpuState,
    pod: PodRequests,
    affinity: Mask | None = None,
    steps: list[str] | None = None,
) -> CpuState:
    """Allocate CPUs for a pod and all its containers.

    Args:
        policy: The policy.
        state: Which containers own which CPUs now.
        pod: What the pod requests; one that requests nothing for itself gets nothing here.
        affinity: NUMA nodes of the hint; None for any.
        steps: Sentences about what was done are added here; None for no record.

    Raises:
        EmptyPodSharedPoolError: A container would have no CPU.
        SmtAlignmentError: The request violates ``full-pcpus-only``.
        NotEnoughCpus: Too few CPUs are available, or the containers request more than the pod.
    """
    wanted = pod_level_cpu_count(pod)
    if wanted == 0 or pod.uid in state.pod_level_cpus:
        return state
    check_whole_cores(policy, state, wanted)
    bubble = take_under(policy, state, wanted, affinity, CpuSet(), steps)
    parts = divide(policy, pod, bubble)
    if steps is not None:
        steps += [f"container {name} of them: {named(cpus)}" for name, cpus in parts.items()]
    return replace(
        state,
        default=state.default - bubble,
        assigned={**state.assigned, pod.uid: parts},
        pod_level_cpus={**state.pod_level_cpus, pod.uid: bubble},
    )


def divide(policy: CpuPolicy, pod: PodRequests, bubble: CpuSet) -> dict[str, CpuSet]:
    """Return the part of the pod's CPUs for each container of a pod.

    Raises:
        EmptyPodSharedPoolError: A container would have no CPU.
        NotEnoughCpus: The containers request more than there is.
    """
    parts: dict[str, CpuSet] = {}
    sharing: list[str] = []
    rest = bubble
    for ask in pod.containers:
        wanted = container_cpus(pod, ask)
        if wanted:
            parts[ask.name] = take(policy.topo, policy.options, rest, wanted)
            if ask.kind is not ContainerKind.INIT:
                rest -= parts[ask.name]
        elif ask.kind is ContainerKind.INIT:
            parts[ask.name] = rest
        else:
            sharing.append(ask.name)
    parts.update(dict.fromkeys(sharing, rest))
    for name, cpus in parts.items():
        if not cpus:
            raise EmptyPodSharedPoolError(
                f"container {name} shares the CPUs of its pod, but the other containers own all {len(bubble)}"
            )
    return parts
