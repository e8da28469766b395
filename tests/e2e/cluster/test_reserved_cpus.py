"""Pods that the extender binds run on the CPUs that it has reserved; other pods are not bound to the node."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cri import STATUS, online
from daemon import QOS_LABEL
from joined_node import JoinedNode, container, is_free, kernel, pod_spec, uid, until

from proxy.model.idset import CpuSet
from tests.cluster.agent_process import NUMATOPOLOGY
from tests.cluster.api_client import Json
from tests.cluster.control_plane import ControlPlane
from tests.cluster.extender_process import DEPLOY, SCHEDULER, ExtenderProcess, extender_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MORE = 2
"""Pods beyond those that fit; by the scheduler's own count of CPUs one of them would fit."""


@pytest.fixture(scope="module")
def extender(plane: ControlPlane) -> Iterator[ExtenderProcess]:
    for name in ("rbac.yaml", "numatopology-crd.yaml"):
        plane.install(DEPLOY / name)
    extender = ExtenderProcess(plane)
    extender.start()
    plane.start_scheduler(**extender_config(extender))
    yield extender
    extender.stop()


def allocated(joined_node: JoinedNode, pod: Json) -> CpuSet:
    """Return the CPUs of a pod in the Numatopology."""
    spec = (joined_node.plane.get(NUMATOPOLOGY) or {})["spec"]
    found = [each for each in spec["podAllocations"] if each["uid"] == uid(pod)]
    return CpuSet.parse(found[0]["containerAllocations"][0]["allocations"]["cpu"])


def unschedulable(joined_node: JoinedNode, app: str) -> list[Json]:
    """List the pods that the scheduler reports as unschedulable."""
    return [
        pod
        for pod in joined_node.pods(app)
        if not pod["spec"].get("nodeName")
        and any(each.get("reason") == "Unschedulable" for each in pod["status"].get("conditions", ()))
    ]


@pytest.mark.parametrize("qos", ["LSR", ""])
def test_pods_that_fit_run_on_their_reserved_cpus_and_the_others_wait(
    joined_node: JoinedNode, extender: ExtenderProcess, qos: str
) -> None:
    fitting = len(online()) - 1  # one CPU stays in the shared pool
    labels = {QOS_LABEL: qos} if qos else {}
    with joined_node.agent():
        until("the node to be known", lambda: 'nodes{state="known"} 1' in extender.get("/metrics"))
        # No event lets kube-scheduler retry a pod when an object shows more free CPUs (docs/scheduler.md).
        until("the object to show all CPUs as free", lambda: is_free(joined_node, online()))
        joined_node.deploy(
            "aligned", pod_spec(container("1"), schedulerName=SCHEDULER), fitting + MORE, **labels
        )
        ran = joined_node.running("aligned", fitting)
        until("the rest to be unschedulable", lambda: len(unschedulable(joined_node, "aligned")) == MORE)
        for pod in ran:
            own = kernel(pod).cpus
            assert (len(own), kernel(pod).tasks) == (1, {own})
            until("the object to show the pod", lambda pod=pod, own=own: allocated(joined_node, pod) == own)
            if qos:
                assert json.loads(pod["metadata"]["annotations"][STATUS])["cpuset"] == str(own)
        ended = ran[0]
        joined_node.plane.delete(
            f"/api/v1/namespaces/demo/pods/{ended['metadata']['name']}?gracePeriodSeconds=0"
        )
        until(
            "another pod to get its CPU",
            lambda: uid(ended) not in map(uid, joined_node.running("aligned", fitting)),
        )
        until("the rest to wait", lambda: len(unschedulable(joined_node, "aligned")) == MORE)
        assert not any(map(joined_node.rejections, [ended, *joined_node.pods("aligned")]))
