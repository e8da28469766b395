"""Machines and pods for simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from proxy.config import parse
from proxy.pools.pod_spec import pod_spec
from proxy.simulate import MAX_PODS
from proxy.simulate.cluster import Cluster
from proxy.simulate.machines import NamedMachine
from proxy.simulate.nodes import SimulatedNode
from proxy.simulate.pods import SimulatedPod, pod_template_of
from proxy.simulate.simulation import SimulationRules, simulated_nodes_of
from proxy.topology.regular_machine import regular_machine

MakePod = Callable[..., SimulatedPod]
MakeCluster = Callable[..., Cluster]


@pytest.fixture
def pod() -> MakePod:
    """Make pods of one container, numbered as they are made; ``limits`` makes it Guaranteed."""
    made = 0

    def make(
        name: str = "", node_name: str = "", requests: Mapping[str, object] | None = None, **limits: object
    ) -> SimulatedPod:
        nonlocal made
        made += 1
        named = {key.replace("_", "/"): value for key, value in limits.items()}
        resources: dict[str, object] = {"limits": named} if named else {"requests": requests or {}}
        raw = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name or f"p{made}"},
            "spec": {"containers": [{"name": "c", "resources": resources}]},
        }
        return pod_template_of(pod_spec(raw), node_name).copy(name or f"p{made}", made)

    return make


@pytest.fixture
def simulated_nodes() -> Callable[..., list[SimulatedNode]]:
    """Make machines of 16 CPUs on two NUMA nodes (``described``), or others."""

    def make(
        count: int = 1, config: str = "cpuManagerPolicy: static", pods: int = MAX_PODS, **shape: int
    ) -> list[SimulatedNode]:
        numbers = {"sockets": 2, "nodes_per_socket": 1, "cores_per_node": 4, **shape}
        machine = regular_machine(**numbers)
        machines = [NamedMachine(f"m{i}", machine) for i in range(1, count + 1)]
        return simulated_nodes_of(parse(config, "test"), machines, SimulationRules({}, max_pods=pods))

    return make


@pytest.fixture
def cluster(simulated_nodes: Callable[..., list[SimulatedNode]]) -> MakeCluster:
    """Make a cluster of such machines."""

    def make(count: int = 1, *, fill: bool = False, retry: bool = False, **more: object) -> Cluster:
        return Cluster(simulated_nodes(count, **more), fill=fill, retry=retry)

    return make
