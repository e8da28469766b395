"""The section of what the daemon reads from the cluster, by way of the cluster agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from proxy.config.kinds import OPTIONAL_FILE
from proxy.config.setting import key


@dataclass(frozen=True, slots=True)
class ClusterFactsConfig:
    """What the cluster agent leaves for the daemon.

    Attributes:
        directory: None where nothing is read.
    """

    directory: Path | None = field(
        default=None,
        metadata=key(
            "directory",
            OPTIONAL_FILE,
            "Where topoproxy agent writes the Node object, the labels of namespaces and this node's pods, "
            "such as /var/lib/topoproxy/cluster, and the daemon reads them. Empty: neither does.",
        ),
    )
