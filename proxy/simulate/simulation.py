"""One simulation: a configuration, nodes, pods; and the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.allocation.devices.state import RegisteredDevice
from proxy.config import Config, check_against
from proxy.engine.node import Node
from proxy.executor.rules_from_config import node_rules
from proxy.simulate import MAX_PODS
from proxy.simulate.cluster import Cluster, Result
from proxy.simulate.machines import NamedMachine
from proxy.simulate.nodes import SimulatedNode, reserve_of, simulated_node_of
from proxy.simulate.pods import SimulatedPod

Plugins = Mapping[str, Mapping[str, RegisteredDevice]]


@dataclass(frozen=True, slots=True)
class SimulationRules:
    """The settings of a simulation in addition to the configuration.

    Attributes:
        plugins: Devices of every node, by resource and id.
        fill: Whether the node with the least free CPU comes first, not the one with the most.
        retry: Whether a rejected pod tries the next node.
        max_pods: Most pods on one node; 0 for no limit.
        explain: Pods (``namespace/name``) whose decisions are kept.
    """

    plugins: Plugins
    fill: bool = False
    retry: bool = False
    max_pods: int = MAX_PODS
    explain: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        config: The configuration that was in effect.
        simulated_nodes: The nodes, with the engine's state of each at the end.
        results: The result for each pod, in their order.
    """

    config: Config
    simulated_nodes: tuple[SimulatedNode, ...]
    results: tuple[Result, ...]


def simulated_nodes_of(
    config: Config, machines: Sequence[NamedMachine], rules: SimulationRules
) -> list[SimulatedNode]:
    """Make empty nodes under a configuration.

    Raises:
        ConfigError: A node cannot meet the configuration.
    """
    nodes: dict[int, Node] = {}
    for named in machines:
        if id(named.machine) not in nodes:
            check_against(config, named.machine)
            nodes[id(named.machine)] = node_rules(config, named.machine, rules.plugins)
    reserve = reserve_of(config)
    return [
        simulated_node_of(named.name, nodes[id(named.machine)], reserve, rules.max_pods) for named in machines
    ]


def simulate(
    config: Config,
    simulated_nodes: Sequence[SimulatedNode],
    simulated_pods: Sequence[SimulatedPod],
    rules: SimulationRules,
    step: Callable[[], object] = lambda: None,
) -> Simulation:
    """Place pods on nodes one after the other.

    Args:
        config: The configuration of every node.
        simulated_nodes: The nodes under it, empty; they are changed.
        simulated_pods: The pods, in their order.
        rules: The settings of the simulation.
        step: Called after each pod.
    """
    cluster = Cluster(simulated_nodes, fill=rules.fill, retry=rules.retry)
    return Simulation(config, tuple(simulated_nodes), tuple(cluster.run(simulated_pods, step, rules.explain)))
