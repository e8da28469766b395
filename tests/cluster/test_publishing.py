"""What the agent publishes at a real API server: right, soon, and seldom, whatever happens to the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.agent.object_writer import WRITE_BURST
from proxy.agent.publisher import FIGURES_S
from proxy.demo import client as demo
from proxy.demo.client import DemoPod
from proxy.model.errors import RuntimeCallError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from tests.cluster.agent_process import (
    NUMATOPOLOGY,
    TOPOLOGY,
    bound_token,
    condition,
    events,
    running_agent,
    writes,
)
from tests.cluster.api_client import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.imitated_node import FREE, STATIC, ImitatedNode, fresh_cluster, on_imitated_node, owner
from tests.testkit.waiting import wait_until


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[ControlPlane]:
    with fresh_cluster(plane):
        yield plane


@contextmanager
def without_permissions(plane: ControlPlane) -> Iterator[None]:
    """Remove the agent's permissions, as an administrator does."""
    path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    before = plane.request("GET", f"{path}/topoproxy-agent")
    plane.delete(f"{path}/topoproxy-agent")
    try:
        yield
    finally:
        del before["metadata"]["resourceVersion"], before["metadata"]["uid"]
        plane.create(path, before)


def zone_cpus(plane: ControlPlane) -> list[str]:
    found = plane.get(TOPOLOGY)
    assert found is not None
    return [
        each["available"] for zone in found["zones"] for each in zone["resources"] if each["name"] == "cpu"
    ]


def test_objects_follow_a_create_and_an_end(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        assert node.free() == FREE
        whole = cluster.get(TOPOLOGY)
        assert whole is not None
        assert whole["zones"][0]["costs"][0] == {"name": "node-0", "value": 10}
        assert {"name": "topologyManagerPolicy", "value": "none"} in whole["attributes"]
        (zone, _) = whole["zones"]
        cpu, memory = zone["resources"]
        assert cpu == {"name": "cpu", "capacity": "8", "allocatable": "7", "available": "6"}
        assert memory["available"] == memory["capacity"] == str(64 << 30)
        assert whole["metadata"]["ownerReferences"][0]["name"] == "n1"
        container = node.launch(owner())
        taken = node.daemon_node.cpus(container)
        left = str(CpuSet.parse(FREE) - CpuSet.parse(taken))
        wait_until(lambda: node.free() == left, 5)
        wait_until(lambda: sum(map(int, zone_cpus(cluster))) == 10, 5)
        attributes = {each["name"]: each["value"] for each in (cluster.get(TOPOLOGY) or {})["attributes"]}
        assert attributes["nodeTopologyPodsFingerprint"].startswith("pfp0v001")
        wait_until(lambda: [e for e in events(cluster) if e["reason"] == "PlacedExclusively"])
        (reported,) = events(cluster)
        assert reported["involvedObject"]["name"] == "owner"
        assert f"has CPUs {taken} exclusively" in reported["message"]
        with node.daemon_node.client() as client:
            client.stop(container)
            client.remove(container)
        wait_until(lambda: node.free() == FREE, 5)

    on_imitated_node(cluster, test)


def test_a_rejection_is_an_event_and_a_condition_says_what_holds(
    cluster: ControlPlane,
) -> None:
    def test(node: ImitatedNode) -> None:
        held = condition(cluster)
        assert (held["status"], held["reason"]) == ("True", "Enforcing")
        assert "topologyManagerPolicy" in held["message"]
        for _ in range(3):
            with pytest.raises(RuntimeCallError):
                node.launch(owner("wide", 40))
        wait_until(lambda: [e for e in events(cluster) if e["reason"] == "PlacementRejected"])
        reported = events(cluster)[0]
        assert reported["type"] == "Warning"
        assert "not enough cpus available" in reported["message"]

    on_imitated_node(cluster, test)


def test_observe_claims_nothing_and_says_so(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        assert condition(cluster)["status"] == "False"
        assert condition(cluster)["reason"] == "Observing"
        node.launch(owner())
        time.sleep(1.5)
        assert node.free() == "1-15"
        assert events(cluster) == []

    on_imitated_node(cluster, test, settings=f"{STATIC}mode: observe\n")


def test_an_idle_node_writes_nothing(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        node.launch(owner())
        time.sleep(FIGURES_S + 3)
        before = writes(cluster)
        time.sleep(10)
        assert writes(cluster) == before

    on_imitated_node(cluster, test)


def test_a_burst_is_one_write_a_second(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        time.sleep(1.2)
        before, began = writes(cluster, events=True), time.monotonic()
        assert before >= 3, "the objects and the condition"
        for number in range(20):
            node.launch(DemoPod(f"p{number}", kube_qos=KubeQos.BURSTABLE))
        node.launch(owner())
        wait_until(lambda: node.free() != FREE, 5)
        time.sleep(1.5)
        lasted = time.monotonic() - began
        assert writes(cluster, events=True) - before <= WRITE_BURST + lasted + 1, (
            "of objects and Events together"
        )

    on_imitated_node(cluster, test)


def test_what_another_program_writes_or_deletes_is_restored(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        time.sleep(1.2)
        foreign = {"spec": {"numares": {"cpu": {"allocatable": "0-99"}}}}
        cluster.merge(NUMATOPOLOGY, foreign)
        wait_until(lambda: node.free() == FREE, 10)
        cluster.delete(TOPOLOGY)
        wait_until(lambda: cluster.get(TOPOLOGY), 10)
        cluster.merge(NUMATOPOLOGY, {"metadata": {"labels": {"theirs": "stays"}}})
        time.sleep(2.5)
        labels = (cluster.get(NUMATOPOLOGY) or {})["metadata"]["labels"]
        assert labels == {"theirs": "stays"}

    on_imitated_node(cluster, test)


def test_after_an_outage_under_churn_objects_are_right_within_five_seconds(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        cluster.stop_api()
        slowest = 0.0
        for number in range(10):
            began = time.monotonic()
            node.launch(owner(f"o{number}", 1))
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.5)
        assert slowest < 2, "no call waits for the API server"
        cluster.start_api()
        wait_until(lambda: len(CpuSet.parse(node.free() or "0-15")) == 2, 10)
        assert len((cluster.get(NUMATOPOLOGY) or {})["spec"]["numares"]) == 1

    on_imitated_node(cluster, test)


def test_permissions_that_are_taken_and_given_back(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        with without_permissions(cluster):
            node.launch(owner())
            time.sleep(2)
            assert node.free() == FREE
        wait_until(lambda: node.free() != FREE, 40)

    on_imitated_node(cluster, test)


def test_a_token_that_ends_is_read_again_from_the_file(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        pods = "/api/v1/namespaces/topoproxy-system/pods/agent-n1"
        cluster.delete(f"{pods}?gracePeriodSeconds=0")  # the token is bound to it
        time.sleep(11)  # the API server remembers for ten seconds that a token is good
        node.launch(owner())
        wait_until(lambda: "Unauthorized" in node.agent.log.read_text(), 30)
        cluster.kubeconfig(bound_token(cluster), node.agent.kubeconfig.name)
        wait_until(lambda: node.free() != FREE, 30)

    on_imitated_node(cluster, test)


def test_an_agent_cannot_write_objects_of_another_node(cluster: ControlPlane) -> None:
    token = bound_token(cluster)
    other = "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies/n2"
    value = {"apiVersion": "nodeinfo.volcano.sh/v1alpha1", "kind": "Numatopology", "metadata": {"name": "n2"}}
    plain = cluster.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}})
    try:
        for path, body in (
            (f"{other}?fieldManager=x&force=true", value),
            (
                "/api/v1/nodes/n2/status?fieldManager=x&force=true",
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": "n2"},
                    "status": {"conditions": [{"type": "TopologyPlacement", "status": "True"}]},
                },
            ),
        ):
            with pytest.raises(ApiError, match="only objects of its own node") as refused:
                cluster.request("PATCH", path, body, "application/apply-patch+yaml", token=token)
            assert refused.value.status == 403
    finally:
        cluster.delete(f"/api/v1/nodes/{plain['metadata']['name']}")


def test_a_released_node_withdraws_its_objects(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        from proxy.admin.client import query_admin

        query_admin(node.daemon_node.directory / "admin.sock", "/release/start", 60, act=True)
        wait_until(lambda: cluster.get(NUMATOPOLOGY) is None and cluster.get(TOPOLOGY) is None)
        wait_until(lambda: condition(cluster)["reason"] == "Released")

    on_imitated_node(cluster, test)


def test_cpus_that_were_chosen_here_are_an_annotation_of_the_pod(
    cluster: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]}
    value = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "lse", "namespace": "demo"},
        "spec": spec,
    }
    pod = cluster.create("/api/v1/namespaces/demo/pods", value)
    monkeypatch.setattr(demo.uuid, "uuid4", lambda: uuid.UUID(pod["metadata"]["uid"]))

    def test(node: ImitatedNode) -> None:
        container = node.launch(DemoPod("lse", "LSE", KubeQos.GUARANTEED, cpus=2))
        key = "scheduling.koordinator.sh/resource-status"
        path = "/api/v1/namespaces/demo/pods/lse"
        wait_until(lambda: (cluster.get(path) or {})["metadata"].get("annotations"))
        text = (cluster.get(path) or {})["metadata"]["annotations"][key]
        assert f'"cpuset":"{node.daemon_node.cpus(container)}"' in text

    on_imitated_node(cluster, test)


def test_without_crds_only_the_condition_is_written_and_later_crds_are_noticed_by_a_new_agent(
    cluster: ControlPlane,
) -> None:
    for name in ("numatopologies.nodeinfo.volcano.sh", "noderesourcetopologies.topology.node.k8s.io"):
        cluster.delete(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")

    def test(node: ImitatedNode) -> None:
        wait_until(lambda: condition(cluster), 20)
        assert "cannot write" not in node.agent.log.read_text()

    on_imitated_node(cluster, test, awaited=False)


def test_an_object_in_koordinators_form_has_the_cpus_of_an_owner(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        container = node.launch(owner())
        path = "/apis/topology.node.k8s.io/v1alpha1/noderesourcetopologies/n1"
        key = "node.koordinator.sh/pod-cpu-allocs"
        taken = node.daemon_node.cpus(container)
        wait_until(
            lambda: taken in ((cluster.get(path) or {})["metadata"].get("annotations") or {}).get(key, "")
        )
        found: Any = cluster.get(path)
        assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Koordinator"
        assert found["topologyPolicies"] == ["None"]
        assert [zone["name"] for zone in found["zones"]] == ["node-0", "node-1"]

    on_imitated_node(cluster, test, agent="cluster: {nodeResourceTopology: koordinator}\n")


def test_two_agents_and_a_new_start_change_nothing(cluster: ControlPlane, tmp_path: Path) -> None:
    def test(node: ImitatedNode) -> None:
        node.launch(owner())
        wait_until(lambda: node.free() != FREE, 5)
        time.sleep(2)
        version = (cluster.get(NUMATOPOLOGY) or {})["metadata"]["resourceVersion"]
        since = condition(cluster)["lastTransitionTime"]
        with running_agent(cluster, node.daemon_node.directory):
            time.sleep(5)
        assert (cluster.get(NUMATOPOLOGY) or {})["metadata"]["resourceVersion"] == version
        assert condition(cluster)["lastTransitionTime"] == since

    on_imitated_node(cluster, test)


def test_what_is_turned_off_is_removed(cluster: ControlPlane) -> None:
    off = "cluster: {numatopology: false, nodeResourceTopology: none, nodeCondition: false}\n"

    def test(node: ImitatedNode) -> None:
        wait_until(lambda: cluster.get(TOPOLOGY), 30)
        node.agent.stop()
        assert cluster.get(NUMATOPOLOGY)
        assert condition(cluster)
        with running_agent(cluster, node.daemon_node.directory, off):
            wait_until(lambda: not condition(cluster), 30)
            wait_until(lambda: cluster.get(NUMATOPOLOGY) is None and cluster.get(TOPOLOGY) is None, 30)

    on_imitated_node(cluster, test)
