"""The objects, from one description of a node."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from proxy.agent.node_status import condition_of, condition_status
from proxy.agent.objects.node_page import NodePage, Rejection, read_node_page
from proxy.agent.objects.node_resource_topology import koordinator_topology, nfd_topology, with_owner
from proxy.agent.objects.numatopology import numatopology
from proxy.agent.objects.pod_events import (
    annotated_pods,
    event_object,
    notice_event,
    placed_events,
    rejection_event,
    removal_patch,
)
from proxy.model.errors import UnavailableError
from proxy.pools.annotations import RESOURCE_STATUS, resource_status
from proxy.pools.pod_fingerprint import fingerprint

CPUS = [[cpu, cpu % 4, cpu // 2 % 2, cpu // 2 % 2] for cpu in range(8)]
PAGE: dict[str, Any] = {
    "name": "n1",
    "mode": "enforce",
    "published": True,
    "applied": True,
    "policies": {
        "cpuManagerPolicy": "static",
        "topologyManagerPolicy": "restricted",
        "topologyManagerScope": "pod",
        "memoryManagerPolicy": "Static",
    },
    "reservedCPUs": "0",
    "freeCPUs": "1,4-5,7",
    "cpus": CPUS,
    "numaNodes": [
        {
            "id": 0,
            "distances": {"0": 10, "1": 21},
            "memory": 4 << 30,
            "hugepages": {"hugepages-2Mi": 1 << 30},
        },
        {"id": 1, "distances": {"0": 21, "1": 10}, "memory": 4 << 30, "hugepages": {}},
    ],
    "memory": {"0": {"memory": {"allocatable": 3 << 30, "free": 1 << 30}}},
    "devices": [
        {
            "name": "node-1",
            "resources": [{"name": "x/gpu", "capacity": "2", "allocatable": "2", "available": "1"}],
        }
    ],
    "pods": [
        {
            "namespace": "a",
            "name": "lse",
            "uid": "u1",
            "resourceStatus": '{"cpuset":"2-3"}',
            "containers": [
                {"name": "main", "cpus": "2-3", "reasons": ["as it asks"]},
                {"name": "side", "cpus": "6"},
                {"name": "log"},
            ],
        },
        {"namespace": "a", "name": "web", "uid": "u2", "containers": [{"name": "main"}]},
    ],
    "koordinator": {
        "labels": {"app.kubernetes.io/managed-by": "Koordinator"},
        "annotations": {"node.koordinator.sh/pod-cpu-allocs": "null"},
        "topologyPolicies": ["RestrictedPodLevel"],
        "zones": [
            {
                "name": "node-0",
                "type": "Node",
                "resources": [{"name": "cpu", "capacity": "4", "allocatable": "4", "available": "4"}],
            }
        ],
    },
    "version": "w.1",
}


def page(**changes: Any) -> NodePage:
    return read_node_page({**PAGE, **changes})


def test_the_numatopology_lists_free_cpus_and_allocations_of_pods() -> None:
    value = numatopology(page())
    assert (value["apiVersion"], value["kind"]) == ("nodeinfo.volcano.sh/v1alpha1", "Numatopology")
    spec = value["spec"]
    assert spec["policies"] == {"CPUManagerPolicy": "static", "TopologyManagerPolicy": "restricted"}
    assert spec["numares"] == {"cpu": {"allocatable": "1,4-5,7", "capacity": 8}}
    assert spec["resReserved"] == {"cpu": "0"}, "reserved CPUs are not free, and must not be deducted twice"
    assert spec["cpuDetail"]["3"] == {"numa": 1, "socket": 1, "core": 3}
    assert spec["podAllocations"] == [
        {
            "uid": "u1",
            "name": "lse",
            "namespace": "a",
            "containerAllocations": [
                {"name": "main", "allocations": {"cpu": "2-3"}},
                {"name": "side", "allocations": {"cpu": "6"}},
            ],
        }
    ]
    assert "podAllocations" not in numatopology(page(), allocations=False)["spec"]
    assert numatopology(page(freeCPUs=""))["spec"]["numares"]["cpu"]["allocatable"] == ""


def test_reserved_cpus_of_a_pod_count_before_its_containers_run() -> None:
    waiting = {"namespace": "a", "name": "waits", "uid": "u3", "setAside": "4-5"}
    (found,) = numatopology(page(pods=[waiting]))["spec"]["podAllocations"]
    assert (found["uid"], found["containerAllocations"]) == (
        "u3",
        [{"name": "", "allocations": {"cpu": "4-5"}}],
    )


def test_the_fingerprint_names_only_pods_that_the_amounts_include() -> None:
    new = {"namespace": "a", "name": "new", "uid": "u3", "counted": False}
    before, after = (nfd_topology(page(pods=pods)) for pods in (PAGE["pods"], [*PAGE["pods"], new]))
    assert before["attributes"] == after["attributes"]


def test_the_format_of_nfd() -> None:
    value = nfd_topology(page())
    assert value["apiVersion"] == "topology.node.k8s.io/v1alpha2"
    assert value["attributes"] == [
        {"name": "topologyManagerPolicy", "value": "restricted"},
        {"name": "topologyManagerScope", "value": "pod"},
        {"name": "cpuManagerPolicy", "value": "static"},
        {"name": "memoryManagerPolicy", "value": "Static"},
        {"name": "nodeTopologyPodsFingerprint", "value": fingerprint([("a", "lse"), ("a", "web")])},
        {"name": "nodeTopologyPodsFingerprintMethod", "value": "all"},
    ]
    first, second = value["zones"]
    assert first["costs"] == [{"name": "node-0", "value": 10}, {"name": "node-1", "value": 21}]
    assert first["resources"] == [
        {"name": "cpu", "capacity": "4", "allocatable": "3", "available": "3"},
        {"name": "memory", "capacity": str(4 << 30), "allocatable": str(3 << 30), "available": str(1 << 30)},
    ]
    assert second["resources"] == [
        {"name": "cpu", "capacity": "4", "allocatable": "4", "available": "1"},
        {"name": "x/gpu", "capacity": "2", "allocatable": "2", "available": "1"},
    ]
    assert value["metadata"]["annotations"]["topoproxy/figures"] == (
        "mode=enforce owners=2 exclusive=2-3,6 free=1,4-5,7 reserved=0"
    )


def test_unreserved_memory_is_available_completely() -> None:
    first, second = nfd_topology(page(memory={}, devices=[]))["zones"]
    amount, pages = str(4 << 30), str(1 << 30)
    assert first["resources"][1:] == [
        {"name": "hugepages-2Mi", "capacity": pages, "allocatable": pages, "available": pages},
        {"name": "memory", "capacity": amount, "allocatable": amount, "available": amount},
    ]
    assert [each["name"] for each in second["resources"]] == ["cpu", "memory"]


def test_a_node_without_pods_has_no_fingerprint() -> None:
    assert [each["name"] for each in nfd_topology(page(pods=[]))["attributes"]] == [
        "topologyManagerPolicy",
        "topologyManagerScope",
        "cpuManagerPolicy",
        "memoryManagerPolicy",
    ]


def test_an_object_in_koordinators_form_has_its_labels_and_zones() -> None:
    value = koordinator_topology(page())
    assert value["apiVersion"] == "topology.node.k8s.io/v1alpha1"
    assert value["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "Koordinator"}
    assert value["metadata"]["annotations"]["node.koordinator.sh/pod-cpu-allocs"] == "null"
    assert value["topologyPolicies"] == ["RestrictedPodLevel"]
    assert value["zones"] == PAGE["koordinator"]["zones"]


def test_an_object_is_owned_by_its_node() -> None:
    owned = with_owner(numatopology(page()), "n1", "uid-1")
    assert owned["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-1"}
    ]
    assert owned["metadata"]["name"] == "n1"


def test_the_condition_reports_the_state() -> None:
    assert condition_of(page()).status == "True"
    assert "restricted" in condition_of(page()).message
    assert condition_of(page(mode="observe")).reason == "Observing"
    assert condition_of(page(applied=False)).reason == "Paused"
    released = condition_of(page(mode="released", published=False))
    assert (released.status, released.reason) == ("False", "Released")
    (written,) = condition_status("n1", released, "2026-01-01T00:00:00Z")["status"]["conditions"]
    assert (written["type"], written["lastTransitionTime"]) == ("TopologyPlacement", "2026-01-01T00:00:00Z")


def test_the_condition_does_not_change_with_pods() -> None:
    assert condition_of(page()) == condition_of(page(pods=[], freeCPUs="1-7"))


def test_the_annotation_counts_for_schedulers_and_not_for_the_next_sandbox() -> None:
    ((path, patch),) = annotated_pods(page()).items()
    assert path == "/api/v1/namespaces/a/pods/lse"
    assert patch["metadata"]["uid"] == "u1"
    text = patch["metadata"]["annotations"][RESOURCE_STATUS]
    assert json.loads(text)["cpuset"] == "2-3"
    status, fault = resource_status({RESOURCE_STATUS: text})
    assert not status.cpus
    assert not fault
    assert removal_patch(patch)["metadata"] == {"uid": "u1", "annotations": {RESOURCE_STATUS: None}}


def test_a_placement_is_an_event_once() -> None:
    before = page(pods=[])
    (first, second) = placed_events(before, page())
    assert (first.pod, first.container, first.reason) == ("lse", "main", "PlacedExclusively")
    assert first.message == "Container main has CPUs 2-3 exclusively: as it asks"
    assert second.container == "side"
    assert list(placed_events(page(), page())) == []
    assert list(placed_events(None, page())) == [], (
        "placements from before the start of the agent are not reported"
    )
    moved = read_node_page(json.loads(json.dumps(PAGE).replace('"cpus": "6"', '"cpus": "7"')))
    assert [each.message for each in placed_events(page(), moved)] == [
        "Container side has CPUs 7 exclusively"
    ]


def test_a_rejection_is_an_event_with_a_remedy() -> None:
    found = Rejection("a/b", "u", "main", "TopologyAffinityError", "cannot do it", 3)
    event = rejection_event(found)
    assert (event.reason, event.warning) == ("PlacementRejected", True)
    assert event.message.startswith("Container main is rejected by topoproxy: cannot do it Fewer CPUs")
    would = rejection_event(structs.replace(found, applied=False))
    assert (would.reason, would.warning) == ("PlacementWouldBeRejected", False)


def test_the_name_of_an_event_follows_from_its_subject() -> None:
    one, two = (rejection_event(Rejection("a/b", "u", "main", message=word)) for word in ("x", "y"))
    assert one.name == two.name
    assert one.name != rejection_event(Rejection("a/b", "u", "other")).name
    assert len(rejection_event(Rejection(f"a/{'b' * 253}", "u")).name) <= 253
    for end in ("-", ".", "-.-"):
        name = rejection_event(Rejection(f"a/{'b' * (200 - len(end))}{end}{'b' * 40}", "u")).name
        assert name.startswith("bb")
        assert "b." in name, "each part of an object's name ends with a letter or a digit"
    value = event_object(one, "n1", "t1", "t2", 5)
    assert value["involvedObject"]["fieldPath"] == "spec.containers{main}"
    assert (value["count"], value["type"], value["source"]["host"]) == (5, "Warning", "n1")


def test_notices_become_events_of_pods_that_run() -> None:
    keys = {"pod": "a/web", "container": "main", "cpus": "0-7", "probably": "kubelet"}
    event = notice_event("drift: another program wrote a cpuset: put back", keys, page())
    assert event is not None
    assert (event.uid, event.reason) == ("u2", "CpusetRepaired")
    assert (
        event.message
        == "Another program (probably kubelet) wrote the cpuset of container main: 0-7 is restored"
    )
    assert notice_event("a hook failed", {"hook": "h"}, page()) is None, "the notice belongs to no pod"
    assert notice_event("drift: another program wrote a cpuset: put back", {"pod": "a/gone"}, page()) is None


def test_a_description_of_another_kind_is_refused() -> None:
    with pytest.raises(UnavailableError, match="cannot read the daemon's description"):
        read_node_page({"name": 3})
