"""The section of what becomes of pods that this node rejects."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from proxy.config.kinds import TRUTH, choice, duration, whole
from proxy.config.setting import key


class RejectedPolicy(enum.StrEnum):
    """What becomes of a rejected pod."""

    RETRY = "retry"
    FAIL = "fail"
    EVICT = "evict"


class KeepAway(enum.StrEnum):
    """How other pods are kept away from a node without room."""

    NONE = "none"
    ANNOTATION = "annotation"
    PREFER_NO_SCHEDULE = "prefer-no-schedule"
    NO_SCHEDULE = "no-schedule"


@dataclass(frozen=True, slots=True)
class RejectedPodsConfig:
    """What the cluster agent does with pods that this node rejects. The daemon does not read this section."""

    policy: RejectedPolicy = field(
        default=RejectedPolicy.RETRY,
        metadata=key(
            "policy",
            choice(RejectedPolicy),
            "retry: kubelet tries the pod again and again. fail: the pod's phase becomes Failed, as after a "
            "rejection by kubelet. evict: the pod is evicted, so that its controller makes another one.",
        ),
    )
    after: int = field(
        default=3,
        metadata=key("afterRejections", whole(1, 1000), "How many rejected tries of a pod come before that."),
    )
    per_minute: int = field(
        default=6,
        metadata=key("perMinute", whole(1, 600), "Most pods of this node in a minute."),
    )
    without_controller: bool = field(
        default=False,
        metadata=key("withoutController", TRUTH, "Also pods that no controller would make again."),
    )
    delete_fallback: bool = field(
        default=False,
        metadata=key(
            "deleteFallback",
            TRUTH,
            "Delete a pod where the API server does not permit its eviction. A disruption budget is "
            "respected in any case.",
        ),
    )
    keep_away: KeepAway = field(
        default=KeepAway.PREFER_NO_SCHEDULE,
        metadata=key(
            "keepAway",
            choice(KeepAway),
            "What the node has until there is room again: nothing; the annotation topoproxy.io/no-room; or "
            "also a taint of that name, with this effect.",
        ),
    )
    keep_away_for: float = field(
        default=600.0,
        metadata=key(
            "keepAwayFor", duration(1, 86_400), "Longest time of that after the last pod that was ended."
        ),
    )
