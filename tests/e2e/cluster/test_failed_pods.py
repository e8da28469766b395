"""Pods that the agent sets to Failed because the node rejects them; kubelet writes their status, too."""

from __future__ import annotations

import time

import pytest
from joined_node import DEMO, JoinedNode, container, one_cpu, pod_spec, rejected, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_failed_pod_stays_failed_and_its_controller_makes_another_one(full_node: JoinedNode) -> None:
    with full_node.agent("rejectedPods: {policy: fail, afterRejections: 2}\n"):
        full_node.deploy("second", one_cpu())
        pod = rejected(full_node, "second")
        path = f"{DEMO}/pods/{pod['metadata']['name']}"
        until("the pod to fail", lambda: full_node.plane.get(path)["status"]["phase"] == "Failed")
        until("another pod", lambda: len(full_node.pods("second")) >= 2)
        time.sleep(12)  # kubelet writes the status of its pods periodically
        failed = full_node.plane.get(path) or {}
        assert (failed["status"]["phase"], failed["status"]["reason"]) == ("Failed", "AdmissionSharedFloor")
        assert full_node.reported(pod, "RejectedPodFailed")
        others = [p for p in full_node.pods("second") if p["metadata"]["uid"] != pod["metadata"]["uid"]]
        waits = [p for p in others if p["status"]["phase"] == "Pending"]
        assert len(waits) == 1, "the next pod of the same controller has to wait"
        by_kubelet = {p["status"].get("reason") for p in others if p not in waits}
        assert by_kubelet <= {"OutOfcpu"}, "kubelet counts the failed pod until its sandbox is gone"


def test_at_most_two_pods_are_failed_in_a_minute(full_node: JoinedNode) -> None:
    """Three LSE pods request a fraction of a CPU, which is rejected; ``perMinute`` is 2."""
    names = ["a", "b", "c"]
    with full_node.agent("rejectedPods: {policy: fail, afterRejections: 1, perMinute: 2}\n"):
        for name in names:
            full_node.deploy(name, pod_spec(container("300m")), **{"koordinator.sh/qosClass": "LSE"})

        def failed() -> int:
            return sum(
                p["status"].get("reason") == "InvalidCPURequest"
                for name in names
                for p in full_node.pods(name)
            )

        until("two to fail", lambda: failed() == 2)
        for name in names:
            until(
                "all to be rejected",
                lambda name=name: [p for p in full_node.pods(name) if full_node.rejections(p)],
            )
        time.sleep(15)
        assert failed() == 2
        until("the third one to fail", lambda: failed() >= 3, 90)
