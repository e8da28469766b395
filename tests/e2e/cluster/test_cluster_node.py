"""A node of a real cluster with stock scheduler and kubelet: the API objects show the CPUs of its pods."""

from __future__ import annotations

import json

import pytest
from cri import STATUS, online
from daemon import QOS_LABEL
from joined_node import DEMO, JoinedNode, container, is_free, is_running, kernel, pod_spec, until

from tests.cluster.agent_process import TOPOLOGY, condition

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def available(joined_node: JoinedNode) -> int:
    found = joined_node.plane.get(TOPOLOGY) or {}
    amounts = [each for zone in found["zones"] for each in zone["resources"] if each["name"] == "cpu"]
    return sum(int(each["available"]) for each in amounts)


def test_a_scheduled_pod_is_pinned_and_the_cluster_sees_it(joined_node: JoinedNode) -> None:
    with joined_node.agent():
        until("the free CPUs", lambda: is_free(joined_node, online()))
        until("the condition", lambda: condition(joined_node.plane)["reason"] == "Enforcing")
        joined_node.deploy("owner", pod_spec(container("1")))
        joined_node.deploy("sharer", pod_spec(container("100m", whole=False)))
        (owner,), (sharer,) = joined_node.running("owner"), joined_node.running("sharer")
        own = kernel(owner)
        assert (len(own.cpus), own.effective, own.tasks) == (1, own.cpus, {own.cpus})
        left = online() - own.cpus
        until("the sharer to leave the owner's CPU", lambda: kernel(sharer).effective == left)
        assert kernel(sharer).tasks == {left}
        until("the Numatopology", lambda: is_free(joined_node, left))
        until("the NodeResourceTopology", lambda: available(joined_node) == len(left) - 1)
        (reported,) = until("the Event", lambda: joined_node.reported(owner, "PlacedExclusively"))
        assert reported.startswith(f"Container main has CPUs {own.cpus} exclusively")
        reasons = {each["reason"] for each in joined_node.described(owner)}
        assert {"Scheduled", "Created", "Started"} <= reasons, "Events of the scheduler and of kubelet"
        joined_node.remove("owner")
        until("the CPU to be free again", lambda: is_free(joined_node, online()))
        until("the zones to be free again", lambda: available(joined_node) == len(online()) - 1)
        until("the sharer to have all CPUs", lambda: kernel(sharer).effective == online())
    assert is_free(joined_node, online()), "the objects of a stopped agent remain"


def test_the_annotation_of_chosen_cpus_matches_the_kernel(joined_node: JoinedNode) -> None:
    with joined_node.agent():
        pod = joined_node.run("lsr", pod_spec(container("1")), labels={QOS_LABEL: "LSR"})
        path = f"{DEMO}/pods/{pod['metadata']['name']}"
        ran = until("the pod to run", lambda: (p := joined_node.plane.get(path)) and is_running(p) and p)
        text = until("the annotation", lambda: joined_node.plane.get(path)["metadata"]["annotations"][STATUS])
        assert json.loads(text)["cpuset"] == str(kernel(ran).cpus)


def test_the_object_matches_the_kernel_while_pods_come_and_go(joined_node: JoinedNode) -> None:
    with joined_node.agent() as agent:
        for number in range(5):
            joined_node.deploy(f"o{number}", pod_spec(container("1")))
            (owner,) = joined_node.running(f"o{number}")
            until(
                "the object",
                lambda owner=owner: is_free(joined_node, online() - kernel(owner).cpus),
            )
            until("the Event", lambda owner=owner: joined_node.reported(owner, "PlacedExclusively"))
            joined_node.remove(f"o{number}")
            until("the pod to be gone", lambda number=number: not joined_node.pods(f"o{number}"))
        until("all CPUs to be free", lambda: is_free(joined_node, online()))
        assert "Traceback" not in agent.log.read_text()
