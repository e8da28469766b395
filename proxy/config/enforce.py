"""The section of enforcement: to which pods the plan is applied, and how fast running ones are changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.config.admission import NAMESPACES, SELECTOR
from proxy.config.kinds import duration, whole
from proxy.config.setting import key
from proxy.model.admission import Namespaces
from proxy.model.label_selector import LabelSelector
from proxy.model.pod_selection import PodSelection


@dataclass(frozen=True, slots=True)
class EnforceConfig:
    """To which pods mode enforce applies the plan. All other pods are observed."""

    namespaces: Namespaces = field(
        default=Namespaces(("*",)),
        metadata=key("namespaces", NAMESPACES, "Namespaces whose pods the plan is applied to.", live=True),
    )
    pod_selector: LabelSelector = field(
        default=LabelSelector(),
        metadata=key(
            "podSelector",
            SELECTOR,
            "Labels of the pods that the plan is applied to; empty: all pods.",
            live=True,
        ),
    )
    percent: int = field(
        default=100,
        metadata=key(
            "percent",
            whole(0, 100),
            "How many of these pods the plan is applied to. The hash of a pod's UID decides, so a larger "
            "percentage only adds pods.",
            live=True,
        ),
    )
    pods_per_step: int = field(
        default=1,
        metadata=key(
            "podsPerStep",
            whole(1, 1000),
            "Where mode or enforce change on a running node: how many running pods are changed together.",
            live=True,
        ),
    )
    step_period: float = field(
        default=1.0,
        metadata=key(
            "stepPeriod", duration(0.1, 3600), "Time between the beginnings of two such steps.", live=True
        ),
    )

    @property
    def selection(self) -> PodSelection:
        """The section as rules."""
        return PodSelection(self.namespaces, self.pod_selector, self.percent)
