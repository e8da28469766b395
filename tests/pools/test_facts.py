from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.defects import DefectKind
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NumaExclusive, NumaPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.quoting import QUOTED
from proxy.model.workload import KubeQos, Pod, QosClass
from proxy.pools.annotations import NUMA_TOPOLOGY_SPEC, RESOURCE_SPEC, RESOURCE_STATUS, VOLCANO_POLICY
from proxy.pools.annotations import VOLCANO_DECISION as DECISION
from proxy.pools.facts import POD_KEYS, QOS_LABEL, kube_qos, parent_of, pod_facts, qos_class


def resource_status(text: str) -> tuple[CpuSet | None, str]:
    pod = reported(text)
    return pod.cpuset, pod.problem


def reported(text: str) -> Pod:
    return pod_facts("s", "u", "ns", "p", 0, {}, {POD_KEYS[1]: text}, "/kubepods/podu")


@pytest.mark.parametrize(
    ("parent", "qos"),
    [
        ("/kubepods/besteffort/podx", KubeQos.BEST_EFFORT),
        ("kubepods-besteffort-podx.slice", KubeQos.BEST_EFFORT),
        ("/kubepods/burstable/podx", KubeQos.BURSTABLE),
        ("kubepods-burstable-podx.slice", KubeQos.BURSTABLE),
        ("/kubepods/podx", KubeQos.GUARANTEED),
        ("kubepods-podx.slice", KubeQos.GUARANTEED),
        ("", KubeQos.GUARANTEED),
        ("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx.slice", KubeQos.BEST_EFFORT),
        ("kubepods.slice/kubepods-podx.slice", KubeQos.GUARANTEED),
        ("/root/kubepods/burstable/podx", KubeQos.BURSTABLE),
        ("root-kubepods-burstable-podx.slice", KubeQos.BURSTABLE),
        ("/root.slice/root-kubepods.slice/root-kubepods-podx.slice", KubeQos.GUARANTEED),
        ("/root.slice/root-kubepods.slice/root-kubepods-besteffort.slice/x.slice", KubeQos.BEST_EFFORT),
        ("/kubepods/besteffort", KubeQos.BEST_EFFORT),
        ("/besteffort/podx", KubeQos.BEST_EFFORT),
        ("/sandboxes/burstable-x", KubeQos.BURSTABLE),
    ],
)
def test_the_kubernetes_qos_class_is_read_from_the_cgroup_parent(parent: str, qos: KubeQos) -> None:
    assert kube_qos(parent) is qos


@pytest.mark.parametrize(
    ("parent", "qos"),
    [
        ("/besteffort-nodes/kubepods/podx", KubeQos.GUARANTEED),
        ("/besteffort-nodes/kubepods/burstable/podx", KubeQos.BURSTABLE),
        ("besteffort.slice/besteffort-kubepods.slice/besteffort-kubepods-podx.slice", KubeQos.GUARANTEED),
        ("burstable-kubepods-besteffort-podx.slice", KubeQos.BEST_EFFORT),
        ("/kubepods-prod/kubepods/burstable/podx", KubeQos.BURSTABLE),
        ("/kubepods/besteffort/kubepods/podx", KubeQos.GUARANTEED),
        ("kubepods-prod-kubepods-besteffort-podx.slice", KubeQos.BEST_EFFORT),
        ("kubepods-burstable-kubepods-podx.slice", KubeQos.GUARANTEED),
        ("/kubepods/podbesteffort", KubeQos.GUARANTEED),
        ("/kubepods/pod-kubepods-besteffort-x", KubeQos.GUARANTEED),
        ("/kubepods/burstable/podbesteffort", KubeQos.BURSTABLE),
        ("/kubepods/burstable/" + "besteffort/" * 10**5, KubeQos.BURSTABLE),
        ("a-" * 10**6, KubeQos.GUARANTEED),
    ],
)
def test_a_cgroup_root_and_a_uid_do_not_determine_the_class(parent: str, qos: KubeQos) -> None:
    assert kube_qos(parent) is qos


def test_a_qos_label_counts_only_as_koordinator_spells_it() -> None:
    assert qos_class("LSE") is QosClass.LSE
    assert qos_class("lse") is QosClass.NONE
    assert qos_class("whatever") is QosClass.NONE


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", None),
        ("{}", None),
        ('{"cpuset": ""}', None),
        ('{"cpuset": "0-3,8"}', "0-3,8"),
        ('{"cpuset":"2","numaNodeResources":[{"node":0}],"unknown":1}', "2"),
    ],
)
def test_the_resource_status_names_cpus_or_none(text: str, cpus: str | None) -> None:
    assert resource_status(text) == (None if cpus is None else CpuSet.parse(cpus), "")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '{"cpuset": 3}',
        '{"cpuset": "3-1"}',
        '{"cpuset": "a"}',
        '{"cpuset": "1:2"}',
        "[" * 100_000,
    ],
)
def test_resource_status_that_is_wrong_is_named(text: str) -> None:
    cpus, problem = resource_status(text)
    assert cpus is None
    assert "resource-status" in problem


@given(st.text())
def test_any_resource_status_is_read_without_an_exception(text: str) -> None:
    cpus, problem = resource_status(text)
    assert cpus is None or not problem


def test_a_long_annotation_is_cut_when_it_is_quoted() -> None:
    def problem_of(length: int) -> str:
        return resource_status(json.dumps({"cpuset": "x" * length}))[1]

    assert f"'{'x' * QUOTED}' is not a list" in problem_of(QUOTED)
    assert f"'{'x' * QUOTED}'... is not a list" in problem_of(QUOTED + 1)
    assert problem_of(QUOTED + 1) == problem_of(9999)


def test_no_other_label_or_annotation_is_read() -> None:
    class Watched(dict[str, str]):
        def get(self, key: str, default: str = "") -> str:
            read.append(key)
            return default

    read: list[str] = []
    pod_facts("s", "u", "ns", "n", 0, Watched(), Watched(dict.fromkeys(POD_KEYS, "")), "")
    assert sorted(read) == sorted(POD_KEYS)


def test_every_fault_of_a_pod_is_reported_with_its_kind() -> None:
    annotations = {
        RESOURCE_STATUS: '{"cpuset": "3-1"}',
        RESOURCE_SPEC: '{"requiredCPUBindPolicy": "FullPCPU"}',
        NUMA_TOPOLOGY_SPEC: "[",
        VOLCANO_POLICY: "strict",
    }
    pod = pod_facts("s", "u", "ns", "n", 0, {QOS_LABEL: "LSX"}, annotations, "")
    kinds = [fault.kind for fault in pod.defects]
    assert kinds == [
        DefectKind.QOS_CLASS,
        DefectKind.CPU_LIST,
        DefectKind.POLICY,
        DefectKind.ANNOTATION,
        DefectKind.POLICY,
    ]
    assert pod.qos is QosClass.NONE
    assert "'LSX' is not a class (LSE, LSR, LS, BE, SYSTEM)" in pod.defects[0]
    assert pod.problem == pod.defects[1]
    assert [fault.decisive for fault in pod.defects].count(True) == 1, "one of the three annotations"
    assert not pod_facts("s", "u", "ns", "n", 0, {QOS_LABEL: "LS"}, {"a": "b"}, "").defects
    assert pod_facts("s", "u", "ns", "n", 0, {QOS_LABEL: "ls"}, {}, "").defects


def test_preferences_of_schedulers_are_read() -> None:
    annotations = {
        NUMA_TOPOLOGY_SPEC: '{"numaTopologyPolicy": "Restricted"}',
        VOLCANO_POLICY: "single-numa-node",
        DECISION: '{"numa": {"1": {"cpu": "2"}}}',
    }
    pod = pod_facts("s", "u", "ns", "n", 0, {}, annotations, "")
    assert (pod.aligned, pod.numa_exclusive) == (NumaPolicy.RESTRICTED, NumaExclusive.REQUIRED)
    assert (pod.volcano_policy, pod.volcano_nodes) == (TopologyPolicy.SINGLE_NUMA_NODE, Mask([1]))


def test_pod_facts_are_read_from_labels_annotations_and_parent() -> None:
    pod = pod_facts(
        "s",
        "u",
        "ns",
        "n",
        3,
        {"koordinator.sh/qosClass": "LSR"},
        {"scheduling.koordinator.sh/resource-status": '{"cpuset":"1-2"}'},
        "/kubepods/burstable/podu",
    )
    assert (pod.ref, pod.attempt, pod.qos, pod.kube_qos) == ("ns/n", 3, QosClass.LSR, KubeQos.BURSTABLE)
    assert pod.cpuset == CpuSet.parse("1-2")


@pytest.mark.parametrize("letter", ["x", "\u00e4"])
def test_a_cgroup_parent_that_is_too_long_for_a_path_is_not_kept(letter: str) -> None:
    def parent(count: int) -> str:
        return pod_facts("s", "u", "ns", "p", 0, {}, {}, "/p/" + letter * count).cgroup_parent

    fits = (4096 - 3) // len(letter.encode())  # PATH_MAX of Linux
    assert parent(fits) == "/p/" + letter * fits
    assert parent(fits + 1) == ""


def test_the_parent_is_read_from_a_cgroups_path() -> None:
    assert parent_of("/kubepods/burstable/podx/abc") == "/kubepods/burstable/podx"
    assert parent_of("kubepods-podx.slice:cri-containerd:abc") == "kubepods-podx.slice"
    assert parent_of("/k8s.io/abc") == "/k8s.io"
    assert parent_of("/odd:name/abc") == "/odd:name"
    assert parent_of("abc") == ""
    assert parent_of("") == ""
