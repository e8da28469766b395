"""A daemon that reads the files of the cluster agent: the Node object, labels of namespaces, and pods."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.client import query_admin
from proxy.atomic_write import write_file
from proxy.backends.cluster.facts_format import ClusterFacts, FactsKind, encode_facts
from proxy.demo.client import DemoPod
from proxy.executor.fact_lookup import THREADS
from proxy.model.errors import InputError, RuntimeCallError
from proxy.model.workload import KubeQos
from tests.testkit.answers import check_answer
from tests.testkit.daemon import DaemonNode, run, temporary_node

RESERVATION = "node.koordinator.sh/reservation"
SELECTOR = "admission: {namespaceSelector: {matchLabels: {cpus: exclusive}}}\n"


class ClusterNode(DaemonNode):
    """A node with an agent's directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "cluster").mkdir(mode=0o700)
        self.settings = f"clusterFacts: {{directory: {directory}/cluster}}\nreconcilePeriod: 1h\n"

    def read(self, kind: FactsKind, *items: dict[str, Any]) -> None:
        data = encode_facts(ClusterFacts(kind, "n1", 5.0, "42", list(items)))
        write_file(self.directory / "cluster" / kind.file_name, data)

    async def query(self, route: str, *, act: bool = False) -> Any:
        answer: Any = await asyncio.to_thread(query_admin, self.directory / "admin.sock", route, 30, act=act)
        check_answer(answer)
        return answer

    async def refresh(self) -> Any:
        return await self.query("/cluster/refresh", act=True)


@pytest.fixture
def node() -> Iterator[ClusterNode]:
    with temporary_node(ClusterNode) as node:
        yield node


def node_object(**annotations: str) -> dict[str, Any]:
    return {"metadata": {"name": "n1", "annotations": annotations}}


def namespace(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}}


def test_a_setting_of_the_node_object_takes_effect_with_the_refresh(node: ClusterNode) -> None:
    node.read(FactsKind.NODE, node_object())

    async def scenario() -> None:
        container = await node.launch(DemoPod("ls", "LS"))
        assert node.cpus(container) == "0-15"
        node.read(FactsKind.NODE, node_object(**{RESERVATION: '{"reservedCPUs": "0-1"}'}))
        answer = await node.refresh()
        assert answer["files"][0]["name"] == "node"
        assert answer["files"][0]["resourceVersion"] == "42"
        status = await node.query("/status")
        assert status["pools"]["shared"] == "2-15"
        assert status["nodePolicy"]["nodeObject"] == f"{node.directory}/cluster/node.json"
        (node.directory / "cluster/node.json").write_bytes(b"{")
        await node.refresh()
        status = await node.query("/status")
        assert status["pools"]["shared"] == "2-15", "the last good object stays in effect"
        (lack,) = [c["reason"] for c in status["checks"] if c["name"] == "cluster"]
        assert "node.json: it is not a file of the cluster agent" in lack
        assert "there is no such file" in lack, "of the other files"

    run(node.daemon(), scenario)


def test_the_status_is_served_while_the_files_cannot_be_read(node: ClusterNode) -> None:
    node.read(FactsKind.NODE, node_object())
    answered = threading.Event()

    async def scenario() -> None:
        assert daemon.executor is not None
        worker = daemon.executor.fact_lookup.worker
        hanging = asyncio.gather(*(worker.submit(answered.wait, 60) for _ in range(THREADS)))
        try:
            await node.query("/status")
            status = await node.query("/status")
            assert not hanging.done()
            assert worker.waiting == 1, "the second status waits for the reading of the first"
            assert [file["name"] for file in status["cluster"]] == ["node", "namespaces", "pods"]
        finally:
            answered.set()
        assert all(await hanging)

    daemon = node.daemon()
    run(daemon, scenario)


def test_labels_decide_which_namespaces_may_own_cpus(node: ClusterNode) -> None:
    async def refused() -> str:
        with pytest.raises(RuntimeCallError) as caught:
            await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        return str(caught.value)

    async def scenario() -> None:
        assert "admission.namespaceSelector" in await refused(), "the daemon has read no labels yet"
        status = await node.query("/status")
        assert any("cannot read the labels of namespaces" in p["what"] for p in status["problems"])
        node.read(FactsKind.NAMESPACES, namespace("demo", cpus="shared"), namespace("x", cpus="exclusive"))
        await node.refresh()
        assert "admission.namespaceSelector" in await refused()
        node.read(FactsKind.NAMESPACES, namespace("demo", cpus="exclusive"))
        await node.refresh()
        container = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        assert node.cpus(container) == "2-3"
        status = await node.query("/status")
        assert status["settings"]["admission"]["namespacesByLabel"] == ["demo"]
        assert not any("cannot read the labels of namespaces" in p["what"] for p in status["problems"])
        node.read(FactsKind.NAMESPACES)
        await node.refresh()
        assert node.cpus(container) == "2-3", "a running owner keeps its CPUs"

    run(node.daemon(SELECTOR), scenario)


def test_owners_keep_their_cpus_after_a_restart_without_the_agent(node: ClusterNode) -> None:
    node.read(FactsKind.NAMESPACES, namespace("demo", cpus="exclusive"))
    found: list[str] = []

    async def first() -> None:
        found.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))

    async def second() -> None:
        await asyncio.sleep(0.3)
        assert node.cpus(found[0]) == "2-3"
        status = await node.query("/status")
        assert [owner["cpus"] for owner in status["exclusive"]] == ["2-3"]

    run(node.daemon(SELECTOR), first)
    run(node.daemon(SELECTOR), second)


def test_the_requests_of_a_pod_are_known_without_kubelet(
    node: ClusterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = uuid.uuid4()
    monkeypatch.setattr("proxy.demo.client.uuid.uuid4", lambda: uid)
    limits = {"limits": {"cpu": "2", "memory": "64Mi"}}
    item = {
        "metadata": {"namespace": "demo", "name": "web", "uid": str(uid)},
        "spec": {"containers": [{"name": "main", "resources": limits}]},
        "status": {"qosClass": "Guaranteed"},
    }

    async def scenario() -> None:
        node.read(FactsKind.PODS, item)
        container = await node.launch(DemoPod("web", kube_qos=KubeQos.GUARANTEED, cpus=2))
        executor = daemon.executor
        assert executor is not None
        pod = executor.state.containers[container].pod
        assert pod.source == "the cluster agent"
        assert pod.requests is not None
        assert pod.requests.named("main").requests == {"cpu": 2000, "memory": 64 << 20}

    daemon = node.daemon("cpuManagerPolicy: static\n")
    run(daemon, scenario)


def test_a_daemon_without_a_directory_refuses_to_refresh() -> None:
    with temporary_node() as plain:

        async def scenario() -> None:
            with pytest.raises(InputError, match="clusterFacts"):
                await asyncio.to_thread(
                    query_admin, plain.directory / "admin.sock", "/cluster/refresh", 30, act=True
                )

        run(plain.daemon(), scenario)
