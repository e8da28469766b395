"""What becomes of rejected pods, with kubelet, scheduler and controllers as they are (kubernetes#84869).

The machine has few CPUs: one container owns all that may be owned, and the scheduler, which counts CPUs,
sends another pod that wants one.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from cri import online
from joined_node import DEMO, NODE, Joined, container, kernel, pod_spec, until, waiting

from proxy.agent.rejections.node_mark import KEY
from tests.cluster.control_plane import Json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PREFERS = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "preference": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
                    ]
                },
            }
        ]
    }
}
"""Without a taint, the scheduler takes our node for such a pod whatever else there is."""


def one_cpu() -> Json:
    return pod_spec(container("1"), affinity=PREFERS)


@pytest.fixture
def full(joined: Joined) -> Joined:
    """The node, with CPUs for no further owner."""
    many = len(online()) - 1
    joined.deploy("first", pod_spec(container(str(many))))
    (first,) = joined.running("first")
    assert len(kernel(first).cpus) == many
    return joined


def rejected(node: Joined, app: str) -> Json:
    """Wait until kubelet shows a pod of a Deployment as rejected."""

    def found() -> Json | None:
        here = [p for p in node.pods(app) if p["spec"].get("nodeName") == NODE]
        return next((p for p in here if waiting(p) == "CreateContainerError"), None)

    pod: Json = until(f"a pod of {app} to be rejected", found)
    return pod


def taints(node: Joined) -> list[Any]:
    return [each["effect"] for each in node.node()["spec"].get("taints", []) if each["key"] == KEY]


def uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def test_a_rejected_pod_is_tried_for_ever_where_nothing_else_is_wanted(full: Joined) -> None:
    with full.agent("rejectedPods: {policy: retry}\n"):
        full.deploy("second", one_cpu())
        pod = rejected(full, "second")
        until("three tries", lambda: full.rejections(pod) >= 3)
        (same,) = full.pods("second")
        assert (uid(same), same["status"]["phase"]) == (uid(pod), "Pending")
        (said,) = full.said(pod, "PlacementRejected")
        assert said.startswith("Container main is rejected by topoproxy: "), said
        assert any("Error" in each["message"] for each in full.described(pod) if each["reason"] == "Failed")
        assert not taints(full)
        full.remove("first")
        (ran,) = full.running("second")
        assert uid(ran) == uid(pod), "kubelet goes on trying, and there is room now"
        assert len(kernel(ran).cpus) == 1


def test_a_failed_pod_stays_failed_and_its_controller_makes_another_one(full: Joined) -> None:
    with full.agent("rejectedPods: {policy: fail, afterRejections: 2}\n"):
        full.deploy("second", one_cpu())
        pod = rejected(full, "second")
        path = f"{DEMO}/pods/{pod['metadata']['name']}"
        until("the pod to fail", lambda: full.plane.get(path)["status"]["phase"] == "Failed")
        until("another pod", lambda: len(full.pods("second")) == 2)
        time.sleep(12)  # kubelet writes the status of its pods again and again
        failed = full.plane.get(path) or {}
        assert (failed["status"]["phase"], failed["status"]["reason"]) == ("Failed", "AdmissionSharedFloor")
        assert full.said(pod, "RejectedPodFailed")
        assert len(full.pods("second")) == 2, "the next pod of the same controller has to wait"


def test_an_evicted_pod_goes_to_another_node_and_the_mark_comes_off(full: Joined) -> None:
    with full.second_node(), full.agent("rejectedPods: {policy: evict, afterRejections: 2}\n"):
        full.deploy("second", one_cpu())
        pod = rejected(full, "second")

        def elsewhere() -> Json | None:
            return next((p for p in full.pods("second") if p["spec"].get("nodeName") == "n2"), None)

        until("another node to get it", elsewhere)
        assert full.rejections(pod) <= 2
        assert taints(full) == ["PreferNoSchedule"]
        assert full.said(pod, "RejectedPodEvicted")
        until("the rejected pod to be gone", lambda: [uid(p) for p in full.pods("second")] != [uid(pod)])
        full.remove("first")
        until("the mark to come off", lambda: not taints(full))
        assert KEY not in full.node()["metadata"].get("annotations", {})


def test_without_a_mark_the_pod_comes_back_and_its_controller_waits(full: Joined) -> None:
    settings = "rejectedPods: {policy: evict, afterRejections: 1, keepAway: none}\n"
    with full.second_node(), full.agent(settings):
        full.deploy("second", one_cpu())
        first = rejected(full, "second")

        def replaced() -> Json | None:
            return next((p for p in full.pods("second") if uid(p) != uid(first)), None)

        again = until("another pod", replaced)
        until("its rejection", lambda: full.rejections(again) >= 2)
        assert {uid(p) for p in full.pods("second")} == {uid(again)}, "once in a minute"
        assert not taints(full)


def test_a_pod_without_a_controller_ends_only_where_that_is_wanted(full: Joined) -> None:
    path = f"{DEMO}/pods/alone"
    with full.agent("rejectedPods: {policy: evict, afterRejections: 1}\n") as agent:
        pod = full.run("alone", one_cpu())
        until("the pod to be left alone", lambda: "left a rejected pod alone" in agent.log.read_text())
        until("another try", lambda: full.rejections(pod) >= 2)
        assert uid(full.plane.get(path) or {}) == uid(pod)
    with full.agent("rejectedPods: {policy: evict, afterRejections: 1, withoutController: true}\n"):
        until("the pod to end", lambda: full.plane.get(path) is None)


def test_so_many_pods_end_in_a_minute(full: Joined) -> None:
    """Half CPUs that an LSE pod asks for are rejected; three pods want that."""
    names = ["a", "b", "c"]
    with full.agent("rejectedPods: {policy: fail, afterRejections: 1, perMinute: 2}\n"):
        for name in names:
            full.deploy(name, pod_spec(container("300m")), **{"koordinator.sh/qosClass": "LSE"})

        def failed() -> int:
            return sum(p["status"]["phase"] == "Failed" for name in names for p in full.pods(name))

        until("two to fail", lambda: failed() == 2)
        for name in names:
            until("all to be rejected", lambda name=name: [p for p in full.pods(name) if full.rejections(p)])
        time.sleep(15)
        assert failed() == 2
        until("the third one to fail", lambda: failed() >= 3, 90)
