"""Compute the largest amounts that the containers of a pod request at the same time.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``podGuaranteedCPUs``. Init containers
run one after the other before the app containers; restartable ones (sidecars) stay. At any time a pod needs
at most: for each ordinary init container its own request with those of the sidecars before it, and afterwards
the sum of all sidecars and app containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from proxy.model.requests import ContainerKind, ContainerResources


def peak_request(
    containers: Iterable[ContainerResources],
    amounts: Callable[[ContainerResources], Mapping[str, int]],
    kinds: Iterable[ContainerKind] = tuple(ContainerKind),
) -> dict[str, int]:
    """Return the largest amounts that containers need together at any time.

    Args:
        containers: In the order of the pod.
        amounts: Returns the amounts that one container needs.
        kinds: Only resources that a container of these kinds names appear in the answer.
    """
    peak: dict[str, int] = {}
    staying: dict[str, int] = {}
    running: dict[str, int] = {}
    named: dict[str, None] = {}
    counted_kinds = frozenset(kinds)
    for container in containers:
        for resource, amount in amounts(container).items():
            if container.kind in counted_kinds:
                named[resource] = None
            if container.kind is ContainerKind.INIT:
                peak[resource] = max(peak.get(resource, 0), staying.get(resource, 0) + amount)
            else:
                sums = staying if container.kind is ContainerKind.SIDECAR else running
                sums[resource] = sums.get(resource, 0) + amount
    return {r: max(peak.get(r, 0), staying.get(r, 0) + running.get(r, 0)) for r in named}
