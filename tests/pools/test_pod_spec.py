"""Pod objects: the requests, the QoS class, and the messages for invalid objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from proxy.model.errors import InputError
from proxy.model.requests import ContainerKind, ContainerResources, peak_request
from proxy.model.workload import KubeQos
from proxy.pools.pod_spec import counted_by_scheduler, pod_spec

Raw = dict[str, Any]
G = 1 << 30


def res(requests: Raw | None = None, limits: Raw | None = None) -> Raw:
    both = {"requests": requests, "limits": limits}
    return {key: value for key, value in both.items() if value is not None}


def pod(*containers: Raw, init: tuple[Raw, ...] = (), **spec: Any) -> Raw:
    apps = [{"name": f"c{i}", "resources": copy.deepcopy(r)} for i, r in enumerate(containers)]
    firsts = [{"name": f"i{i}", **raw} for i, raw in enumerate(init)]
    metadata = {"name": "web", "namespace": "shop", "uid": "u-1"}
    whole = {"containers": apps, **({"initContainers": firsts} if firsts else {}), **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}


FULL = res(limits={"cpu": "2", "memory": "1Gi"})


def test_a_pod_object_is_read() -> None:
    raw = pod(
        res(
            {"cpu": "1500m", "memory": "1Gi"}, {"memory": "2Gi", "nvidia.com/gpu": 2, "hugepages-2Mi": "4Mi"}
        ),
        init=(
            {"resources": res({"cpu": 3})},
            {"restartPolicy": "Always", "resources": res({"cpu": 0.5})},
            {"restartPolicy": "OnFailure"},
        ),
        overhead={"cpu": "250m", "memory": "120Mi"},
        ephemeralContainers=[{"name": "c0"}],
    )
    raw["metadata"] |= {"labels": {"app": "web"}, "annotations": {"a/b": "c", "none": None}}
    spec = pod_spec(raw)
    assert (spec.uid, spec.namespace, spec.name) == ("u-1", "shop", "web")
    assert (spec.labels, spec.annotations) == ({"app": "web"}, {"a/b": "c", "none": ""})
    assert spec.overhead == {"cpu": 250, "memory": 120 << 20}
    assert spec.qos is KubeQos.BURSTABLE
    assert (spec.requests.uid, spec.requests.guaranteed, spec.requests.pod_level_requests) == (
        "u-1",
        False,
        None,
    )
    assert spec.requests.containers == (
        ContainerResources("i0", ContainerKind.INIT, {"cpu": 3000}),
        ContainerResources("i1", ContainerKind.SIDECAR, {"cpu": 500}),
        ContainerResources("i2", ContainerKind.INIT),
        ContainerResources(
            "c0",
            ContainerKind.APP,
            {"cpu": 1500, "memory": G, "nvidia.com/gpu": 2, "hugepages-2Mi": 4 << 20},
            {"memory": 2 * G, "nvidia.com/gpu": 2, "hugepages-2Mi": 4 << 20},
        ),
    )


def test_a_manifest_without_uid_and_namespace() -> None:
    raw = pod(FULL)
    del raw["metadata"]["uid"], raw["metadata"]["namespace"]
    spec = pod_spec(raw)
    assert (spec.uid, spec.namespace, spec.requests.uid) == ("", "default", "")


@pytest.mark.parametrize(
    ("raw", "qos"),
    [
        (pod({}), KubeQos.BEST_EFFORT),
        (pod(res({"cpu": 0}), {}), KubeQos.BEST_EFFORT),
        (pod(res({"ephemeral-storage": "1Gi"})), KubeQos.BEST_EFFORT),
        (pod(res(limits={"nvidia.com/gpu": 1})), KubeQos.BEST_EFFORT),
        (pod(FULL), KubeQos.GUARANTEED),
        (pod(FULL, FULL), KubeQos.GUARANTEED),
        (pod(FULL, {}), KubeQos.BURSTABLE),
        (pod(FULL, res(limits={"cpu": 1})), KubeQos.BURSTABLE),
        (pod(FULL, res(limits={"memory": 1})), KubeQos.BURSTABLE),
        (pod(res(limits={"cpu": "1m", "memory": 1})), KubeQos.GUARANTEED),
        (pod(FULL, res(limits={"cpu": 1, "memory": 0})), KubeQos.BURSTABLE),
        (pod(res({"cpu": 1}, {"cpu": 2, "memory": "1Gi"})), KubeQos.BURSTABLE),
        # A zero request is not the limit, and leaves the sums unequal.
        (pod(res({"cpu": 0}, {"cpu": 2, "memory": "1Gi"})), KubeQos.BURSTABLE),
        (pod(res({"cpu": 1, "memory": "1Gi"})), KubeQos.BURSTABLE),
        # Requests and limits are summed over all containers.
        (pod(res({"cpu": 1}, {"cpu": 2, "memory": 1}), FULL), KubeQos.BURSTABLE),
        (pod(FULL, res({"cpu": 1}, {"cpu": 2, "memory": 1})), KubeQos.BURSTABLE),
        (pod(FULL, init=({"resources": FULL},)), KubeQos.GUARANTEED),
        (pod(FULL, init=({"resources": {}},)), KubeQos.BURSTABLE),
        (pod(FULL, init=({"restartPolicy": "Always", "resources": {}},)), KubeQos.BURSTABLE),
        (pod({}, resources=FULL), KubeQos.GUARANTEED),
        (pod(FULL, resources=res({"cpu": 2}, {"cpu": 3})), KubeQos.BURSTABLE),
        (pod({}, resources=res({"cpu": 2})), KubeQos.BURSTABLE),
        (pod(FULL, resources={}), KubeQos.GUARANTEED),
    ],
)
def test_the_qos_class_follows_from_requests_and_limits(raw: Raw, qos: KubeQos) -> None:
    spec = pod_spec(raw)
    assert spec.qos is qos
    assert spec.requests.guaranteed is (qos is KubeQos.GUARANTEED)


def test_kubelets_class_wins_in_its_lists_only() -> None:
    raw = {**pod(FULL), "status": {"qosClass": "Burstable"}}
    assert pod_spec(raw).qos is KubeQos.GUARANTEED
    reported = pod_spec(raw, listed=True)
    assert reported.qos is KubeQos.BURSTABLE
    assert not reported.requests.guaranteed
    raw["status"] = {"qosClass": "Splendid"}
    assert pod_spec(raw, listed=True).qos is KubeQos.GUARANTEED


def test_pod_requests_default_to_container_needs_then_to_limits() -> None:
    raw = pod(res({"cpu": 1}), res({"cpu": 2}), resources=res(limits={"cpu": 4, "memory": "1Gi"}))
    spec = pod_spec(raw)
    assert spec.requests.pod_level_requests == {"cpu": 3000, "memory": G}
    assert spec.requests.pod_level_limits == {"cpu": 4000, "memory": G}
    raw["spec"]["resources"]["requests"] = {"cpu": "3500m"}
    assert pod_spec(raw).requests.pod_level_requests == {"cpu": 3500, "memory": G}
    assert pod_spec(pod(res({"cpu": 1}), resources=res({"memory": 5}))).requests.pod_level_requests == {
        "memory": 5
    }


def test_a_scheduler_counts_the_request_and_the_overhead_of_the_runtime_class() -> None:
    raw = pod(res({"cpu": 1}), overhead={"cpu": "250m", "memory": 5})
    assert counted_by_scheduler(pod_spec(raw)) == {"cpu": 1250, "memory": 5}
    raw["spec"]["resources"] = res({"cpu": 3})
    assert counted_by_scheduler(pod_spec(raw)) == {"cpu": 3250, "memory": 5}


def test_containers_need_the_most_of_init_and_of_apps_with_sidecars() -> None:
    def cpu(kind: ContainerKind, amount: int) -> ContainerResources:
        return ContainerResources("x", kind, {"cpu": amount})

    def need(*requests: ContainerResources) -> int:
        return peak_request(requests, lambda container: container.requests)["cpu"]

    assert (
        need(
            cpu(ContainerKind.INIT, 5),
            cpu(ContainerKind.SIDECAR, 2),
            cpu(ContainerKind.APP, 1),
            cpu(ContainerKind.APP, 1),
        )
        == 5
    )
    assert need(cpu(ContainerKind.SIDECAR, 2), cpu(ContainerKind.INIT, 5), cpu(ContainerKind.APP, 1)) == 7
    assert (
        need(
            cpu(ContainerKind.INIT, 1),
            cpu(ContainerKind.SIDECAR, 2),
            cpu(ContainerKind.APP, 1),
            cpu(ContainerKind.APP, 3),
        )
        == 6
    )
    assert peak_request(
        [ContainerResources("a", requests={"b": 1}), ContainerResources("c", requests={"d": 2})],
        lambda a: a.requests,
    ) == {
        "b": 1,
        "d": 2,
    }


def test_a_pod_object_reads_the_same_with_defaults_applied() -> None:
    """Objects from kubelet carry the defaults already."""
    raw = pod(res(limits={"cpu": 1, "memory": 5}), resources=res(limits={"cpu": 2}))
    first = pod_spec(raw)
    again = copy.deepcopy(raw)
    again["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1000m", "memory": "5"}
    again["spec"]["resources"]["requests"] = {"cpu": "1", "memory": "5"}
    again["spec"]["resources"]["limits"] = {"cpu": "2"}
    assert pod_spec(again) == first


def changed(path: tuple[str | int, ...], value: object) -> Raw:
    raw = pod(FULL, FULL, init=({},))
    at: Any = raw
    for key in path[:-1]:
        at = at.setdefault(key, {}) if isinstance(at, dict) else at[key]
    at[path[-1]] = value
    return raw


C1 = ("spec", "containers", 1)
R1 = (*C1, "resources", "requests")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kind",), "Deployment", "web: kind: 'Deployment' is not 'Pod'"),
        (("kind",), None, "web: kind: is missing"),
        (("apiVersion",), "v2", "web: apiVersion: 'v2' is not 'v1'"),
        (("metadata",), [], "the pod: metadata: a list is not an object"),
        (("metadata", "name"), None, "the pod: metadata.name: is missing"),
        (("metadata", "name"), "Web", "Web: metadata.name: 'Web' is not a name such as 'web-1'"),
        (("metadata", "namespace"), "a.b", "web: metadata.namespace: 'a.b' is not a name"),
        (("metadata", "uid"), 7, "web: metadata.uid: 7 is not a string"),
        (("metadata", "labels"), {"a/b": True}, "web: metadata.labels['a/b']: True is not a string"),
        (("metadata", "annotations"), {1: "x"}, "web: metadata.annotations: the key 1 is not a string"),
        (("spec",), None, "web: spec.containers: a pod needs at least one container"),
        (("spec", "containers"), {}, "web: spec.containers: an object is not a list"),
        (C1, "busybox", "web: spec.containers[1]: 'busybox' is not an object"),
        ((*C1, "name"), "c0", "web: spec.containers[1].name: 'c0' is taken by another container"),
        (
            ("spec", "initContainers", 0, "name"),
            "a/b",
            "web: spec.initContainers[0].name: 'a/b' is not a name",
        ),
        ((*C1, "name"), "i0", "web: spec.containers[1].name: 'i0' is taken"),
        ((*C1, "name"), "x" * 64, "web: spec.containers[1].name: 'xxx"),
        ((*C1, "name"), "x.y", "web: spec.containers[1].name: 'x.y' is not a name"),
        ((*C1, "resources"), 3, "web: spec.containers[1].resources: 3 is not an object"),
        (R1, {"cpu": "-1"}, "web: spec.containers[1].resources.requests.cpu: '-1' is negative"),
        (R1, {"cpu": -1}, "web: spec.containers[1].resources.requests.cpu: -1 is negative"),
        (R1, {"cpu": "much"}, "web: spec.containers[1].resources.requests.cpu: 'much' is not an amount"),
        (R1, {"cpu": True}, "web: spec.containers[1].resources.requests.cpu: True is not an amount"),
        (R1, {"cpu": "2001m"}, "web: spec.containers[1].resources.requests.cpu: is above its limit"),
        (R1, {"a.b/c": 1}, "requests['a.b/c']: needs a limit of the same size"),
        (R1, {"hugepages-2Mi": 1}, "requests.hugepages-2Mi: needs a limit"),
        ((*C1, "resources"), res({"a.b/c": 1}, {"a.b/c": 2}), "requests['a.b/c']: differs from its limit"),
        (("spec", "resources"), res({"x/y": 1}), "spec.resources.requests['x/y']: a pod itself has only cpu"),
        (
            ("spec", "resources"),
            res({"cpu": 2}, {"cpu": 1}),
            "spec.resources.requests.cpu: is above its limit",
        ),
        (("spec", "overhead"), {"cpu": "x"}, "web: spec.overhead.cpu: 'x' is not an amount"),
        (("status",), "fine", "web: status: 'fine' is not an object"),
    ],
)
def test_reports_about_a_bad_pod(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        pod_spec(changed(path, value))
    assert str(caught.value).startswith("cannot read the pod")
    assert message in str(caught.value)


@pytest.mark.parametrize("raw", [None, [], "pod", 7, {}])
def test_an_object_that_is_not_a_pod_is_refused_with_its_name(raw: object) -> None:
    with pytest.raises(InputError, match=r"^cannot read the pod web\.yaml: "):
        pod_spec(raw, "web.yaml")


def test_items_of_a_list_may_omit_their_kind_but_not_have_another_kind() -> None:
    raw = pod(FULL)
    del raw["kind"], raw["apiVersion"]
    assert pod_spec(raw, listed=True).name == "web"
    with pytest.raises(InputError, match="kind"):
        pod_spec({**raw, "kind": "Node"}, listed=True)


@pytest.mark.parametrize("name", ["web.v1", "0", "a" * 253])
def test_names_of_pods_may_have_dots_and_be_long(name: str) -> None:
    raw = pod(FULL)
    raw["metadata"]["name"] = name
    assert pod_spec(raw).name == name
    raw["metadata"]["name"] = f"{name}{'b' * 253}"
    with pytest.raises(InputError):
        pod_spec(raw)


def test_long_values_are_cut_in_messages() -> None:
    raw = pod(FULL)
    raw["metadata"]["name"] = "x" * 5000
    with pytest.raises(InputError) as caught:
        pod_spec(raw)
    assert len(str(caught.value)) < 400
