"""The resources of a pod's containers, as Kubernetes counts them: requests and limits by resource."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, field

MEMORY = "memory"
HUGE_PAGES = "hugepages-"


def in_bytes(resource: str) -> bool:
    """Return whether a resource is counted in bytes: memory or huge pages."""
    return resource == MEMORY or resource.startswith(HUGE_PAGES)


class ContainerKind(enum.StrEnum):
    """The role of a container in its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


class ContainerResources(Struct, frozen=True):
    """What one container requests.

    Attributes:
        requests, limits: Resource name to amount: ``cpu`` in thousandths of a CPU, ``memory`` and
            ``hugepages-*`` in bytes, anything else in devices.
    """

    name: str
    kind: ContainerKind = ContainerKind.APP
    requests: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def requests_equal_limits(self) -> bool:
        """True when CPU and memory are requested, and exactly up to their limits."""
        return all(self.requests.get(r, 0) == self.limits.get(r, 0) != 0 for r in ("cpu", MEMORY))


class PodRequests(Struct, frozen=True):
    """What a pod requests.

    Attributes:
        containers: Init containers and sidecars in their order, then app containers.
        guaranteed: True when the pod's QoS class is Guaranteed.
        pod_level_requests: Requests of the pod itself (``spec.resources``); None if it makes none.
        are_pod_level_requests_managed: Whether such requests are served (gate ``PodLevelResourceManagers``).
        pod_level_limits: Limits of the pod itself; empty if it has none.
    """

    uid: str
    containers: tuple[ContainerResources, ...]
    guaranteed: bool = True
    pod_level_requests: Mapping[str, int] | None = None
    are_pod_level_requests_managed: bool = False
    pod_level_limits: Mapping[str, int] = field(default_factory=dict)

    def named(self, name: str) -> ContainerResources:
        """Return the container of that name.

        Raises:
            KeyError: The pod has no such container.
        """
        for container in self.containers:
            if container.name == name:
                return container
        raise KeyError(name)

    def of_kinds(self, *kinds: ContainerKind) -> tuple[ContainerResources, ...]:
        """Return the containers of some kinds, in their order."""
        return tuple(container for container in self.containers if container.kind in kinds)


def peak_request(
    containers: Iterable[ContainerResources],
    amounts: Callable[[ContainerResources], Mapping[str, int]],
    kinds: Iterable[ContainerKind] = tuple(ContainerKind),
) -> dict[str, int]:
    """Return the largest amounts that the containers of a pod need together at any time.

    Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``podGuaranteedCPUs``. Init
    containers run one after the other before the app containers; restartable ones (sidecars) stay. The peak
    is the largest of these amounts: for each ordinary init container its own request plus those of the
    sidecars before it, and finally the sum of all sidecars and app containers.

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
