"""The files follow the API server while it answers, and hold only the fields that the daemon reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.agent import cluster_facts
from proxy.agent.cluster_facts import (
    LONGEST_TEXT,
    stored_namespace_json,
    stored_node_json,
    stored_pod_json,
    write_facts,
)
from proxy.agent.session import AgentSession
from proxy.backends.cluster.files import AgentFiles
from proxy.config.cluster_config import ClusterFactsConfig
from proxy.config.load import parse
from proxy.config.schema import Config
from proxy.model.errors import UnavailableError
from proxy.model.requests import ContainerKind
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.node_keys import RESERVATION
from proxy.pools.node_meta import node_meta_of
from proxy.pools.pod_spec import pod_spec
from tests.agent.fake_api import FakeApi
from tests.testkit.captured_log import telemetry
from tests.testkit.waiting import until

NODES, PODS, NAMESPACES = "/api/v1/nodes", "/api/v1/pods", "/api/v1/namespaces"
SELECTING = parse("admission: {namespaceSelector: {matchLabels: {a: b}}}", "test").admission
SPEC = {"containers": [{"name": "main", "resources": {"limits": {"cpu": "2", "memory": "1Gi"}}}]}

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


class QueriedDaemon:
    """Records the queries to the daemon."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.down = False

    async def query(self, route: str, params: Any = None, *, timeout: float = 5, act: bool = False) -> object:
        self.queries.append(route)
        if self.down:
            raise UnavailableError("it is down")
        return {}


class ClusterWithFacts:
    def __init__(self, directory: Path, *, selecting: bool = True) -> None:
        self.directory = directory / "cluster"
        self.api = FakeApi(NODES, PODS, NAMESPACES)
        self.daemon = QueriedDaemon()
        self.lines: list[str] = []
        config = Config(cluster_facts=ClusterFactsConfig(self.directory))
        self.config = replace(config, admission=SELECTING) if selecting else config
        self.files = AgentFiles(self.directory)

    def pages(self) -> dict[str, dict[str, Any]]:
        self.files.read()
        return {str(page["name"]): page for page in self.files.page()}

    def pod(self, uid: str) -> bool:
        index = self.files.pods.read()
        return index is not None and (uid,) in index

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        session = AgentSession(
            self.config, "n1", self.daemon, self.api.client(), telemetry(self.lines)  # type: ignore[arg-type]
        )  # fmt: skip
        task = asyncio.ensure_future(write_facts(session))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await session.api.close()


def confirmed(cluster: ClusterWithFacts, name: str) -> Any:
    """Return the seconds since a file was confirmed; the API server sends a bookmark to its watch."""
    if not cluster.api.down:
        cluster.api.bookmark(f"/api/v1/{name}")
    return cluster.pages()[name if name != "nodes" else "node"]["confirmed_s"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterWithFacts:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(cluster_facts, "CONFIRM_S", 0.2)
    monkeypatch.setattr(cluster_facts, "NAMESPACES_S", 0.4)
    cluster = ClusterWithFacts(tmp_path)
    cluster.api.put(
        NODES, "n1", metadata={"labels": {"node.koordinator.sh/cpu-bind-policy": "FullPCPUsOnly"}}
    )
    cluster.api.put(NAMESPACES, "team", metadata={"labels": {"a": "b"}})
    cluster.api.put(PODS, "team/web", metadata={"uid": "u1"}, spec=SPEC)
    return cluster


def run_scenario(cluster: ClusterWithFacts, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with cluster.reading():
            await until(lambda: all(page["read_s"] is not None for page in cluster.pages().values()))
            await scenario()

    asyncio.run(whole())


def test_files_follow_the_objects(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        meta = cluster.files.node.read()
        assert meta is not None
        assert meta.labels == {"node.koordinator.sh/cpu-bind-policy": "FullPCPUsOnly"}
        assert cluster.files.namespaces.read() == {"team": {"a": "b"}}
        assert cluster.pod("u1")
        assert cluster.pages()["pods"]["node"] == "n1"
        cluster.api.put(PODS, "team/late", metadata={"uid": "u2"}, spec=SPEC)
        await until(lambda: cluster.pod("u2"), 1.0)
        assert cluster.pages()["pods"]["resourceVersion"] == str(cluster.api.version)
        cluster.api.remove(PODS, "team/web")
        await until(lambda: not cluster.pod("u1"), 1.0)
        cluster.api.put(NAMESPACES, "team", metadata={"labels": {}})
        await until(lambda: cluster.files.namespaces.read() == {"team": {}}, 1.0)

    run_scenario(cluster, scenario)
    selectors = {(r.url.path, r.url.params.get("fieldSelector")) for r in cluster.api.received}
    assert selectors == {(NODES, "metadata.name=n1"), (PODS, "spec.nodeName=n1"), (NAMESPACES, None)}


def test_the_daemon_is_notified_of_changes_of_the_node_and_not_of_pods(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        await until(lambda: len(cluster.daemon.queries) == 2)
        cluster.api.put(PODS, "team/late", metadata={"uid": "u2"}, spec=SPEC)
        await until(lambda: cluster.pod("u2"))
        assert cluster.daemon.queries == ["/cluster/refresh"] * 2
        cluster.daemon.down = True
        cluster.api.put(NAMESPACES, "team", metadata={"labels": {"a": "c"}})
        await until(lambda: len(cluster.daemon.queries) == 3)
        cluster.api.put(NAMESPACES, "team", metadata={"labels": {"a": "d"}})
        await until(lambda: cluster.files.namespaces.read() == {"team": {"a": "d"}})

    run_scenario(cluster, scenario)


def test_a_heartbeat_of_a_node_writes_nothing(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        path = cluster.directory / "node.json"
        before = path.stat().st_ino
        cluster.api.put(
            NODES,
            "n1",
            metadata={"labels": {"node.koordinator.sh/cpu-bind-policy": "FullPCPUsOnly", "other": "x"}},
            status={"conditions": [{"lastHeartbeatTime": "now"}]},
        )
        cluster.api.put(PODS, "team/late", metadata={"uid": "u2"}, spec=SPEC)
        await until(lambda: cluster.pod("u2"))
        assert path.stat().st_ino == before

    run_scenario(cluster, scenario)


def test_the_age_of_a_file_is_that_of_the_last_watch_event(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        await until(lambda: cluster.pages()["pods"]["confirmed_s"] > 0.8)
        assert cluster.api.watches == 3, "a dead connection looks like this"
        await until(lambda: confirmed(cluster, "pods") < 0.3)

    run_scenario(cluster, scenario)


def test_an_outage_leaves_the_files_and_they_get_older(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        await until(lambda: confirmed(cluster, "pods") < 0.15)
        cluster.api.crash()
        await until(lambda: cluster.pages()["pods"]["confirmed_s"] > 0.5)
        assert cluster.pod("u1")
        cluster.api.down = False
        cluster.api.put(PODS, "team/late", metadata={"uid": "u2"}, spec=SPEC)
        await until(lambda: cluster.pod("u2"), 5.0)
        await until(lambda: confirmed(cluster, "namespaces") < 0.15)

    run_scenario(cluster, scenario)


@pytest.mark.parametrize("code", [401, 403, 404])
def test_revoked_permissions_do_not_empty_the_files(cluster: ClusterWithFacts, code: int) -> None:
    async def scenario() -> None:
        for path in (NODES, PODS, NAMESPACES):
            cluster.api.answers[path] += [code] * 50
        cluster.api.end_watches()
        await until(lambda: cluster.pages()["pods"]["confirmed_s"] > 0.6)
        assert cluster.pod("u1")
        assert cluster.files.namespaces.read() == {"team": {"a": "b"}}
        assert cluster.files.node.read() is not None

    run_scenario(cluster, scenario)


def test_a_node_object_that_is_deleted_leaves_the_last_one(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        cluster.api.remove(NODES, "n1")
        await until(lambda: cluster.pages()["node"]["confirmed_s"] > 0.5)
        assert cluster.files.node.read() is not None
        await until(lambda: confirmed(cluster, "pods") < 0.15)
        assert cluster.pages()["node"]["confirmed_s"] > 0.5, "only the others are current"

    run_scenario(cluster, scenario)


def test_a_removed_file_is_written_again(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        (cluster.directory / "pods.json").unlink()
        await until((cluster.directory / "pods.json").exists)

    run_scenario(cluster, scenario)


def test_a_directory_that_cannot_be_written_is_reported_and_tried_again(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        cluster.directory.rename(cluster.directory.with_name("away"))
        cluster.api.put(PODS, "team/late", metadata={"uid": "u2"}, spec=SPEC)
        await until(
            lambda: any("cannot write what was read from the cluster" in line for line in cluster.lines)
        )
        cluster.directory.with_name("away").rename(cluster.directory)
        await until(lambda: cluster.pod("u2"))

    run_scenario(cluster, scenario)


def test_without_a_selector_namespaces_are_not_watched(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cluster = ClusterWithFacts(tmp_path, selecting=False)

    async def scenario() -> None:
        async with cluster.reading():
            await until(lambda: cluster.pages()["pods"]["read_s"] is not None)

    asyncio.run(scenario())
    assert cluster.api.count("GET", NAMESPACES) == 0
    assert not (cluster.directory / "namespaces.json").exists()
    assert json.loads((cluster.directory / "pods.json").read_bytes())["items"] == []
    assert (cluster.directory.stat().st_mode & 0o777) == 0o700


def test_without_a_directory_nothing_is_done(tmp_path: Path) -> None:
    api = FakeApi(NODES)
    session = AgentSession(Config(), "n1", QueriedDaemon(), api.client(), telemetry())  # type: ignore[arg-type]
    done: Awaitable[None] = write_facts(session)
    asyncio.run(asyncio.wait_for(done, 5))
    assert not api.requests


def test_namespaces_that_change_often_are_written_rarely(cluster: ClusterWithFacts) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        began, written = loop.time(), list[object]()
        while loop.time() - began < 1.2:
            cluster.api.put(NAMESPACES, "team", metadata={"labels": {"a": str(loop.time())}})
            await asyncio.sleep(0.02)
            if (now := cluster.files.namespaces.read()) not in written:
                written.append(now)
        assert 2 <= len(written) <= 2 + (loop.time() - began) / 0.4
        cluster.api.put(NAMESPACES, "team", metadata={"labels": {"a": "last"}})
        await until(lambda: cluster.files.namespaces.read() == {"team": {"a": "last"}}, 2.0)

    run_scenario(cluster, scenario)


def test_the_daemon_reads_of_a_pod_what_it_would_read_of_the_whole_object() -> None:
    kept = json.loads(stored_pod_json(POD))
    assert pod_spec(kept, listed=True).requests == pod_spec(POD, listed=True).requests
    requests = pod_spec(kept, listed=True).requests
    assert [c.kind for c in requests.containers] == [ContainerKind.SIDECAR, ContainerKind.APP]
    assert requests.pod_level_requests == {"cpu": 2000, "memory": 1 << 30}
    assert kept["metadata"]["annotations"] == {RESOURCE_STATUS: "{}", "kubernetes.io/config.hash": "h"}
    assert kept["spec"].keys() == {"initContainers", "containers", "overhead", "resources"}
    assert len(stored_pod_json(POD)) < 800


def test_the_prescribing_parts_of_a_node_object_are_kept() -> None:
    item = {
        "metadata": {
            "name": "n1",
            "uid": "u",
            "labels": {"node.koordinator.sh/cpu-bind-policy": "FullPCPUsOnly", "zone": "a"},
            "annotations": {RESERVATION: "{}", "big": "x" * 100_000},
        },
        "status": {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "7"}, "images": [{}] * 100},
    }
    meta = node_meta_of(json.loads(stored_node_json(item)))
    assert (meta.name, meta.uid) == ("n1", "u")
    assert meta.labels == {"node.koordinator.sh/cpu-bind-policy": "FullPCPUsOnly"}
    assert meta.annotations == {RESERVATION: "{}"}
    assert (meta.capacity, meta.allocatable) == ({"cpu": 8000}, {"cpu": 7000})
    assert meta.problems == ()


def test_all_labels_of_a_namespace_are_kept() -> None:
    item = {"metadata": {"name": "a", "labels": {"x": "1", "y": 2, "z": "l" * (LONGEST_TEXT + 1)}}}
    assert json.loads(stored_namespace_json(item)) == {"metadata": {"name": "a", "labels": {"x": "1"}}}


@pytest.mark.parametrize("fields", [stored_node_json, stored_namespace_json, stored_pod_json])
@pytest.mark.parametrize("item", [{}, {"metadata": None}, {"metadata": {}}, {"metadata": {"name": 3}}])
def test_objects_without_a_name_are_refused(fields: Any, item: Any) -> None:
    with pytest.raises(ValueError, match="no metadata"):
        fields(item)


@pytest.mark.parametrize("odd", [None, 5, "x", [1]])
def test_invalid_parts_are_omitted(odd: Any) -> None:
    name = {"name": "a", "labels": odd, "annotations": odd}
    for fields in (stored_node_json, stored_namespace_json, stored_pod_json):
        item = {"metadata": name, "spec": odd, "status": odd}
        assert json.loads(fields(item))["metadata"]["name"] == "a"
    assert json.loads(stored_pod_json({"metadata": name, "spec": {"containers": odd}}))["spec"].get(
        "containers"
    ) in (
        None,
        [{}],
    )
