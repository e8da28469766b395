"""All files of the cluster agent that the daemon reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from proxy.backends.cluster.node_facts import ClusterNamespaces, ClusterNode
from proxy.backends.cluster.pod_facts import ClusterPods


class AgentFiles:
    """The files in one directory; implements ``proxy.executor.ports.ClusterFiles``.

    Attributes:
        node: The Node object.
        namespaces: The labels of namespaces.
        pods: This node's pods.
    """

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        """Name the directory; a file is read when it is asked for."""
        self.node = ClusterNode(directory, wall)
        self.namespaces = ClusterNamespaces(directory, wall)
        self.pods = ClusterPods(directory, wall)

    def read(self) -> None:
        """Read the files that have changed."""
        for file in (self.node, self.namespaces, self.pods):
            file.read()

    def page(self) -> list[dict[str, object]]:
        """Return what is in effect of each file and how old it is, as plain data."""
        return [self.node.page(), self.namespaces.page(), self.pods.page()]
