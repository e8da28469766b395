"""One control plane for all tests of the cluster agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, missing

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
