"""What the agent reads at a real API server, and what becomes of rejected pods there."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.admin.client import query_admin
from proxy.agent.config_objects import ANNOTATION, COLLECTION
from proxy.agent.rejections.node_mark import KEY
from proxy.daemon import Daemon
from proxy.demo import client as demo
from proxy.demo.client import DemoPod
from proxy.model.errors import RuntimeCallError
from proxy.model.workload import KubeQos
from tests.cluster.agent_process import AgentProcess, running_agent
from tests.cluster.api_client import ApiError, Json
from tests.cluster.control_plane import ControlPlane
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.waiting import wait_until

RESERVATION = "node.koordinator.sh/reservation"
PODS = "/api/v1/namespaces/demo/pods"
NODE = "/api/v1/nodes/n1"
CRD = Path(__file__).parents[2] / "deploy/crds/topoproxyconfigs.yaml"
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-uid", "controller": True}


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[ControlPlane]:
    plane.install(CRD)
    if plane.get("/api/v1/namespaces/demo") is None:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "demo"}}
        plane.create("/api/v1/namespaces", namespace)
    plane.node(tier="gold")
    yield plane
    plane.delete(NODE)
    plane.delete(COLLECTION)
    for namespace in ("demo", "topoproxy-system"):
        plane.delete(f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")


class AgentNode:
    """A daemon and its agent, which share a directory."""

    def __init__(
        self, plane: ControlPlane, daemon_node: DaemonNode, agent: AgentProcess, daemon: Daemon
    ) -> None:
        self.daemon = daemon
        self.plane = plane
        self.daemon_node = daemon_node
        self.agent = agent

    def status(self) -> Any:
        return query_admin(self.daemon_node.directory / "admin.sock", "/status", 30)

    def file(self, name: str) -> Any:
        return next(each for each in self.status()["cluster"] if each["name"] == name)

    def pod(self, name: str, cpus: int = 2) -> Json:
        """Create a pod with the memory that ``launch`` requests."""
        metadata = {"name": name, "ownerReferences": [OWNER]}
        limits = {"cpu": cpus, "memory": "64Mi"}
        containers = [{"name": "main", "image": "x", "resources": {"limits": limits}}]
        value = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        return self.plane.create(PODS, {**value, "spec": {"nodeName": "n1", "containers": containers}})

    def knows(self, uid: str) -> bool:
        """Return whether the agent has written a pod for the daemon."""
        return uid in (self.daemon_node.directory / "cluster/pods.json").read_text()

    def launch(self, name: str, uid: str, cpus: int = 2, kube_qos: KubeQos = KubeQos.GUARANTEED) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo.uuid, "uuid4", lambda: uuid.UUID(uid))
            with self.daemon_node.client() as client:
                return client.launch(DemoPod(name, kube_qos=kube_qos, cpus=cpus)).container_id


def on_agent_node(plane: ControlPlane, test: Callable[[AgentNode], None], settings: str = "") -> None:
    """Run a test with a daemon and an agent that have the same configuration."""
    with temporary_node() as daemon_node:
        facts = f"clusterFacts: {{directory: {daemon_node.directory}/cluster}}\n"
        text = f"cpuManagerPolicy: static\n{facts}{settings}"
        file = daemon_node.directory / "daemon.yaml"
        file.write_text(daemon_node.configuration(text))
        file.chmod(0o600)
        daemon = daemon_node.daemon(text, file=file)

        def work() -> None:
            with running_agent(plane, daemon_node.directory, text) as process:
                node = AgentNode(plane, daemon_node, process, daemon)
                wait_until(lambda: node.file("pods")["read_s"] is not None, 60)
                test(node)

        run(daemon, lambda: asyncio.to_thread(work), reconciled=True)


def test_the_daemon_follows_the_node_object_and_knows_pods_before_their_calls(cluster: ControlPlane) -> None:
    def test(node: AgentNode) -> None:
        wait_until(lambda: node.status()["pools"]["shared"] == "0-15")
        annotation = {RESERVATION: json.dumps({"reservedCPUs": "0-1"})}
        cluster.merge(NODE, {"metadata": {"annotations": annotation}})
        seconds = wait_until(lambda: node.status()["pools"]["shared"] == "2-15")
        print(f"a reservation of the Node object took effect after {seconds:.2f} s")
        pod = node.pod("web")
        wait_until(lambda: node.knows(pod["metadata"]["uid"]))
        container = node.launch("web", pod["metadata"]["uid"])
        (owner,) = node.status()["exclusive"]
        assert owner["pod"] == "demo/web"
        assert container
        assert node.daemon.executor is not None
        assert node.daemon.executor.state.containers[container].pod.source == "the cluster agent"

    on_agent_node(cluster, test)


def test_an_outage_leaves_everything_as_it_was_read(cluster: ControlPlane) -> None:
    def test(node: AgentNode) -> None:
        pod = node.pod("web")
        wait_until(lambda: node.knows(pod["metadata"]["uid"]))
        cluster.stop_api()
        try:
            time.sleep(12)
            assert node.file("pods")["confirmed_s"] > 5
            began = time.monotonic()
            assert node.launch("web", pod["metadata"]["uid"])
            assert time.monotonic() - began < 2
            (owner,) = node.status()["exclusive"]
            assert owner["pod"] == "demo/web"
        finally:
            cluster.start_api()
        late = node.pod("late")
        seconds = wait_until(lambda: node.knows(late["metadata"]["uid"]), 15)
        print(f"current {seconds:.2f} s after the API server was back")

    on_agent_node(cluster, test)


def test_labels_of_namespaces_decide(cluster: ControlPlane) -> None:
    def test(node: AgentNode) -> None:
        wait_until(lambda: node.status()["settings"]["admission"]["namespacesByLabel"] == [])
        cluster.merge("/api/v1/namespaces/demo", {"metadata": {"labels": {"cpus": "exclusive"}}})
        wait_until(lambda: node.status()["settings"]["admission"]["namespacesByLabel"] == ["demo"])
        cluster.merge("/api/v1/namespaces/demo", {"metadata": {"labels": {"cpus": None}}})
        wait_until(lambda: node.status()["settings"]["admission"]["namespacesByLabel"] == [])

    on_agent_node(cluster, test, "admission: {namespaceSelector: {matchLabels: {cpus: exclusive}}}\n")


class Retried:
    """A pod whose container kubelet tries to create again and again."""

    def __init__(self, node: AgentNode, pod: Json) -> None:
        self.node = node
        spec = DemoPod(pod["metadata"]["name"], kube_qos=KubeQos.GUARANTEED, cpus=12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo.uuid, "uuid4", lambda: uuid.UUID(pod["metadata"]["uid"]))
            with node.daemon_node.client() as client:
                self.started = client.run_pod(spec)

    def rejected(self) -> None:
        with self.node.daemon_node.client() as client, pytest.raises(RuntimeCallError):
            client.create(self.started)


@pytest.mark.parametrize("policy", ["evict", "fail"])
def test_a_rejected_pod_ends_and_the_node_is_marked_until_there_is_room(
    cluster: ControlPlane, policy: str
) -> None:
    def found(name: str) -> Json | None:
        return cluster.get(f"{PODS}/{name}")

    def test(node: AgentNode) -> None:
        owner, large, alone = node.pod("owner", 4), node.pod("large", 12), node.pod("alone", 40)
        cluster.merge(f"{PODS}/alone", {"metadata": {"ownerReferences": None}})
        wait_until(lambda: all(node.knows(pod["metadata"]["uid"]) for pod in (owner, large, alone)))
        held = node.launch("owner", owner["metadata"]["uid"], cpus=4)
        single, retried = Retried(node, alone), Retried(node, large)
        for each in (single, single, retried):
            each.rejected()
        time.sleep(1)
        assert found("large") is not None, "not before afterRejections"
        retried.rejected()
        if policy == "evict":
            wait_until(lambda: found("large") is None or found("large")["metadata"].get("deletionTimestamp"))
        else:
            wait_until(lambda: found("large")["status"]["phase"] == "Failed")
            assert found("large")["status"]["reason"] == "AdmissionSharedFloor"
        assert found("alone")["status"]["phase"] == "Pending", "no controller would create it again"
        node_object = cluster.get(NODE)
        wait_until(lambda: KEY in cluster.get(NODE)["metadata"].get("annotations", {}))
        node_object = cluster.get(NODE)
        assert [(t["key"], t["effect"]) for t in node_object["spec"]["taints"] if t["key"] == KEY] == [
            (KEY, "PreferNoSchedule")
        ]
        events = cluster.request("GET", "/api/v1/namespaces/demo/events")["items"]
        assert any(e["reason"].startswith("RejectedPod") for e in events)
        with node.daemon_node.client() as client:
            client.stop(held)
            client.remove(held)
        wait_until(lambda: KEY not in cluster.get(NODE)["metadata"].get("annotations", {}))
        assert not [t for t in cluster.get(NODE)["spec"].get("taints", []) if t["key"] == KEY]

    on_agent_node(cluster, test, f"rejectedPods: {{policy: {policy}, afterRejections: 2}}\n")


def config(name: str = "gold", **values: Any) -> Json:
    spec = {"nodeSelector": {"matchLabels": {"tier": "gold"}}, "config": values}
    return {
        "apiVersion": "topoproxy.io/v1alpha1",
        "kind": "TopoproxyConfig",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_settings_from_the_cluster_take_effect_as_far_as_the_node_permits(cluster: ControlPlane) -> None:
    def reported() -> Any:
        return json.loads(cluster.get(NODE)["metadata"].get("annotations", {}).get(ANNOTATION, "null"))

    def limit(node: AgentNode) -> Any:
        return node.status()["settings"]["admission"]["maxCPUsPerPod"]

    def test(node: AgentNode) -> None:
        cluster.create(COLLECTION, config(admission={"maxCPUsPerPod": 3}))
        seconds = wait_until(lambda: limit(node) == 3, 30)
        print(f"settings of the cluster took effect after {seconds:.2f} s")
        wait_until(lambda: reported() == {"name": "gold", "generation": 1, "accepted": True})
        wait_until(lambda: "status" in cluster.get(f"{COLLECTION}/gold"))
        status = cluster.get(f"{COLLECTION}/gold")["status"]
        assert status["nodes"] == [{"name": "n1", "generation": 1, "accepted": True}]
        cluster.merge(f"{COLLECTION}/gold", {"spec": {"config": {"log": {"level": "debug"}}}})
        wait_until(lambda: reported()["generation"] == 2, 30)
        assert "log.level: this node does not permit it" in reported()["reason"]
        assert limit(node) == 3
        cluster.delete(f"{COLLECTION}/gold")
        wait_until(lambda: limit(node) is None, 30)
        wait_until(lambda: reported() is None)

    on_agent_node(cluster, test, "clusterConfig: {allowed: [admission]}\n")


def test_the_crd_refuses_objects_that_make_no_sense(cluster: ControlPlane) -> None:
    for spec in ({}, {"config": 5}, {"config": {}, "nodeSelector": {"matchExpressions": [{"key": "a"}]}}):
        with pytest.raises(ApiError) as caught:
            cluster.create(COLLECTION, {**config(), "spec": spec})
        assert caught.value.status == 422
    assert yaml.safe_load(CRD.read_text())["metadata"]["name"] == "topoproxyconfigs.topoproxy.io"
