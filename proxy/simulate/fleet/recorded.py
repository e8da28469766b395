"""Nodes of a live cluster, from the objects that ``kubectl get -o yaml`` prints.

A node is described by its Node object, a Numatopology and a NodeResourceTopology, as the scheduler extender
reads them (``proxy.scheduler.node_facts``). CPUs that they show as taken are taken when the simulation
begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.errors import InputError
from proxy.model.idset import CpuSet
from proxy.model.kubelet import NodeMeta
from proxy.model.phrases import counted
from proxy.pools.node_meta import node_meta_of
from proxy.pools.pod_fields import CPU
from proxy.scheduler.decision import shown_state
from proxy.scheduler.node_facts import SchedulableNode, UnknownNodeError, join_facts
from proxy.scheduler.numatopology import NumatopologyFacts, read_numatopology
from proxy.scheduler.resource_topology import ResourceTopologyFacts, read_resource_topology
from proxy.simulate import MAX_PODS
from proxy.simulate.documents import Document, shape_of
from proxy.simulate.nodes import PODS, SimulatedNode
from proxy.topology.regular_machine import regular_machine

NODE, NUMATOPOLOGY, RESOURCE_TOPOLOGY = "Node", "Numatopology", "NodeResourceTopology"
KINDS = (NODE, NUMATOPOLOGY, RESOURCE_TOPOLOGY)
_MILLI = 1000
_MOST_CPUS = 65536


@dataclass(slots=True)
class RecordedNodes:
    """Nodes that were read.

    Attributes:
        simulated_nodes: The nodes, in the order of their Node objects.
        shown: By node, the uids of pods whose CPUs are taken already.
        notes: Facts that the objects lack, in sentences.
    """

    simulated_nodes: list[SimulatedNode] = field(default_factory=list)
    shown: dict[str, Mapping[str, CpuSet]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Objects:
    meta: dict[str, NodeMeta] = field(default_factory=dict)
    numa: dict[str, NumatopologyFacts] = field(default_factory=dict)
    zones: dict[str, ResourceTopologyFacts] = field(default_factory=dict)


def recorded_nodes(documents: Iterable[Document], *, empty: bool = False) -> RecordedNodes:
    """Read the nodes of documents; objects of other kinds are left out.

    Args:
        documents: The objects.
        empty: Whether CPUs that the objects show as taken are free anyway.

    Raises:
        InputError: An object of a node is invalid; one line with file and line.
    """
    objects = _Objects()
    for kind, name, raw, where in _each(documents):
        if kind == NODE:
            _keep(objects.meta, name, node_meta_of, raw, where)
        elif kind == NUMATOPOLOGY:
            _keep(objects.numa, name, read_numatopology, raw, where)
        else:
            _keep(objects.zones, name, read_resource_topology, raw, where)
    return _joined(objects, empty=empty)


def _each(documents: Iterable[Document]) -> Iterator[tuple[str, str, Mapping[str, Any], str]]:
    """Return the objects of nodes: kind, name, object, and where it was found."""
    for document in documents:
        value = document.value
        items = value.get("items") if isinstance(value, dict) and value.get("kind") == "List" else None
        for number, raw in enumerate(items if isinstance(items, list) else [value], 1):
            if not isinstance(raw, dict):
                place = f"{document.at(value)}, item {number}"
                raise InputError(f"cannot read {place}: it is {shape_of(raw)}, not an object")
            if (kind := raw.get("kind")) in KINDS:
                where = document.where(raw)
                metadata = raw.get("metadata")
                name = metadata.get("name") if isinstance(metadata, dict) else None
                if not isinstance(name, str) or not name:
                    raise InputError(f"cannot read the {kind} in {where}: metadata.name is missing")
                yield str(kind), name, raw, where


def _keep(
    objects: dict[str, Any], name: str, reader: Callable[[Any], Any], raw: Mapping[str, Any], where: str
) -> None:
    kind = raw["kind"]
    if name in objects:
        raise InputError(f"cannot read the {kind} in {where}: there is another one of the name {name}")
    try:
        objects[name] = reader(raw)
    except ValueError as error:
        raise InputError(f"cannot read the {kind} in {where}: {error}") from None


def _joined(objects: _Objects, *, empty: bool) -> RecordedNodes:
    recorded = RecordedNodes()
    unknown = 0
    for name, meta in objects.meta.items():
        numa, zones = objects.numa.get(name), objects.zones.get(name)
        if meta.problems:
            raise InputError(f"cannot read the Node {name}: {meta.problems[0]}")
        node = None
        if numa is not None or zones is not None:
            try:
                node = join_facts(name, meta, numa, zones)
                node = _emptied(node) if empty else node
            except UnknownNodeError as error:
                raise InputError(f"cannot use the node {name}: {error}") from None
        unknown += node is None
        recorded.simulated_nodes.append(_simulated_node(name, meta, node))
        recorded.shown[name] = node.shown if node else {}
    without_node = [name for name in {**objects.numa, **objects.zones} if name not in objects.meta]
    if without_node:
        raise InputError(
            f"cannot use the node {sorted(without_node)[0]}: there is no Node object of that name"
        )
    if unknown:
        recorded.notes.append(
            f"{counted(unknown, 'node')} without Numatopology and NodeResourceTopology: taken as one NUMA "
            "node whose CPU manager has the policy none"
        )
    return recorded


def _simulated_node(name: str, meta: NodeMeta, node: SchedulableNode | None) -> SimulatedNode:
    if CPU not in meta.allocatable:
        raise InputError(f"cannot use the node {name}: status.allocatable of its Node object has no cpu")
    offers = {
        resource: amount if resource == CPU else amount // _MILLI
        for resource, amount in meta.allocatable.items()
    }
    offers.setdefault(PODS, MAX_PODS)
    if node is None:
        cpus = max(1, meta.capacity.get(CPU, meta.allocatable[CPU]) // _MILLI)
        state = NodeState.empty(_without_topology(min(cpus, _MOST_CPUS)))
    else:
        state = shown_state(node)
    return SimulatedNode(name, state.node, state, offers, dict(offers))


@functools.cache
def _without_topology(cpus: int) -> Node:
    machine = regular_machine(1, 1, cpus, 1)
    return Node(machine, CpuTopology.of(machine))


def _emptied(node: SchedulableNode) -> SchedulableNode:
    devices = {
        resource: {numa: (total, total) for numa, (total, _) in zones.items()}
        for resource, zones in node.devices.items()
    }
    free = node.rules.machine.online - node.reserved
    return replace(node, free=free, devices=devices, shown={})
