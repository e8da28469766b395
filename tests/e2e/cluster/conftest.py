"""Fixtures of the tests on a node of a real cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules in this directory are imported by name

from cri import online
from crio import DIRECTORY as CRIO
from daemon import DaemonProcess
from joined_node import JoinedNode, container, kernel, pod_spec, until
from real_kubelet import RealKubelet

from tests.cluster.control_plane import ControlPlane, control_plane_skip_reason
from tests.cluster.upstream_crds import crd

if TYPE_CHECKING:
    from private_runtime import PrivateRuntime

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, API server, scheduler and controllers, with the agent's permissions and CRDs."""
    reason = control_plane_skip_reason("kube-scheduler", "kube-controller-manager", "kubelet")
    if reason or CRIO:
        pytest.skip(reason or "on containerd only")
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    try:
        plane.start_api()
        for manifest in ("agent/rbac.yaml", "agent/rejected-pods/rbac.yaml", "agent/node-restriction.yaml"):
            plane.install(DEPLOY / manifest)
        for name in ("topology", "volcano"):
            plane.install(crd(name))
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "demo"}}
        plane.create("/api/v1/namespaces", namespace)
        plane.start_scheduler()
        plane.start_controllers()
        yield plane
    finally:
        plane.close()


@pytest.fixture(scope="session")
def node_with_kubelet(
    plane: ControlPlane, runtime: PrivateRuntime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JoinedNode]:
    """The node for all tests: kubelet and the daemon keep running; each test starts its own agents."""
    directory = tmp_path_factory.mktemp("node")
    directory.chmod(0o755)
    facts = directory / "proxy/cluster"
    facts.mkdir(parents=True)
    floor = {"sharedFloor": 1, "sharedFloorPerNUMANode": 0}
    settings = {"clusterFacts": {"directory": str(facts)}, "admission": floor}
    daemon = DaemonProcess(directory / "proxy", runtime, settings)
    kubelet = RealKubelet(directory / "kubelet", runtime, plane, daemon.socket, "n1")
    try:
        daemon.start()
        kubelet.start()

        def is_joined() -> bool:
            kubelet.check()
            return kubelet.ready

        until("the node to be ready", is_joined, 120)
        yield JoinedNode(plane, runtime, daemon, kubelet)
    finally:
        kubelet.close()
        daemon.stop()
        runtime.widen()


@pytest.fixture
def joined_node(node_with_kubelet: JoinedNode) -> Iterator[JoinedNode]:
    """The node, without pods of other tests."""
    yield node_with_kubelet
    node_with_kubelet.clear()


@pytest.fixture
def full_node(joined_node: JoinedNode) -> JoinedNode:
    """The node, with one owner and no CPUs left for another one."""
    many = len(online()) - 1
    joined_node.deploy("first", pod_spec(container(str(many))))
    (first,) = joined_node.running("first")
    assert len(kernel(first).cpus) == many
    return joined_node
