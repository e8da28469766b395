from __future__ import annotations

import json

import pytest

from proxy.backends.kubelet.checkpoints import Checkpoint, read_cpu_checkpoint
from proxy.engine.node_policy import node_reservation
from proxy.model.idset import CpuSet
from proxy.model.workload import QosClass
from proxy.observe.koordinator_kubelet import (
    Alloc,
    KubeletFacts,
    PodRow,
    kubelet_allocs,
    manager_policy,
    topology_of,
    topology_policy,
)
from proxy.pools.annotations import ResourceStatus
from proxy.pools.cpu_location import locations_of
from proxy.pools.node_keys import RESERVATION
from proxy.pools.topology_keys import ManagerPolicy
from proxy.topology.regular_machine import regular_machine

TOPOLOGY = topology_of(locations_of(regular_machine(2, 1, 2, 2)))  # cores (0,4) (1,5) | (2,6) (3,7)


def checkpoint(entries: object) -> Checkpoint:
    return read_cpu_checkpoint(json.dumps({"policyName": "static", "entries": entries, "checksum": 1}))


def test_what_kubelet_gave_to_pods_of_its_own() -> None:
    pods = [
        PodRow("n", "mine", "b"),
        PodRow("n", "ls", "c", QosClass.LS),
        PodRow("n", "named", "d", status=ResourceStatus("1", CpuSet([1]))),
    ]
    entries = {"b": {"x": "2", "y": "6"}, "a": {"x": "0"}, "c": {"x": "3"}, "d": {"x": "7"}, "e": {"x": ""}}
    found = kubelet_allocs(checkpoint(entries), pods)
    assert found == (Alloc("a", CpuSet([0])), Alloc("b", CpuSet([2, 6]), "n", "mine"))
    assert found[0].data() == {"uid": "a", "cpuset": "0", "managedByKubelet": True}


@pytest.mark.parametrize("entries", [None, {}, {"a": "0-3"}, {"a": {"x": "?"}}, {"a": {"x": 3}}, {"a": None}])
def test_invalid_sets_are_ignored(entries: object) -> None:
    assert kubelet_allocs(checkpoint(entries), ()) == ()


def test_without_a_file_kubelet_has_given_nothing() -> None:
    assert kubelet_allocs(None, ()) == ()


def test_the_cpu_managers_reserve() -> None:
    def reported(**facts: object) -> ManagerPolicy:
        return manager_policy(KubeletFacts(**facts), TOPOLOGY)  # type: ignore[arg-type]

    assert reported() == ManagerPolicy()
    assert reported(policy="none", reserved_milli=2000) == ManagerPolicy("none")
    options = {"full-pcpus-only": "true"}
    static = reported(policy="static", options=options, reserved_milli=2100)
    assert static == ManagerPolicy("static", (("full-pcpus-only", "true"),), "0-1,4")
    assert static.data() == {"policy": "static", "options": options, "reservedCPUs": "0-1,4"}
    named = reported(policy="static", reserved_cpus=CpuSet([7]), reserved_milli=2100)
    assert named == ManagerPolicy("static", (), "7")
    for milli in (0, 9000):
        assert reported(policy="static", reserved_milli=milli).reserved == ""


def test_a_reservation_is_given_cpus() -> None:
    found, problem = node_reservation({RESERVATION: '{"resources": {"cpu": "1100m"}}'}, TOPOLOGY)
    assert (found.text, problem) == ("0,4", "")
    named, problem = node_reservation({RESERVATION: '{"reservedCPUs": "3,2"}'}, TOPOLOGY)
    assert (named.text, problem) == ("2-3", "")
    wrong, problem = node_reservation({RESERVATION: '{"reservedCPUs": "x"}'}, TOPOLOGY)
    assert (wrong.data(), "'x' is not a list" in problem) == ({}, True)
    much, problem = node_reservation({RESERVATION: '{"resources": {"cpu": 9}}'}, TOPOLOGY)
    assert (much.text, problem.startswith("cannot choose CPUs for the node's reservation: ")) == ("", True)


def test_names_of_policies() -> None:
    assert topology_policy("single-numa-node", "pod") == "SingleNUMANodePodLevel"
    assert topology_policy("best-effort", "container") == "BestEffortContainerLevel"
    assert {
        topology_policy("none", "pod"),
        topology_policy("restricted", ""),
        topology_policy("", "pod"),
    } == {"None"}
