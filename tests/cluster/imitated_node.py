"""An imitated node with a daemon and an agent, for tests of what the agent publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from proxy.demo.client import DemoPod
from proxy.model.workload import KubeQos
from tests.cluster.agent_process import (
    NUMATOPOLOGY,
    TOPOLOGY,
    AgentProcess,
    condition,
    free_cpus,
    running_agent,
)
from tests.cluster.control_plane import ControlPlane
from tests.cluster.upstream_crds import crd
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.waiting import wait_until

STATIC = "cpuManagerPolicy: static\nreservedSystemCPUs: '0'\nreconcilePeriod: 1h\n"
FREE = "1-6,9-14"
"""CPUs that owners may have: CPU 0 is reserved, and of each NUMA node two stay in the shared pool."""


def owner(name: str = "owner", cpus: int = 2) -> DemoPod:
    return DemoPod(name, kube_qos=KubeQos.GUARANTEED, cpus=cpus)


@contextmanager
def fresh_cluster(plane: ControlPlane) -> Iterator[None]:
    """Provide a cluster with the CRDs of NFD and Volcano and a Node n1, and nothing that was published."""
    plane.install(crd("topology"))
    plane.install(crd("volcano"))
    if plane.get("/api/v1/namespaces/demo") is None:
        plane.create(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "demo"}}
        )
    plane.node()
    yield
    for path in (NUMATOPOLOGY, TOPOLOGY, "/api/v1/nodes/n1"):
        if plane.get(path):
            plane.delete(path)
    for namespace in ("demo", "topoproxy-system"):
        for kind in ("pods", "events"):
            plane.delete(f"/api/v1/namespaces/{namespace}/{kind}?gracePeriodSeconds=0")


class ImitatedNode:
    """A daemon in a thread of its own, and its agent."""

    def __init__(
        self, plane: ControlPlane, daemon_node: DaemonNode, agent: AgentProcess, daemon: Any
    ) -> None:
        self.plane = plane
        self.daemon_node = daemon_node
        self.agent = agent
        self.daemon = daemon

    def launch(self, spec: DemoPod) -> str:
        with self.daemon_node.client() as client:
            return client.launch(spec).container_id

    def free(self) -> str | None:
        return free_cpus(self.plane)


def on_imitated_node(
    plane: ControlPlane,
    test: Callable[[ImitatedNode], None],
    settings: str = STATIC,
    agent: str = "",
    awaited: bool = True,
    **more: Any,
) -> None:
    """Run a test with a daemon and an agent; the test is in a thread, the daemon on the loop."""
    with temporary_node() as daemon_node:
        daemon = daemon_node.daemon(settings)

        def work() -> None:
            with running_agent(plane, daemon_node.directory, agent, **more) as process:
                node = ImitatedNode(plane, daemon_node, process, daemon)
                if awaited:
                    wait_until(lambda: node.free() is not None and condition(plane), 30)
                test(node)

        run(daemon, lambda: asyncio.to_thread(work), reconciled=True)
