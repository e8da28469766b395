"""The agent follows the files of the configuration for the keys that need no restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proxy import logs
from proxy.agent import cluster_config, config_file
from proxy.agent.cluster_config import follow_cluster_config
from proxy.agent.cluster_facts import write_facts
from proxy.agent.config_file import follow_config_files
from proxy.agent.config_objects import ANNOTATION, COLLECTION
from proxy.agent.session import AgentSession
from proxy.backends.cluster.files import AgentFiles
from proxy.config.load import drop_in_directory, load
from proxy.config.origin import Origin
from proxy.config.schema import Config
from tests.agent.fake_api import FakeApi
from tests.testkit.captured_log import telemetry
from tests.testkit.waiting import until

NODES, PODS, NAMESPACES = "/api/v1/nodes", "/api/v1/pods", "/api/v1/namespaces"
SELECTING = "admission: {namespaceSelector: {matchLabels: {cpus: may-own}}}\n"


class AcceptingDaemon:
    """A daemon that accepts everything."""

    async def query(self, route: str, params: object = None, **more: object) -> object:
        return {"reload": {"result": "applied"}} if route == "/reload" else {}


class ClusterWithConfigFile:
    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        self.directory = directory / "cluster"
        self.file = directory / "config.yaml"
        self.write("")
        self.api = FakeApi(NODES, PODS, NAMESPACES, COLLECTION)
        self.api.put(NODES, "n1", metadata={"labels": {}})
        self.api.put(NAMESPACES, "trading", metadata={"labels": {"cpus": "may-own"}})
        self.lines: list[str] = []
        self.session = AgentSession(
            replace(load(self.file), origin=Origin(self.file, trusted=False)),
            "n1",
            AcceptingDaemon(),  # type: ignore[arg-type]
            self.api.client(),
            telemetry(self.lines),
        )

    def write(self, text: str) -> None:
        self.file.write_text(f"clusterFacts: {{directory: {self.directory}}}\n{text}")

    @property
    def namespaces(self) -> object:
        return AgentFiles(self.directory).namespaces.read()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterWithConfigFile:
    monkeypatch.setattr(config_file, "COMPARE_S", 0.05)
    monkeypatch.setattr(cluster_config, "SPREAD_S", 0.05)
    return ClusterWithConfigFile(tmp_path)


def run_scenario(cluster: ClusterWithConfigFile, scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        parts = [
            asyncio.ensure_future(part(cluster.session))
            for part in (follow_config_files, write_facts, follow_cluster_config)
        ]
        try:
            await scenario()
            assert not any(part.done() for part in parts)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            await cluster.session.api.close()

    asyncio.run(whole())


def test_namespaces_are_read_while_the_configuration_selects_by_their_labels(
    cluster: ClusterWithConfigFile,
) -> None:
    async def scenario() -> None:
        await until(lambda: cluster.api.watches == 2)
        assert cluster.api.count("GET", NAMESPACES) == 0
        cluster.write(SELECTING)
        await until(lambda: cluster.namespaces == {"trading": {"cpus": "may-own"}})
        requests = cluster.api.count("GET", NAMESPACES)
        cluster.write("")
        await until(lambda: cluster.session.config.admission.namespace_selector.all)
        await asyncio.sleep(0.1)
        cluster.api.end_watches()
        await asyncio.sleep(1.0)
        assert cluster.api.count("GET", NAMESPACES) == requests
        cluster.api.put(NAMESPACES, "other", metadata={"labels": {}})
        cluster.write(SELECTING)
        await until(lambda: cluster.namespaces == {"trading": {"cpus": "may-own"}, "other": {}})

    run_scenario(cluster, scenario)


def test_a_selector_from_the_cluster_counts(cluster: ClusterWithConfigFile) -> None:
    async def scenario() -> None:
        cluster.write("clusterConfig: {allowed: [admission]}\n")
        selector = {"matchLabels": {"cpus": "may-own"}}
        settings = {"admission": {"namespaceSelector": selector}}
        cluster.api.put(COLLECTION, "tenants", metadata={"generation": 1}, spec={"config": settings})
        await until(lambda: cluster.namespaces == {"trading": {"cpus": "may-own"}})

    run_scenario(cluster, scenario)


def test_settings_of_the_cluster_are_used_once_the_node_permits_them(cluster: ClusterWithConfigFile) -> None:
    async def scenario() -> None:
        settings = {"log": {"level": "debug"}}
        cluster.api.put(COLLECTION, "base", metadata={"generation": 1}, spec={"config": settings})
        await asyncio.sleep(0.2)
        assert cluster.api.count("GET", COLLECTION) == 0
        drop_in = drop_in_directory(cluster.file) / "10-cluster.yaml"
        drop_in.parent.mkdir()
        drop_in.write_text("clusterConfig: {allowed: [log]}\n")
        await until(lambda: ANNOTATION in str(cluster.api.collections[NODES]["n1"]))
        assert (cluster.directory / "config.yaml").exists()

    run_scenario(cluster, scenario)


def test_a_faulty_file_is_reported_and_what_was_read_last_stays(cluster: ClusterWithConfigFile) -> None:
    async def scenario() -> None:
        cluster.write(SELECTING)
        await until(lambda: not cluster.session.config.admission.namespace_selector.all)
        cluster.write("admission: [\n")
        await until(lambda: any("cannot read the configuration again" in line for line in cluster.lines))
        assert not cluster.session.config.admission.namespace_selector.all
        cluster.write(SELECTING)
        await until(lambda: any(line.startswith("resolved") for line in cluster.lines))

    run_scenario(cluster, scenario)


def test_the_level_of_the_log_follows_and_other_keys_wait_for_a_restart(
    cluster: ClusterWithConfigFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str] = []
    monkeypatch.setattr(logs.log, "change", lambda level, form: levels.append(level))

    async def scenario() -> None:
        cluster.write("log: {level: debug}\ncluster: {events: false}\nrejectedPods: {policy: evict}\n")
        await until(lambda: levels)
        assert levels == ["debug"]
        assert cluster.session.config.cluster == Config().cluster
        assert cluster.session.config.rejected_pods == Config().rejected_pods

    run_scenario(cluster, scenario)
