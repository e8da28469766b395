"""Rejected pods end at the API server, and the node is marked while it has no room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from proxy.agent import node_follower
from proxy.agent.objects.node_page import NodePage, Policies, Rejection, passthrough_page
from proxy.agent.rejections import ending as ending_module
from proxy.agent.rejections.ending import (
    KNOWN_S,
    RECHECK_S,
    RejectedPodEnding,
    TerminationHistory,
    end_rejected_pods,
)
from proxy.agent.rejections.node_mark import KEY
from proxy.agent.session import AgentSession
from proxy.agent.watcher import REFUSALS_UNTIL_ABSENT
from proxy.config.cluster import KeepAway, RejectedPodsConfig, RejectedPolicy
from proxy.config.schema import Config
from proxy.model.backoff import Backoff
from proxy.model.errors import UnavailableError
from tests.agent.fake_api import FakeApi
from tests.testkit.captured_log import telemetry
from tests.testkit.waiting import until

PODS, NODES, EVENTS = "/api/v1/pods", "/api/v1/nodes", "/api/v1/events"
OWNER = {"kind": "ReplicaSet", "uid": "rs", "controller": True}
CPUS = tuple((cpu, cpu // 2, cpu // 4, cpu // 4) for cpu in range(8))
"""Eight CPUs on two NUMA nodes."""
EVICT = RejectedPodsConfig(policy=RejectedPolicy.EVICT)


def page(*rejections: Rejection, free: str = "0,4") -> NodePage:
    policies = Policies("single-numa-node", cpu_manager_policy="static")
    return NodePage("n1", "enforce", True, True, policies, "", free, CPUS, (), rejections=rejections)


def rejection(**changed: Any) -> Rejection:
    known = Rejection("ns/web", "u1", "main", "TopologyAffinityError", "cannot place ns/web: no room", 3)
    return structs.replace(known, **changed)


class ClusterWithRejectedPod:
    def __init__(self, settings: RejectedPodsConfig = EVICT) -> None:
        self.now = 1000.0
        self.lines: list[str] = []
        self.api = FakeApi(NODES, PODS, EVENTS)
        self.api.put(NODES, "n1", spec={"taints": [{"key": "other", "effect": "NoExecute"}]})
        self.pod()
        self.session = AgentSession(
            replace(Config(), rejected_pods=settings),
            "n1",
            None,  # type: ignore[arg-type]
            self.api.client(),
            telemetry(self.lines),
        )
        self.history = TerminationHistory()
        self.ending = RejectedPodEnding(self.session, self.history, lambda: self.now, lambda: self.now)

    def pod(self, uid: str = "u1", owners: Any = (OWNER,), **status: Any) -> None:
        limits = {"limits": {"cpu": "4", "memory": "1Gi"}}
        self.api.put(
            PODS,
            "ns/web",
            metadata={"uid": uid, "ownerReferences": list(owners)},
            spec={"nodeName": "n1", "containers": [{"name": "main", "resources": limits}]},
            status={"phase": "Pending", **status},
        )

    @property
    def pod_exists(self) -> bool:
        return "ns/web" in self.api.collections[PODS]

    def sent(self, method: str, path: str) -> list[Any]:
        return [
            json.loads(r.content)
            for r in self.api.received
            if r.method == method and r.url.path.endswith(path)
        ]

    @property
    def taints(self) -> list[Any]:
        return [each["key"] for each in self.api.collections[NODES]["n1"]["spec"]["taints"] or []]


def run_scenario(
    cluster: ClusterWithRejectedPod, scenario: Callable[[ClusterWithRejectedPod], Awaitable[None]]
) -> None:
    async def whole() -> None:
        try:
            await scenario(cluster)
        finally:
            await cluster.session.api.close()

    asyncio.run(whole())


def test_a_node_whose_daemon_publishes_nothing_is_not_marked() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        assert cluster.taints == ["other", KEY]
        assert await cluster.ending.step(passthrough_page("n1")) is None
        assert cluster.taints == ["other"]

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_pod_that_was_rejected_often_enough_is_evicted_and_the_node_marked() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        assert await cluster.ending.step(page(rejection(count=2))) == RECHECK_S
        assert (cluster.pod_exists, cluster.api.count("GET")) == (True, 0), (
            "no request is sent before it is due"
        )
        later = await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists
        assert later == RECHECK_S
        assert await cluster.ending.step(page()) == EVICT.keep_away_for
        (eviction,) = cluster.sent("POST", "/eviction")
        assert eviction["deleteOptions"]["preconditions"]["uid"] == "u1"
        (event,) = cluster.api.collections[EVENTS].values()
        assert event["reason"] == "RejectedPodEvicted"
        assert event["message"] == "Rejected 3 times by topoproxy: cannot place ns/web: no room"
        assert cluster.taints == ["other", KEY]
        (patch,) = cluster.sent("PATCH", "/nodes/n1")
        assert json.loads(patch["metadata"]["annotations"][KEY]) == {
            "since": 1000.0,
            "cpus": 4,
            "free": {"0": 1, "1": 1},
        }
        written = [r.url.path for r in cluster.api.received if r.method in ("PATCH", "POST")]
        assert written.index("/api/v1/nodes/n1") < written.index("/api/v1/namespaces/ns/pods/web/eviction"), (
            "the next pod of the controller must find the mark"
        )
        writes = cluster.session.api.writes
        await cluster.ending.step(page())
        assert cluster.session.api.writes == writes, "nothing has changed"
        await cluster.ending.step(page(free="0-3"))
        assert cluster.taints == ["other"], "the node has room again"
        assert await cluster.ending.step(page(free="0-3")) is None

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_the_mark_is_removed_after_its_time() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        cluster.now += EVICT.keep_away_for - 10
        assert await cluster.ending.step(page()) == 10.0
        cluster.now += 10
        assert await cluster.ending.step(page()) is None
        assert cluster.taints == ["other"]

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_pod_is_failed_as_kubelet_would() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        (patch,) = cluster.sent("PATCH", "/pods/web/status")
        assert patch == {
            "metadata": {"uid": "u1", "annotations": {"topoproxy.io/failed-at": "1970-01-01T00:16:40Z"}},
            "status": {
                "phase": "Failed",
                "reason": "TopologyAffinityError",
                "message": "Pod was rejected: cannot place ns/web: no room",
            },
        }

    run_scenario(ClusterWithRejectedPod(replace(EVICT, policy=RejectedPolicy.FAIL)), scenario)


def test_a_pod_without_a_controller_stays_and_is_queried_once() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.pod(owners=())
        for _ in range(3):
            await cluster.ending.step(page(rejection()))
        assert await cluster.ending.step(page(rejection())) is None
        assert cluster.pod_exists
        assert cluster.api.count("GET", "/api/v1/namespaces/ns/pods/web") == 1
        (line,) = cluster.lines
        assert line.startswith("left a rejected pod alone pod=ns/web reason=")
        assert cluster.taints == ["other"], "only a pod that ended marks the node"
        await cluster.ending.step(page())
        await cluster.ending.step(page(rejection()))
        assert len(cluster.lines) == 2, "a pod that is rejected again is queried again"

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_another_pod_of_the_same_name_is_never_ended() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.pod("u2")
        await cluster.ending.step(page(rejection()))
        assert cluster.pod_exists
        cluster.pod("u1")
        cluster.now += KNOWN_S
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_pod_that_is_bound_to_another_node_is_not_ended() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.api.collections[PODS]["ns/web"]["spec"]["nodeName"] = "n2"
        await cluster.ending.step(page(rejection()))
        assert cluster.pod_exists
        assert cluster.session.api.writes == 0

    run_scenario(ClusterWithRejectedPod(), scenario)


@pytest.mark.parametrize("gone", [False, True])
def test_a_missing_pod_is_queried_at_intervals(gone: bool) -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        if gone:
            cluster.api.remove(PODS, "ns/web")
        else:
            cluster.pod("u2")
        for _ in range(5):
            cluster.now += 5
            assert await cluster.ending.step(page(rejection())) == RECHECK_S
        assert cluster.api.count("GET", "/api/v1/namespaces/ns/pods/web") == 1
        cluster.now += KNOWN_S
        await cluster.ending.step(page(rejection()))
        assert cluster.api.count("GET", "/api/v1/namespaces/ns/pods/web") == 2

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_the_planned_action_for_an_observed_pod_is_only_reported() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        for _ in range(3):
            await cluster.ending.step(page(rejection(applied=False)))
        assert await cluster.ending.step(page(rejection(applied=False))) is None
        assert cluster.pod_exists
        assert cluster.session.api.writes == 0
        (line,) = cluster.lines
        assert line.startswith("would end a rejected pod pod=ns/web")

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_report_is_forgotten_with_the_rejection() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        for _ in range(2):
            await cluster.ending.step(page(rejection(applied=False)))
        assert cluster.ending._history.done.reported
        await cluster.ending.step(page())
        assert not cluster.ending._history.done.reported
        assert len(cluster.lines) == 1

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_pod_whose_end_was_only_reported_ends_once_the_plan_is_applied_to_it() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        assert await cluster.ending.step(page(rejection(applied=False))) == RECHECK_S
        assert await cluster.ending.step(page(rejection(applied=False))) is None
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_pod_that_was_left_alone_ends_once_it_is_rejected_for_another_reason() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        everywhere = rejection(reason="RefusedByHook")
        await cluster.ending.step(page(everywhere))
        await cluster.ending.step(page(everywhere, rejection(container="side")))
        assert await cluster.ending.step(page(everywhere, rejection(container="side"))) is None
        assert cluster.pod_exists
        assert sum("left a rejected pod alone" in line for line in cluster.lines) == 1
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_disruption_budget_is_respected_and_tried_again() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        path = "/api/v1/namespaces/ns/pods/web/eviction"
        cluster.api.answers[path] = [429]
        await cluster.ending.step(page(rejection()))
        assert cluster.pod_exists
        assert any("cannot end a rejected pod pod=ns/web" in line for line in cluster.lines)
        assert cluster.taints == ["other"], "no pod was ended, so none must be kept away"
        await cluster.ending.step(page(rejection()))
        assert len(cluster.sent("POST", "/eviction")) == 1, "not again at once"
        cluster.now += 60
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists

    run_scenario(ClusterWithRejectedPod(replace(EVICT, delete_fallback=True)), scenario)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_pod_is_deleted_instead_if_the_operator_permits_that(fallback: bool) -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.api.answers["/api/v1/namespaces/ns/pods/web/eviction"] = [403]
        await cluster.ending.step(page(rejection()))
        assert cluster.pod_exists is not fallback
        if fallback:
            assert cluster.sent("DELETE", "/pods/web") == [{"preconditions": {"uid": "u1"}}]

    run_scenario(ClusterWithRejectedPod(replace(EVICT, delete_fallback=fallback)), scenario)


@pytest.mark.parametrize("status", [400, 409, 422, 500, 503])
def test_a_pod_is_never_deleted_because_its_eviction_fails(status: int) -> None:
    """The API server answers 500 for a pod that more than one disruption budget covers."""

    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.api.answers["/api/v1/namespaces/ns/pods/web/eviction"] = [status]
        await cluster.ending.step(page(rejection()))
        assert cluster.pod_exists
        assert cluster.sent("DELETE", "/pods/web") == []

    run_scenario(ClusterWithRejectedPod(replace(EVICT, delete_fallback=True)), scenario)


def test_an_api_server_that_does_not_answer_is_tried_again() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.api.down = True
        assert await cluster.ending.step(page(rejection())) == 1.0
        cluster.api.down = False
        cluster.now += 1
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_pods_that_may_not_be_read_are_queried_at_growing_intervals() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        path, start = "/api/v1/namespaces/ns/pods/web", cluster.now
        cluster.api.answers[path] = [403] * 1000
        while cluster.now < start + 600:
            later = await cluster.ending.step(page(rejection()))
            assert later is not None
            cluster.now += later
        assert cluster.api.count("GET", path) < 20
        cluster.api.answers[path] = []
        cluster.now += 60
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_node_that_may_not_be_marked_is_tried_at_growing_intervals() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        path, start = "/api/v1/nodes/n1", cluster.now
        cluster.api.answers[path] = [403] * 1000
        later = await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists
        while cluster.now < start + 300:
            assert later is not None
            cluster.now += later
            later = await cluster.ending.step(page())
        assert cluster.api.count("GET", path) < 13
        cluster.api.answers[path] = []
        cluster.now += 60
        await cluster.ending.step(page())
        assert cluster.taints == ["other", KEY]

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_pod_that_cannot_be_ended_does_not_keep_the_node_marked() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.api.answers["/api/v1/namespaces/ns/pods/web/eviction"] = [403] * 100
        for _ in range(20):
            await cluster.ending.step(page(rejection()))
            assert cluster.taints == ["other"]
            cluster.now += 200
        assert len(cluster.sent("POST", "/eviction")) > 2
        assert "no rejected pod was terminated: the mark of the node is as before" in cluster.lines

    run_scenario(ClusterWithRejectedPod(replace(EVICT, keep_away=KeepAway.NO_SCHEDULE)), scenario)


def test_an_end_that_fails_does_not_renew_the_mark() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        marked = cluster.api.collections[NODES]["n1"]["metadata"]["annotations"][KEY]
        cluster.pod("u2", owners=({**OWNER, "uid": "rs2"},))
        cluster.api.answers["/api/v1/namespaces/ns/pods/web/eviction"] = [403]
        cluster.now += EVICT.keep_away_for - 10
        later = await cluster.ending.step(page(rejection(uid="u2")))
        assert len(cluster.sent("POST", "/eviction")) == 2
        assert cluster.api.collections[NODES]["n1"]["metadata"]["annotations"][KEY] == marked
        assert later is not None
        assert later <= 10
        cluster.now += 10
        await cluster.ending.step(page())
        assert cluster.taints == ["other"]

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_mark_whose_write_had_no_answer_is_removed_if_no_pod_was_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        original, lost = cluster.api._handle_object, [1]

        def one(method: str, collection: str, name: str, body: Any) -> Any:
            answer = original(method, collection, name, body)
            if (method, collection) == ("PATCH", NODES) and lost[0]:
                lost[0] -= 1
                return type(answer)(504, json={"message": "timeout"})
            return answer

        monkeypatch.setattr(cluster.api, "_handle_object", one)
        cluster.api.answers["/api/v1/namespaces/ns/pods/web/eviction"] = [403]
        await cluster.ending.step(page(rejection()))
        assert cluster.taints == ["other", KEY]
        cluster.now += 1
        await cluster.ending.step(page())
        assert cluster.taints == ["other"]

    run_scenario(ClusterWithRejectedPod(), scenario)


@pytest.mark.parametrize("policy", [RejectedPolicy.EVICT, RejectedPolicy.FAIL])
def test_a_pod_that_has_gone_before_it_is_ended_causes_no_event_and_no_mark(policy: RejectedPolicy) -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        for name in ("eviction", "status"):
            cluster.api.answers[f"/api/v1/namespaces/ns/pods/web/{name}"] = [404]
        await cluster.ending.step(page(rejection()))
        assert not cluster.api.collections[EVENTS]
        assert cluster.taints == ["other"]
        assert not any("ended a rejected pod" in line or "cannot end" in line for line in cluster.lines)

    run_scenario(ClusterWithRejectedPod(replace(EVICT, policy=policy)), scenario)


def test_a_pod_that_has_gone_before_it_is_deleted_causes_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        original = cluster.api._handle_object

        def one(method: str, collection: str, name: str, body: Any) -> Any:
            if method == "DELETE":
                cluster.api.remove(PODS, "ns/web")
            return original(method, collection, name, body)

        monkeypatch.setattr(cluster.api, "_handle_object", one)
        cluster.api.answers["/api/v1/namespaces/ns/pods/web/eviction"] = [405]
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists
        assert not cluster.api.collections[EVENTS]
        assert cluster.taints == ["other"]

    run_scenario(ClusterWithRejectedPod(replace(EVICT, delete_fallback=True)), scenario)


def test_a_concurrent_change_of_the_node_is_no_error() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        original, conflicts = cluster.api._handle_object, [2]

        def one(method: str, collection: str, name: str, body: Any) -> Any:
            if (method, collection) == ("PATCH", NODES) and conflicts[0]:
                conflicts[0] -= 1
                return type(original("GET", NODES, "n1", {}))(409, json={"message": "modified"})
            return original(method, collection, name, body)

        cluster.api._handle_object = one  # type: ignore[method-assign]
        await cluster.ending.step(page(rejection()))
        assert cluster.taints == ["other", KEY]

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_restarted_agent_keeps_the_mark() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        again = RejectedPodEnding(
            cluster.session, TerminationHistory(), lambda: cluster.now, lambda: cluster.now
        )
        await again.recover()
        await again.step(page())
        assert cluster.taints == ["other", KEY]
        await again.step(page(free="0-3"))
        assert cluster.taints == ["other"]

    run_scenario(ClusterWithRejectedPod(), scenario)


@pytest.mark.parametrize(("refusals", "is_known"), [(2, True), (REFUSALS_UNTIL_ABSENT, False)])
def test_a_starting_api_server_that_refuses_for_a_moment_does_not_hide_the_mark(
    monkeypatch: pytest.MonkeyPatch, refusals: int, is_known: bool
) -> None:
    monkeypatch.setattr(ending_module, "PAUSES", Backoff(0.01, 0.01))

    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        again = RejectedPodEnding(
            cluster.session, TerminationHistory(), lambda: cluster.now, lambda: cluster.now
        )
        cluster.api.answers[f"{NODES}/n1"] = [403] * refusals
        await again.recover()
        await again.step(page(free="0-3"))
        assert (cluster.taints == ["other"]) == is_known

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_the_mark_is_not_read_again_before_the_api_server_permits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_module, "PAUSES", Backoff(0.01, 0.01))

    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        path = f"{NODES}/n1"
        cluster.api.answers[path], cluster.api.retry_after = [429], "1"
        task = asyncio.ensure_future(cluster.ending.recover())
        await asyncio.sleep(0.5)
        assert cluster.api.count("GET", path) == 1
        await asyncio.wait_for(task, 5)

    run_scenario(ClusterWithRejectedPod(), scenario)


@pytest.mark.parametrize("path", [f"{NODES}/n1", "/api/v1/namespaces/ns/pods/web"])
def test_a_request_is_not_repeated_before_the_api_server_permits_it(path: str) -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        cluster.api.answers[path], cluster.api.retry_after = [429], "30"
        assert await cluster.ending.step(page(rejection())) == RECHECK_S
        before = cluster.api.count("GET", path)
        cluster.now += 29
        await cluster.ending.step(page(rejection()))
        assert cluster.api.count("GET", path) == before
        cluster.now += 1
        await cluster.ending.step(page(rejection()))
        assert cluster.api.count("GET", path) > before

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_a_part_that_is_restarted_keeps_to_the_limits() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        cluster.pod("u2")
        again = RejectedPodEnding(cluster.session, cluster.history, lambda: cluster.now, lambda: cluster.now)
        await again.step(page(rejection(uid="u2")))
        assert cluster.pod_exists, "another pod of the same controller has to wait"

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_the_mark_is_removed_when_the_operator_enables_retries_again() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        assert cluster.taints == ["other", KEY]
        session = replace(cluster.session, config=Config())
        await asyncio.wait_for(end_rejected_pods(session, TerminationHistory()), 5)
        assert cluster.taints == ["other"]
        writes = cluster.session.api.writes
        await asyncio.wait_for(end_rejected_pods(session, TerminationHistory()), 5)
        assert cluster.session.api.writes == writes

    run_scenario(ClusterWithRejectedPod(), scenario)


@pytest.mark.usefixtures("short_pauses")
def test_removing_the_mark_is_retried_until_it_succeeds() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        original, failures = cluster.api._handle_object, [3]

        def one(method: str, collection: str, name: str, body: Any) -> Any:
            if (method, collection) == ("PATCH", NODES) and failures[0]:
                failures[0] -= 1
                return type(original("GET", NODES, "n1", {}))(500, json={"message": "no leader"})
            return original(method, collection, name, body)

        cluster.api._handle_object = one  # type: ignore[method-assign]
        await asyncio.wait_for(
            end_rejected_pods(replace(cluster.session, config=Config()), TerminationHistory()), 5
        )
        assert cluster.taints == ["other"]

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_without_a_mark_nothing_is_written_at_the_node() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        assert not cluster.pod_exists
        assert cluster.sent("PATCH", "/nodes/n1") == []

    run_scenario(ClusterWithRejectedPod(replace(EVICT, keep_away=KeepAway.NONE)), scenario)


class ScriptedDaemon:
    """A daemon that rejects a pod from its second change on."""

    def __init__(self) -> None:
        self.changes = 0

    async def query(self, route: str, params: Any = None, *, timeout: float = 5, act: bool = False) -> object:
        if route == "/changes":
            self.changes += 1
            if self.changes == 1:
                raise UnavailableError("it starts")
            if self.changes > 3:
                await asyncio.sleep(10)
            return {"version": f"w.{self.changes}", "notices": []}
        row = {"pod": "ns/web", "uid": "u1", "container": "main", "reason": "TopologyAffinityError"}
        rows = [{**row, "message": "no room", "count": 3, "applied": True}] if self.changes == 3 else []
        return {
            "name": "n1",
            "mode": "enforce",
            "published": True,
            "applied": True,
            "policies": {},
            "reservedCPUs": "",
            "freeCPUs": "",
            "cpus": [list(each) for each in CPUS],
            "numaNodes": [],
            "rejections": rows,
        }


class DaemonThatStops(ScriptedDaemon):
    """A daemon that describes a rejected pod, and then does not answer any more."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.answers = answers
        self.refusals = 0

    async def query(self, route: str, params: Any = None, *, timeout: float = 5, act: bool = False) -> object:
        self.changes = 2 if route == "/changes" else 3
        if not self.answers:
            self.refusals += 1
            raise UnavailableError("it has ended")
        if route == "/node":
            self.answers -= 1
        return await super().query(route, params)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_module, "RECHECK_S", 0.01)
    monkeypatch.setattr(ending_module, "PAUSES", Backoff(0.01, 0.05))
    monkeypatch.setattr(node_follower, "PAUSES", Backoff(0.01, 0.02))
    monkeypatch.setattr(node_follower, "READ_INTERVAL_S", 0.01)


async def run_until(
    cluster: ClusterWithRejectedPod, part: Awaitable[None], holds: Callable[[], object]
) -> None:
    task = asyncio.ensure_future(part)
    try:
        await until(holds, pause=0.005)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.usefixtures("short_pauses")
def test_reports_of_a_daemon_that_no_longer_answers_are_not_used() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        daemon = DaemonThatStops(1)
        cluster.api.down = True  # the report of the daemon could not be acted on
        session = replace(cluster.session, daemon=daemon)  # type: ignore[arg-type]
        ending = RejectedPodEnding(session, TerminationHistory(), lambda: cluster.now, lambda: cluster.now)

        def stopped() -> bool:
            cluster.api.down = daemon.refusals < 5
            return daemon.refusals >= 40

        await run_until(cluster, ending.run(), stopped)
        assert cluster.pod_exists

    run_scenario(ClusterWithRejectedPod(), scenario)


@pytest.mark.usefixtures("short_pauses")
def test_a_mark_is_removed_after_its_time_also_without_the_daemon() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        await cluster.ending.step(page(rejection()))
        assert cluster.taints == ["other", KEY]
        daemon = DaemonThatStops(0)
        session = replace(cluster.session, daemon=daemon)  # type: ignore[arg-type]
        again = RejectedPodEnding(session, TerminationHistory(), lambda: cluster.now, lambda: cluster.now)
        await again.recover()
        await run_until(cluster, again.run(), lambda: daemon.refusals >= 10)
        assert cluster.taints == ["other", KEY]
        cluster.now += EVICT.keep_away_for
        await run_until(cluster, again.run(), lambda: cluster.taints == ["other"])

    run_scenario(ClusterWithRejectedPod(), scenario)


def test_the_part_follows_the_daemon() -> None:
    async def scenario(cluster: ClusterWithRejectedPod) -> None:
        session = replace(cluster.session, daemon=ScriptedDaemon())  # type: ignore[arg-type]
        task = asyncio.ensure_future(end_rejected_pods(session, TerminationHistory()))
        await until(lambda: not cluster.pod_exists)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_scenario(ClusterWithRejectedPod(), scenario)
