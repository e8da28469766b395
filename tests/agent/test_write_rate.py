"""The rate of all writes of a node, on a simulated clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from proxy import logs
from proxy.agent.api_client import ApiServerError, ApiUnreachableError, JsonObject
from proxy.agent.object_writer import WRITE_BURST, WRITE_INTERVAL_S, ObjectWriter, WriteBudget
from proxy.agent.pod_annotations import DELAY_FACTOR
from proxy.agent.publisher import FINGERPRINT_S
from tests.testkit.simulated_clock import run_simulated


class CountingServer:
    """The writes and their times; ``changed`` has the time since which a path is outdated."""

    def __init__(self) -> None:
        self.writer = ObjectWriter(logs.telemetry())
        self.writes: list[tuple[float, str]] = []
        self.changed: dict[str, float] = {}
        self.delays: dict[str, list[float]] = {}
        self.error: Exception | None = None
        self.attempts = 0

    def want(self, path: str, value: object, delay_factor: float = 1.0, delay_s: float = 0.0) -> None:
        self.changed.setdefault(path, self._now())

        async def write() -> JsonObject | None:
            self.attempts += 1
            if self.error is not None:
                raise self.error
            self.writes.append((self._now(), path))
            self.delays.setdefault(path, []).append(self._now() - self.changed.pop(path))
            return None

        self.writer.want(
            path, value, write, delay_factor=delay_factor, delay_s=delay_s, once=delay_factor == math.inf
        )

    def count(self, since: float, path: str = "") -> int:
        return sum(1 for at, written in self.writes if at > since and written.startswith(path))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def play(test: Callable[[CountingServer], Awaitable[None]]) -> None:
    async def run() -> None:
        server = CountingServer()
        task = asyncio.create_task(server.writer.run())
        try:
            await test(server)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_simulated(run())


def test_a_budget_has_a_burst_and_a_rate_and_keeps_spare_tokens() -> None:
    budget = WriteBudget(2.0, 3)
    for _ in range(3):
        assert budget.seconds_until_token(1000.0) == 0.0
        budget.take_token()
    assert budget.seconds_until_token(1000.0) == 0.5
    assert budget.seconds_until_token(1000.25) == 0.25
    assert budget.seconds_until_token(1000.5) == 0.0
    assert budget.seconds_until_token(1000.5, spare=1) == 0.5
    budget.return_token()
    assert budget.seconds_until_token(1000.5, spare=1) == 0.0
    assert budget.seconds_until_token(2000.0, spare=3) == 0.5, "there are never more than the burst"


def test_one_object_and_a_pod_every_second_are_one_write_a_second_each_within_a_second() -> None:
    async def test(server: CountingServer) -> None:
        for number in range(300):
            server.want("node", number)
            server.want(f"event {number}", number, math.inf)
            await asyncio.sleep(1.0)
        assert server.count(0.0) <= 300 + WRITE_BURST
        assert server.count(100.0) - server.count(200.0) <= 101
        assert max(server.delays["node"]) <= 1.0
        assert len(server.delays["node"]) >= 299

    play(test)


def test_a_sandbox_and_its_container_are_one_write_without_delay() -> None:
    async def test(server: CountingServer) -> None:
        server.want("node", "nothing")
        await asyncio.sleep(5.0)
        for number in range(200):
            server.want("node", ("sandbox", number), delay_s=FINGERPRINT_S)
            await asyncio.sleep(0.1)
            server.changed["node"] = server._now()
            server.want("node", ("container", number))
            await asyncio.sleep(0.95)
        assert max(server.delays["node"]) < 0.01
        assert len(server.writes) == 201

    play(test)


def test_a_change_that_is_not_urgent_is_written_once_it_has_waited() -> None:
    async def test(server: CountingServer) -> None:
        server.want("node", 0)
        await asyncio.sleep(5.0)
        for number in range(1, 5):
            server.want("node", number, delay_s=FINGERPRINT_S)
            await asyncio.sleep(0.2)
        await asyncio.sleep(5.0)
        assert [at for at, _ in server.writes] == [
            0.0,
            5.0 + FINGERPRINT_S,
            5.0 + FINGERPRINT_S + WRITE_INTERVAL_S,
        ]

    play(test)


def test_two_objects_take_turns_and_each_is_written_every_second_second() -> None:
    async def test(server: CountingServer) -> None:
        for number in range(400):
            server.want("a", number)
            server.want("b", number)
            await asyncio.sleep(0.25)
        assert server.count(0.0) <= 100 + WRITE_BURST
        assert abs(server.count(10.0, "a") - server.count(10.0, "b")) <= 1
        for path in "ab":
            assert max(server.delays[path]) <= 2.1

    play(test)


def test_objects_of_the_node_do_not_wait_for_a_crowd_of_pods_nor_for_events() -> None:
    async def test(server: CountingServer) -> None:
        for number in range(80):
            server.want(f"pod {number}", 1, DELAY_FACTOR)
            server.want(f"event {number}", 1, math.inf)
        for number in range(100):
            server.want("node", number)
            await asyncio.sleep(2.0)
        assert max(server.delays["node"]) <= 5.0
        assert server.count(0.0, "pod") + server.count(-1.0, "pod") > 80
        assert server.count(0.0, "event") > 15, "the remaining tokens are for Events"

    play(test)


def test_an_event_leaves_a_write_for_an_object_of_the_node() -> None:
    async def test(server: CountingServer) -> None:
        for number in range(60):
            server.want(f"event {number}", 1, math.inf)
        await asyncio.sleep(20.3)
        server.want("node", 1)
        await asyncio.sleep(0.001)
        assert server.delays["node"][0] < 0.001

    play(test)


def test_an_idle_node_writes_nothing() -> None:
    async def test(server: CountingServer) -> None:
        server.want("node", 1)
        await asyncio.sleep(3600.0)
        server.want("node", 1)
        await asyncio.sleep(3600.0)
        assert server.writes == [(0.0, "node")]

    play(test)


def test_an_outage_uses_no_tokens_and_all_objects_are_current_within_five_seconds() -> None:
    async def test(server: CountingServer) -> None:
        server.error = ApiUnreachableError("down")
        for number in range(600):
            for path in ("a", "b", "condition"):
                server.want(path, number)
            server.want(f"event {number}", number, math.inf)
            await asyncio.sleep(1.0)
        assert not server.writes
        server.error, server.changed = None, dict.fromkeys(server.changed, server._now())
        await asyncio.sleep(5.0)
        assert {"a", "b", "condition"} <= server.delays.keys()

    play(test)


def test_refused_writes_count() -> None:
    async def test(server: CountingServer) -> None:
        server.error = ApiServerError("busy", 503)
        for number in range(40):
            server.want(f"pod {number}", 1, DELAY_FACTOR)
        await asyncio.sleep(100.0)
        assert 90 <= server.attempts <= 100 + WRITE_BURST

    play(test)
