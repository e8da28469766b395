"""Which TopoproxyConfig applies on a node; the daemon applies it, or the node reports why not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.agent import cluster_config
from proxy.agent.cluster_config import CANNOT_REMOVE, follow_cluster_config
from proxy.agent.config_objects import ANNOTATION, COLLECTION
from proxy.agent.session import AgentSession
from proxy.config.cluster_config import FILE_NAME, IGNORED, ClusterConfigConfig
from proxy.config.load import load
from proxy.config.origin import Origin
from proxy.config.schema import Config
from proxy.model.backoff import Backoff
from proxy.model.errors import UnavailableError
from tests.agent.fake_api import FakeApi
from tests.testkit.captured_log import telemetry
from tests.testkit.simulated_clock import run_simulated
from tests.testkit.waiting import until

NODES = "/api/v1/nodes"


class ReloadedDaemon:
    """A daemon that reloads, unless a test makes it refuse."""

    def __init__(self) -> None:
        self.reloads = 0
        self.down = False
        self.refusal = ""
        self.notes: list[str] = []

    async def query(self, route: str, params: Any = None, *, timeout: float = 5, act: bool = False) -> object:
        assert (route, act) == ("/reload", True)
        if self.down:
            raise UnavailableError("it is down")
        self.reloads += 1
        result = "refused" if self.refusal else "applied"
        return {"reload": {"result": result, "reason": self.refusal, "notes": self.notes}}


class ClusterWithConfigs:
    def __init__(self, directory: Path, allowed: str = "[log, admission]") -> None:
        directory.chmod(0o700)
        self.path = directory / "cluster" / FILE_NAME
        file = directory / "config.yaml"
        file.write_text(
            f"clusterFacts: {{directory: {directory}/cluster}}\nclusterConfig: {{allowed: {allowed}}}\n"
        )
        self.config = replace(load(file), origin=Origin(file))
        self.api = FakeApi(NODES, COLLECTION)
        self.api.put(NODES, "n1", metadata={"labels": {"tier": "gold"}})
        self.daemon = ReloadedDaemon()
        self.lines: list[str] = []

    def put(self, name: str, generation: int = 1, config: Any = None, **spec: Any) -> None:
        metadata = {"generation": generation}
        config = {"log": {"level": "debug"}} if config is None else config
        self.api.put(COLLECTION, name, metadata=metadata, spec={"config": config, **spec})

    @property
    def content(self) -> Any:
        return json.loads(self.path.read_text()) if self.path.exists() else None

    @property
    def reported(self) -> Any:
        text = self.api.collections[NODES]["n1"]["metadata"].get("annotations", {}).get(ANNOTATION)
        return json.loads(text) if text else None

    def status(self, name: str) -> Any:
        return self.api.collections[COLLECTION][name].get("status", {}).get("nodes")

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        session = AgentSession(
            self.config, "n1", self.daemon, self.api.client(), telemetry(self.lines)  # type: ignore[arg-type]
        )  # fmt: skip
        task = asyncio.ensure_future(follow_cluster_config(session))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await session.api.close()


async def at_once(work: Callable[..., object], *arguments: object) -> object:
    """Do what the part does in a thread, for which the simulated clock would not wait."""
    return work(*arguments)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterWithConfigs:
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    monkeypatch.setattr(cluster_config, "PAUSES", Backoff(0.05, 0.1))
    monkeypatch.setattr(cluster_config, "SPREAD_S", 0.05)
    return ClusterWithConfigs(tmp_path)


def run_scenario(cluster: ClusterWithConfigs, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with cluster.following():
            await scenario()

    run_simulated(whole())


def test_the_daemon_gets_the_settings_and_the_node_reports_them(cluster: ClusterWithConfigs) -> None:
    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.reported)
        assert cluster.content == {"log": {"level": "debug"}}
        assert cluster.reported == {"name": "base", "generation": 1, "accepted": True}
        await until(lambda: cluster.status("base"))
        assert cluster.status("base") == [{"name": "n1", "generation": 1, "accepted": True}]
        assert cluster.daemon.reloads == 1
        cluster.put(
            "gold",
            5,
            {"admission": {"maxCPUsPerPod": 2}},
            priority=1,
            nodeSelector={"matchLabels": {"tier": "gold"}},
        )
        await until(lambda: cluster.reported["name"] == "gold")
        assert cluster.content == {"admission": {"maxCPUsPerPod": 2}}
        cluster.api.put(NODES, "n1", metadata={"labels": {}})
        await until(lambda: cluster.reported and cluster.reported["name"] == "base")
        cluster.api.remove(COLLECTION, "base")
        await until(lambda: cluster.reported is None)
        assert cluster.content is None
        assert cluster.daemon.reloads == 4

    run_scenario(cluster, scenario)


@pytest.mark.parametrize("is_noticed", [False, True])
def test_an_object_that_is_created_again_gets_the_answer_in_its_status(
    cluster: ClusterWithConfigs, is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.status("base"))
        former = cluster.api.collections[COLLECTION]["base"]
        monkeypatch.setattr(cluster_config, "SPREAD_S", 0.3)
        cluster.api.remove(COLLECTION, "base")
        if is_noticed:
            await until(lambda: cluster.content is None)
        metadata = {**former["metadata"], "uid": "another"}
        cluster.api.put(COLLECTION, "base", metadata=metadata, spec=former["spec"])
        await until(lambda: cluster.status("base"))
        assert cluster.status("base") == [{"name": "n1", "generation": 1, "accepted": True}]

    run_scenario(cluster, scenario)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"listen": "unix:///x"}, "listen: this node does not permit it"),
        ({"hooks": {"enabled": True}}, "hooks.enabled: this node does not permit it"),
        ({"log": {"level": "loud"}}, "'loud' is not"),
        ({"log": {"level": ["a"]}}, "must be"),
    ],
)
def test_settings_that_the_node_does_not_permit_change_nothing(
    cluster: ClusterWithConfigs, config: Any, why: str
) -> None:
    async def scenario() -> None:
        cluster.put("good")
        await until(lambda: cluster.reported)
        cluster.put("good", 2, config)
        await until(lambda: cluster.reported["generation"] == 2)
        assert not cluster.reported["accepted"]
        assert why in cluster.reported["reason"]
        assert cluster.content == {"log": {"level": "debug"}}, "the previous settings stay in effect"
        assert cluster.daemon.reloads == 1, (
            "the daemon is not reloaded with settings that are known to be invalid"
        )
        await until(lambda: cluster.status("good")[0]["accepted"] is False)

    run_scenario(cluster, scenario)


@pytest.mark.parametrize("noted", [False, True])
def test_settings_that_the_daemon_refuses_are_removed_before_its_next_start(
    cluster: ClusterWithConfigs, noted: bool
) -> None:
    async def scenario() -> None:
        cluster.put("good")
        await until(lambda: cluster.reported)
        if noted:
            cluster.daemon.notes = [f"{IGNORED}: there is no CPU 9"]
        else:
            cluster.daemon.refusal = "there is no CPU 9"
        cluster.put("good", 2, {"log": {"level": "error"}})
        await until(lambda: cluster.reported["generation"] == 2)
        assert "there is no CPU 9" in cluster.reported["reason"]
        assert cluster.content == {"log": {"level": "debug"}}

    run_scenario(cluster, scenario)


def test_settings_that_the_daemon_refuses_are_tried_again(
    cluster: ClusterWithConfigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_config, "RECHECK_S", 0.1)

    async def scenario() -> None:
        cluster.put("good")
        await until(lambda: cluster.reported)
        cluster.daemon.refusal = "a container has CPU 9"
        cluster.put("good", 2, {"log": {"level": "error"}})
        await until(lambda: not cluster.reported["accepted"])
        await until(lambda: cluster.status("good")[0]["accepted"] is False)
        patches, reloads = cluster.api.count("PATCH"), cluster.daemon.reloads
        await until(lambda: cluster.daemon.reloads >= reloads + 3)
        assert cluster.api.count("PATCH") == patches, "the same answer is reported once"
        assert sum("refused the settings of the cluster" in line for line in cluster.lines) == 1
        cluster.daemon.refusal = ""
        await until(lambda: cluster.reported["accepted"])
        assert cluster.content == {"log": {"level": "error"}}

    run_scenario(cluster, scenario)


@pytest.mark.parametrize("restart", [False, True])
def test_settings_of_a_deleted_object_are_removed_as_soon_as_the_daemon_accepts_it(
    cluster: ClusterWithConfigs, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    monkeypatch.setattr(cluster_config, "RECHECK_S", 0.1)

    def has_problem() -> bool:
        return any(line.startswith(CANNOT_REMOVE) for line in cluster.lines)

    async def deleted() -> None:
        cluster.put("base")
        await until(lambda: cluster.reported)
        cluster.daemon.refusal = "line 3: not YAML"
        cluster.api.remove(COLLECTION, "base")
        await until(lambda: "reason" in cluster.reported)
        assert cluster.reported["accepted"], "they are in effect"
        assert "line 3: not YAML" in cluster.reported["reason"]
        assert cluster.content is None, "a restart of the daemon does not use them"
        assert has_problem()

    async def accepted() -> None:
        reloads = cluster.daemon.reloads
        await until(lambda: cluster.daemon.reloads >= reloads + 3)
        assert cluster.reported["accepted"]
        cluster.daemon.refusal = ""
        await until(lambda: cluster.reported is None)
        assert any(line.startswith("resolved") and CANNOT_REMOVE in line for line in cluster.lines)
        reloads = cluster.daemon.reloads
        await asyncio.sleep(0.4)
        assert cluster.daemon.reloads == reloads

    async def both() -> None:
        await deleted()
        await accepted()

    if restart:
        run_scenario(cluster, deleted)
        run_scenario(cluster, accepted)
    else:
        run_scenario(cluster, both)


def test_another_node_object_of_the_same_name_gets_the_answer(cluster: ClusterWithConfigs) -> None:
    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.reported)
        cluster.api.remove(NODES, "n1")
        await asyncio.sleep(0.1)
        cluster.api.put(NODES, "n1", metadata={"uid": "new", "labels": {"tier": "gold"}})
        assert cluster.reported is None
        await until(lambda: cluster.reported)
        assert cluster.daemon.reloads == 1

    run_scenario(cluster, scenario)


def test_a_daemon_that_is_down_gets_the_settings_later(cluster: ClusterWithConfigs) -> None:
    cluster.daemon.down = True

    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.content)
        await until(lambda: any("cannot apply the settings of the cluster" in line for line in cluster.lines))
        assert cluster.reported is None, "nothing is reported before the result is known"
        cluster.daemon.down = False
        await until(lambda: cluster.reported)
        assert cluster.reported["accepted"]

    run_scenario(cluster, scenario)


def test_without_the_crd_or_the_api_server_the_settings_stay(cluster: ClusterWithConfigs) -> None:
    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.reported)
        cluster.api.answers[COLLECTION] += [404] * 20
        cluster.api.end_watches()
        await asyncio.sleep(0.5)
        assert cluster.content == {"log": {"level": "debug"}}
        assert cluster.daemon.reloads == 1

    run_scenario(cluster, scenario)


def test_a_node_removes_its_entry_from_an_object_that_it_no_longer_uses(cluster: ClusterWithConfigs) -> None:
    async def scenario() -> None:
        cluster.put("gold", nodeSelector={"matchLabels": {"tier": "gold"}})
        await until(lambda: cluster.status("gold"))
        cluster.api.put(NODES, "n1", metadata={"labels": {}})

        def applied() -> list[Any]:
            return [r for r in cluster.api.received if r.url.path == f"{COLLECTION}/gold/status"]

        await until(lambda: len(applied()) == 2)
        assert cluster.reported is None
        assert json.loads(applied()[1].content)["status"] == {}, (
            "an apply without the fields that its owner had before"
        )
        assert {r.url.params["fieldManager"] for r in applied()} == {"topoproxy-n1"}, (
            "only the entry of this node"
        )

    run_scenario(cluster, scenario)


def test_nodes_take_settings_at_once_and_report_them_at_different_times(
    cluster: ClusterWithConfigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_config.random, "uniform", lambda low, high: 0.5)

    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.daemon.reloads)
        await asyncio.sleep(0.2)
        assert cluster.reported is None
        assert not cluster.status("base")
        await until(lambda: cluster.reported)
        await until(lambda: cluster.status("base"))

    run_scenario(cluster, scenario)


@pytest.mark.parametrize("message", ["status.nodes: Too many: 21: must have at most 20 items", "status: no"])
def test_a_list_that_other_nodes_have_filled_is_no_error(cluster: ClusterWithConfigs, message: str) -> None:
    one = cluster.api._handle_object

    def full(method: str, collection: str, name: str, body: Any) -> Any:
        if collection == COLLECTION and name.endswith("/status"):
            return httpx2.Response(422, json={"message": message})
        return one(method, collection, name, body)

    cluster.api._handle_object = full  # type: ignore[method-assign]

    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.reported)
        path = f"{COLLECTION}/base/status"
        await until(lambda: cluster.api.count("PATCH", path))
        await asyncio.sleep(0.5)
        assert (cluster.api.count("PATCH", path) == 1) == ("Too many" in message)
        problem = "cannot report which settings of the cluster are in effect"
        assert any(problem in line for line in cluster.lines) == ("Too many" not in message)

    run_scenario(cluster, scenario)


def test_a_key_that_is_no_longer_permitted_is_reported(
    cluster: ClusterWithConfigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_config, "RECHECK_S", 0.05)

    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.reported)
        assert cluster.reported["accepted"]
        file = cluster.path.parent.with_name("config.yaml")
        text = file.read_text()
        file.write_text(text.replace("[log, admission]", "[admission]"))
        await until(lambda: not cluster.reported["accepted"])
        assert "log.level: this node does not permit it" in cluster.reported["reason"]
        await until(lambda: cluster.status("base")[0]["accepted"] is False)
        file.write_text(text)
        await until(lambda: cluster.reported["accepted"])
        reloads = cluster.daemon.reloads
        await asyncio.sleep(0.3)
        assert cluster.daemon.reloads == reloads, "the daemon is not reloaded without a change"

    run_scenario(cluster, scenario)


def test_settings_refused_after_an_outage_of_the_daemon_are_reverted(cluster: ClusterWithConfigs) -> None:
    async def scenario() -> None:
        cluster.put("good")
        await until(lambda: cluster.reported)
        cluster.daemon.down = True
        cluster.put("good", 2, {"log": {"level": "error"}})
        await until(lambda: cluster.content == {"log": {"level": "error"}})
        cluster.daemon.refusal = "there is no CPU 9"
        cluster.daemon.down = False
        await until(lambda: cluster.reported["generation"] == 2)
        assert not cluster.reported["accepted"]
        assert cluster.content == {"log": {"level": "debug"}}

    run_scenario(cluster, scenario)


def test_an_odd_object_is_ignored_with_a_reason(cluster: ClusterWithConfigs) -> None:
    async def scenario() -> None:
        cluster.api.put(COLLECTION, "odd", spec={"config": 5, "priority": 100})
        cluster.put("base")
        await until(lambda: cluster.reported)
        assert cluster.reported["name"] == "base"
        assert any("spec.config is missing" in line for line in cluster.lines)

    run_scenario(cluster, scenario)


def test_a_node_that_permits_nothing_reads_its_node_once(cluster: ClusterWithConfigs) -> None:
    cluster.config = Config()

    async def scenario() -> None:
        await asyncio.sleep(0.1)

    run_scenario(cluster, scenario)
    assert dict(cluster.api.requests) == {("GET", f"{NODES}/n1"): 1}


@pytest.mark.parametrize("with_directory", [True, False])
def test_reports_of_an_earlier_run_are_removed_if_nothing_is_permitted_any_more(
    cluster: ClusterWithConfigs, with_directory: bool
) -> None:
    async def reports() -> None:
        cluster.put("base")
        await until(lambda: cluster.reported and cluster.status("base"))

    async def removes() -> None:
        await until(lambda: cluster.reported is None)

    run_scenario(cluster, reports)
    cluster.api.put(COLLECTION, "other", spec={"config": {}}, status={"nodes": [{"name": "n2"}]})
    facts = replace(cluster.config.cluster_facts, directory=None) if not with_directory else None
    cluster.config = replace(
        cluster.config,
        cluster_config=ClusterConfigConfig(),
        cluster_facts=facts or cluster.config.cluster_facts,
    )
    cluster.api.answers[f"{NODES}/n1"] = [503, 403]
    run_scenario(cluster, removes)
    owner = {"fieldManager": "topoproxy-n1", "force": "true"}
    left = [request for request in cluster.api.received if request.url.path == f"{COLLECTION}/base/status"][
        -1
    ]
    assert dict(left.url.params) == owner
    assert json.loads(left.content)["status"] == {}
    assert not cluster.api.count("PATCH", f"{COLLECTION}/other/status")
    assert (cluster.content is None) == with_directory


@pytest.mark.parametrize("path", [f"{NODES}/n1", f"{COLLECTION}/base/status"])
def test_a_report_is_not_repeated_before_the_api_server_permits_it(
    cluster: ClusterWithConfigs, path: str
) -> None:
    async def scenario() -> None:
        cluster.api.answers[path], cluster.api.retry_after = [429], "1"
        cluster.put("base")
        await until(lambda: cluster.api.count("PATCH", path) == 1)
        cluster.put("base", 2, {"log": {"level": "error"}})
        await until(lambda: cluster.content == {"log": {"level": "error"}})
        await asyncio.sleep(0.5)
        assert cluster.api.count("PATCH", path) == 1
        await until(lambda: cluster.status("base"))
        assert cluster.reported["generation"] == 2

    run_scenario(cluster, scenario)


def test_a_node_is_not_removed_from_a_status_before_the_api_server_permits_it(
    cluster: ClusterWithConfigs,
) -> None:
    path = f"{COLLECTION}/base/status"

    async def scenario() -> None:
        cluster.put("base")
        await until(lambda: cluster.status("base"))
        cluster.api.answers[path], cluster.api.retry_after = [429], "1"
        cluster.put("gold", priority=1)
        cluster.api.put(COLLECTION, "base", spec={"config": {}}, status={"nodes": [{"name": "n1"}]})
        await until(lambda: cluster.api.count("PATCH", path) == 2)
        await asyncio.sleep(0.5)
        assert cluster.api.count("PATCH", path) == 2
        await until(lambda: cluster.api.count("PATCH", path) == 3)

    run_scenario(cluster, scenario)


def test_reports_of_an_earlier_run_are_not_read_before_the_api_server_permits_it(
    cluster: ClusterWithConfigs,
) -> None:
    path = f"{NODES}/n1"
    cluster.config = Config()
    cluster.api.answers[path], cluster.api.retry_after = [429], "1"

    async def scenario() -> None:
        await until(lambda: cluster.api.count("GET", path) == 1)
        await asyncio.sleep(0.5)
        assert cluster.api.count("GET", path) == 1
        await until(lambda: cluster.api.count("GET", path) == 2)

    run_scenario(cluster, scenario)


@pytest.mark.parametrize("answers", [[404], [403] * 10])
def test_a_node_that_cannot_be_read_has_no_reports(cluster: ClusterWithConfigs, answers: list[int]) -> None:
    cluster.config = Config()
    cluster.api.answers[f"{NODES}/n1"] = answers

    async def scenario() -> None:
        await asyncio.sleep(1)

    run_scenario(cluster, scenario)
    assert cluster.api.requests["GET", f"{NODES}/n1"] <= 6
    assert not cluster.api.count("PATCH")


def test_keys_may_be_permitted_while_the_api_server_is_away(cluster: ClusterWithConfigs) -> None:
    config, cluster.config = cluster.config, replace(cluster.config, cluster_config=ClusterConfigConfig())
    cluster.api.down = True

    async def scenario() -> None:
        session = AgentSession(
            cluster.config, "n1", cluster.daemon, cluster.api.client(), telemetry([])  # type: ignore[arg-type]
        )  # fmt: skip
        task = asyncio.ensure_future(follow_cluster_config(session))
        await asyncio.sleep(0.1)
        session.use(config)
        await asyncio.sleep(0.2)
        cluster.api.down = False
        cluster.put("base")
        await until(lambda: cluster.reported)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await session.api.close()

    run_simulated(scenario())
    assert cluster.reported["accepted"]
