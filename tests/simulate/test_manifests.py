from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.model.errors import InputError
from proxy.model.idset import CpuSet
from proxy.model.requests import ContainerKind
from proxy.model.workload import KubeQos
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.simulate.manifests import Pods, load_pods
from proxy.simulate.pods import SimulatedPod

MACHINES = ["m1", "m2", "m3"]
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers:
  - name: c
    resources: {limits: {cpu: 2, memory: 1Gi}}
"""


def read(tmp_path: Path, text: str | bytes, name: str = "p.yaml", **more: object) -> Pods:
    data = text.encode() if isinstance(text, str) else text
    (tmp_path / name).write_bytes(data)
    return load_pods([str(tmp_path / name)], MACHINES, **more)


def names(pods: Pods) -> list[str]:
    return [simulated_pod.ref for simulated_pod in pods.simulated_pods]


def refused(tmp_path: Path, text: str | bytes, name: str = "p.yaml") -> str:
    with pytest.raises(InputError) as error:
        read(tmp_path, text, name)
    message = str(error.value).replace(str(tmp_path) + "/", "")
    assert "\n" not in message
    return message


def template(kind: str, spec: str = "", version: str = "apps/v1") -> str:
    separator = "\n  "
    return f"""\
apiVersion: {version}
kind: {kind}
metadata: {{name: set, namespace: ns}}
spec:
  {(spec or "paused: false").replace(", ", separator)}
  template:
    metadata: {{labels: {{koordinator.sh/qosClass: LS}}}}
    spec:
      containers: [{{name: c, resources: {{requests: {{cpu: 100m}}}}}}]
"""


def test_a_pod_becomes_the_requests_that_kubelet_would_send(tmp_path: Path) -> None:
    simulated_pod = read(tmp_path, POD).simulated_pods[0]
    pod = simulated_pod.arrival.pod
    assert (simulated_pod.ref, pod.kube_qos) == ("default/web", KubeQos.GUARANTEED)
    assert simulated_pod.where.endswith("p.yaml line 1")
    assert simulated_pod.needs == {"cpu": 2000, "memory": 1 << 30}
    ((name, request),) = simulated_pod.arrival.requests
    assert (name, request.cpu_shares, request.memory_limit) == ("c", 2048, 1 << 30)
    assert simulated_pod.arrival.total.cpu_shares == 2048
    assert pod.requests is not None
    assert pod.requests.uid == pod.uid != ""


def test_what_a_scheduler_counts(tmp_path: Path) -> None:
    text = """\
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  overhead: {cpu: 250m, memory: 1Mi}
  initContainers:
  - {name: first, resources: {requests: {cpu: 3, example.com/gpu: 1}, limits: {example.com/gpu: 1}}}
  - {name: side, restartPolicy: Always, resources: {requests: {cpu: 500m}}}
  - {name: second, resources: {requests: {cpu: 3, ephemeral-storage: 1Gi}}}
  containers:
  - {name: a, resources: {requests: {cpu: 1}}}
  - {name: b, resources: {requests: {cpu: 1, memory: 1Mi}}}
"""
    simulated_pod = read(tmp_path, text).simulated_pods[0]
    assert simulated_pod.needs == {"cpu": 3750, "memory": 2 << 20, "example.com/gpu": 1}
    pod_requests = simulated_pod.arrival.pod.requests
    assert pod_requests is not None
    assert [a.kind for a in pod_requests.containers] == [
        ContainerKind.INIT,
        ContainerKind.SIDECAR,
        ContainerKind.INIT,
        ContainerKind.APP,
        ContainerKind.APP,
    ]
    assert [n for n, _ in simulated_pod.arrival.requests] == ["first", "side", "second", "a", "b"]


def test_a_pod_may_have_requests_at_the_pod_level(tmp_path: Path) -> None:
    text = POD + "  resources: {requests: {cpu: 7}, limits: {cpu: 8, memory: 4Gi}}\n"
    simulated_pod = read(tmp_path, text).simulated_pods[0]
    assert simulated_pod.needs == {"cpu": 7000, "memory": 1 << 30}
    assert simulated_pod.arrival.total.memory_limit == 4 << 30


def test_replicas_are_pods_of_their_own(tmp_path: Path) -> None:
    simulated_pods = read(tmp_path, POD, replicas=3).simulated_pods
    assert [g.ref for g in simulated_pods] == ["default/web-1", "default/web-2", "default/web-3"]
    assert len({g.arrival.pod.uid for g in simulated_pods}) == 3
    assert len({g.arrival.pod.sandbox_id for g in simulated_pods}) == 3
    assert {
        g.arrival.pod.requests.uid == g.arrival.pod.uid for g in simulated_pods if g.arrival.pod.requests
    } == {True}


def test_lists_directories_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "c"}]}}
    items = [{**pod, "metadata": {"name": name}} for name in "ab"]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "z.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    )
    (tmp_path / "a.yml").write_text(POD)
    (tmp_path / "notes.txt").write_text("no manifest")
    assert names(load_pods([str(tmp_path)], MACHINES)) == ["default/web", "default/a", "default/b"]
    bare = [
        {
            "metadata": {"name": "x", "namespace": "n"},
            "spec": pod["spec"],
            "status": {"qosClass": "BestEffort"},
        }
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "PodList", "items": bare})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert names(load_pods(["-"], MACHINES)) == ["n/x"]


@pytest.mark.parametrize(
    ("kind", "spec", "wanted"),
    [
        ("Deployment", "replicas: 2", ["ns/set-1", "ns/set-2"]),
        ("Deployment", "", ["ns/set-1"]),
        ("ReplicaSet", "replicas: 1", ["ns/set-1"]),
        ("StatefulSet", "replicas: 2", ["ns/set-0", "ns/set-1"]),
        ("Deployment", "replicas: null", ["ns/set-1"]),
        ("StatefulSet", "replicas: null", ["ns/set-0"]),
        ("Job", "parallelism: 2", ["ns/set-1", "ns/set-2"]),
        ("Job", "parallelism: 6, completions: 2", ["ns/set-1", "ns/set-2"]),
        ("Job", "parallelism: 1, completions: 5", ["ns/set-1"]),
        ("Job", "parallelism: 2, completions: null", ["ns/set-1", "ns/set-2"]),
        ("Job", "completions: 5", ["ns/set-1"]),
        ("Job", "parallelism: null, suspend: false", ["ns/set-1"]),
        ("DaemonSet", "", ["ns/set-m1", "ns/set-m2", "ns/set-m3"]),
    ],
)
def test_workloads_stand_for_their_pods(tmp_path: Path, kind: str, spec: str, wanted: list[str]) -> None:
    simulated_pods = read(tmp_path, template(kind, spec)).simulated_pods
    assert [simulated_pod.ref for simulated_pod in simulated_pods] == wanted
    assert {simulated_pod.arrival.pod.qos for simulated_pod in simulated_pods} == {"LS"}
    simulated_nodes = [simulated_pod.node_name for simulated_pod in simulated_pods]
    assert simulated_nodes == (MACHINES if kind == "DaemonSet" else [""] * len(wanted))


def test_a_job_without_pods(tmp_path: Path) -> None:
    suspended = template("Job", "parallelism: 2, suspend: true").replace("name: set", "name: later")
    text = "---\n".join([POD, suspended, template("Job", "completions: 0")])
    pods = read(tmp_path, text)
    assert names(pods) == ["default/web"]
    assert pods.notes == ["left out: the pods of 1 suspended Job"]


@pytest.mark.parametrize("wrap", [False, True])
def test_the_pods_of_a_suspended_job_are_left_out(tmp_path: Path, wrap: bool) -> None:
    def pod(name: str, namespace: str, job: str) -> dict[str, object]:
        owners = [{"apiVersion": "batch/v1", "kind": "Job", "name": job, "controller": True}]
        metadata = {"name": name, "namespace": namespace, "ownerReferences": owners}
        spec = {"nodeName": "m1", "containers": [{"name": "c"}]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    job = yaml.safe_load(template("Job", "suspend: true"))
    items = [pod("a", "ns", "set"), pod("b", "other", "set"), pod("c", "ns", "runs"), job]
    pods = read(tmp_path, json.dumps({"kind": "List", "items": items}) if wrap else yaml.safe_dump_all(items))
    assert names(pods) == ["other/b", "ns/c"]
    assert pods.notes == ["left out: the pods of 1 suspended Job"]


def test_replicas_multiply_workloads_but_not_daemons(tmp_path: Path) -> None:
    assert len(read(tmp_path, template("Deployment", "replicas: 2"), replicas=3).simulated_pods) == 6
    assert len(read(tmp_path, template("DaemonSet"), replicas=3).simulated_pods) == 3


def test_a_live_cluster_names_machines_and_holds_pods_that_ended(tmp_path: Path) -> None:
    spec = "containers: [{name: c}]"
    text = f"""\
apiVersion: v1
kind: List
items:
- {{apiVersion: v1, kind: Pod, metadata: {{name: a}}, spec: {{nodeName: m2, {spec}}}}}
- {{apiVersion: v1, kind: Pod, metadata: {{name: b}}, spec: {{{spec}}}, status: {{phase: Succeeded}}}}
- apiVersion: v1
  kind: Pod
  metadata: {{generateName: c-}}
  spec: {{nodeSelector: {{kubernetes.io/hostname: m1, disk: ssd}}, affinity: {{x: y}}, {spec}}}
"""
    pods = read(tmp_path, text)
    assert [(simulated_pod.ref, simulated_pod.node_name) for simulated_pod in pods.simulated_pods] == [
        ("default/a", "m2"),
        ("default/c-2", "m1"),
    ]
    assert pods.simulated_pods[1].where.endswith("p.yaml line 6")
    assert pods.notes == [
        "left out: 1 pod that ended already",
        "not followed: affinity of 1 pod",
        "not followed: nodeSelector disk of 1 pod",
    ]
    assert {
        simulated_pod.node_name for simulated_pod in read(tmp_path, text, bound=False).simulated_pods
    } == {""}


PINNED = POD.replace(
    "{name: web}",
    """
  name: web
  labels: {koordinator.sh/qosClass: LSR}
  annotations: {other: kept, scheduling.koordinator.sh/resource-status: '{"cpuset": "2-3"}'}""",
)
BOUND = PINNED.replace("spec:\n", "spec:\n  nodeName: m2\n")


@pytest.mark.parametrize(
    ("text", "more", "named"),
    [
        (BOUND, {}, "2-3"),
        (BOUND, {"bound": False}, None),
        (BOUND, {"replicas": 2}, None),
        (PINNED, {}, None),
        (PINNED.replace("spec:\n", "spec:\n  nodeSelector: {kubernetes.io/hostname: m2}\n"), {}, None),
    ],
    ids=["bound", "anywhere", "replicas", "not bound", "selected by host"],
)
def test_only_a_pod_that_stays_where_it_runs_keeps_the_cpus_of_its_annotation(
    tmp_path: Path, text: str, more: dict[str, object], named: str | None
) -> None:
    for simulated_pod in read(tmp_path, text, **more).simulated_pods:
        assert simulated_pod.arrival.pod.qos == "LSR"
        assert simulated_pod.arrival.pod.cpuset == (CpuSet.parse(named) if named else None)
        annotations = simulated_pod.pod_template.spec.annotations
        assert annotations["other"] == "kept"
        assert (RESOURCE_STATUS in annotations) == (named is not None)


def test_pods_of_a_template_do_not_share_the_cpus_of_an_annotation(tmp_path: Path) -> None:
    annotated = "{annotations: {" + RESOURCE_STATUS + ': \'{"cpuset": "2-3"}\'}, labels:'
    for kind in ("Deployment", "DaemonSet"):
        text = template(kind).replace("{labels:", annotated).replace("qosClass: LS}", "qosClass: LSR}")
        for simulated_pod in read(tmp_path, text).simulated_pods:
            assert simulated_pod.arrival.pod.qos == "LSR"
            assert simulated_pod.arrival.pod.cpuset is None


def test_a_name_that_was_given_stays(tmp_path: Path) -> None:
    text = POD.replace("{name: web}", "{name: web-x7, generateName: web-}")
    assert names(read(tmp_path, text)) == ["default/web-x7"]


def test_numbers_and_texts_of_amounts(tmp_path: Path) -> None:
    def needs(cpu: str) -> object:
        return read(tmp_path, POD.replace("cpu: 2,", f"cpu: {cpu},")).simulated_pods[0].needs["cpu"]

    assert [needs(cpu) for cpu in ("2", "'2'", "2.5", "2500m", "1e1", "0.1")] == [
        2000,
        2000,
        2500,
        2500,
        10_000,
        100,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kind: Service",
            "cannot read p.yaml, line 1: kind 'Service' is not supported (supported: Pod, List, Deployment, ",
        ),
        (POD + "---\nkind: ConfigMap\n", "p.yaml, line 9: kind 'ConfigMap' is not supported"),
        ("a: 1", "p.yaml, line 1: it has no kind (supported: Pod"),
        ("just words", "p.yaml, line 1: the document is text, not an object"),
        ("- a\n- b", "the document is a list, not an object"),
        ("kind: [Pod]", "kind \"['Pod']\" is not supported"),
        ("kind: List", "the list in p.yaml line 1: items must be a list"),
        ("kind: List\nitems:\n- kind: List\n  items: []\n- 7", "line 1, item 2: it is the value '7', not"),
        ("kind: Pod", "p.yaml line 1: apiVersion: is missing"),
        (POD.replace("v1", "v2", 1), "p.yaml line 1: apiVersion: 'v2' is not 'v1'"),
        (POD.replace("cpu: 2", "cpu: -2"), "spec.containers[0].resources.limits.cpu: -2 is negative"),
        (POD.replace("cpu: 2", "cpu: .inf"), "spec.containers[0].resources.limits.cpu: "),
        (POD.replace("cpu: 2", "cpu: two"), "spec.containers[0].resources.limits.cpu: "),
        (POD.replace("cpu: 2", "cpu: 1:30"), "spec.containers[0].resources.limits.cpu: "),
        (POD.replace("name: web", "name: 7"), "metadata.name: 7 is not a string"),
        (POD.replace("name: web", "label: x"), "metadata.name: is missing"),
        (POD + "---\n" + POD, "cannot simulate the pod default/web twice: p.yaml line 1 and "),
        (POD.replace("- name: c", "- &a [*a]"), "line 6: the alias"),
        ("", "cannot simulate pods: no pods found in "),
        ("kind: List\nitems: []", "no pods found in "),
        (template("Deployment", "replicas: -1"), "the Deployment in p.yaml line 1: spec.replicas must be"),
        (template("Deployment", "replicas: two"), "spec.replicas must be a whole number"),
        (template("Job", "completions: -1"), "the Job in p.yaml line 1: spec.completions must be a whole"),
        (template("Job", "suspend: 1"), "the Job in p.yaml line 1: spec.suspend must be true or false"),
        (template("Deployment", "replicas: 99999999"), "cannot simulate more than 1000000 pods"),
        ("kind: Job\nmetadata: {name: x}\nspec: {}", "the Job in p.yaml line 1: spec.template must be"),
        ("kind: Job\nmetadata: x\nspec: {}", "the Job in p.yaml line 1: metadata and spec must be"),
    ],
)
def test_one_line_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_pods([str(tmp_path / "no.yaml")], MACHINES)
    with pytest.raises(InputError, match="no file in it ends in"):
        load_pods([str(tmp_path)], MACHINES)


def test_items_of_json_are_numbered(tmp_path: Path) -> None:
    items = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "a"},
            "spec": {"containers": [{"name": "c"}]},
        }
    ]
    text = json.dumps({"kind": "List", "items": [*items, {"kind": "Node"}]})
    assert "p.json, line 1, item 2: kind 'Node' is not supported" in refused(tmp_path, text, "p.json")


def test_identical_pods_share_their_objects(tmp_path: Path) -> None:
    simulated_pods: list[SimulatedPod] = read(tmp_path, POD, replicas=1000).simulated_pods
    assert len({id(simulated_pod.arrival.requests) for simulated_pod in simulated_pods}) == 1


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
WHOLE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "x", "namespace": "n", "labels": {"a": "b"}, "annotations": {"c": "d"}},
    "spec": {
        "nodeName": "m1",
        "nodeSelector": {"kubernetes.io/hostname": "m1", "d": "e"},
        "overhead": {"cpu": "1m"},
        "resources": {"limits": {"cpu": 1}},
        "initContainers": [{"name": "i", "restartPolicy": "Always", "resources": {"requests": {"cpu": 1}}}],
        "containers": [{"name": "c", "resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}],
    },
    "status": {"phase": "Running"},
}


def _paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in _paths(part, (*path, key)))]


def _with(value: object, path: tuple[object, ...], odd: object) -> object:
    if not path:
        return odd
    if isinstance(value, dict):
        return {key: _with(part, path[1:], odd) if key == path[0] else part for key, part in value.items()}
    assert isinstance(value, list)
    return [_with(part, path[1:], odd) if at == path[0] else part for at, part in enumerate(value)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(_paths(WHOLE)),
    odd=ODD,
    kind=st.sampled_from(["Pod", "Deployment", "DaemonSet", "List"]),
)
def test_anything_anywhere_is_read_or_refused_in_one_line(
    tmp_path: Path, path: tuple[object, ...], odd: object, kind: str
) -> None:
    raw = _with(WHOLE, path, odd)
    if kind == "List":
        raw = {"kind": "List", "items": [raw]}
    elif kind != "Pod" and isinstance(raw, dict):
        metadata = {"name": "x"}
        raw = {
            "kind": kind,
            "metadata": metadata,
            "spec": {"template": {**raw, "metadata": raw.get("metadata")}},
        }
    text = json.dumps(raw)
    for name in ("p.json", "p.yaml"):
        reported = ""
        try:
            read(tmp_path, text, name)
        except InputError as error:
            reported = str(error)
        assert "\n" not in reported
        assert len(reported) < 600


def test_a_closed_standard_input_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="cannot read the manifests: standard input is closed"):
        load_pods(["-"], ["m"], 1, bound=True)
