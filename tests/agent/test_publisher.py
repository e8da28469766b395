"""The publisher: from the daemon's pages to objects at an API server in memory."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import httpx2
import pytest

from proxy import logs
from proxy.agent import node_follower, object_writer, publisher
from proxy.agent.api_client import APPLY
from proxy.agent.node_status import timestamp
from proxy.agent.objects.node_page import NodePage
from proxy.agent.publisher import Publisher
from proxy.agent.session import AgentSession
from proxy.config.load import parse
from proxy.model.backoff import Backoff
from proxy.model.errors import InputError, UnavailableError
from proxy.pools.annotations import CHOSEN_BY, RESOURCE_STATUS, THIS_NODE
from tests.agent.fake_api import FakeApi
from tests.agent.objects.test_objects import PAGE
from tests.testkit.simulated_clock import run_simulated
from tests.testkit.waiting import until

NODES, EVENTS, PODS = "/api/v1/nodes", "/api/v1/events", "/api/v1/pods"
VOLCANO = "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies"
TOPOLOGY = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
OLD = "/apis/topology.node.k8s.io/v1alpha1/noderesourcetopologies"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_writer, "LEAST_S", 0.05)
    monkeypatch.setattr(object_writer, "WRITE_BURST", 1000)
    monkeypatch.setattr(object_writer, "FAILED", Backoff(0.02, 0.05))
    monkeypatch.setattr(node_follower, "APART_S", 0.01)
    monkeypatch.setattr(node_follower, "PAUSES", Backoff(0.01, 0.02))
    monkeypatch.setattr(node_follower, "SILENT_S", 0.1)


class Daemon:
    """A daemon with pages that a test sets."""

    def __init__(self) -> None:
        self.page: dict[str, Any] = {**PAGE}
        self.number = 1
        self.notices: list[dict[str, Any]] = []
        self._down = False
        self._changed = asyncio.Event()
        self.passthrough = False

    @property
    def down(self) -> bool:
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        self._changed.set()

    def change(self, **changes: Any) -> None:
        self.page = {**self.page, **changes}
        self.number += 1
        self._changed.set()

    async def query(self, route: str, params: Mapping[str, str] = MappingProxyType({}), **more: Any) -> Any:
        if self.down:
            raise UnavailableError("cannot query the daemon")
        if self.passthrough and route != "/status":
            raise InputError("cannot follow the node: in passthrough mode nothing is decided")
        if route == "/status":
            return {"mode": "passthrough" if self.passthrough else "enforce"}
        if route == "/node":
            return self.page
        while params["since"] == str(self.number) and not self.down:
            self._changed.clear()
            await self._changed.wait()
        if self.down:
            raise UnavailableError("cannot query the daemon")
        notices, self.notices = self.notices, []
        return {"version": str(self.number), "notices": notices}


class Published:
    def __init__(self, settings: str = "", groups: Mapping[str, list[str]] | None = None) -> None:
        self.api = FakeApi(NODES, EVENTS, PODS, VOLCANO, TOPOLOGY, OLD)
        self.api.groups = dict(
            {"nodeinfo.volcano.sh": ["v1alpha1"], "topology.node.k8s.io": ["v1alpha2", "v1alpha1"]}
            if groups is None
            else groups
        )
        status = {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}, "conditions": []}
        self.api.put(NODES, "n1", metadata={"uid": "node-uid"}, status=status)
        self.api.put(PODS, "a/lse", metadata={"uid": "u1", "annotations": {}})
        self.daemon = Daemon()
        self.telemetry = logs.telemetry()
        config = parse(settings, "test")
        client: Any = self.daemon
        self.publisher = Publisher(AgentSession(config, "n1", client, self.api.client(), self.telemetry))

    def get(self, path: str, name: str = "n1") -> Any:
        return self.api.collections[path].get(name)

    until = staticmethod(until)


def publish(
    test: Callable[[Published], Awaitable[None]],
    settings: str = "",
    groups: Mapping[str, list[str]] | None = None,
) -> None:
    async def run() -> None:
        published = Published(settings, groups)
        task = asyncio.create_task(published.publisher.run())
        try:
            await test(published)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_simulated(run())


def test_all_supported_objects_are_published_and_owned_by_the_node() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO) and it.get(TOPOLOGY) and it.get(NODES)["status"]["conditions"])
        assert it.get(OLD) is None
        assert it.get(VOLCANO)["metadata"]["ownerReferences"][0]["uid"] == "node-uid"
        await it.until(lambda: it.get(PODS, "a/lse")["metadata"]["annotations"])
        assert it.api.collections[EVENTS] == {}, "earlier placements are not reported"
        applied = [r for r in it.api.seen if r.headers.get("Content-Type", "").startswith(APPLY)]
        answers = {r.headers["Accept"] for r in applied}
        assert answers == {"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}

    publish(test)


@pytest.mark.parametrize(
    ("settings", "groups", "collection", "koordinator"),
    [
        ("", {"topology.node.k8s.io": ["v1alpha2", "v1alpha1"]}, TOPOLOGY, False),
        ("", {"topology.node.k8s.io": ["v1alpha1"]}, OLD, True),
        ("", {"topology.node.k8s.io": ["v1alpha2", "v1alpha1"], "slo.koordinator.sh": ["v1"]}, OLD, True),
        ("cluster: {nodeResourceTopology: koordinator}", None, OLD, True),
        ("cluster: {nodeResourceTopology: nfd}", {"topology.node.k8s.io": ["v1alpha2"]}, TOPOLOGY, False),
    ],
)
def test_the_format_of_the_topology_object(
    settings: str, groups: Any, collection: str, koordinator: bool
) -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(collection))
        assert ("labels" in it.get(collection)["metadata"]) == koordinator
        other = OLD if collection == TOPOLOGY else TOPOLOGY
        assert it.get(other) is None

    publish(test, settings, groups)


def test_the_form_of_nfd_is_not_written_if_its_version_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "DISCOVER_S", 20.0)

    async def test(it: Published) -> None:
        await it.until(lambda: publisher.CANNOT_PUBLISH_TOPOLOGY in str(it.telemetry.problems()))
        assert "it serves v1alpha1, and NFD's form needs v1alpha2" in str(it.telemetry.problems())
        await asyncio.sleep(60.0)
        assert it.api.count("PATCH", OLD) == 0
        it.api.groups["topology.node.k8s.io"] = ["v1alpha2"]
        await it.until(lambda: it.get(TOPOLOGY))
        assert it.telemetry.problems() == []

    publish(test, "cluster: {nodeResourceTopology: nfd}", {"topology.node.k8s.io": ["v1alpha1"]})


def test_another_version_of_the_topology_object_replaces_the_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "DISCOVER_S", 20.0)

    async def test(it: Published) -> None:
        it.api.views(TOPOLOGY, OLD)
        await it.until(lambda: it.get(TOPOLOGY))
        it.api.groups["scheduling.koordinator.sh"] = ["v1alpha1"]
        await it.until(lambda: it.api.count("PATCH", OLD))
        await asyncio.sleep(60.0)
        before = it.api.count("PATCH", TOPOLOGY), it.api.count("PATCH", OLD)
        await asyncio.sleep(600.0)
        assert (it.api.count("PATCH", TOPOLOGY), it.api.count("PATCH", OLD)) == before
        it.daemon.change(published=False, mode="released")
        await it.until(lambda: it.get(OLD) is None)
        await asyncio.sleep(600.0)
        assert it.get(OLD) is None, "it is not published again"

    publish(test)


def test_an_api_that_is_missing_for_a_moment_is_used_again_soon() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO))
        groups, it.api.groups = it.api.groups, {}
        await it.until(lambda: it.api.requests["GET", "/apis"] > 1, publisher.DISCOVER_S + 1.0, 0.5)
        it.api.groups = groups
        it.daemon.change(freeCPUs="7")
        await asyncio.sleep(publisher.RETURNS_S + 5.0)
        assert it.get(VOLCANO)["spec"]["numares"]["cpu"]["allocatable"] == "7"

    publish(test)


def test_a_daemon_that_has_never_answered_is_reported_at_a_node_that_comes_later() -> None:
    async def test(it: Published) -> None:
        it.daemon.down = True
        node = it.get(NODES)
        it.api.remove(NODES, "n1")
        await asyncio.sleep(5.0)
        it.api.put(NODES, "n1", **node)
        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        assert it.get(NODES)["status"]["conditions"][0]["reason"] == "DaemonUnreachable"
        assert it.get(NODES)["status"]["conditions"][0]["message"] == "cannot query the daemon"

    publish(test)


def test_a_description_of_another_version_is_the_cause_in_the_condition() -> None:
    async def test(it: Published) -> None:
        it.daemon.page = {"name": "n1"}
        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        (condition,) = it.get(NODES)["status"]["conditions"]
        assert condition["reason"] == "DaemonUnreachable"
        assert condition["message"].startswith("cannot read the daemon's description of the node: ")

    publish(test)


def test_disabled_objects_are_not_written() -> None:
    off = "numatopology: false, nodeResourceTopology: none, podAnnotations: false, events: false"

    async def test(it: Published) -> None:
        await it.until(lambda: it.publisher.follower.page)
        it.daemon.change(pods=[])
        await asyncio.sleep(0.1)
        assert it.api.count("PATCH") == 0

    publish(test, f"cluster: {{{off}, nodeCondition: false}}")


def test_nothing_is_written_before_the_node_object_exists() -> None:
    async def test(it: Published) -> None:
        it.api.remove(NODES, "n1")
        await it.until(lambda: it.publisher.follower.page)
        await asyncio.sleep(0.1)
        assert it.api.count("PATCH") == 0
        it.api.put(NODES, "n1", metadata={"uid": "other"}, status={"conditions": []})
        await it.until(lambda: it.get(VOLCANO))
        assert it.get(VOLCANO)["metadata"]["ownerReferences"][0]["uid"] == "other"

    publish(test)


def test_a_change_of_the_node_is_written_and_a_new_owner_is_an_event() -> None:
    async def test(it: Published) -> None:
        it.daemon.change(pods=[])
        await it.until(lambda: it.get(VOLCANO) and it.publisher.follower.page.pods == ())  # type: ignore[union-attr]
        it.daemon.change(pods=PAGE["pods"], freeCPUs="7")
        await it.until(lambda: it.get(VOLCANO)["spec"]["numares"]["cpu"]["allocatable"] == "7")
        await it.until(lambda: len(it.api.collections[EVENTS]) == 2)
        reasons = {each["reason"] for each in it.api.collections[EVENTS].values()}
        assert reasons == {"PlacedExclusively"}

    publish(test)


@pytest.mark.parametrize("collection", [VOLCANO, NODES])
def test_a_write_of_another_program_before_the_answer_is_repaired(collection: str) -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO) and it.get(NODES)["status"]["conditions"])
        handle, reactions = it.api.handle_async_request, [1]

        async def reacting(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            if request.method == "PATCH" and request.url.path.startswith(f"{collection}/n1") and reactions:
                reactions.pop()
                answer = httpx2.Response(200, json=json.loads(answer.content))  # of the agent's own version
                there = copy.deepcopy(it.get(collection))
                if collection == NODES:
                    there["status"]["conditions"][0]["reason"] = "Foreign"
                else:
                    there["spec"]["numares"] = {}
                it.api.put(collection, "n1", **there)
                await asyncio.sleep(0.05)
            return answer

        it.api.handle_async_request = reacting  # type: ignore[method-assign]
        await asyncio.sleep(0.2)
        it.daemon.change(freeCPUs="7", mode="observe")
        await it.until(lambda: not reactions)
        await it.until(
            lambda: (
                it.get(VOLCANO)["spec"]["numares"].get("cpu", {}).get("allocatable") == "7"
                and it.get(NODES)["status"]["conditions"][0]["reason"] == "Observing"
            )
        )
        await asyncio.sleep(5.0)
        assert it.telemetry.problems() == []

    publish(test)


def test_the_condition_that_arrives_before_the_answer_is_written_once() -> None:
    async def test(it: Published) -> None:
        path = f"{NODES}/n1/status"
        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        handle = it.api.handle_async_request

        async def slow(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            await asyncio.sleep(0.05 if request.method == "PATCH" else 0)
            return answer

        it.api.handle_async_request = slow  # type: ignore[method-assign]
        for count, mode in enumerate(("observe", "enforce") * 3):
            it.daemon.change(mode=mode)
            await asyncio.sleep(2.0)
            assert it.api.count("PATCH", path) == count + 2
        assert it.telemetry.problems() == []

    publish(test)


def test_what_no_scheduler_places_by_waits_for_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "FINGERPRINT_S", 0.4)
    monkeypatch.setattr(publisher, "FIGURES_S", 1.2)

    async def test(it: Published) -> None:
        async def lasted(**changes: Any) -> float:
            """Change the node, and return the seconds until the topology has been written."""
            await asyncio.sleep(0.2)
            before, began = it.api.count("PATCH", TOPOLOGY), asyncio.get_running_loop().time()
            it.daemon.change(**changes)
            await it.until(lambda: it.api.count("PATCH", TOPOLOGY) > before)
            return asyncio.get_running_loop().time() - began

        await it.until(lambda: it.get(TOPOLOGY))
        assert await lasted(freeCPUs="7") < 0.4
        assert 0.4 <= await lasted(pods=PAGE["pods"][:1]) < 1.2, "the fingerprint alone"
        assert await lasted(mode="other") >= 1.2, "the figures alone"
        it.daemon.change(mode="another")
        assert await lasted(freeCPUs="6-7") < 0.4
        assert "mode=another" in it.get(TOPOLOGY)["metadata"]["annotations"]["topoproxy/figures"]

    publish(test)


def test_a_rejection_is_written_when_it_is_new_and_when_its_count_has_doubled() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO))
        written = 0
        for count in (1, 2, 3, 4, 5, 6, 7):
            found = {"pod": "a/big", "uid": "u9", "container": "main", "message": "no", "count": count}
            it.daemon.change(rejections=[found])
            await asyncio.sleep(0.1)
            written = it.api.count("PATCH", "/api/v1/namespaces/a/events/")
        assert written == 3
        (event,) = it.api.collections[EVENTS].values()
        assert (event["reason"], event["count"]) == ("PlacementRejected", 4)

    publish(test)


def test_the_times_of_a_rejection_are_those_of_the_daemon() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO))
        found = {"pod": "a/big", "uid": "u9", "message": "no", "count": 4, "first": 1000.5, "last": 1600.5}
        it.daemon.change(rejections=[found])
        await it.until(lambda: it.api.collections[EVENTS])
        (event,) = it.api.collections[EVENTS].values()
        assert event["firstTimestamp"] == "1970-01-01T00:16:40Z"
        assert event["lastTimestamp"] == "1970-01-01T00:26:40Z"

    publish(test)


def test_repetitions_of_an_event_are_counted_from_the_first_one() -> None:
    async def test(it: Published) -> None:
        now = 1000.0
        it.publisher._events._wall_clock = lambda: now
        await it.until(lambda: it.get(VOLCANO))
        for count in (1, 2, 3):
            keys = {"pod": "a/lse", "container": "main", "cpus": "2-3"}
            notice = {"message": "drift: another program wrote a cpuset: put back", "keys": keys}
            it.daemon.notices.append(notice)
            it.daemon.change()
            await it.until(lambda c=count: [e["count"] for e in it.api.collections[EVENTS].values()] == [c])
            (event,) = it.api.collections[EVENTS].values()
            assert event["reason"] == "CpusetRepaired"
            assert event["firstTimestamp"] == "1970-01-01T00:16:40Z"
            assert event["lastTimestamp"] == timestamp(now)
            now += 60.0

    publish(test)


def test_a_flood_of_events_is_bounded() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO))
        found = [{"pod": f"a/p{n}", "uid": f"u{n}", "message": "no"} for n in range(100)]
        it.daemon.change(rejections=found)
        await it.until(lambda: len(it.api.collections[EVENTS]) >= 25)
        await asyncio.sleep(0.1)
        assert len(it.api.collections[EVENTS]) <= 27

    publish(test)


def test_a_released_node_withdraws_everything() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO) and it.get(TOPOLOGY))
        await it.until(lambda: it.get(PODS, "a/lse")["metadata"]["annotations"])
        it.daemon.change(published=False, mode="released")
        await it.until(lambda: it.get(VOLCANO) is None and it.get(TOPOLOGY) is None)
        await it.until(lambda: None in it.get(PODS, "a/lse")["metadata"]["annotations"].values())
        (held,) = it.get(NODES)["status"]["conditions"]
        assert held["reason"] == "Released"

    publish(test)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_daemon_in_mode_passthrough_withdraws_everything(restarted: bool) -> None:
    async def test(it: Published) -> None:
        def reason() -> Any:
            return it.get(NODES)["status"]["conditions"][0]["reason"]

        if not restarted:
            await it.until(lambda: it.get(VOLCANO) and it.get(TOPOLOGY))
            await it.until(lambda: it.get(PODS, "a/lse")["metadata"]["annotations"])
            it.daemon.down = True
            await it.until(lambda: reason() == "DaemonUnreachable")
        else:
            it.api.put(VOLCANO, "n1", metadata={"managedFields": [{"manager": "topoproxy"}]})
        it.daemon.passthrough, it.daemon.down = True, False
        await it.until(lambda: it.get(NODES)["status"]["conditions"] and reason() == "Passthrough")
        await it.until(lambda: it.get(VOLCANO) is None and it.get(TOPOLOGY) is None)
        await it.until(lambda: not any(it.get(PODS, "a/lse")["metadata"]["annotations"].values()))
        await asyncio.sleep(60.0)
        assert (reason(), it.telemetry.problems()) == ("Passthrough", [])
        it.daemon.passthrough = False
        await it.until(lambda: it.get(VOLCANO) and it.get(TOPOLOGY) and reason() == "Enforcing")

    publish(test)


@pytest.mark.parametrize("late", [False, True])
def test_a_node_released_without_an_agent_withdraws_the_agents_objects(late: bool) -> None:
    async def test(it: Published) -> None:
        it.daemon.change(published=False, mode="released")
        ours, theirs = ([{"manager": name, "operation": "Apply"}] for name in ("topoproxy", "nfd"))

        def put() -> None:
            it.api.put(VOLCANO, "n1", metadata={"managedFields": ours})
            it.api.put(TOPOLOGY, "n1", metadata={"managedFields": theirs})

        if not late:
            put()
        await it.until(lambda: it.publisher.follower.page and it.api.watches >= 3)
        if late:
            put()
        await it.until(lambda: it.get(VOLCANO) is None)
        await asyncio.sleep(0.1)
        assert it.get(TOPOLOGY), "another program's object"
        assert it.api.count("DELETE", TOPOLOGY) == 0
        assert it.publisher.writer.paths == (f"{NODES}/n1/status",)

    publish(test)


def test_annotations_of_an_earlier_run_are_removed_when_the_node_is_released() -> None:
    ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})

    async def test(it: Published) -> None:
        texts = {"a/old": ours, "a/theirs": '{"cpuset":"4"}', "a/odd": "[", "b/none": None}
        for name, text in texts.items():
            annotations = {} if text is None else {RESOURCE_STATUS: text}
            it.api.put(PODS, name, metadata={"uid": f"uid-{name}", "annotations": annotations})
        it.daemon.change(published=False, mode="released")
        await it.until(lambda: it.get(PODS, "a/old")["metadata"]["annotations"][RESOURCE_STATUS] is None)
        await asyncio.sleep(0.1)
        for name in ("a/theirs", "a/odd"):
            assert it.get(PODS, name)["metadata"]["annotations"][RESOURCE_STATUS] == texts[name]
        assert it.api.count("PATCH", "/api/v1/namespaces") == 1
        listed = [r for r in it.api.seen if r.method == "GET" and r.url.path == PODS]
        assert [r.url.params["fieldSelector"] for r in listed] == ["spec.nodeName=n1"], "once"
        assert it.publisher.writer.paths == (f"{NODES}/n1/status",)

    publish(test)


@pytest.mark.parametrize("is_silent", [False, True])
def test_annotations_of_an_earlier_run_are_removed_if_they_are_turned_off(is_silent: bool) -> None:
    ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})

    async def test(it: Published) -> None:
        it.daemon.down = is_silent
        it.api.answers[PODS] = [503, 403, 429]
        it.api.answers["/api/v1/namespaces/a/pods/lse"] = [503, 403, 403, 403, 403]
        it.api.put(PODS, "a/lse", metadata={"uid": "u1", "annotations": {RESOURCE_STATUS: ours}})
        theirs = {RESOURCE_STATUS: '{"cpuset":"4"}'}
        it.api.put(PODS, "a/theirs", metadata={"uid": "u2", "annotations": theirs})
        await asyncio.sleep(300.0)
        assert it.get(PODS, "a/lse")["metadata"]["annotations"][RESOURCE_STATUS] is None
        assert it.get(PODS, "a/theirs")["metadata"]["annotations"] == theirs
        assert it.api.count("GET", PODS) == 4
        assert it.api.count("PATCH", "/api/v1/namespaces/a/pods/") == 6
        it.daemon.down = False
        it.daemon.change(published=False, mode="released")
        await asyncio.sleep(60.0)
        assert it.api.count("GET", PODS) == 4

    publish(test, "cluster: {podAnnotations: false, events: false}\n")


def test_annotations_of_an_earlier_run_that_are_not_wanted_any_more_are_removed() -> None:
    ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})

    async def test(it: Published) -> None:
        for name, uid in (("a/lse", "u1"), ("a/shared", "u2")):
            it.api.put(PODS, name, metadata={"uid": uid, "annotations": {RESOURCE_STATUS: ours}})
        await it.until(lambda: it.get(PODS, "a/shared")["metadata"]["annotations"][RESOURCE_STATUS] is None)
        await asyncio.sleep(60.0)
        assert it.get(PODS, "a/lse")["metadata"]["annotations"][RESOURCE_STATUS]
        assert it.api.count("PATCH", "/api/v1/namespaces/a/pods/") == 2

    publish(test)


@pytest.mark.parametrize(
    ("cause", "is_repeated"),
    [
        ("the object has been modified; please apply your changes to the latest version", True),
        ("Precondition failed: UID in precondition: u1, UID in object meta: u2", False),
    ],
)
def test_an_annotation_is_written_again_after_a_conflict_unless_the_pod_was_replaced(
    cause: str, is_repeated: bool
) -> None:
    async def test(it: Published) -> None:
        handle, conflicts = it.api.handle_async_request, [1]

        async def busy(request: httpx2.Request) -> httpx2.Response:
            if request.method == "PATCH" and "/pods/" in request.url.path and conflicts:
                conflicts.pop()
                return httpx2.Response(409, json={"message": cause, "reason": "Conflict"})
            return await handle(request)

        it.api.handle_async_request = busy  # type: ignore[method-assign]
        await asyncio.sleep(60.0)
        assert not conflicts
        assert (RESOURCE_STATUS in it.get(PODS, "a/lse")["metadata"]["annotations"]) == is_repeated

    publish(test)


def test_a_release_that_is_undone_meanwhile_keeps_the_annotations() -> None:
    async def test(it: Published) -> None:
        handle = it.api.handle_async_request
        listed = asyncio.Event()

        async def slow(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            if (request.method, request.url.path) == ("GET", PODS):
                listed.set()
                await asyncio.sleep(30.0)
            return answer

        it.api.handle_async_request = slow  # type: ignore[method-assign]
        ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})
        it.api.put(PODS, "a/lse", metadata={"uid": "u1", "annotations": {RESOURCE_STATUS: ours}})
        it.daemon.change(published=False, mode="released")
        await listed.wait()
        it.daemon.change(published=True, mode="enforce")
        await asyncio.sleep(120.0)
        assert it.get(PODS, "a/lse")["metadata"]["annotations"][RESOURCE_STATUS]

    publish(test)


def test_a_crd_without_pod_allocations_gets_the_object_without_them() -> None:
    async def test(it: Published) -> None:
        one = it.api._one

        def strict(method: str, collection: str, name: str, body: Any) -> Any:
            if collection == VOLCANO and "podAllocations" in body.get("spec", {}):
                return httpx2.Response(500, json={"message": ".spec.podAllocations: field not declared"})
            return one(method, collection, name, body)

        it.api._one = strict  # type: ignore[method-assign]
        await it.until(lambda: it.get(VOLCANO))
        assert "podAllocations" not in it.get(VOLCANO)["spec"]
        it.daemon.change(freeCPUs="7")
        before = it.api.count("PATCH", VOLCANO)
        await it.until(lambda: it.get(VOLCANO)["spec"]["numares"]["cpu"]["allocatable"] == "7")
        assert it.api.count("PATCH", VOLCANO) == before + 1, "it is not tried each time"

    publish(test)


def test_a_condition_without_a_time_gets_one() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        foreign = {"type": "TopologyPlacement", "status": "True", "reason": "Foreign", "message": ""}
        it.api.put(NODES, "n1", metadata={"uid": "node-uid"}, status={"conditions": [foreign]})
        await it.until(lambda: it.get(NODES)["status"]["conditions"][0]["reason"] == "Enforcing")
        (held,) = it.get(NODES)["status"]["conditions"]
        assert held["lastTransitionTime"].startswith("20")

    publish(test)


def test_a_silent_daemon_is_a_condition_and_leaves_the_objects() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO) and it.get(NODES)["status"]["conditions"])
        it.daemon.down = True
        await it.until(lambda: it.get(NODES)["status"]["conditions"][0]["status"] == "Unknown")
        assert it.get(VOLCANO)
        it.daemon.down = False
        it.daemon.number += 1
        await it.until(lambda: it.get(NODES)["status"]["conditions"][0]["status"] == "True")

    publish(test)


def test_a_recreated_node_keeps_the_condition_of_a_silent_daemon() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        it.daemon.down = True
        await it.until(lambda: it.get(NODES)["status"]["conditions"][0]["status"] == "Unknown")
        it.api.put(NODES, "n1", metadata={"uid": "another"}, status={"conditions": []})
        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        await asyncio.sleep(0.2)
        assert it.get(NODES)["status"]["conditions"][0]["status"] == "Unknown"

    publish(test)


def test_owned_objects_are_not_recreated_after_the_node_is_removed() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(VOLCANO) and it.get(TOPOLOGY))
        await it.until(lambda: it.get(PODS, "a/lse")["metadata"]["annotations"] and it.api.watches >= 3)
        it.api.remove(NODES, "n1")
        await it.until(lambda: not it.publisher._status.uid)
        it.api.remove(VOLCANO, "n1")
        it.api.remove(TOPOLOGY, "n1")
        await asyncio.sleep(1.5)
        assert it.get(VOLCANO) is None
        assert it.get(TOPOLOGY) is None
        it.api.put(NODES, "n1", metadata={"uid": "another"}, status={"conditions": []})
        await it.until(lambda: it.get(VOLCANO) and it.get(TOPOLOGY))
        assert it.get(VOLCANO)["metadata"]["ownerReferences"][0]["uid"] == "another"

    publish(test)


def test_devices_are_counted_at_the_node_and_again_after_kubelet() -> None:
    async def test(it: Published) -> None:
        gpus = [{"name": "x/gpu", "capacity": "4", "allocatable": "3", "available": "1"}]
        it.daemon.change(deviceResources=gpus)

        def counted() -> Any:
            status = it.get(NODES)["status"]
            return status["capacity"].get("x/gpu"), status["allocatable"].get("x/gpu")

        await it.until(lambda: counted() == ("3", "3"))
        node = it.get(NODES)
        node["status"]["capacity"]["x/gpu"] = node["status"]["allocatable"]["x/gpu"] = "0"
        it.api.put(NODES, "n1", **node)
        await it.until(lambda: counted() == ("3", "3"))
        it.daemon.change(deviceResources=[])
        await it.until(lambda: counted() == ("0", "0"))

    publish(test)


@pytest.mark.parametrize("changes", [{"published": False, "mode": "released"}, {"deviceResources": []}])
def test_device_amounts_of_an_earlier_run_become_0(changes: dict[str, Any]) -> None:
    async def test(it: Published) -> None:
        fields = {
            "f:status": {part: {"f:x/gpu": {}, "f:cpu": {}} for part in ("f:capacity", "f:allocatable")}
        }
        entry = {"manager": "topoproxy", "operation": "Update", "subresource": "status", "fieldsV1": fields}
        amounts = {"cpu": "8", "x/gpu": "4", "x/nic": "2"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": []}
        it.api.put(NODES, "n1", metadata={"uid": "node-uid", "managedFields": [entry]}, status=status)
        it.daemon.change(**changes)
        await it.until(lambda: it.get(NODES)["status"]["allocatable"]["x/gpu"] == "0")
        assert it.get(NODES)["status"]["capacity"] == {"cpu": "8", "x/gpu": "0", "x/nic": "2"}

    publish(test)


def test_the_amount_of_a_withdrawn_resource_is_left_to_kubelet() -> None:
    async def test(it: Published) -> None:
        it.daemon.change(
            deviceResources=[{"name": "x/gpu", "capacity": "4", "allocatable": "4", "available": "4"}]
        )
        await it.until(lambda: it.get(NODES)["status"]["allocatable"].get("x/gpu") == "4")
        it.daemon.change(deviceResources=[])
        await it.until(lambda: it.get(NODES)["status"]["allocatable"]["x/gpu"] == "0")
        node = it.get(NODES)
        amounts = {"cpu": "8", "x/gpu": "4"}
        status = {**node["status"], "capacity": amounts, "allocatable": amounts}
        it.api.put(NODES, "n1", metadata=node["metadata"], status=status)
        await asyncio.sleep(600.0)
        assert it.get(NODES)["status"]["allocatable"]["x/gpu"] == "4"

    publish(test)


def test_device_amounts_that_are_refused_or_reset_again_and_again_are_written_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_writer, "REFUSED", Backoff(0.2, 0.2))
    monkeypatch.setattr(object_writer, "OVERWRITTEN", Backoff(0.2, 1.0, steady=600.0, tolerated=2))
    status = f"{NODES}/n1/status"

    async def test(it: Published) -> None:
        def reset() -> int:
            """Write the Node as kubelet does, and return how many writes of the agent there were."""
            held = it.get(NODES)["status"]
            for part in ("capacity", "allocatable"):
                held[part]["x/gpu"] = "0"
            it.api.put(NODES, "n1", **it.get(NODES))
            return it.api.count("PATCH", status)

        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        before = it.api.count("PATCH", status)
        it.api.answers[status] += [403] * 2
        it.daemon.change(
            deviceResources=[{"name": "x/gpu", "capacity": "4", "allocatable": "3", "available": "1"}]
        )
        for number in range(8):
            await asyncio.sleep(0.05)
            reset()
            it.daemon.change(freeCPUs=str(number))
        assert it.api.count("PATCH", status) - before <= 4
        await it.until(lambda: it.get(NODES)["status"]["capacity"]["x/gpu"] == "3")
        before = it.api.count("PATCH", status)
        for _ in range(50):
            await asyncio.sleep(0.02)
            reset()
        assert it.api.count("PATCH", status) - before <= 6
        await it.until(lambda: it.get(NODES)["status"]["capacity"]["x/gpu"] == "3")

    publish(test)


def test_a_condition_that_another_program_has_written_is_written_again() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(NODES)["status"]["conditions"] and it.publisher._status._condition)
        node = it.get(NODES)
        (ours,) = node["status"]["conditions"]
        theirs = [{**ours, "status": "False", "reason": "Theirs"}]
        it.api.put(NODES, "n1", **{**node, "status": {**node["status"], "conditions": theirs}})
        await it.until(lambda: it.get(NODES)["status"]["conditions"][0]["reason"] == ours["reason"])
        writes = it.api.count("PATCH", f"{NODES}/n1/status")
        await asyncio.sleep(0.2)
        assert it.api.count("PATCH", f"{NODES}/n1/status") == writes, "once"

    publish(test)


def test_the_condition_keeps_its_time_over_a_new_start() -> None:
    async def test(it: Published) -> None:
        await it.until(lambda: it.get(NODES)["status"]["conditions"])
        (held,) = it.get(NODES)["status"]["conditions"]
        writes = it.api.count("PATCH", f"{NODES}/n1/status")
        again = Publisher(it.publisher._session, lambda: 0.0)
        task = asyncio.create_task(again.run())
        await it.until(lambda: isinstance(again.follower.page, NodePage))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert it.get(NODES)["status"]["conditions"] == [held]
        assert it.api.count("PATCH", f"{NODES}/n1/status") == writes

    publish(test)


def test_an_api_server_that_refuses_to_list_its_apis_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "UNKNOWN_PAUSES", Backoff(0.1, 0.2))

    async def test(it: Published) -> None:
        it.api.answers["/apis"] = [403] * 100

        def reported() -> list[object]:
            return [each["message"] for each in it.telemetry.problems()]

        await it.until(lambda: publisher.CANNOT_DISCOVER in reported())
        assert it.get(VOLCANO) is None
        it.api.answers["/apis"].clear()
        await it.until(lambda: it.get(VOLCANO))
        assert publisher.CANNOT_DISCOVER not in reported()

    publish(test)


@pytest.mark.parametrize(
    ("settings", "collection", "other"),
    [
        ("cluster: {numatopology: false}\n", VOLCANO, TOPOLOGY),
        ("cluster: {nodeResourceTopology: none}\n", TOPOLOGY, VOLCANO),
    ],
)
@pytest.mark.parametrize("manager", ["topoproxy", "nfd-topology-updater"])
def test_an_object_of_an_earlier_run_is_removed_if_it_is_turned_off(
    settings: str, collection: str, other: str, manager: str
) -> None:
    async def test(it: Published) -> None:
        it.api.put(collection, "n1", metadata={"managedFields": [{"manager": manager}]})
        it.api.answers[f"{collection}/n1"] = [503]
        await it.until(lambda: it.get(other))
        await it.until(lambda: it.api.count("GET", f"{collection}/n1") == 2)
        await asyncio.sleep(0.1)
        assert (it.get(collection) is None) == (manager == "topoproxy")
        assert it.api.count("GET", f"{collection}/n1") == 2
        assert it.get(other)

    publish(test, settings)


THEIRS = {"manager": "other", "operation": "Update"}


@pytest.mark.parametrize(
    ("fields", "is_refused", "is_deleted"),
    [({"f:status": {}}, False, False), ({"f:metadata": {}}, False, True), ({"f:status": {}}, True, True)],
)
@pytest.mark.parametrize("is_off", [True, False])
def test_content_of_other_programs_in_an_object_stays(
    fields: dict[str, Any], is_refused: bool, is_deleted: bool, is_off: bool
) -> None:
    async def test(it: Published) -> None:
        managers = [{"manager": "topoproxy", "fieldsV1": {"f:spec": {}}}, {**THEIRS, "fieldsV1": fields}]
        it.api.put(VOLCANO, "n1", metadata={"managedFields": managers})
        it.api.answers[f"{VOLCANO}/n1"] = [200, 422] if is_refused else []
        handle, found = it.api.handle_async_request, it.get(VOLCANO)

        async def first(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            is_read = answer.status_code == 200 and (request.method, answer.json().get("reason")) == (
                "GET",
                "Scripted",
            )
            return httpx2.Response(200, json=found) if is_read else answer

        it.api.handle_async_request = first  # type: ignore[method-assign]
        if not is_off:
            it.daemon.change(published=False, mode="released")
        await asyncio.sleep(60.0)
        sent = [json.loads(r.content) for r in it.api.seen if r.method == "PATCH" and VOLCANO in r.url.path]
        nothing = {
            "apiVersion": "nodeinfo.volcano.sh/v1alpha1",
            "kind": "Numatopology",
            "metadata": {"name": "n1"},
        }
        assert sent == ([nothing] if "f:status" in fields else [])
        assert (it.get(VOLCANO) is None) == is_deleted

    publish(test, "cluster: {numatopology: false, events: false}\n" if is_off else "")


def test_an_object_that_is_turned_off_and_that_may_not_be_read_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_writer, "REFUSED", Backoff(0.02, 0.05))

    async def test(it: Published) -> None:
        it.api.answers[f"{VOLCANO}/n1"] = [403] * 10
        await it.until(lambda: it.api.count("GET", f"{VOLCANO}/n1") == 3)
        await it.until(lambda: f"{VOLCANO}/n1" not in it.publisher.writer._objects)

    publish(test, "cluster: {numatopology: false}\n")


@pytest.mark.parametrize("has_condition", [True, False])
def test_the_condition_of_an_earlier_run_is_removed_if_it_is_turned_off(has_condition: bool) -> None:
    async def test(it: Published) -> None:
        conditions = [{"type": "TopologyPlacement", "status": "True"}] if has_condition else []
        it.api.put(NODES, "n1", metadata={"uid": "node-uid"}, status={"conditions": conditions})
        await it.until(lambda: it.get(VOLCANO))
        await asyncio.sleep(0.1)
        sent = [json.loads(r.content) for r in it.api.seen if r.url.path == f"{NODES}/n1/status"]
        nothing = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        assert sent == ([nothing] if has_condition else [])

    publish(test, "cluster: {nodeCondition: false}\n")
