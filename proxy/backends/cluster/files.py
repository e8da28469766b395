"""The files of the cluster agent that the daemon reads: the Node object, namespaces, pods."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from proxy.backends.cluster.facts_format import FactsFile, FactsKind, namespace_labels
from proxy.backends.cluster.pod_facts import ClusterPods
from proxy.model.kubelet import NodeMeta
from proxy.pools.node_meta import node_meta_of


class AgentFiles:
    """The files in one directory; implements ``proxy.executor.ports.ClusterFiles``.

    Attributes:
        node: The Node object.
        namespaces: The labels of namespaces.
        pods: This node's pods.
    """

    def __init__(self, directory: Path) -> None:
        """Set the directory; a file is read when it is requested."""
        self.node = ClusterNode(directory)
        self.namespaces = ClusterNamespaces(directory)
        self.pods = ClusterPods(directory)

    def read(self) -> None:
        """Read the files that have changed."""
        for file in (self.node, self.namespaces, self.pods):
            file.read()

    def page(self) -> list[dict[str, object]]:
        """Return the content in effect of each file and its age, as plain data."""
        return [self.node.page(), self.namespaces.page(), self.pods.page()]


class ClusterNode(FactsFile[NodeMeta]):
    """The Node object; implements ``proxy.executor.ports.NodeObject``."""

    def __init__(self, directory: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Set the directory of the agent's files."""
        super().__init__(directory, FactsKind.NODE, lambda facts: node_meta_of(facts.items[0]), wall_clock)

    def close(self) -> None:
        """Nothing is open."""


class ClusterNamespaces(FactsFile[Mapping[str, Mapping[str, str]]]):
    """The labels of namespaces; implements ``proxy.executor.ports.NamespaceLabels``."""

    def __init__(self, directory: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Set the directory of the agent's files."""
        super().__init__(directory, FactsKind.NAMESPACES, namespace_labels, wall_clock)
