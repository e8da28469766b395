"""The Node object is deleted and created again, with the garbage collector and a real kubelet."""

from __future__ import annotations

import time

import pytest
from joined_node import NODE, JoinedNode, container, kernel, pod_spec, until

from proxy.model.idset import CpuSet
from tests.cluster.agent_process import NUMATOPOLOGY, TOPOLOGY, condition, free_cpus
from tests.cluster.api_client import Json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NODES = "/api/v1/nodes"


def owner_uid(joined_node: JoinedNode, path: str = NUMATOPOLOGY) -> str:
    found: Json = joined_node.plane.get(path) or {}
    return str(found["metadata"]["ownerReferences"][0]["uid"]) if found else ""


def free(joined_node: JoinedNode, path: str) -> str:
    found: Json = joined_node.plane.get(path) or {}
    return str(found["spec"]["numares"]["cpu"]["allocatable"])


def test_the_objects_of_a_deleted_node_are_collected_and_created_again(joined_node: JoinedNode) -> None:
    with joined_node.agent():
        until("the object", lambda: owner_uid(joined_node) == joined_node.node()["metadata"]["uid"])
        joined_node.kubelet.stop()
        joined_node.plane.delete(f"{NODES}/{NODE}")
        for path in (NUMATOPOLOGY, TOPOLOGY):
            until("the garbage collector", lambda path=path: joined_node.plane.get(path) is None)
        time.sleep(5)
        assert joined_node.plane.get(NUMATOPOLOGY) is None, "the agent creates no object for a deleted Node"
        joined_node.kubelet.start()
        until("the node to be ready", lambda: joined_node.kubelet.ready)
        until("the object", lambda: owner_uid(joined_node) == joined_node.node()["metadata"]["uid"])
        until("the condition", lambda: condition(joined_node.plane)["reason"] == "Enforcing")
        joined_node.deploy("owner", pod_spec(container("1")))
        (owner,) = joined_node.running("owner")
        own = kernel(owner).cpus
        until("the free CPUs", lambda: own.isdisjoint(CpuSet.parse(free_cpus(joined_node.plane) or "")))
        time.sleep(5)
        assert owner_uid(joined_node) == joined_node.node()["metadata"]["uid"], (
            "the new object is not collected"
        )


def test_the_objects_of_a_renamed_node_are_replaced(joined_node: JoinedNode) -> None:
    other = "/".join((NUMATOPOLOGY.rpartition("/")[0], "n2"))
    with joined_node.agent():
        until("the object", lambda: owner_uid(joined_node))
    joined_node.kubelet.stop()
    joined_node.kubelet.name = "n2"
    try:
        joined_node.kubelet.start()
        until("the node to be ready", lambda: joined_node.kubelet.ready)
        with joined_node.agent(node="n2"):
            until("the object", lambda: owner_uid(joined_node, other))
            until("the condition", lambda: condition(joined_node.plane, "n2")["reason"] == "Enforcing")
            assert owner_uid(joined_node), "the object of the old name stays as long as its Node"
            joined_node.plane.delete(f"{NODES}/{NODE}")
            until("the garbage collector", lambda: joined_node.plane.get(NUMATOPOLOGY) is None)
            pod = joined_node.run("alone", pod_spec(container("1")))
            path = f"/api/v1/namespaces/demo/pods/{pod['metadata']['name']}"
            until(
                "the pod to run",
                lambda: "running" in joined_node.plane.get(path)["status"]["containerStatuses"][0]["state"],
            )
            own = kernel(joined_node.plane.get(path) or {}).cpus
            until("the free CPUs", lambda: own.isdisjoint(CpuSet.parse(free(joined_node, other))))
            joined_node.plane.delete(f"{path}?gracePeriodSeconds=0")
    finally:
        joined_node.kubelet.stop()
        joined_node.plane.delete(f"{NODES}/n2")
        joined_node.kubelet.name = NODE
        joined_node.kubelet.start()
        until("the node to be ready", lambda: joined_node.kubelet.ready)
    until("no object of the other name", lambda: joined_node.plane.get(other) is None)
