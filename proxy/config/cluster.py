"""The sections ``cluster`` and ``rejectedPods``: the settings of the cluster agent."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path

from proxy.config.kinds import (
    BOOLEAN,
    OPTIONAL_FILE,
    SettingKind,
    choice,
    duration,
    text_schema,
    whole_number,
)
from proxy.config.setting import key

_NAME = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"


class TopologyObject(enum.StrEnum):
    """The form in which the NodeResourceTopology object of the node is written."""

    AUTO = "auto"
    NFD = "nfd"
    KOORDINATOR = "koordinator"
    NONE = "none"


def _read_name(text: str) -> str:
    name = text.strip()
    if name and not re.fullmatch(_NAME, name):
        raise ValueError(f"{text!r} is not the name of a node")
    return name


NODE_NAME = SettingKind(
    "the name of a Node object, or empty",
    _read_name,
    str,
    frozenset({"str"}),
    schema=text_schema(f"({_NAME})?"),
)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The tasks of ``topoproxy agent``. The daemon does not read this section."""

    node: str = field(
        default="",
        metadata=key(
            "node",
            NODE_NAME,
            "The name of the Node object. Empty: the environment variable NODE_NAME, or the host's name.",
        ),
    )
    kubeconfig: Path | None = field(
        default=None,
        metadata=key(
            "kubeconfig",
            OPTIONAL_FILE,
            "The credentials for the API server. Empty: those of the pod, or otherwise the environment "
            "variable KUBECONFIG; without any, nothing is published.",
        ),
    )
    numatopology: bool = field(
        default=True,
        metadata=key(
            "numatopology",
            BOOLEAN,
            "Publish a Numatopology (Volcano) if its CustomResourceDefinition (CRD) is installed.",
        ),
    )
    node_resource_topology: TopologyObject = field(
        default=TopologyObject.AUTO,
        metadata=key(
            "nodeResourceTopology",
            choice(TopologyObject),
            "The form in which a NodeResourceTopology is published: that of the topology-updater of Node "
            "Feature Discovery (NFD), that of Koordinator's agent, or none. auto: Koordinator's if the "
            "cluster has an API of Koordinator or the CRD lacks version v1alpha2, otherwise NFD's.",
        ),
    )
    pod_annotations: bool = field(
        default=True,
        metadata=key(
            "podAnnotations",
            BOOLEAN,
            "Write the annotation resource-status (Koordinator) to pods whose CPUs were chosen on the node.",
        ),
    )
    events: bool = field(
        default=True,
        metadata=key("events", BOOLEAN, "Write Events about pods: placed, rejected, drift repaired."),
    )
    node_condition: bool = field(
        default=True,
        metadata=key(
            "nodeCondition", BOOLEAN, "Maintain the condition TopologyPlacement of the Node object."
        ),
    )


class RejectedPolicy(enum.StrEnum):
    """What happens to a rejected pod."""

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
            "rejection by kubelet. evict: the pod is evicted, so that its controller creates another one.",
        ),
    )
    after: int = field(
        default=3,
        metadata=key(
            "afterRejections",
            whole_number(1, 1000),
            "The number of rejected attempts after which the policy applies to a pod.",
        ),
    )
    per_minute: int = field(
        default=6,
        metadata=key(
            "perMinute", whole_number(1, 600), "The most pods of this node that are ended in a minute."
        ),
    )
    without_controller: bool = field(
        default=False,
        metadata=key("withoutController", BOOLEAN, "Also end pods that no controller would replace."),
    )
    delete_fallback: bool = field(
        default=False,
        metadata=key(
            "deleteFallback",
            BOOLEAN,
            "Delete a pod if the API server does not permit its eviction. A disruption budget is "
            "respected in any case.",
        ),
    )
    keep_away: KeepAway = field(
        default=KeepAway.PREFER_NO_SCHEDULE,
        metadata=key(
            "keepAway",
            choice(KeepAway),
            "How the node is marked until it has room again: not at all; by the annotation "
            "topoproxy.io/no-room; or also by a taint of that name with this effect.",
        ),
    )
    keep_away_for: float = field(
        default=600.0,
        metadata=key(
            "keepAwayFor",
            duration(1, 86_400),
            "The longest time that the node stays marked after the last pod was ended.",
        ),
    )
