"""What of an object is kept: what the daemon reads, and nothing that others can make large."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.agent.facts.kept_fields import LONGEST_TEXT, namespace_fields, node_fields, pod_fields
from proxy.backends.kubelet.pod_spec import pod_spec
from proxy.model.requests import ContainerKind
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.node_keys import RESERVATION
from proxy.pools.node_meta import node_meta_of

RESOURCES = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
POD: dict[str, Any] = {
    "metadata": {
        "namespace": "ns",
        "name": "web",
        "uid": "u1",
        "labels": {"app": "web"},
        "annotations": {RESOURCE_STATUS: "{}", "mine": "x" * 100_000, "kubernetes.io/config.hash": "h"},
        "managedFields": [{}] * 50,
        "ownerReferences": [{}],
    },
    "spec": {
        "nodeName": "n1",
        "volumes": [{}],
        "initContainers": [{"name": "side", "restartPolicy": "Always", "env": [], "resources": {}}],
        "containers": [{"name": "main", "image": "i", "resources": RESOURCES}],
        "overhead": {"cpu": "10m"},
        "resources": RESOURCES,
    },
    "status": {"qosClass": "Guaranteed", "phase": "Running", "containerStatuses": [{}]},
}


def test_the_daemon_reads_of_a_pod_what_it_would_read_of_the_whole_object() -> None:
    kept = json.loads(pod_fields(POD))
    assert pod_spec(kept, listed=True).ask == pod_spec(POD, listed=True).ask
    ask = pod_spec(kept, listed=True).ask
    assert [c.kind for c in ask.containers] == [ContainerKind.SIDECAR, ContainerKind.APP]
    assert ask.own == {"cpu": 2000, "memory": 1 << 30}
    assert kept["metadata"]["annotations"] == {RESOURCE_STATUS: "{}", "kubernetes.io/config.hash": "h"}
    assert kept["spec"].keys() == {"initContainers", "containers", "overhead", "resources"}
    assert len(pod_fields(POD)) < 800


def test_of_a_node_what_prescribes_something_is_kept() -> None:
    item = {
        "metadata": {
            "name": "n1",
            "uid": "u",
            "labels": {"node.koordinator.sh/cpu-bind-policy": "FullPCPUsOnly", "zone": "a"},
            "annotations": {RESERVATION: "{}", "big": "x" * 100_000},
        },
        "status": {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "7"}, "images": [{}] * 100},
    }
    meta = node_meta_of(json.loads(node_fields(item)))
    assert (meta.name, meta.uid) == ("n1", "u")
    assert meta.labels == {"node.koordinator.sh/cpu-bind-policy": "FullPCPUsOnly"}
    assert meta.annotations == {RESERVATION: "{}"}
    assert (meta.capacity, meta.allocatable) == ({"cpu": 8000}, {"cpu": 7000})
    assert meta.problems == ()


def test_all_labels_of_a_namespace_are_kept() -> None:
    item = {"metadata": {"name": "a", "labels": {"x": "1", "y": 2, "z": "l" * (LONGEST_TEXT + 1)}}}
    assert json.loads(namespace_fields(item)) == {"metadata": {"name": "a", "labels": {"x": "1"}}}


@pytest.mark.parametrize("fields", [node_fields, namespace_fields, pod_fields])
@pytest.mark.parametrize("item", [{}, {"metadata": None}, {"metadata": {}}, {"metadata": {"name": 3}}])
def test_what_has_no_name_is_refused(fields: Any, item: Any) -> None:
    with pytest.raises(ValueError, match="no metadata"):
        fields(item)


@pytest.mark.parametrize("odd", [None, 5, "x", [1]])
def test_odd_parts_are_left_out(odd: Any) -> None:
    name = {"name": "a", "labels": odd, "annotations": odd}
    for fields in (node_fields, namespace_fields, pod_fields):
        item = {"metadata": name, "spec": odd, "status": odd}
        assert json.loads(fields(item))["metadata"]["name"] == "a"
    assert json.loads(pod_fields({"metadata": name, "spec": {"containers": odd}}))["spec"].get(
        "containers"
    ) in (
        None,
        [{}],
    )
