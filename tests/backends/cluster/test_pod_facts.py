"""Pods from the files of the cluster agent, which are read before kubelet is queried."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.cluster.facts_format import CURRENT_S, ClusterFacts, FactsKind, encode_facts
from proxy.backends.cluster.pod_facts import SOURCE, ClusterPods, PodFactSources
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.testkit.captured_log import report


def pod(uid: str = "u1", cpu: str = "2", **metadata: Any) -> dict[str, Any]:
    limits = {"limits": {"cpu": cpu, "memory": "1Gi"}}
    return {
        "metadata": {"namespace": "ns", "name": "web", "uid": uid, **metadata},
        "spec": {
            "initContainers": [{"name": "side", "restartPolicy": "Always", "resources": {}}],
            "containers": [{"name": "main", "resources": limits}],
            "resources": limits,
        },
        "status": {"qosClass": "Guaranteed"},
    }


class QueriedKubelet:
    """A kubelet that knows one pod."""

    knows_pods = True
    knows_devices = True

    def __init__(self, answer: tuple[PodRequests, str] | None) -> None:
        self.answer = answer
        self.queries = 0
        self.closed = False

    def pod_requests(self, uid: str, namespace: str, name: str) -> tuple[PodRequests, str] | None:
        self.queries += 1
        return self.answer

    def devices(self, namespace: str, pod: str, container: str) -> None:
        return None

    def allocatable(self) -> Mapping[str, Any]:
        return {"gpu": {}}

    def close(self) -> None:
        self.closed = True


KUBELETS = (PodRequests("u1", (ContainerResources("other"),)), "kubelet")


class World:
    def __init__(self, directory: Path, kubelet: QueriedKubelet | None) -> None:
        directory.chmod(0o700)
        self.now = 1000.0
        self.lines: list[str] = []
        self.pods = ClusterPods(directory, lambda: self.now)
        self.sources = PodFactSources(self.pods, kubelet, report(self.lines))

    def write(self, *items: dict[str, Any]) -> None:
        data = encode_facts(ClusterFacts(FactsKind.PODS, "n1", self.now, "1", list(items)))
        self.pods.path.write_bytes(data)
        self.pods.path.chmod(0o600)
        os.utime(self.pods.path, (self.now, self.now))

    def pod_requests(self, uid: str = "u1", name: str = "web") -> tuple[PodRequests, str] | None:
        return self.sources.pod_requests(uid, "ns", name)


def test_the_exact_requests_of_a_pod(tmp_path: Path) -> None:
    kubelet = QueriedKubelet(KUBELETS)
    w = World(tmp_path, kubelet)
    w.write(pod())
    found = w.pod_requests()
    assert found is not None
    requests, source = found
    assert source == SOURCE
    assert [(c.name, c.kind) for c in requests.containers] == [
        ("side", ContainerKind.SIDECAR),
        ("main", ContainerKind.APP),
    ]
    assert requests.named("main").requests == {"cpu": 2000, "memory": 1 << 30}
    assert requests.pod_level_requests == {"cpu": 2000, "memory": 1 << 30}
    assert requests.guaranteed
    assert kubelet.queries == 0, "kubelet is not queried for a pod that the file has"


def test_kubelet_is_queried_for_a_pod_without_facts(tmp_path: Path) -> None:
    w = World(tmp_path, QueriedKubelet(KUBELETS))
    assert w.pod_requests() == KUBELETS, "there is no file yet"
    w.write(pod("other"))
    assert w.pod_requests() == KUBELETS
    assert w.pod_requests("") is None


def test_an_old_file_is_used_only_if_kubelet_does_not_answer(tmp_path: Path) -> None:
    kubelet = QueriedKubelet(KUBELETS)
    w = World(tmp_path, kubelet)
    w.write(pod())
    w.now += CURRENT_S + 1
    assert w.pod_requests() == KUBELETS
    kubelet.answer = None
    found = w.pod_requests()
    assert found is not None
    assert found[1] == f"{SOURCE} (not confirmed since)"
    os.utime(w.pods.path, (w.now, w.now))
    found = w.pod_requests()
    assert found is not None
    assert found[1] == SOURCE


def test_a_static_pod_is_found_by_its_hash_in_its_own_namespace_only(tmp_path: Path) -> None:
    w = World(tmp_path, None)
    w.write(pod("mirror", annotations={"kubernetes.io/config.hash": "abc"}))
    assert w.pod_requests("abc") is not None
    assert w.pod_requests("abc", "another") is None


def test_an_invalid_pod_is_reported_and_skipped(tmp_path: Path) -> None:
    kubelet = QueriedKubelet(None)
    w = World(tmp_path, kubelet)
    w.write(pod(cpu="many"), pod("u2"))
    assert w.pod_requests() is None
    assert kubelet.queries == 1
    (line,) = w.lines
    assert line.startswith("cannot use a fact of the cluster pod=ns/web reason=")
    assert w.pod_requests("u2") is not None, "the other pods count"


@pytest.mark.parametrize("there", [True, False])
def test_devices_come_from_kubelet(tmp_path: Path, there: bool) -> None:
    kubelet = QueriedKubelet(KUBELETS)
    w = World(tmp_path, kubelet if there else None)
    assert w.sources.knows_pods
    assert w.sources.knows_devices is there
    assert w.sources.devices("ns", "web", "main") is None
    assert w.sources.allocatable() == ({"gpu": {}} if there else {})
    assert w.pod_requests("gone") == (KUBELETS if there else None)
    w.sources.close()
    assert kubelet.closed is there
