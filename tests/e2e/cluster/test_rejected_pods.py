"""Rejected pods in a cluster with stock kubelet, scheduler and controllers (kubernetes#84869).

One container owns all CPUs that may be owned. The scheduler, which only counts CPUs, binds another pod that
requests one.
"""

from __future__ import annotations

from typing import Any

import pytest
from joined_node import DEMO, NODE, Joined, container, kernel, one_cpu, pod_spec, rejected, uid, until

from proxy.agent.rejections.node_mark import KEY
from tests.cluster.api_client import Json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def taints(node: Joined) -> list[Any]:
    return [each["effect"] for each in node.node()["spec"].get("taints", []) if each["key"] == KEY]


def test_under_policy_retry_kubelet_retries_a_rejected_pod_until_it_fits(full: Joined) -> None:
    with full.agent("rejectedPods: {policy: retry}\n"):
        full.deploy("second", one_cpu())
        pod = rejected(full, "second")
        until("three attempts", lambda: full.rejections(pod) >= 3)
        (same,) = full.pods("second")
        assert (uid(same), same["status"]["phase"]) == (uid(pod), "Pending")
        (reported,) = full.reported(pod, "PlacementRejected")
        assert reported.startswith("Container main is rejected by topoproxy: "), reported
        assert any("Error" in each["message"] for each in full.described(pod) if each["reason"] == "Failed")
        assert not taints(full)
        full.remove("first")
        (ran,) = full.running("second")
        assert uid(ran) == uid(pod), "kubelet retried the same pod, and its CPUs are free now"
        assert len(kernel(ran).cpus) == 1


def test_an_evicted_pod_goes_to_another_node_and_the_taint_is_removed(full: Joined) -> None:
    with full.second_node(), full.agent("rejectedPods: {policy: evict, afterRejections: 2}\n"):
        full.deploy("second", one_cpu())
        pod = rejected(full, "second")

        def elsewhere() -> Json | None:
            return next((p for p in full.pods("second") if p["spec"].get("nodeName") == "n2"), None)

        until("the next pod to be bound to another node", elsewhere)
        assert full.rejections(pod) <= 2
        assert taints(full) == ["PreferNoSchedule"]
        assert full.reported(pod, "RejectedPodEvicted")
        until("the rejected pod to be gone", lambda: [uid(p) for p in full.pods("second")] != [uid(pod)])
        full.remove("first")
        until("the taint to be removed", lambda: not taints(full))
        assert KEY not in full.node()["metadata"].get("annotations", {})


def test_without_a_taint_the_next_pod_is_rejected_and_not_evicted_within_a_minute(full: Joined) -> None:
    with full.agent("rejectedPods: {policy: evict, afterRejections: 1, keepAway: none}\n"):
        # With another node, the scheduler could take that one while the evicted pod still ends on this one.
        full.deploy("second", pod_spec(container("1"), nodeSelector={"kubernetes.io/hostname": NODE}))
        # It may be evicted before kubelet shows that it is rejected.
        first = until("a pod", lambda: next(iter(full.pods("second")), None))

        def replaced() -> Json | None:
            return next((p for p in full.pods("second") if uid(p) != uid(first)), None)

        again = until("another pod", replaced)
        until("the report", lambda: full.reported(first, "RejectedPodEvicted"))
        until("its rejection", lambda: full.rejections(again) >= 2)
        assert {uid(p) for p in full.pods("second")} == {uid(again)}, "at most one eviction in a minute"
        assert not taints(full)


def test_a_pod_without_a_controller_is_evicted_only_if_configured(full: Joined) -> None:
    path = f"{DEMO}/pods/alone"
    with full.agent("rejectedPods: {policy: evict, afterRejections: 1}\n") as agent:
        pod = full.run("alone", one_cpu())
        until("the pod to be left alone", lambda: "left a rejected pod alone" in agent.log.read_text())
        until("another attempt", lambda: full.rejections(pod) >= 2)
        assert uid(full.plane.get(path) or {}) == uid(pod)
    with full.agent("rejectedPods: {policy: evict, afterRejections: 1, withoutController: true}\n"):
        until("the pod to be evicted", lambda: full.plane.get(path) is None)
