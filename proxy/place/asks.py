"""What the containers of a pod ask for, and what the pod asks for with them.

Theory (kubelet 1.36, reference A.2). Init containers run one after the other before the app containers;
restartable ones (sidecars) stay. A pod needs at any time at most: for each ordinary init container its own
request with those of the sidecars before it, and afterwards the sum of all sidecars and app containers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

MEMORY = "memory"
HUGE_PAGES = "hugepages-"


class Kind(enum.StrEnum):
    """What a container is in its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


@dataclass(frozen=True, slots=True)
class Ask:
    """What one container asks for.

    Attributes:
        requests, limits: Resource name to amount: ``cpu`` in thousandths of a CPU, ``memory`` and
            ``hugepages-*`` in bytes, anything else in devices.
    """

    name: str
    kind: Kind = Kind.APP
    requests: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """True when CPU and memory are requested, and exactly up to their limits."""
        return all(self.requests.get(r, 0) == self.limits.get(r, 0) != 0 for r in ("cpu", MEMORY))


@dataclass(frozen=True, slots=True)
class PodAsk:
    """What a pod asks for.

    Attributes:
        containers: Init containers and sidecars in their order, then app containers.
        guaranteed: True when the pod's QoS class is Guaranteed.
        own: Requests of the pod itself (``spec.resources``); None where it makes none.
        own_managed: True where such requests are served (gate ``PodLevelResourceManagers``).
    """

    uid: str
    containers: tuple[Ask, ...]
    guaranteed: bool = True
    own: Mapping[str, int] | None = None
    own_managed: bool = False

    def named(self, name: str) -> Ask:
        """Give the container of that name.

        Raises:
            KeyError: The pod has none.
        """
        for ask in self.containers:
            if ask.name == name:
                return ask
        raise KeyError(name)

    def of(self, *kinds: Kind) -> tuple[Ask, ...]:
        """Give the containers of some kinds, in their order."""
        return tuple(ask for ask in self.containers if ask.kind in kinds)


def together(
    containers: Iterable[Ask],
    amounts: Callable[[Ask], Mapping[str, int]],
    kinds: Iterable[Kind] = tuple(Kind),
) -> dict[str, int]:
    """Give what containers need together at the worst moment.

    Args:
        containers: In the order of the pod.
        amounts: What one container needs.
        kinds: Only resources that a container of these kinds names appear in the answer.
    """
    peak: dict[str, int] = {}
    staying: dict[str, int] = {}
    running: dict[str, int] = {}
    named: dict[str, None] = {}
    wanted = frozenset(kinds)
    for ask in containers:
        for resource, amount in amounts(ask).items():
            if ask.kind in wanted:
                named[resource] = None
            if ask.kind is Kind.INIT:
                peak[resource] = max(peak.get(resource, 0), staying.get(resource, 0) + amount)
            else:
                into = staying if ask.kind is Kind.SIDECAR else running
                into[resource] = into.get(resource, 0) + amount
    return {r: max(peak.get(r, 0), staying.get(r, 0) + running.get(r, 0)) for r in named}
