"""Rejected pods in a cluster with stock kubelet, scheduler and controllers (kubernetes#84869).

One container owns all CPUs that may be owned. The scheduler, which only counts CPUs, binds another pod that
requests one.
"""

from __future__ import annotations

from typing import Any

import pytest
from joined_node import DEMO, NODE, JoinedNode, container, kernel, one_cpu, pod_spec, rejected, uid, until

from proxy.agent.rejections.node_mark import KEY
from tests.cluster.api_client import Json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def taints(node: JoinedNode) -> list[Any]:
    return [each["effect"] for each in node.node()["spec"].get("taints", []) if each["key"] == KEY]


def test_under_policy_retry_kubelet_retries_a_rejected_pod_until_it_fits(full_node: JoinedNode) -> None:
    with full_node.agent("rejectedPods: {policy: retry}\n"):
        full_node.deploy("second", one_cpu())
        pod = rejected(full_node, "second")
        until("three attempts", lambda: full_node.rejections(pod) >= 3)
        (same,) = full_node.pods("second")
        assert (uid(same), same["status"]["phase"]) == (uid(pod), "Pending")
        (reported,) = full_node.reported(pod, "PlacementRejected")
        assert reported.startswith("Container main is rejected by topoproxy: "), reported
        assert any(
            "Error" in each["message"] for each in full_node.described(pod) if each["reason"] == "Failed"
        )
        assert not taints(full_node)
        full_node.remove("first")
        (ran,) = full_node.running("second")
        assert uid(ran) == uid(pod), "kubelet retried the same pod, and its CPUs are free now"
        assert len(kernel(ran).cpus) == 1


def test_an_evicted_pod_goes_to_another_node_and_the_taint_is_removed(full_node: JoinedNode) -> None:
    with full_node.second_node(), full_node.agent("rejectedPods: {policy: evict, afterRejections: 2}\n"):
        full_node.deploy("second", one_cpu())
        pod = rejected(full_node, "second")

        def elsewhere() -> Json | None:
            return next((p for p in full_node.pods("second") if p["spec"].get("nodeName") == "n2"), None)

        until("the next pod to be bound to another node", elsewhere)
        assert full_node.rejections(pod) <= 2
        assert taints(full_node) == ["PreferNoSchedule"]
        assert full_node.reported(pod, "RejectedPodEvicted")
        until("the rejected pod to be gone", lambda: [uid(p) for p in full_node.pods("second")] != [uid(pod)])
        full_node.remove("first")
        until("the taint to be removed", lambda: not taints(full_node))
        assert KEY not in full_node.node()["metadata"].get("annotations", {})


def test_without_a_taint_the_next_pod_is_rejected_and_not_evicted_within_a_minute(
    full_node: JoinedNode,
) -> None:
    with full_node.agent("rejectedPods: {policy: evict, afterRejections: 1, keepAway: none}\n"):
        # With another node, the scheduler could take that one while the evicted pod still ends on this one.
        full_node.deploy("second", pod_spec(container("1"), nodeSelector={"kubernetes.io/hostname": NODE}))
        # It may be evicted before kubelet shows that it is rejected.
        first = until("a pod", lambda: next(iter(full_node.pods("second")), None))

        def replaced() -> Json | None:
            return next((p for p in full_node.pods("second") if uid(p) != uid(first)), None)

        again = until("another pod", replaced)
        until("the report", lambda: full_node.reported(first, "RejectedPodEvicted"))
        until("its rejection", lambda: full_node.rejections(again) >= 2)
        assert {uid(p) for p in full_node.pods("second")} == {uid(again)}, "at most one eviction in a minute"
        assert not taints(full_node)


def test_a_pod_without_a_controller_is_evicted_only_if_configured(full_node: JoinedNode) -> None:
    path = f"{DEMO}/pods/alone"
    with full_node.agent("rejectedPods: {policy: evict, afterRejections: 1}\n") as agent:
        pod = full_node.run("alone", one_cpu())
        until("the pod to be left alone", lambda: "left a rejected pod alone" in agent.log.read_text())
        until("another attempt", lambda: full_node.rejections(pod) >= 2)
        assert uid(full_node.plane.get(path) or {}) == uid(pod)
    with full_node.agent("rejectedPods: {policy: evict, afterRejections: 1, withoutController: true}\n"):
        until("the pod to be evicted", lambda: full_node.plane.get(path) is None)
