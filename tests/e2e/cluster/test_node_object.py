"""The Node object is deleted and created again, with the garbage collector and a real kubelet."""

from __future__ import annotations

import time

import pytest
from joined_node import NODE, Joined, container, kernel, pod_spec, until

from proxy.model.idset import CpuSet
from tests.cluster.agent_process import NUMATOPOLOGY, TOPOLOGY, condition, free_cpus
from tests.cluster.api_client import Json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NODES = "/api/v1/nodes"


def owner_uid(joined: Joined, path: str = NUMATOPOLOGY) -> str:
    found: Json = joined.plane.get(path) or {}
    return str(found["metadata"]["ownerReferences"][0]["uid"]) if found else ""


def free(joined: Joined, path: str) -> str:
    found: Json = joined.plane.get(path) or {}
    return str(found["spec"]["numares"]["cpu"]["allocatable"])


def test_the_objects_of_a_deleted_node_are_collected_and_created_again(joined: Joined) -> None:
    with joined.agent():
        until("the object", lambda: owner_uid(joined) == joined.node()["metadata"]["uid"])
        joined.kubelet.stop()
        joined.plane.delete(f"{NODES}/{NODE}")
        for path in (NUMATOPOLOGY, TOPOLOGY):
            until("the garbage collector", lambda path=path: joined.plane.get(path) is None)
        time.sleep(5)
        assert joined.plane.get(NUMATOPOLOGY) is None, "the agent creates no object for a deleted Node"
        joined.kubelet.start()
        until("the node to be ready", lambda: joined.kubelet.ready)
        until("the object", lambda: owner_uid(joined) == joined.node()["metadata"]["uid"])
        until("the condition", lambda: condition(joined.plane)["reason"] == "Enforcing")
        joined.deploy("owner", pod_spec(container("1")))
        (owner,) = joined.running("owner")
        own = kernel(owner).cpus
        until("the free CPUs", lambda: own.isdisjoint(CpuSet.parse(free_cpus(joined.plane) or "")))
        time.sleep(5)
        assert owner_uid(joined) == joined.node()["metadata"]["uid"], "the new object is not collected"


def test_the_objects_of_a_renamed_node_are_replaced(joined: Joined) -> None:
    other = "/".join((NUMATOPOLOGY.rpartition("/")[0], "n2"))
    with joined.agent():
        until("the object", lambda: owner_uid(joined))
    joined.kubelet.stop()
    joined.kubelet.name = "n2"
    try:
        joined.kubelet.start()
        until("the node to be ready", lambda: joined.kubelet.ready)
        with joined.agent(node="n2"):
            until("the object", lambda: owner_uid(joined, other))
            until("the condition", lambda: condition(joined.plane, "n2")["reason"] == "Enforcing")
            assert owner_uid(joined), "the object of the old name stays as long as its Node"
            joined.plane.delete(f"{NODES}/{NODE}")
            until("the garbage collector", lambda: joined.plane.get(NUMATOPOLOGY) is None)
            pod = joined.run("alone", pod_spec(container("1")))
            path = f"/api/v1/namespaces/demo/pods/{pod['metadata']['name']}"
            until(
                "the pod to run",
                lambda: "running" in joined.plane.get(path)["status"]["containerStatuses"][0]["state"],
            )
            own = kernel(joined.plane.get(path) or {}).cpus
            until("the free CPUs", lambda: own.isdisjoint(CpuSet.parse(free(joined, other))))
            joined.plane.delete(f"{path}?gracePeriodSeconds=0")
    finally:
        joined.kubelet.stop()
        joined.plane.delete(f"{NODES}/n2")
        joined.kubelet.name = NODE
        joined.kubelet.start()
        until("the node to be ready", lambda: joined.kubelet.ready)
    until("no object of the other name", lambda: joined.plane.get(other) is None)
