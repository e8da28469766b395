"""The section ``cluster`` of the configuration: what the cluster agent publishes, and how it connects."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path

from proxy.config.kinds import OPTIONAL_FILE, TRUTH, SettingKind, choice, text_schema
from proxy.config.setting import key

_NAME = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"


class TopologyObject(enum.StrEnum):
    """In which form the NodeResourceTopology object of the node is written."""

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
    """What ``topoproxy agent`` does. The daemon does not read this section."""

    node: str = field(
        default="",
        metadata=key(
            "node",
            NODE_NAME,
            "The name of the Node object. Empty: the environment variable NODE_NAME, else the host's name.",
        ),
    )
    kubeconfig: Path | None = field(
        default=None,
        metadata=key(
            "kubeconfig",
            OPTIONAL_FILE,
            "The credentials for the API server. Empty: those of the pod, else the environment variable "
            "KUBECONFIG; without any, nothing is published.",
        ),
    )
    numatopology: bool = field(
        default=True,
        metadata=key("numatopology", TRUTH, "Publish a Numatopology (Volcano) where its CRD is installed."),
    )
    node_resource_topology: TopologyObject = field(
        default=TopologyObject.AUTO,
        metadata=key(
            "nodeResourceTopology",
            choice(TopologyObject),
            "Publish a NodeResourceTopology: as NFD's topology-updater does, as Koordinator's agent does, or "
            "not. auto: as Koordinator where the cluster has an API of Koordinator or the CRD does not have "
            "version v1alpha2, else as NFD.",
        ),
    )
    pod_annotations: bool = field(
        default=True,
        metadata=key(
            "podAnnotations",
            TRUTH,
            "Write the annotation resource-status (Koordinator) at pods whose CPUs were chosen on the node.",
        ),
    )
    events: bool = field(
        default=True,
        metadata=key("events", TRUTH, "Write Events about pods: placed, rejected, drift repaired."),
    )
    node_condition: bool = field(
        default=True,
        metadata=key("nodeCondition", TRUTH, "Keep the condition TopologyPlacement of the Node object."),
    )
