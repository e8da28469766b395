"""The Node object and the labels of namespaces, as the cluster agent has read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from proxy.backends.cluster.facts_file import FactsFile
from proxy.backends.cluster.facts_format import FactsKind, namespace_labels
from proxy.model.kubelet import NodeMeta
from proxy.pools.node_meta import node_meta_of


class ClusterNode(FactsFile[NodeMeta]):
    """The Node object; implements ``proxy.executor.ports.NodeObject``."""

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        """Name the directory of the agent's files."""
        super().__init__(directory, FactsKind.NODE, lambda facts: node_meta_of(facts.items[0]), wall)

    def close(self) -> None:
        """Nothing is open."""


class ClusterNamespaces(FactsFile[Mapping[str, Mapping[str, str]]]):
    """The labels of namespaces; implements ``proxy.executor.ports.NamespaceLabels``."""

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        """Name the directory of the agent's files."""
        super().__init__(directory, FactsKind.NAMESPACES, namespace_labels, wall)
