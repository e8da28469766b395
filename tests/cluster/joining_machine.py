"""A cluster for a node in a virtual machine: its programs run here, and its other nodes are objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.extender_process import SCHEDULER
from tests.cluster.scheduling_cluster import SchedulingCluster, scheduling_cluster

AGENT = Path(__file__).parents[2] / "deploy" / "agent"
NODE = "n1"
FLEET = 2
FULL = [6] * 4 * FLEET
"""Pods for the nodes of the fleet: they leave less than 4 CPUs on each NUMA node, and 7 on each node."""


@contextmanager
def cluster_for_a_machine(directory: Path, host: str) -> Iterator[tuple[SchedulingCluster, Path]]:
    """Start the cluster, and fill the nodes of its fleet.

    Args:
        directory: For files of the programs.
        host: The address at which the virtual machine reaches this host's loopback.

    Yields:
        The cluster, and a directory for the machine with kubelet's ``kubeconfig`` and ``cluster.json``.
    """
    (directory / "programs").mkdir()
    with scheduling_cluster(directory / "programs", FLEET) as scheduling:
        plane, fleet = scheduling.plane, scheduling.fleet
        for manifest in ("rbac.yaml", "node-restriction.yaml"):
            plane.install(AGENT / manifest)
        plane.start_controllers()
        fleet.create_pods("full", FULL, SCHEDULER)
        fleet.until_settled(len(FULL), quiet_s=30)
        assert len(fleet.admitted) == len(FULL), fleet.figures(len(FULL))
        given = directory / "cluster"
        given.mkdir()
        kubeconfig = plane.kubeconfig(f"{NODE}-token", "node", f"https://{host}:{plane.port}")
        kubeconfig.rename(given / "kubeconfig")
        values = {
            "node": NODE,
            "host": host,
            "port": plane.port,
            "extender": f"https://{host}:{scheduling.extender.port}",
            "scheduler": SCHEDULER,
            "fleet": sorted(fleet.nodes),
        }
        (given / "cluster.json").write_text(json.dumps(values))
        yield scheduling, given
