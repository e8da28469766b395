"""One control plane for tests of the agent, and one with schedulers for each module that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, missing
from tests.cluster.scheduling_bed import SchedulingBed, scheduling_bed

DEPLOY = Path(__file__).parents[2] / "deploy" / "agent"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if reason := missing():
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
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulingBed]:
    if reason := missing("kube-scheduler"):
        pytest.skip(reason)
    with scheduling_bed(tmp_path_factory.mktemp("scheduling"), nodes=12) as bed:
        yield bed
