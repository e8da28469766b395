"""The watcher: a copy of a collection that stays current despite failures of the API server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest
from lightkube.core.exceptions import ConfigError

from proxy import logs
from proxy.agent import watcher as module
from proxy.agent.watcher import REFUSALS_UNTIL_ABSENT, UNREADABLE, Watcher
from proxy.backends.cluster.facts_format import CURRENT_S
from proxy.model.backoff import Backoff
from tests.agent.fake_api import FakeApi
from tests.testkit.simulated_clock import run_simulated
from tests.testkit.waiting import LIMIT_S, until

PODS = "/api/v1/pods"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", Backoff(0.01, 0.05))
    monkeypatch.setattr(module, "ABSENT_S", 0.05)


class FollowedCollection:
    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.changes: list[tuple[str, Any]] = []
        self.telemetry = logs.telemetry()
        self.watcher = Watcher(
            api.client(),
            PODS,
            lambda item: item["spec"]["cpus"],
            self.telemetry,
            selectors={"fieldSelector": "spec.nodeName=n1"},
            changed=lambda key, value: self.changes.append(("/".join(key), value)),
        )

    @property
    def values(self) -> dict[str, Any]:
        return {"/".join(key): value for key, value in self.watcher.values.items()}

    until = staticmethod(until)


def follow(
    test: Callable[[FollowedCollection], Awaitable[None]], api: FakeApi | None = None
) -> FollowedCollection:
    followed = FollowedCollection(api or FakeApi(PODS))

    async def run() -> None:
        task = asyncio.create_task(followed.watcher.run())
        try:
            await test(followed)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_simulated(run())
    return followed


def put(api: FakeApi, name: str, cpus: Any) -> None:
    api.put(PODS, f"ns/{name}", spec={"cpus": cpus, "large": "x" * 100})


def test_the_watcher_lists_and_then_watches() -> None:
    async def test(followed: FollowedCollection) -> None:
        put(followed.api, "a", 1)
        put(followed.api, "b", 2)
        await followed.until(followed.watcher.listed.is_set)
        assert followed.values == {"ns/a": 1, "ns/b": 2}
        await followed.until(lambda: followed.api.watches == 1)
        put(followed.api, "c", 3)
        put(followed.api, "a", 4)
        followed.api.remove(PODS, "ns/b")
        await followed.until(lambda: len(followed.changes) == 5)
        assert followed.values == {"ns/a": 4, "ns/c": 3}
        assert followed.changes[2:] == [("ns/c", 3), ("ns/a", 4), ("ns/b", None)]
        assert followed.watcher.is_open

    follow(test)


def test_a_long_list_is_read_page_by_page_with_the_selector() -> None:
    api = FakeApi(PODS)
    api.page = 3
    for number in range(8):
        put(api, f"p{number}", number)

    async def test(followed: FollowedCollection) -> None:
        await followed.until(followed.watcher.listed.is_set)
        assert len(followed.values) == 8
        queries = [r.url.params for r in api.received if "watch" not in r.url.params]
        assert len(queries) == 3
        assert {p["fieldSelector"] for p in queries} == {"spec.nodeName=n1"}

    follow(test, api)


def test_watches_that_end_at_once_are_opened_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", Backoff(0.25, 4.0, steady=30.0))

    async def test(followed: FollowedCollection) -> None:
        ending = asyncio.create_task(end_all(followed.api))
        before = followed.api.count("GET", PODS)
        await asyncio.sleep(60)
        ending.cancel()
        assert followed.api.count("GET", PODS) - before <= 60 / (4.0 * 0.6) + 5
        await asyncio.sleep(40)
        followed.api.end_watches()
        await asyncio.sleep(0.3)
        assert followed.api.watches == 1, "this one has lasted"

    async def end_all(api: FakeApi) -> None:
        while True:
            api.end_watches()
            await asyncio.sleep(0.01)

    follow(test)


def test_a_watch_that_ends_continues_where_it_was_without_a_new_list() -> None:
    async def test(followed: FollowedCollection) -> None:
        put(followed.api, "a", 1)
        await followed.until(lambda: followed.api.watches == 1)
        followed.api.bookmark(PODS)
        version = followed.api.version
        await asyncio.sleep(0.01)
        followed.api.end_watches()
        put(followed.api, "b", 2)  # while no watch is open
        await followed.until(lambda: "ns/b" in followed.values)
        assert followed.api.count("GET") == 3  # one list, two watches
        assert followed.api.received[-1].url.params["resourceVersion"] == str(version)
        assert followed.api.received[-1].url.params["allowWatchBookmarks"] == "true"

    follow(test)


@pytest.mark.parametrize("as_event", [True, False])
def test_a_version_that_the_server_no_longer_has_is_listed_again(as_event: bool) -> None:
    async def test(followed: FollowedCollection) -> None:
        put(followed.api, "a", 1)
        put(followed.api, "b", 2)
        await followed.until(lambda: followed.api.watches == 1)
        followed.changes.clear()
        if as_event:
            followed.api.error(PODS, 410)
            followed.api._watches.clear()
        followed.api.oldest = followed.api.version + 3
        followed.api.end_watches()
        followed.api.remove(PODS, "ns/a")
        put(followed.api, "c", 3)
        followed.api.version += 5
        await followed.until(lambda: "ns/c" in followed.values and followed.api.watches == 1)
        assert followed.values == {"ns/b": 2, "ns/c": 3}
        assert sorted(followed.changes) == [("ns/a", None), ("ns/c", 3)], (
            "unchanged objects cause no notification"
        )

    follow(test)


def test_an_outage_keeps_the_copy_and_reports_its_age() -> None:
    async def test(followed: FollowedCollection) -> None:
        put(followed.api, "a", 1)
        await followed.until(lambda: followed.api.watches == 1)
        followed.api.crash()
        await followed.until(lambda: not followed.watcher.is_open)
        assert followed.values == {"ns/a": 1}
        await followed.until(lambda: bool(followed.telemetry.problems()))
        assert "cannot follow the cluster" in str(followed.telemetry.problems())
        put(followed.api, "b", 2)
        followed.api.down = False
        await followed.until(lambda: "ns/b" in followed.values)
        assert followed.watcher.is_open
        assert followed.telemetry.problems() == []

    follow(test)


def test_the_age_is_that_of_the_last_line_also_of_an_open_watch() -> None:
    async def test(followed: FollowedCollection) -> None:
        assert followed.watcher.age is None
        await followed.until(lambda: followed.api.watches == 1)
        await asyncio.sleep(0.1)
        assert followed.watcher.is_open
        assert 0.1 <= (followed.watcher.age or 0.0) < 5
        followed.api.bookmark(PODS)
        await followed.until(lambda: (followed.watcher.age or 0.0) < 0.1)

    follow(test)


def test_a_watch_in_which_nothing_happens_ends_before_its_connection_counts_as_dead() -> None:
    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: followed.api.watches == 1)
        (request,) = [r for r in followed.api.received if "watch" in r.url.params]
        lasts, silence = int(request.url.params["timeoutSeconds"]), request.extensions["timeout"]["read"]
        assert lasts + 5 <= silence <= CURRENT_S, "the daemon does not accept older files as current"
        followed.api.end_watches()
        await followed.until(lambda: followed.api.watches == 1)
        assert followed.telemetry.problems() == []

    follow(test)


def test_a_collection_that_does_not_exist_is_empty_until_it_does() -> None:
    api = FakeApi()

    async def test(followed: FollowedCollection) -> None:
        await followed.until(followed.watcher.listed.is_set)
        assert (followed.watcher.present, followed.values) == (False, {})
        assert followed.telemetry.problems() == []
        api.collections[PODS] = {}
        put(api, "a", 1)
        await followed.until(lambda: followed.watcher.present and "ns/a" in followed.values)

    follow(test, api)


def test_a_missing_permission_is_reported() -> None:
    api = FakeApi(PODS)
    api.answers[PODS] = [403] * REFUSALS_UNTIL_ABSENT

    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: bool(followed.telemetry.problems()))
        assert followed.watcher.present, "an API server that has just started refuses everything"
        await followed.until(lambda: not followed.watcher.present)
        await followed.until(lambda: followed.watcher.present)

    follow(test, api)


def test_a_permission_that_is_withdrawn_keeps_the_copy_and_lets_it_age() -> None:
    async def test(followed: FollowedCollection) -> None:
        put(followed.api, "a", 1)
        await followed.until(lambda: followed.api.watches == 1)
        followed.api.answers[PODS] = [403] * 50
        followed.api.end_watches()
        await followed.until(lambda: not followed.watcher.present)
        age = followed.watcher.age
        assert age is not None
        await asyncio.sleep(0.1)
        assert followed.values == {"ns/a": 1}, (
            "that objects may not be read does not mean that there are none"
        )
        assert (followed.watcher.age or 0.0) > age
        followed.api.answers[PODS] = []
        followed.api.remove(PODS, "ns/a")
        await followed.until(lambda: followed.watcher.present)
        assert followed.values == {}

    follow(test)


def test_a_collection_that_no_longer_exists_is_empty() -> None:
    async def test(followed: FollowedCollection) -> None:
        put(followed.api, "a", 1)
        await followed.until(lambda: followed.api.watches == 1)
        followed.api.answers[PODS] = [404] * 50
        followed.api.end_watches()
        await followed.until(lambda: not followed.watcher.present)
        assert (followed.values, followed.watcher.age) == ({}, None)

    follow(test)


def test_an_object_that_cannot_be_read_counts_as_absent_and_is_reported() -> None:
    api = FakeApi(PODS)
    api.put(PODS, "ns/bad", spec={})
    put(api, "good", 1)

    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: bool(followed.values))
        assert followed.values == {"ns/good": 1}
        (problem,) = followed.telemetry.problems()
        assert UNREADABLE in str(problem)
        assert "object=ns/bad" in str(problem)
        put(api, "bad", 2)
        await followed.until(lambda: "ns/bad" in followed.values)
        assert not followed.telemetry.problems(), "it can be read again"
        api.put(PODS, "ns/bad", spec={})
        await followed.until(lambda: bool(followed.telemetry.problems()))
        api.remove(PODS, "ns/bad")
        await followed.until(lambda: not followed.telemetry.problems())

    follow(test, api)


def test_a_problem_with_an_object_ends_when_a_list_no_longer_has_it() -> None:
    api = FakeApi(PODS)
    api.put(PODS, "ns/bad", spec={})

    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: api.watches == 1)
        api.down = True
        api.end_watches(httpx2.ReadError("reset"))
        api.remove(PODS, "ns/bad")
        api.oldest, api.down = api.version + 1, False
        await followed.until(
            lambda: not followed.telemetry.problems() and followed.api.count("GET", PODS) > 2
        )

    follow(test, api)


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\x1c", "\v", "\r"])
def test_only_a_line_feed_ends_a_line(separator: str) -> None:
    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: followed.api.watches == 1)
        followed.api.put(PODS, "ns/a", spec={"cpus": f"1{separator}2"})
        put(followed.api, "b", 2)
        await followed.until(lambda: len(followed.values) == 2)
        assert followed.values == {"ns/a": f"1{separator}2", "ns/b": 2}
        assert followed.api.count("GET", PODS) == 2, "one list and one watch"

    follow(test)


def test_after_an_event_that_cannot_be_decoded_the_collection_is_listed() -> None:
    """Every new watch from the same version would begin with the same event."""

    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: followed.api.watches == 1)
        followed.api.send_line(PODS, b"{]\n")
        put(followed.api, "a", 1)
        await followed.until(lambda: followed.values == {"ns/a": 1})
        assert "cannot follow the cluster" not in str(followed.telemetry.problems())

    follow(test)


def test_an_error_while_a_list_is_taken_over_lists_again() -> None:
    api = FakeApi(PODS)
    put(api, "a", 1)
    failures = [RuntimeError("a fault")]
    seen = []

    def changed(key: tuple[str, str], value: int | None) -> None:
        if failures:
            raise failures.pop()
        seen.append((key, value))

    async def run() -> None:
        watcher: Watcher[int] = Watcher(
            api.client(), PODS, lambda item: item["spec"]["cpus"], logs.telemetry(), changed=changed
        )
        with pytest.raises(RuntimeError):
            await watcher.run()
        assert watcher.version == ""
        put(api, "b", 2)
        task = asyncio.create_task(watcher.run())  # as the agent starts a part again that has failed
        await asyncio.wait_for(watcher.listed.wait(), LIMIT_S)
        task.cancel()
        assert seen == [(("ns", "b"), 2)]
        assert watcher.values == {("ns", "a"): 1, ("ns", "b"): 2}

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"kind": "Status", "metadata": {"resourceVersion": "9"}},
        {"kind": "PodList", "metadata": {}, "items": []},
        {"kind": "PodList", "metadata": "x", "items": []},
        {"kind": "PodList", "metadata": {"resourceVersion": "9"}, "items": {"a": 1}},
        {"kind": "PodList", "metadata": {"resourceVersion": "9"}, "items": ["a"]},
    ],
)
def test_an_answer_that_is_not_a_list_keeps_the_copy(answer: Any) -> None:
    api = FakeApi(PODS)
    put(api, "a", 1)

    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: api.watches == 1)
        serve, lists = api._list, 0

        def answered(request: httpx2.Request) -> httpx2.Response:
            nonlocal lists
            lists += 1
            return httpx2.Response(200, json=answer)

        api._list = answered  # type: ignore[method-assign]
        api.error(PODS, 410)
        await followed.until(lambda: lists >= 2)
        assert followed.values == {"ns/a": 1}
        assert "the answer is not a list" in str(followed.telemetry.problems())
        api._list = serve  # type: ignore[method-assign]
        put(api, "b", 2)
        await followed.until(lambda: followed.values == {"ns/a": 1, "ns/b": 2})

    follow(test, api)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "MODIFIED", "object": {}},
        {"type": "MODIFIED", "object": {"metadata": "x"}},
        {"type": "MODIFIED", "object": 5},
        {"type": "ERROR", "object": []},
        {"type": "ERROR", "object": {"code": "x"}},
    ],
)
def test_an_event_that_cannot_be_read_ends_the_watch_and_not_the_part(event: Any) -> None:
    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: followed.api.watches == 1)
        followed.api._send(PODS, event)
        followed.api.end_watches()
        await followed.until(lambda: followed.api.watches == 1)
        put(followed.api, "a", 1)
        await followed.until(lambda: followed.values == {"ns/a": 1})

    follow(test)


FAULTS = [
    ConfigError("the command failed"),
    AssertionError("secret"),
    ValueError("secret"),
    KeyError("secret"),
    ssl.SSLError("bad certificate"),
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ["list", "watch"])
def test_a_fault_below_a_request_is_reported_and_tried_again(fault: Exception, method: str) -> None:
    api = FakeApi(PODS)
    put(api, "a", 1)
    serve, failures = api.handle_async_request, 0

    async def handle(request: httpx2.Request) -> httpx2.Response:
        nonlocal failures
        if failures < 2 and ("watch" in request.url.params) == (method == "watch"):
            failures += 1
            raise fault
        return await serve(request)

    api.handle_async_request = handle  # type: ignore[method-assign]

    async def test(followed: FollowedCollection) -> None:
        await followed.until(lambda: bool(followed.telemetry.problems()))
        reported = str(followed.telemetry.problems())
        shown = {ConfigError: "the command failed", ssl.SSLError: "bad certificate"}
        assert shown.get(type(fault), type(fault).__name__) in reported
        assert "secret" not in reported
        await followed.until(lambda: followed.values == {"ns/a": 1} and api.watches == 1)
        assert followed.telemetry.problems() == []

    follow(test, api)


@pytest.mark.parametrize("fault", FAULTS)
def test_credentials_that_cannot_be_used_are_reported_and_read_again(fault: Exception) -> None:
    async def test(followed: FollowedCollection) -> None:
        original, failures = followed.watcher._api._credentials, [fault, fault]

        def read() -> Any:
            if failures:
                raise failures.pop()
            return original()

        followed.watcher._api._credentials = read
        await followed.until(followed.watcher.listed.is_set)
        assert failures == []

    follow(test)


def test_credentials_are_read_again_after_401() -> None:
    read: list[int] = []
    api = FakeApi(PODS)
    api.answers[PODS] = [401]

    async def test(followed: FollowedCollection) -> None:
        first = followed.watcher._api._credentials
        followed.watcher._api._credentials = lambda: (read.append(1), first())[1]
        await followed.until(followed.watcher.listed.is_set)
        assert len(read) >= 2

    follow(test, api)


def test_the_delay_that_the_api_server_requests_is_kept() -> None:
    api, times = FakeApi(PODS), list[float]()
    handle = api.handle_async_request

    async def busy(request: httpx2.Request) -> httpx2.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            return httpx2.Response(503, headers={"Retry-After": "7"}, json={"message": "busy"})
        return await handle(request)

    async def test(followed: FollowedCollection) -> None:
        await asyncio.sleep(6.9)
        assert len(times) == 1
        await followed.until(followed.watcher.listed.is_set)
        assert times[1] - times[0] == pytest.approx(7.0, abs=0.05)

    api.handle_async_request = busy  # type: ignore[method-assign]
    follow(test, api)
