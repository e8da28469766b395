"""Which pods may own CPUs: the rules as values, and the names of the rules.

A value made without arguments allows everything. The default limits of a configuration are in
``proxy.config.admission``.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Mapping

from msgspec import Struct, structs

from proxy.model.label_selector import LabelSelector


class ResourceStatusMode(enum.StrEnum):
    """Whether the CPUs that the annotation ``resource-status`` names are used."""

    BOUNDED = "bounded"
    FOLLOW = "follow"
    IGNORE = "ignore"


class BeyondLimit(enum.StrEnum):
    """What happens to a pod that claims more than it may."""

    REJECT = "reject"
    SHARE = "share"


class AdmissionRule(enum.StrEnum):
    """The rules that can reject a claim; metrics and messages name them."""

    NAMESPACE = "namespace"
    SYSTEM_NAMESPACE = "system-namespace"
    REQUEST = "request"
    WHOLE_CPUS = "whole-cpus"
    RESERVED_CPUS = "reserved-cpus"
    POD_LIMIT = "pod-limit"
    NAMESPACE_LIMIT = "namespace-limit"
    NODE_LIMIT = "node-limit"
    SHARED_FLOOR = "shared-floor"

    @property
    def reason(self) -> str:
        """The rule as a reason of a rejection: ``AdmissionSharedFloor``."""
        message = ("CPUs" if part == "cpus" else part.capitalize() for part in self.split("-"))
        return f"Admission{''.join(message)}"


SHARED_POOL_EXHAUSTED = "SharedPoolExhausted"
"""The reason of a rejection that no rule demands: no CPU would be left in the shared pool."""
CLAIMED = (
    AdmissionRule.NAMESPACE,
    AdmissionRule.SYSTEM_NAMESPACE,
    AdmissionRule.REQUEST,
    AdmissionRule.WHOLE_CPUS,
    AdmissionRule.RESERVED_CPUS,
)
"""Rules that depend on the claim of a pod alone. The other rules depend on the CPUs that others own."""


class Breach(Struct, frozen=True):
    """A claim that goes beyond a rule.

    Attributes:
        rule: The rule.
        message: The cause as text. It names no other pod, so that a pod's events may show it.
    """

    rule: AdmissionRule
    message: str


class Namespaces(Struct, frozen=True):
    """Namespaces by name, and by label if a selector is set: both must select a namespace.

    Attributes:
        patterns: Names, in which ``*`` matches any characters and ``?`` one.
        selector: Labels that a namespace must have.
        selected: The namespaces whose labels are known and have them.
    """

    patterns: tuple[str, ...] = ("*",)
    selector: LabelSelector = LabelSelector()
    selected: frozenset[str] = frozenset()

    def admits(self, namespace: str) -> bool:
        """Return whether a namespace is among them."""
        return self.names(namespace) and (self.selector.all or namespace in self.selected)

    def names(self, namespace: str) -> bool:
        """Return whether a namespace is among them by its name."""
        return any(
            pattern == "*" or fnmatch.fnmatchcase(namespace, pattern)  # fnmatch keeps compiled patterns
            for pattern in self.patterns
        )

    @property
    def all(self) -> bool:
        """Whether every namespace is among them."""
        return "*" in self.patterns and self.selector.all

    def knowing(self, labels: Mapping[str, Mapping[str, str]] | None) -> Namespaces:
        """Return the namespaces with those that the selector selects by their labels.

        Args:
            labels: The labels of each namespace; None if they are unknown.
        """
        if self.selector.all:
            return self
        selected = frozenset(
            name for name, labels_of_name in (labels or {}).items() if self.selector.matches(labels_of_name)
        )
        return self if selected == self.selected else structs.replace(self, selected=selected)


EVERYWHERE = Namespaces()
"""All namespaces."""


class AdmissionRules(Struct, frozen=True):
    """The rules of a node.

    Attributes:
        resource_status: Whether the CPUs of the annotation ``resource-status`` are used.
        owners: Namespaces that may use the classes LSE (latency-sensitive exclusive) and LSR
            (latency-sensitive reserved), and ``resource-status``.
        system: Namespaces that may use class SYSTEM if the node keeps CPUs for it.
        pod_limit, namespace_limit, node_limit: Most exclusive CPUs; None for no limit.
        floor: The fewest CPUs of the shared pool; None for a share of the machine (``proxy.pools.pools``).
        numa_floor: The fewest CPUs of the shared pool on each NUMA node; None as for ``floor``.
        beyond: What happens to a pod that claims more.
        name_others: Whether messages to a client may name other pods.
    """

    resource_status: ResourceStatusMode = ResourceStatusMode.FOLLOW
    owners: Namespaces = EVERYWHERE
    system: Namespaces = EVERYWHERE
    pod_limit: int | None = None
    namespace_limit: int | None = None
    node_limit: int | None = None
    floor: int | None = 0
    numa_floor: int | None = 0
    beyond: BeyondLimit = BeyondLimit.REJECT
    name_others: bool = True

    @property
    def distinguish_namespaces(self) -> bool:
        """Whether equal pods of two namespaces may get different verdicts."""
        return self.namespace_limit is not None or not (self.owners.all and self.system.all)
