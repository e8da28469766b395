"""One control plane for tests of the agent, and one with schedulers for each module that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, control_plane_skip_reason
from tests.cluster.scheduling_cluster import SchedulingCluster, scheduling_cluster

DEPLOY = Path(__file__).parents[2] / "deploy" / "agent"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if reason := control_plane_skip_reason():
        pytest.skip(reason)
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    try:
        plane.start_api()
        plane.install(DEPLOY / "rbac.yaml")
        plane.install(DEPLOY / "rejected-pods/rbac.yaml")
        plane.install(DEPLOY / "node-restriction.yaml")
        yield plane
    finally:
        plane.close()


@pytest.fixture(scope="module")
def scheduling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulingCluster]:
    if reason := control_plane_skip_reason("kube-scheduler"):
        pytest.skip(reason)
    with scheduling_cluster(tmp_path_factory.mktemp("scheduling"), nodes=12) as scheduling:
        yield scheduling
