"""The writer: prompt and rare writes, and retries after failures or writes of other programs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy import logs
from proxy.agent import object_writer as module
from proxy.agent.api_client import ApiServerError, ApiUnreachableError
from proxy.agent.object_writer import ObjectWriter
from proxy.model.backoff import Backoff
from tests.testkit.simulated_clock import run_simulated

LEAST = 0.05


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_INTERVAL_S", LEAST)
    monkeypatch.setattr(module, "WRITE_BURST", 1000)
    monkeypatch.setattr(module, "FAILED_BACKOFF", Backoff(0.02, 0.05))
    monkeypatch.setattr(module, "REFUSED_BACKOFF", Backoff(0.2, 0.4))
    monkeypatch.setattr(
        module, "OVERWRITTEN_BACKOFF", Backoff(0.05, 1.0, steady=5.0, tolerated=2, least=0.05)
    )


class WrittenServer:
    def __init__(self) -> None:
        self.writes: list[tuple[str, Any]] = []
        self.errors: list[Exception] = []
        self.version = 0
        self.telemetry = logs.telemetry()
        self.writer = ObjectWriter(self.telemetry)

    def want(self, path: str, value: Any, **more: Any) -> None:
        self.writer.want(path, value, lambda: self.write(path, value), **more)

    async def write(self, path: str, value: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        self.version += 1
        self.writes.append((path, value))
        return {"metadata": {"resourceVersion": str(self.version)}}

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self.writes]


def write(test: Callable[[WrittenServer], Awaitable[None]]) -> WrittenServer:
    server = WrittenServer()

    async def run() -> None:
        server.writer = ObjectWriter(server.telemetry)
        task = asyncio.create_task(server.writer.run())
        try:
            await test(server)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_simulated(run())
    return server


def test_the_first_change_is_written_at_once_and_a_burst_is_one_more_write() -> None:
    async def test(server: WrittenServer) -> None:
        server.want("a", 0)
        await asyncio.sleep(0.01)
        assert server.values == [0]
        for value in range(1, 20):
            server.want("a", value)
        await asyncio.sleep(3 * LEAST)
        assert server.values == [0, 19]
        server.want("a", 19)
        await asyncio.sleep(2 * LEAST)
        assert server.values == [0, 19], "nothing has changed"

    write(test)


def test_objects_do_not_wait_for_each_other() -> None:
    async def test(server: WrittenServer) -> None:
        server.want("a", 1)
        server.want("b", 2)
        await asyncio.sleep(0.01)
        assert sorted(server.writes) == [("a", 1), ("b", 2)]

    write(test)


def test_a_write_that_fails_is_repeated_with_the_newest_value() -> None:
    async def test(server: WrittenServer) -> None:
        server.errors = [ApiUnreachableError("down"), ApiServerError("busy", 503)]
        server.want("a", 1)
        await asyncio.sleep(0.01)
        assert "cannot write an object" in str(server.telemetry.problems())
        server.want("a", 2)
        await asyncio.sleep(0.25)
        assert server.values == [2]
        assert server.telemetry.problems() == []

    write(test)


def test_refused_writes_are_retried_rarely() -> None:
    async def test(server: WrittenServer) -> None:
        server.errors = [ApiServerError("no", 403) for _ in range(99)]
        server.want("a", 1)
        await asyncio.sleep(0.35)
        assert 99 - len(server.errors) == 2

    write(test)


def test_a_version_of_another_writer_is_overwritten_and_the_agents_own_is_not() -> None:
    async def test(server: WrittenServer) -> None:
        server.want("a", 1)
        await asyncio.sleep(0.01)
        server.writer.observed("a", "1")
        await asyncio.sleep(0.12)
        assert server.values == [1]
        server.writer.observed("a", "77")
        await asyncio.sleep(0.12)
        assert server.values == [1, 1]
        server.writer.observed("a", None)
        await asyncio.sleep(0.12)
        assert server.values == [1, 1, 1], "it was deleted"

    write(test)


@pytest.mark.parametrize(
    ("during", "after", "writes"),
    [
        (["77"], [], 2),  # another program has written after us
        (["2", "77"], [], 2),
        ([None], [], 2),  # it was deleted
        (["2"], [], 1),  # ours
        (["1"], ["2"], 1),  # another program has written before us
        ([], ["2"], 1),
    ],
)
def test_a_version_that_arrives_before_the_answer_of_a_write(
    during: list[str | None], after: list[str], writes: int
) -> None:
    async def test(server: WrittenServer) -> None:
        server.version = 1

        async def slow() -> dict[str, Any]:
            answer = await server.write("a", 1)
            for version in during:
                server.writer.observed("a", version)
            return answer

        server.writer.want("a", 1, slow)
        await asyncio.sleep(0.01)
        during.clear()
        for version in after:
            server.writer.observed("a", version)
        await asyncio.sleep(1.0)
        assert server.values == [1] * writes
        assert server.telemetry.problems() == []

    write(test)


def test_a_write_without_an_answer_may_have_taken_effect() -> None:
    async def test(server: WrittenServer) -> None:
        async def lost() -> dict[str, Any]:
            server.writes.append(("a", 2))
            server.want("a", 1)
            raise ApiUnreachableError("no answer")

        server.want("a", 1)
        await asyncio.sleep(2 * LEAST)
        server.writer.want("a", 2, lost)
        await asyncio.sleep(4 * LEAST)
        assert server.values == [1, 2, 1]

    write(test)


def test_an_object_that_is_wanted_again_during_its_last_write_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WRITE_BURST", 1)

    async def test(server: WrittenServer) -> None:
        async def slow() -> dict[str, Any]:
            server.writer.forget("a")
            server.want("a", 2)
            return await server.write("a", 1)

        server.writer.want("a", 1, slow, once=True)
        await asyncio.sleep(2.0)
        assert server.values == [1, 2]

    write(test)


def test_repairs_against_a_persistent_writer_become_rare_and_are_reported() -> None:
    async def test(server: WrittenServer) -> None:
        server.want("a", 1)
        for step in range(40):
            await asyncio.sleep(0.02)
            server.writer.observed("a", f"theirs {step}")
        assert 3 <= len(server.writes) <= 8
        assert "another program keeps writing" in str(server.telemetry.problems())

    write(test)


def test_the_report_of_another_writer_ends_with_its_writes() -> None:
    async def test(server: WrittenServer) -> None:
        for end in (5.0, 0.0):
            server.want("a", 1)
            for step in range(40):
                await asyncio.sleep(0.02)
                server.writer.observed("a", f"theirs {step} {end}")
            await asyncio.sleep(1.0)
            assert len(server.telemetry.problems()) == 1
            if end:
                await asyncio.sleep(end)
                server.writer.observed("a", "theirs, once")
            else:
                server.writer.forget("a")
            assert server.telemetry.problems() == []

    write(test)


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_an_object_that_is_forgotten_is_no_problem_any_more(is_in_flight: bool) -> None:
    async def test(server: WrittenServer) -> None:
        async def refused() -> None:
            await asyncio.sleep(1.0)
            raise ApiServerError("no", 403)

        server.writer.want("a", 1, refused)
        await asyncio.sleep(0.5 if is_in_flight else 1.1)
        assert len(server.telemetry.problems()) == (0 if is_in_flight else 1)
        server.writer.forget("a")
        await asyncio.sleep(5.0)
        assert server.telemetry.problems() == []

    write(test)


def test_a_slow_write_delays_no_other_object() -> None:
    async def test(server: WrittenServer) -> None:
        done = asyncio.Event()

        async def slow() -> None:
            await done.wait()

        server.writer.want("slow", 1, slow)
        await asyncio.sleep(0.01)
        for value in range(3):
            server.want("a", value)
            await asyncio.sleep(2 * LEAST)
        assert server.values == [0, 1, 2]
        done.set()

    write(test)


def test_a_withdrawn_object_is_removed_once_and_forgotten() -> None:
    async def test(server: WrittenServer) -> None:
        server.want("a", 1)
        await asyncio.sleep(2 * LEAST)
        server.writer.withdraw("a", lambda: server.write("a", "gone"))
        server.writer.withdraw("never", lambda: server.write("never", "gone"))
        await asyncio.sleep(2 * LEAST)
        assert server.values == [1, "gone"]
        server.writer.observed("a", None)
        await asyncio.sleep(2 * LEAST)
        assert server.values == [1, "gone"]

    write(test)


def test_single_writes_are_forgotten_and_bounded() -> None:
    async def test(server: WrittenServer) -> None:
        server.errors = [ApiUnreachableError("down")] * 1000
        server.want("turned off", None, once=True)
        for number in range(300):
            server.want(f"event {number}", number, once=True, delay_factor=math.inf)
        await asyncio.sleep(0.01)
        server.errors = []
        await asyncio.sleep(0.3)
        assert len(server.writes) == module.ONCE_LIMIT + 1
        assert ("event 299", 299) in server.writes
        assert ("turned off", None) in server.writes, "Events take the place of Events alone"

    write(test)


def test_single_writes_that_fail_are_one_problem_of_their_collection() -> None:
    async def test(server: WrittenServer) -> None:
        server.errors = [
            ApiUnreachableError(f"cannot PATCH /events/{n} at the API server: down") for n in "abc"
        ]
        for name in "abc":
            server.want(f"/events/{name}", name, once=True)
        await asyncio.sleep(0.01)
        (problem,) = server.telemetry.problems()
        assert problem["keys"] == {"path": "/events", "err": "cannot PATCH /events at the API server: down"}
        await asyncio.sleep(0.2)
        assert sorted(server.values) == ["a", "b", "c"]
        assert server.telemetry.problems() == []

    write(test)


def test_only_writes_with_a_limit_are_dropped_after_some_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr(module, "FAILED_BACKOFF", Backoff(0.01, 0.01))
    tries = {"event": 0, "amounts": 0, "unreachable": 0}

    async def test(server: WrittenServer) -> None:
        async def refuse(path: str) -> None:
            tries[path] += 1
            raise ApiUnreachableError("down") if path == "unreachable" else ApiServerError("no", 404)

        server.writer.want("event", 1, lambda: refuse("event"), once=True, gives_up=True)
        server.writer.want("amounts", 1, lambda: refuse("amounts"), once=True)
        server.writer.want("unreachable", 1, lambda: refuse("unreachable"), once=True, gives_up=True)
        await asyncio.sleep(0.3)
        assert tries["event"] == module.ONCE_REFUSALS
        assert server.writer.paths == ("amounts", "unreachable")

    write(test)
    assert min(tries["amounts"], tries["unreachable"]) > module.ONCE_REFUSALS


def test_a_dropped_write_is_no_longer_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_BACKOFF", Backoff(0.05, 0.05))

    async def test(server: WrittenServer) -> None:
        async def refuse() -> None:
            raise ApiServerError("no", 404)

        server.writer.want("/gone/events/a", 1, refuse, once=True, gives_up=True)
        await asyncio.sleep(0.05)
        assert server.telemetry.problems()
        async with asyncio.timeout(3):
            while server.writer.paths:
                await asyncio.sleep(0.005)
        assert server.telemetry.problems() == []

    write(test)


def test_a_refusal_after_an_outage_waits_as_the_first_one_does() -> None:
    async def test(server: WrittenServer) -> None:
        server.errors = [ApiUnreachableError("down") for _ in range(6)] + [ApiServerError("forbidden", 403)]
        server.want("a", 1)
        async with asyncio.timeout(3):
            while server.errors:
                await asyncio.sleep(0.005)
        refused = asyncio.get_running_loop().time()
        async with asyncio.timeout(3):
            while not server.values:
                await asyncio.sleep(0.005)
        assert asyncio.get_running_loop().time() - refused < 0.35, "the longest pause is 0.4 s"

    write(test)


def test_the_delay_that_the_api_server_requests_is_kept_also_after_a_change() -> None:
    async def test(server: WrittenServer) -> None:
        server.errors = [ApiServerError("busy", 429, retry_after=5.0)]
        server.want("a", 1)
        await asyncio.sleep(0.2)
        server.want("a", 2)
        await asyncio.sleep(4.7)
        assert server.writes == []
        await asyncio.sleep(0.3)
        assert server.values == [2]

    write(test)
