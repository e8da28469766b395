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
from proxy.agent.api_client import APPLY_PATCH
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
OLD_TOPOLOGY = "/apis/topology.node.k8s.io/v1alpha1/noderesourcetopologies"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_writer, "WRITE_INTERVAL_S", 0.05)
    monkeypatch.setattr(object_writer, "WRITE_BURST", 1000)
    monkeypatch.setattr(object_writer, "FAILED_BACKOFF", Backoff(0.02, 0.05))
    monkeypatch.setattr(node_follower, "READ_INTERVAL_S", 0.01)
    monkeypatch.setattr(node_follower, "PAUSES", Backoff(0.01, 0.02))
    monkeypatch.setattr(node_follower, "SILENT_S", 0.1)


class PagesDaemon:
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
        self.api = FakeApi(NODES, EVENTS, PODS, VOLCANO, TOPOLOGY, OLD_TOPOLOGY)
        self.api.groups = dict(
            {"nodeinfo.volcano.sh": ["v1alpha1"], "topology.node.k8s.io": ["v1alpha2", "v1alpha1"]}
            if groups is None
            else groups
        )
        status = {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}, "conditions": []}
        self.api.put(NODES, "n1", metadata={"uid": "node-uid"}, status=status)
        self.api.put(PODS, "a/lse", metadata={"uid": "u1", "annotations": {}})
        self.daemon = PagesDaemon()
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
    async def test(published: Published) -> None:
        await published.until(
            lambda: (
                published.get(VOLCANO)
                and published.get(TOPOLOGY)
                and published.get(NODES)["status"]["conditions"]
            )
        )
        assert published.get(OLD_TOPOLOGY) is None
        assert published.get(VOLCANO)["metadata"]["ownerReferences"][0]["uid"] == "node-uid"
        await published.until(lambda: published.get(PODS, "a/lse")["metadata"]["annotations"])
        assert published.api.collections[EVENTS] == {}, "earlier placements are not reported"
        applied = [
            r for r in published.api.received if r.headers.get("Content-Type", "").startswith(APPLY_PATCH)
        ]
        answers = {r.headers["Accept"] for r in applied}
        assert answers == {"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}

    publish(test)


@pytest.mark.parametrize(
    ("settings", "groups", "collection", "koordinator"),
    [
        ("", {"topology.node.k8s.io": ["v1alpha2", "v1alpha1"]}, TOPOLOGY, False),
        ("", {"topology.node.k8s.io": ["v1alpha1"]}, OLD_TOPOLOGY, True),
        (
            "",
            {"topology.node.k8s.io": ["v1alpha2", "v1alpha1"], "slo.koordinator.sh": ["v1"]},
            OLD_TOPOLOGY,
            True,
        ),
        ("cluster: {nodeResourceTopology: koordinator}", None, OLD_TOPOLOGY, True),
        ("cluster: {nodeResourceTopology: nfd}", {"topology.node.k8s.io": ["v1alpha2"]}, TOPOLOGY, False),
    ],
)
def test_the_format_of_the_topology_object(
    settings: str, groups: Any, collection: str, koordinator: bool
) -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(collection))
        assert ("labels" in published.get(collection)["metadata"]) == koordinator
        other = OLD_TOPOLOGY if collection == TOPOLOGY else TOPOLOGY
        assert published.get(other) is None

    publish(test, settings, groups)


def test_the_form_of_nfd_is_not_written_if_its_version_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "DISCOVER_S", 20.0)

    async def test(published: Published) -> None:
        await published.until(
            lambda: publisher.CANNOT_PUBLISH_TOPOLOGY in str(published.telemetry.problems())
        )
        assert "it serves v1alpha1, and NFD's form needs v1alpha2" in str(published.telemetry.problems())
        await asyncio.sleep(60.0)
        assert published.api.count("PATCH", OLD_TOPOLOGY) == 0
        published.api.groups["topology.node.k8s.io"] = ["v1alpha2"]
        await published.until(lambda: published.get(TOPOLOGY))
        assert published.telemetry.problems() == []

    publish(test, "cluster: {nodeResourceTopology: nfd}", {"topology.node.k8s.io": ["v1alpha1"]})


def test_another_version_of_the_topology_object_replaces_the_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "DISCOVER_S", 20.0)

    async def test(published: Published) -> None:
        published.api.views(TOPOLOGY, OLD_TOPOLOGY)
        await published.until(lambda: published.get(TOPOLOGY))
        published.api.groups["scheduling.koordinator.sh"] = ["v1alpha1"]
        await published.until(lambda: published.api.count("PATCH", OLD_TOPOLOGY))
        await asyncio.sleep(60.0)
        before = published.api.count("PATCH", TOPOLOGY), published.api.count("PATCH", OLD_TOPOLOGY)
        await asyncio.sleep(600.0)
        assert (published.api.count("PATCH", TOPOLOGY), published.api.count("PATCH", OLD_TOPOLOGY)) == before
        published.daemon.change(published=False, mode="released")
        await published.until(lambda: published.get(OLD_TOPOLOGY) is None)
        await asyncio.sleep(600.0)
        assert published.get(OLD_TOPOLOGY) is None, "it is not published again"

    publish(test)


def test_an_api_that_is_missing_for_a_moment_is_used_again_soon() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO))
        groups, published.api.groups = published.api.groups, {}
        await published.until(
            lambda: published.api.requests["GET", "/apis"] > 1, publisher.DISCOVER_S + 1.0, 0.5
        )
        published.api.groups = groups
        published.daemon.change(freeCPUs="7")
        await asyncio.sleep(publisher.MISSING_API_S + 5.0)
        assert published.get(VOLCANO)["spec"]["numares"]["cpu"]["allocatable"] == "7"

    publish(test)


def test_a_daemon_that_has_never_answered_is_reported_at_a_node_that_comes_later() -> None:
    async def test(published: Published) -> None:
        published.daemon.down = True
        node = published.get(NODES)
        published.api.remove(NODES, "n1")
        await asyncio.sleep(5.0)
        published.api.put(NODES, "n1", **node)
        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        assert published.get(NODES)["status"]["conditions"][0]["reason"] == "DaemonUnreachable"
        assert published.get(NODES)["status"]["conditions"][0]["message"] == "cannot query the daemon"

    publish(test)


def test_a_description_of_another_version_is_the_cause_in_the_condition() -> None:
    async def test(published: Published) -> None:
        published.daemon.page = {"name": "n1"}
        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        (condition,) = published.get(NODES)["status"]["conditions"]
        assert condition["reason"] == "DaemonUnreachable"
        assert condition["message"].startswith("cannot read the daemon's description of the node: ")

    publish(test)


def test_disabled_objects_are_not_written() -> None:
    off = "numatopology: false, nodeResourceTopology: none, podAnnotations: false, events: false"

    async def test(published: Published) -> None:
        await published.until(lambda: published.publisher.follower.page)
        published.daemon.change(pods=[])
        await asyncio.sleep(0.1)
        assert published.api.count("PATCH") == 0

    publish(test, f"cluster: {{{off}, nodeCondition: false}}")


def test_nothing_is_written_before_the_node_object_exists() -> None:
    async def test(published: Published) -> None:
        published.api.remove(NODES, "n1")
        await published.until(lambda: published.publisher.follower.page)
        await asyncio.sleep(0.1)
        assert published.api.count("PATCH") == 0
        published.api.put(NODES, "n1", metadata={"uid": "other"}, status={"conditions": []})
        await published.until(lambda: published.get(VOLCANO))
        assert published.get(VOLCANO)["metadata"]["ownerReferences"][0]["uid"] == "other"

    publish(test)


def test_a_change_of_the_node_is_written_and_a_new_owner_is_an_event() -> None:
    async def test(published: Published) -> None:
        published.daemon.change(pods=[])
        await published.until(lambda: published.get(VOLCANO) and published.publisher.follower.page.pods == ())  # type: ignore[union-attr]
        published.daemon.change(pods=PAGE["pods"], freeCPUs="7")
        await published.until(lambda: published.get(VOLCANO)["spec"]["numares"]["cpu"]["allocatable"] == "7")
        await published.until(lambda: len(published.api.collections[EVENTS]) == 2)
        reasons = {each["reason"] for each in published.api.collections[EVENTS].values()}
        assert reasons == {"PlacedExclusively"}

    publish(test)


@pytest.mark.parametrize("collection", [VOLCANO, NODES])
def test_a_write_of_another_program_before_the_answer_is_repaired(collection: str) -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO) and published.get(NODES)["status"]["conditions"])
        handle, reactions = published.api.handle_async_request, [1]

        async def reacting(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            if request.method == "PATCH" and request.url.path.startswith(f"{collection}/n1") and reactions:
                reactions.pop()
                answer = httpx2.Response(200, json=json.loads(answer.content))  # of the agent's own version
                there = copy.deepcopy(published.get(collection))
                if collection == NODES:
                    there["status"]["conditions"][0]["reason"] = "Foreign"
                else:
                    there["spec"]["numares"] = {}
                published.api.put(collection, "n1", **there)
                await asyncio.sleep(0.05)
            return answer

        published.api.handle_async_request = reacting  # type: ignore[method-assign]
        await asyncio.sleep(0.2)
        published.daemon.change(freeCPUs="7", mode="observe")
        await published.until(lambda: not reactions)
        await published.until(
            lambda: (
                published.get(VOLCANO)["spec"]["numares"].get("cpu", {}).get("allocatable") == "7"
                and published.get(NODES)["status"]["conditions"][0]["reason"] == "Observing"
            )
        )
        await asyncio.sleep(5.0)
        assert published.telemetry.problems() == []

    publish(test)


def test_the_condition_that_arrives_before_the_answer_is_written_once() -> None:
    async def test(published: Published) -> None:
        path = f"{NODES}/n1/status"
        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        handle = published.api.handle_async_request

        async def slow(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            await asyncio.sleep(0.05 if request.method == "PATCH" else 0)
            return answer

        published.api.handle_async_request = slow  # type: ignore[method-assign]
        for count, mode in enumerate(("observe", "enforce") * 3):
            published.daemon.change(mode=mode)
            await asyncio.sleep(2.0)
            assert published.api.count("PATCH", path) == count + 2
        assert published.telemetry.problems() == []

    publish(test)


def test_what_no_scheduler_places_by_waits_for_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "FINGERPRINT_S", 0.4)
    monkeypatch.setattr(publisher, "FIGURES_S", 1.2)

    async def test(published: Published) -> None:
        async def lasted(**changes: Any) -> float:
            """Change the node, and return the seconds until the topology has been written."""
            await asyncio.sleep(0.2)
            before, began = published.api.count("PATCH", TOPOLOGY), asyncio.get_running_loop().time()
            published.daemon.change(**changes)
            await published.until(lambda: published.api.count("PATCH", TOPOLOGY) > before)
            return asyncio.get_running_loop().time() - began

        await published.until(lambda: published.get(TOPOLOGY))
        assert await lasted(freeCPUs="7") < 0.4
        assert 0.4 <= await lasted(pods=PAGE["pods"][:1]) < 1.2, "the fingerprint alone"
        assert await lasted(mode="other") >= 1.2, "the figures alone"
        published.daemon.change(mode="another")
        assert await lasted(freeCPUs="6-7") < 0.4
        assert "mode=another" in published.get(TOPOLOGY)["metadata"]["annotations"]["topoproxy/figures"]

    publish(test)


def test_a_rejection_is_written_when_it_is_new_and_when_its_count_has_doubled() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO))
        written = 0
        for count in (1, 2, 3, 4, 5, 6, 7):
            found = {"pod": "a/big", "uid": "u9", "container": "main", "message": "no", "count": count}
            published.daemon.change(rejections=[found])
            await asyncio.sleep(0.1)
            written = published.api.count("PATCH", "/api/v1/namespaces/a/events/")
        assert written == 3
        (event,) = published.api.collections[EVENTS].values()
        assert (event["reason"], event["count"]) == ("PlacementRejected", 4)

    publish(test)


def test_the_times_of_a_rejection_are_those_of_the_daemon() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO))
        found = {"pod": "a/big", "uid": "u9", "message": "no", "count": 4, "first": 1000.5, "last": 1600.5}
        published.daemon.change(rejections=[found])
        await published.until(lambda: published.api.collections[EVENTS])
        (event,) = published.api.collections[EVENTS].values()
        assert event["firstTimestamp"] == "1970-01-01T00:16:40Z"
        assert event["lastTimestamp"] == "1970-01-01T00:26:40Z"

    publish(test)


def test_repetitions_of_an_event_are_counted_from_the_first_one() -> None:
    async def test(published: Published) -> None:
        now = 1000.0
        published.publisher._events._wall_clock = lambda: now
        await published.until(lambda: published.get(VOLCANO))
        for count in (1, 2, 3):
            keys = {"pod": "a/lse", "container": "main", "cpus": "2-3"}
            notice = {"message": "drift: another program wrote a cpuset: put back", "keys": keys}
            published.daemon.notices.append(notice)
            published.daemon.change()
            await published.until(
                lambda c=count: [e["count"] for e in published.api.collections[EVENTS].values()] == [c]
            )
            (event,) = published.api.collections[EVENTS].values()
            assert event["reason"] == "CpusetRepaired"
            assert event["firstTimestamp"] == "1970-01-01T00:16:40Z"
            assert event["lastTimestamp"] == timestamp(now)
            now += 60.0

    publish(test)


def test_a_flood_of_events_is_bounded() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO))
        found = [{"pod": f"a/p{n}", "uid": f"u{n}", "message": "no"} for n in range(100)]
        published.daemon.change(rejections=found)
        await published.until(lambda: len(published.api.collections[EVENTS]) >= 25)
        await asyncio.sleep(0.1)
        assert len(published.api.collections[EVENTS]) <= 27

    publish(test)


def test_a_released_node_withdraws_everything() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO) and published.get(TOPOLOGY))
        await published.until(lambda: published.get(PODS, "a/lse")["metadata"]["annotations"])
        published.daemon.change(published=False, mode="released")
        await published.until(lambda: published.get(VOLCANO) is None and published.get(TOPOLOGY) is None)
        await published.until(
            lambda: None in published.get(PODS, "a/lse")["metadata"]["annotations"].values()
        )
        (held,) = published.get(NODES)["status"]["conditions"]
        assert held["reason"] == "Released"

    publish(test)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_daemon_in_mode_passthrough_withdraws_everything(restarted: bool) -> None:
    async def test(published: Published) -> None:
        def reason() -> Any:
            return published.get(NODES)["status"]["conditions"][0]["reason"]

        if not restarted:
            await published.until(lambda: published.get(VOLCANO) and published.get(TOPOLOGY))
            await published.until(lambda: published.get(PODS, "a/lse")["metadata"]["annotations"])
            published.daemon.down = True
            await published.until(lambda: reason() == "DaemonUnreachable")
        else:
            published.api.put(VOLCANO, "n1", metadata={"managedFields": [{"manager": "topoproxy"}]})
        published.daemon.passthrough, published.daemon.down = True, False
        await published.until(
            lambda: published.get(NODES)["status"]["conditions"] and reason() == "Passthrough"
        )
        await published.until(lambda: published.get(VOLCANO) is None and published.get(TOPOLOGY) is None)
        await published.until(
            lambda: not any(published.get(PODS, "a/lse")["metadata"]["annotations"].values())
        )
        await asyncio.sleep(60.0)
        assert (reason(), published.telemetry.problems()) == ("Passthrough", [])
        published.daemon.passthrough = False
        await published.until(
            lambda: published.get(VOLCANO) and published.get(TOPOLOGY) and reason() == "Enforcing"
        )

    publish(test)


@pytest.mark.parametrize("late", [False, True])
def test_a_node_released_without_an_agent_withdraws_the_agents_objects(late: bool) -> None:
    async def test(published: Published) -> None:
        published.daemon.change(published=False, mode="released")
        ours, theirs = ([{"manager": name, "operation": "Apply"}] for name in ("topoproxy", "nfd"))

        def put() -> None:
            published.api.put(VOLCANO, "n1", metadata={"managedFields": ours})
            published.api.put(TOPOLOGY, "n1", metadata={"managedFields": theirs})

        if not late:
            put()
        await published.until(lambda: published.publisher.follower.page and published.api.watches >= 3)
        if late:
            put()
        await published.until(lambda: published.get(VOLCANO) is None)
        await asyncio.sleep(0.1)
        assert published.get(TOPOLOGY), "another program's object"
        assert published.api.count("DELETE", TOPOLOGY) == 0
        assert published.publisher.writer.paths == (f"{NODES}/n1/status",)

    publish(test)


def test_annotations_of_an_earlier_run_are_removed_when_the_node_is_released() -> None:
    ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})

    async def test(published: Published) -> None:
        texts = {"a/old": ours, "a/theirs": '{"cpuset":"4"}', "a/odd": "[", "b/none": None}
        for name, text in texts.items():
            annotations = {} if text is None else {RESOURCE_STATUS: text}
            published.api.put(PODS, name, metadata={"uid": f"uid-{name}", "annotations": annotations})
        published.daemon.change(published=False, mode="released")
        await published.until(
            lambda: published.get(PODS, "a/old")["metadata"]["annotations"][RESOURCE_STATUS] is None
        )
        await asyncio.sleep(0.1)
        for name in ("a/theirs", "a/odd"):
            assert published.get(PODS, name)["metadata"]["annotations"][RESOURCE_STATUS] == texts[name]
        assert published.api.count("PATCH", "/api/v1/namespaces") == 1
        listed = [r for r in published.api.received if r.method == "GET" and r.url.path == PODS]
        assert [r.url.params["fieldSelector"] for r in listed] == ["spec.nodeName=n1"], "once"
        assert published.publisher.writer.paths == (f"{NODES}/n1/status",)

    publish(test)


@pytest.mark.parametrize("is_silent", [False, True])
def test_annotations_of_an_earlier_run_are_removed_if_they_are_turned_off(is_silent: bool) -> None:
    ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})

    async def test(published: Published) -> None:
        published.daemon.down = is_silent
        published.api.answers[PODS] = [503, 403, 429]
        published.api.answers["/api/v1/namespaces/a/pods/lse"] = [503, 403, 403, 403, 403]
        published.api.put(PODS, "a/lse", metadata={"uid": "u1", "annotations": {RESOURCE_STATUS: ours}})
        theirs = {RESOURCE_STATUS: '{"cpuset":"4"}'}
        published.api.put(PODS, "a/theirs", metadata={"uid": "u2", "annotations": theirs})
        await asyncio.sleep(300.0)
        assert published.get(PODS, "a/lse")["metadata"]["annotations"][RESOURCE_STATUS] is None
        assert published.get(PODS, "a/theirs")["metadata"]["annotations"] == theirs
        assert published.api.count("GET", PODS) == 4
        assert published.api.count("PATCH", "/api/v1/namespaces/a/pods/") == 6
        published.daemon.down = False
        published.daemon.change(published=False, mode="released")
        await asyncio.sleep(60.0)
        assert published.api.count("GET", PODS) == 4

    publish(test, "cluster: {podAnnotations: false, events: false}\n")


def test_annotations_of_an_earlier_run_that_are_not_wanted_any_more_are_removed() -> None:
    ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})

    async def test(published: Published) -> None:
        for name, uid in (("a/lse", "u1"), ("a/shared", "u2")):
            published.api.put(PODS, name, metadata={"uid": uid, "annotations": {RESOURCE_STATUS: ours}})
        await published.until(
            lambda: published.get(PODS, "a/shared")["metadata"]["annotations"][RESOURCE_STATUS] is None
        )
        await asyncio.sleep(60.0)
        assert published.get(PODS, "a/lse")["metadata"]["annotations"][RESOURCE_STATUS]
        assert published.api.count("PATCH", "/api/v1/namespaces/a/pods/") == 2

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
    async def test(published: Published) -> None:
        handle, conflicts = published.api.handle_async_request, [1]

        async def busy(request: httpx2.Request) -> httpx2.Response:
            if request.method == "PATCH" and "/pods/" in request.url.path and conflicts:
                conflicts.pop()
                return httpx2.Response(409, json={"message": cause, "reason": "Conflict"})
            return await handle(request)

        published.api.handle_async_request = busy  # type: ignore[method-assign]
        await asyncio.sleep(60.0)
        assert not conflicts
        assert (RESOURCE_STATUS in published.get(PODS, "a/lse")["metadata"]["annotations"]) == is_repeated

    publish(test)


def test_a_release_that_is_undone_meanwhile_keeps_the_annotations() -> None:
    async def test(published: Published) -> None:
        handle = published.api.handle_async_request
        listed = asyncio.Event()

        async def slow(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            if (request.method, request.url.path) == ("GET", PODS):
                listed.set()
                await asyncio.sleep(30.0)
            return answer

        published.api.handle_async_request = slow  # type: ignore[method-assign]
        ours = json.dumps({"cpuset": "2-3", CHOSEN_BY: THIS_NODE})
        published.api.put(PODS, "a/lse", metadata={"uid": "u1", "annotations": {RESOURCE_STATUS: ours}})
        published.daemon.change(published=False, mode="released")
        await listed.wait()
        published.daemon.change(published=True, mode="enforce")
        await asyncio.sleep(120.0)
        assert published.get(PODS, "a/lse")["metadata"]["annotations"][RESOURCE_STATUS]

    publish(test)


def test_a_crd_without_pod_allocations_gets_the_object_without_them() -> None:
    async def test(published: Published) -> None:
        one = published.api._handle_object

        def strict(method: str, collection: str, name: str, body: Any) -> Any:
            if collection == VOLCANO and "podAllocations" in body.get("spec", {}):
                return httpx2.Response(500, json={"message": ".spec.podAllocations: field not declared"})
            return one(method, collection, name, body)

        published.api._handle_object = strict  # type: ignore[method-assign]
        await published.until(lambda: published.get(VOLCANO))
        assert "podAllocations" not in published.get(VOLCANO)["spec"]
        published.daemon.change(freeCPUs="7")
        before = published.api.count("PATCH", VOLCANO)
        await published.until(lambda: published.get(VOLCANO)["spec"]["numares"]["cpu"]["allocatable"] == "7")
        assert published.api.count("PATCH", VOLCANO) == before + 1, "it is not tried each time"

    publish(test)


def test_a_condition_without_a_time_gets_one() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        foreign = {"type": "TopologyPlacement", "status": "True", "reason": "Foreign", "message": ""}
        published.api.put(NODES, "n1", metadata={"uid": "node-uid"}, status={"conditions": [foreign]})
        await published.until(
            lambda: published.get(NODES)["status"]["conditions"][0]["reason"] == "Enforcing"
        )
        (held,) = published.get(NODES)["status"]["conditions"]
        assert held["lastTransitionTime"].startswith("20")

    publish(test)


def test_a_silent_daemon_is_a_condition_and_leaves_the_objects() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO) and published.get(NODES)["status"]["conditions"])
        published.daemon.down = True
        await published.until(lambda: published.get(NODES)["status"]["conditions"][0]["status"] == "Unknown")
        assert published.get(VOLCANO)
        published.daemon.down = False
        published.daemon.number += 1
        await published.until(lambda: published.get(NODES)["status"]["conditions"][0]["status"] == "True")

    publish(test)


def test_a_recreated_node_keeps_the_condition_of_a_silent_daemon() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        published.daemon.down = True
        await published.until(lambda: published.get(NODES)["status"]["conditions"][0]["status"] == "Unknown")
        published.api.put(NODES, "n1", metadata={"uid": "another"}, status={"conditions": []})
        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        await asyncio.sleep(0.2)
        assert published.get(NODES)["status"]["conditions"][0]["status"] == "Unknown"

    publish(test)


def test_owned_objects_are_not_recreated_after_the_node_is_removed() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(VOLCANO) and published.get(TOPOLOGY))
        await published.until(
            lambda: published.get(PODS, "a/lse")["metadata"]["annotations"] and published.api.watches >= 3
        )
        published.api.remove(NODES, "n1")
        await published.until(lambda: not published.publisher._status.uid)
        published.api.remove(VOLCANO, "n1")
        published.api.remove(TOPOLOGY, "n1")
        await asyncio.sleep(1.5)
        assert published.get(VOLCANO) is None
        assert published.get(TOPOLOGY) is None
        published.api.put(NODES, "n1", metadata={"uid": "another"}, status={"conditions": []})
        await published.until(lambda: published.get(VOLCANO) and published.get(TOPOLOGY))
        assert published.get(VOLCANO)["metadata"]["ownerReferences"][0]["uid"] == "another"

    publish(test)


def test_devices_are_counted_at_the_node_and_again_after_kubelet() -> None:
    async def test(published: Published) -> None:
        gpus = [{"name": "x/gpu", "capacity": "4", "allocatable": "3", "available": "1"}]
        published.daemon.change(deviceResources=gpus)

        def counted() -> Any:
            status = published.get(NODES)["status"]
            return status["capacity"].get("x/gpu"), status["allocatable"].get("x/gpu")

        await published.until(lambda: counted() == ("3", "3"))
        node = published.get(NODES)
        node["status"]["capacity"]["x/gpu"] = node["status"]["allocatable"]["x/gpu"] = "0"
        published.api.put(NODES, "n1", **node)
        await published.until(lambda: counted() == ("3", "3"))
        published.daemon.change(deviceResources=[])
        await published.until(lambda: counted() == ("0", "0"))

    publish(test)


@pytest.mark.parametrize("changes", [{"published": False, "mode": "released"}, {"deviceResources": []}])
def test_device_amounts_of_an_earlier_run_become_0(changes: dict[str, Any]) -> None:
    async def test(published: Published) -> None:
        fields = {
            "f:status": {part: {"f:x/gpu": {}, "f:cpu": {}} for part in ("f:capacity", "f:allocatable")}
        }
        entry = {"manager": "topoproxy", "operation": "Update", "subresource": "status", "fieldsV1": fields}
        amounts = {"cpu": "8", "x/gpu": "4", "x/nic": "2"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": []}
        published.api.put(NODES, "n1", metadata={"uid": "node-uid", "managedFields": [entry]}, status=status)
        published.daemon.change(**changes)
        await published.until(lambda: published.get(NODES)["status"]["allocatable"]["x/gpu"] == "0")
        assert published.get(NODES)["status"]["capacity"] == {"cpu": "8", "x/gpu": "0", "x/nic": "2"}

    publish(test)


def test_the_amount_of_a_withdrawn_resource_is_left_to_kubelet() -> None:
    async def test(published: Published) -> None:
        published.daemon.change(
            deviceResources=[{"name": "x/gpu", "capacity": "4", "allocatable": "4", "available": "4"}]
        )
        await published.until(lambda: published.get(NODES)["status"]["allocatable"].get("x/gpu") == "4")
        published.daemon.change(deviceResources=[])
        await published.until(lambda: published.get(NODES)["status"]["allocatable"]["x/gpu"] == "0")
        node = published.get(NODES)
        amounts = {"cpu": "8", "x/gpu": "4"}
        status = {**node["status"], "capacity": amounts, "allocatable": amounts}
        published.api.put(NODES, "n1", metadata=node["metadata"], status=status)
        await asyncio.sleep(600.0)
        assert published.get(NODES)["status"]["allocatable"]["x/gpu"] == "4"

    publish(test)


def test_device_amounts_that_are_refused_or_reset_again_and_again_are_written_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_writer, "REFUSED_BACKOFF", Backoff(0.2, 0.2))
    monkeypatch.setattr(object_writer, "OVERWRITTEN_BACKOFF", Backoff(0.2, 1.0, steady=600.0, tolerated=2))
    status = f"{NODES}/n1/status"

    async def test(published: Published) -> None:
        def reset() -> int:
            """Write the Node as kubelet does, and return how many writes of the agent there were."""
            held = published.get(NODES)["status"]
            for part in ("capacity", "allocatable"):
                held[part]["x/gpu"] = "0"
            published.api.put(NODES, "n1", **published.get(NODES))
            return published.api.count("PATCH", status)

        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        before = published.api.count("PATCH", status)
        published.api.answers[status] += [403] * 2
        published.daemon.change(
            deviceResources=[{"name": "x/gpu", "capacity": "4", "allocatable": "3", "available": "1"}]
        )
        for number in range(8):
            await asyncio.sleep(0.05)
            reset()
            published.daemon.change(freeCPUs=str(number))
        assert published.api.count("PATCH", status) - before <= 4
        await published.until(lambda: published.get(NODES)["status"]["capacity"]["x/gpu"] == "3")
        before = published.api.count("PATCH", status)
        for _ in range(50):
            await asyncio.sleep(0.02)
            reset()
        assert published.api.count("PATCH", status) - before <= 6
        await published.until(lambda: published.get(NODES)["status"]["capacity"]["x/gpu"] == "3")

    publish(test)


def test_a_condition_that_another_program_has_written_is_written_again() -> None:
    async def test(published: Published) -> None:
        await published.until(
            lambda: published.get(NODES)["status"]["conditions"] and published.publisher._status._condition
        )
        node = published.get(NODES)
        (ours,) = node["status"]["conditions"]
        theirs = [{**ours, "status": "False", "reason": "Theirs"}]
        published.api.put(NODES, "n1", **{**node, "status": {**node["status"], "conditions": theirs}})
        await published.until(
            lambda: published.get(NODES)["status"]["conditions"][0]["reason"] == ours["reason"]
        )
        writes = published.api.count("PATCH", f"{NODES}/n1/status")
        await asyncio.sleep(0.2)
        assert published.api.count("PATCH", f"{NODES}/n1/status") == writes, "once"

    publish(test)


def test_the_condition_keeps_its_time_over_a_new_start() -> None:
    async def test(published: Published) -> None:
        await published.until(lambda: published.get(NODES)["status"]["conditions"])
        (held,) = published.get(NODES)["status"]["conditions"]
        writes = published.api.count("PATCH", f"{NODES}/n1/status")
        again = Publisher(published.publisher._session, lambda: 0.0)
        task = asyncio.create_task(again.run())
        await published.until(lambda: isinstance(again.follower.page, NodePage))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert published.get(NODES)["status"]["conditions"] == [held]
        assert published.api.count("PATCH", f"{NODES}/n1/status") == writes

    publish(test)


def test_an_api_server_that_refuses_to_list_its_apis_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "UNKNOWN_PAUSES", Backoff(0.1, 0.2))

    async def test(published: Published) -> None:
        published.api.answers["/apis"] = [403] * 100

        def reported() -> list[object]:
            return [each["message"] for each in published.telemetry.problems()]

        await published.until(lambda: publisher.CANNOT_DISCOVER in reported())
        assert published.get(VOLCANO) is None
        published.api.answers["/apis"].clear()
        await published.until(lambda: published.get(VOLCANO))
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
    async def test(published: Published) -> None:
        published.api.put(collection, "n1", metadata={"managedFields": [{"manager": manager}]})
        published.api.answers[f"{collection}/n1"] = [503]
        await published.until(lambda: published.get(other))
        await published.until(lambda: published.api.count("GET", f"{collection}/n1") == 2)
        await asyncio.sleep(0.1)
        assert (published.get(collection) is None) == (manager == "topoproxy")
        assert published.api.count("GET", f"{collection}/n1") == 2
        assert published.get(other)

    publish(test, settings)


OTHER_MANAGER = {"manager": "other", "operation": "Update"}


@pytest.mark.parametrize(
    ("fields", "is_refused", "is_deleted"),
    [({"f:status": {}}, False, False), ({"f:metadata": {}}, False, True), ({"f:status": {}}, True, True)],
)
@pytest.mark.parametrize("is_off", [True, False])
def test_content_of_other_programs_in_an_object_stays(
    fields: dict[str, Any], is_refused: bool, is_deleted: bool, is_off: bool
) -> None:
    async def test(published: Published) -> None:
        managers = [
            {"manager": "topoproxy", "fieldsV1": {"f:spec": {}}},
            {**OTHER_MANAGER, "fieldsV1": fields},
        ]
        published.api.put(VOLCANO, "n1", metadata={"managedFields": managers})
        published.api.answers[f"{VOLCANO}/n1"] = [200, 422] if is_refused else []
        handle, found = published.api.handle_async_request, published.get(VOLCANO)

        async def first(request: httpx2.Request) -> httpx2.Response:
            answer = await handle(request)
            is_read = answer.status_code == 200 and (request.method, answer.json().get("reason")) == (
                "GET",
                "Scripted",
            )
            return httpx2.Response(200, json=found) if is_read else answer

        published.api.handle_async_request = first  # type: ignore[method-assign]
        if not is_off:
            published.daemon.change(published=False, mode="released")
        await asyncio.sleep(60.0)
        sent = [
            json.loads(r.content)
            for r in published.api.received
            if r.method == "PATCH" and VOLCANO in r.url.path
        ]
        nothing = {
            "apiVersion": "nodeinfo.volcano.sh/v1alpha1",
            "kind": "Numatopology",
            "metadata": {"name": "n1"},
        }
        assert sent == ([nothing] if "f:status" in fields else [])
        assert (published.get(VOLCANO) is None) == is_deleted

    publish(test, "cluster: {numatopology: false, events: false}\n" if is_off else "")


def test_an_object_that_is_turned_off_and_that_may_not_be_read_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_writer, "REFUSED_BACKOFF", Backoff(0.02, 0.05))

    async def test(published: Published) -> None:
        published.api.answers[f"{VOLCANO}/n1"] = [403] * 10
        await published.until(lambda: published.api.count("GET", f"{VOLCANO}/n1") == 3)
        await published.until(lambda: f"{VOLCANO}/n1" not in published.publisher.writer._objects)

    publish(test, "cluster: {numatopology: false}\n")


@pytest.mark.parametrize("has_condition", [True, False])
def test_the_condition_of_an_earlier_run_is_removed_if_it_is_turned_off(has_condition: bool) -> None:
    async def test(published: Published) -> None:
        conditions = [{"type": "TopologyPlacement", "status": "True"}] if has_condition else []
        published.api.put(NODES, "n1", metadata={"uid": "node-uid"}, status={"conditions": conditions})
        await published.until(lambda: published.get(VOLCANO))
        await asyncio.sleep(0.1)
        sent = [json.loads(r.content) for r in published.api.received if r.url.path == f"{NODES}/n1/status"]
        nothing = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        assert sent == ([nothing] if has_condition else [])

    publish(test, "cluster: {nodeCondition: false}\n")
