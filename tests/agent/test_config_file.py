"""The agent follows the files of the configuration for the keys that need no restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proxy import logs
from proxy.agent import cluster_config, config_file
from proxy.agent.cluster_config import follow_config
from proxy.agent.cluster_facts import read_facts
from proxy.agent.config_file import follow_file
from proxy.agent.config_objects import ANNOTATION, COLLECTION
from proxy.agent.session import AgentSession
from proxy.backends.cluster.files import AgentFiles
from proxy.config.load import drop_ins, load
from proxy.config.origin import Origin
from proxy.config.schema import Config
from tests.agent.fake_api import FakeApi
from tests.testkit.captured_log import telemetry
from tests.testkit.waiting import until

NODES, PODS, NAMESPACES = "/api/v1/nodes", "/api/v1/pods", "/api/v1/namespaces"
SELECTING = "admission: {namespaceSelector: {matchLabels: {cpus: may-own}}}\n"


class ReloadedDaemon:
    """A daemon that accepts everything."""

    async def query(self, route: str, params: object = None, **more: object) -> object:
        return {"reload": {"result": "applied"}} if route == "/reload" else {}


class World:
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
            ReloadedDaemon(),  # type: ignore[arg-type]
            self.api.client(),
            telemetry(self.lines),
        )

    def write(self, text: str) -> None:
        self.file.write_text(f"clusterFacts: {{directory: {self.directory}}}\n{text}")

    @property
    def namespaces(self) -> object:
        return AgentFiles(self.directory).namespaces.read()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(config_file, "LOOK_S", 0.05)
    monkeypatch.setattr(cluster_config, "SPREAD_S", 0.05)
    return World(tmp_path)


def run_scenario(world: World, scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        parts = [
            asyncio.ensure_future(part(world.session)) for part in (follow_file, read_facts, follow_config)
        ]
        try:
            await scenario()
            assert not any(part.done() for part in parts)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            await world.session.api.close()

    asyncio.run(whole())


def test_namespaces_are_read_while_the_configuration_selects_by_their_labels(world: World) -> None:
    async def scenario() -> None:
        await until(lambda: world.api.watches == 2)
        assert world.api.count("GET", NAMESPACES) == 0
        world.write(SELECTING)
        await until(lambda: world.namespaces == {"trading": {"cpus": "may-own"}})
        requests = world.api.count("GET", NAMESPACES)
        world.write("")
        await until(lambda: world.session.config.admission.namespace_selector.all)
        await asyncio.sleep(0.1)
        world.api.end_watches()
        await asyncio.sleep(1.0)
        assert world.api.count("GET", NAMESPACES) == requests
        world.api.put(NAMESPACES, "other", metadata={"labels": {}})
        world.write(SELECTING)
        await until(lambda: world.namespaces == {"trading": {"cpus": "may-own"}, "other": {}})

    run_scenario(world, scenario)


def test_a_selector_from_the_cluster_counts(world: World) -> None:
    async def scenario() -> None:
        world.write("clusterConfig: {allowed: [admission]}\n")
        selector = {"matchLabels": {"cpus": "may-own"}}
        settings = {"admission": {"namespaceSelector": selector}}
        world.api.put(COLLECTION, "tenants", metadata={"generation": 1}, spec={"config": settings})
        await until(lambda: world.namespaces == {"trading": {"cpus": "may-own"}})

    run_scenario(world, scenario)


def test_settings_of_the_cluster_are_used_once_the_node_permits_them(world: World) -> None:
    async def scenario() -> None:
        settings = {"log": {"level": "debug"}}
        world.api.put(COLLECTION, "base", metadata={"generation": 1}, spec={"config": settings})
        await asyncio.sleep(0.2)
        assert world.api.count("GET", COLLECTION) == 0
        drop_in = drop_ins(world.file) / "10-cluster.yaml"
        drop_in.parent.mkdir()
        drop_in.write_text("clusterConfig: {allowed: [log]}\n")
        await until(lambda: ANNOTATION in str(world.api.collections[NODES]["n1"]))
        assert (world.directory / "config.yaml").exists()

    run_scenario(world, scenario)


def test_a_faulty_file_is_reported_and_what_was_read_last_stays(world: World) -> None:
    async def scenario() -> None:
        world.write(SELECTING)
        await until(lambda: not world.session.config.admission.namespace_selector.all)
        world.write("admission: [\n")
        await until(lambda: any("cannot read the configuration again" in line for line in world.lines))
        assert not world.session.config.admission.namespace_selector.all
        world.write(SELECTING)
        await until(lambda: any(line.startswith("resolved") for line in world.lines))

    run_scenario(world, scenario)


def test_the_level_of_the_log_follows_and_other_keys_wait_for_a_restart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str] = []
    monkeypatch.setattr(logs.log, "change", lambda level, form: levels.append(level))

    async def scenario() -> None:
        world.write("log: {level: debug}\ncluster: {events: false}\nrejectedPods: {policy: evict}\n")
        await until(lambda: levels)
        assert levels == ["debug"]
        assert world.session.config.cluster == Config().cluster
        assert world.session.config.rejected_pods == Config().rejected_pods

    run_scenario(world, scenario)
