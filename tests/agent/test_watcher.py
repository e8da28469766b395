"""The watcher: a copy of a collection that is current, through everything that an API server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy import logs
from proxy.agent import watcher as module
from proxy.agent.watcher import FORBIDDEN, Watcher
from proxy.model.backoff import Backoff
from tests.agent.fake_api import FakeApi

PODS = "/api/v1/pods"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", Backoff(0.01, 0.05))
    monkeypatch.setattr(module, "ABSENT_S", 0.05)


class Followed:
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

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():
                await asyncio.sleep(0.002)


def follow(test: Callable[[Followed], Awaitable[None]], api: FakeApi | None = None) -> Followed:
    followed = Followed(api or FakeApi(PODS))

    async def run() -> None:
        task = asyncio.create_task(followed.watcher.run())
        try:
            await test(followed)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return followed


def put(api: FakeApi, name: str, cpus: Any) -> None:
    api.put(PODS, f"ns/{name}", spec={"cpus": cpus, "large": "x" * 100})


def test_lists_and_then_follows() -> None:
    async def test(it: Followed) -> None:
        put(it.api, "a", 1)
        put(it.api, "b", 2)
        await it.until(it.watcher.listed.is_set)
        assert it.values == {"ns/a": 1, "ns/b": 2}
        await it.until(lambda: it.api.watches == 1)
        put(it.api, "c", 3)
        put(it.api, "a", 4)
        it.api.remove(PODS, "ns/b")
        await it.until(lambda: len(it.changes) == 5)
        assert it.values == {"ns/a": 4, "ns/c": 3}
        assert it.changes[2:] == [("ns/c", 3), ("ns/a", 4), ("ns/b", None)]
        assert it.watcher.age == 0.0

    follow(test)


def test_reads_a_long_list_page_by_page_with_the_selector() -> None:
    api = FakeApi(PODS)
    api.page = 3
    for number in range(8):
        put(api, f"p{number}", number)

    async def test(it: Followed) -> None:
        await it.until(it.watcher.listed.is_set)
        assert len(it.values) == 8
        asked = [r.url.params for r in api.seen if "watch" not in r.url.params]
        assert len(asked) == 3
        assert {p["fieldSelector"] for p in asked} == {"spec.nodeName=n1"}

    follow(test, api)


def test_a_watch_that_ends_continues_where_it_was_without_a_new_list() -> None:
    async def test(it: Followed) -> None:
        put(it.api, "a", 1)
        await it.until(lambda: it.api.watches == 1)
        it.api.bookmark(PODS)
        version = it.api.version
        await asyncio.sleep(0.01)
        it.api.end_watches()
        put(it.api, "b", 2)  # while no watch is open
        await it.until(lambda: "ns/b" in it.values)
        assert it.api.count("GET") == 3  # one list, two watches
        assert it.api.seen[-1].url.params["resourceVersion"] == str(version)
        assert it.api.seen[-1].url.params["allowWatchBookmarks"] == "true"

    follow(test)


@pytest.mark.parametrize("as_event", [True, False])
def test_a_version_that_the_server_no_longer_has_is_listed_again(as_event: bool) -> None:
    async def test(it: Followed) -> None:
        put(it.api, "a", 1)
        put(it.api, "b", 2)
        await it.until(lambda: it.api.watches == 1)
        it.changes.clear()
        if as_event:
            it.api.error(PODS, 410)
            it.api._watches.clear()
        it.api.oldest = it.api.version + 3
        it.api.end_watches()
        it.api.remove(PODS, "ns/a")
        put(it.api, "c", 3)
        it.api.version += 5
        await it.until(lambda: "ns/c" in it.values and it.api.watches == 1)
        assert it.values == {"ns/b": 2, "ns/c": 3}
        assert sorted(it.changes) == [("ns/a", None), ("ns/c", 3)], "what is unchanged is not notified"

    follow(test)


def test_an_outage_keeps_the_copy_and_says_how_old_it_is() -> None:
    async def test(it: Followed) -> None:
        put(it.api, "a", 1)
        await it.until(lambda: it.api.watches == 1)
        it.api.crash()
        await it.until(lambda: bool(it.watcher.age))
        assert it.values == {"ns/a": 1}
        await it.until(lambda: bool(it.telemetry.problems()))
        assert "cannot follow the cluster" in str(it.telemetry.problems())
        put(it.api, "b", 2)
        it.api.down = False
        await it.until(lambda: "ns/b" in it.values)
        assert it.watcher.age == 0.0
        assert it.telemetry.problems() == []

    follow(test)


def test_a_collection_that_does_not_exist_is_empty_until_it_does() -> None:
    api = FakeApi()

    async def test(it: Followed) -> None:
        await it.until(it.watcher.listed.is_set)
        assert (it.watcher.present, it.values) == (False, {})
        assert it.telemetry.problems() == []
        api.collections[PODS] = {}
        put(api, "a", 1)
        await it.until(lambda: it.watcher.present and "ns/a" in it.values)

    follow(test, api)


def test_what_is_not_permitted_is_reported() -> None:
    api = FakeApi(PODS)
    api.answers[PODS] = [403] * FORBIDDEN

    async def test(it: Followed) -> None:
        await it.until(lambda: bool(it.telemetry.problems()))
        assert it.watcher.present, "an API server that has just started refuses everything"
        await it.until(lambda: not it.watcher.present)
        await it.until(lambda: it.watcher.present)

    follow(test, api)


def test_an_object_that_cannot_be_read_counts_as_absent_and_is_reported() -> None:
    api = FakeApi(PODS)
    api.put(PODS, "ns/bad", spec={})
    put(api, "good", 1)

    async def test(it: Followed) -> None:
        await it.until(lambda: bool(it.values))
        assert it.values == {"ns/good": 1}
        assert "cannot read an object of the cluster" in str(it.telemetry.problems())

    follow(test, api)


def test_credentials_are_read_again_after_401() -> None:
    read: list[int] = []
    api = FakeApi(PODS)
    api.answers[PODS] = [401]

    async def test(it: Followed) -> None:
        first = it.watcher._api._credentials
        it.watcher._api._credentials = lambda: (read.append(1), first())[1]
        await it.until(it.watcher.listed.is_set)
        assert len(read) >= 2

    follow(test, api)
