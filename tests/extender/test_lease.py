"""The lease: one holder at a time, independent of the clocks."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import httpx2
import pytest

from proxy import logs
from proxy.extender import lease as module
from proxy.extender.lease import Lease
from tests.extender.running_extender import LEASES, ClusterApi
from tests.testkit.simulated_clock import run_simulated
from tests.testkit.waiting import until


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "DURATION_S", 1)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(module, "MARGIN_S", 0.3)


def lease(api: ClusterApi, identity: str) -> Lease:
    return Lease(api.client(), "default", "extender", identity, logs.telemetry())


def test_one_replica_holds_the_lease_until_it_stops_renewing_it() -> None:
    async def run() -> None:
        api = ClusterApi()
        one, two = lease(api, "one"), lease(api, "two")
        await one.acquire()
        keeping = asyncio.ensure_future(one.renew_until_lost())
        waiting = asyncio.ensure_future(two.acquire())
        await asyncio.sleep(1.5)
        assert (one.is_held, two.is_held) == (True, False)
        keeping.cancel()
        while not two.is_held:
            await asyncio.sleep(0.01)
            assert not (one.is_held and two.is_held)
        await waiting
        assert not one.is_held

    run_simulated(run())


def test_a_replaced_holder_stops() -> None:
    async def run() -> None:
        api = ClusterApi()
        one, two = lease(api, "one"), lease(api, "two")
        await one.acquire()
        spec = {**api.collections[LEASES]["extender"]["spec"], "holderIdentity": ""}
        api.put(LEASES, "extender", spec=spec)
        await two.acquire()
        async with asyncio.timeout(1):
            await one.renew_until_lost()

    run_simulated(run())


def test_a_lease_that_is_deleted_is_held_by_no_two_replicas() -> None:
    async def run() -> None:
        api = ClusterApi()
        one, two = lease(api, "one"), lease(api, "two")
        await one.acquire()
        waiting = asyncio.ensure_future(two.acquire())
        await until(lambda: bool(two._observed[0]))
        api.remove(LEASES, "extender")
        async with asyncio.timeout(0.6):
            await one.renew_until_lost()
        assert not one.is_held
        began = asyncio.get_running_loop().time()
        await waiting
        assert two.is_held
        assert asyncio.get_running_loop().time() - began > 0.6, "the holder may not have noticed yet"

    run_simulated(run())


def test_a_holder_that_cannot_renew_stops_before_its_lease_ends() -> None:
    async def run() -> None:
        api = ClusterApi()
        one = lease(api, "one")
        await one.acquire()
        api.down = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        await one.renew_until_lost()
        assert loop.time() - began < 1.0
        assert not one.is_held

    run_simulated(run())


def test_a_released_lease_is_taken_at_once() -> None:
    async def run() -> None:
        api = ClusterApi()
        one, two = lease(api, "one"), lease(api, "two")
        await one.acquire()
        await one.release()
        assert not one.is_held
        async with asyncio.timeout(0.5):
            await two.acquire()
        assert two.is_held

    run_simulated(run())


class LosingApi(ClusterApi):
    """An API server that carries out the next changes of the lease, and whose answers are lost."""

    lost = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await super().handle_async_request(request)
        if self.lost and request.method in ("PATCH", "POST") and answer.status_code < 400:
            self.lost -= 1
            raise httpx2.ReadError("connection reset")
        return answer

    @property
    def holder(self) -> str:
        return str(self.collections[LEASES]["extender"]["spec"]["holderIdentity"])


def test_a_holder_keeps_its_lease_when_the_answer_to_a_renewal_is_lost() -> None:
    async def run() -> None:
        api = LosingApi()
        one = lease(api, "one")
        await one.acquire()
        keeping = asyncio.ensure_future(one.renew_until_lost())
        api.lost = 1
        await asyncio.sleep(1.5)
        assert (api.lost, one.is_held, keeping.done()) == (0, True, False)
        keeping.cancel()

    run_simulated(run())


def test_a_lease_is_released_also_after_a_renewal_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 5.0)

    async def run() -> None:
        api = LosingApi()
        one = lease(api, "one")
        await one.acquire()
        renewal = {**api.collections[LEASES]["extender"]["spec"], "renewTime": "later"}
        api.put(LEASES, "extender", spec=renewal)
        await one.release()
        assert (api.holder, one.is_held) == ("", False)

    run_simulated(run())


def test_the_lease_of_another_holder_is_not_released() -> None:
    async def run() -> None:
        api = LosingApi()
        one = lease(api, "one")
        await one.acquire()
        api.put(LEASES, "extender", spec={"holderIdentity": "two", "leaseDurationSeconds": 15})
        await one.release()
        assert api.holder == "two"

    run_simulated(run())


def test_a_replica_that_has_got_the_lease_without_an_answer_does_not_wait_for_its_end() -> None:
    async def run() -> None:
        api = LosingApi()
        one = lease(api, "one")
        api.lost = 1
        async with asyncio.timeout(0.5):
            await one.acquire()
        assert (api.holder, one.is_held) == ("one", True)

    run_simulated(run())


class GarbageApi(ClusterApi):
    """An API server behind a proxy that answers requests of some methods 200 with something else."""

    def __init__(self, content: object, *methods: str) -> None:
        super().__init__()
        self.content = content
        self.garbled = list(methods)
        self.renewals = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await super().handle_async_request(request)
        if request.method in self.garbled and answer.status_code < 400:
            self.garbled.remove(request.method)
            return httpx2.Response(200, json=self.content)
        self.renewals += request.method == "PATCH" and answer.status_code < 400
        return answer


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"metadata": None},
        {"metadata": {"resourceVersion": 7}},
        {"metadata": {"resourceVersion": "7"}, "spec": {"leaseDurationSeconds": "soon"}},
        ["not", "an", "object"],
    ],
)
def test_an_answer_that_is_no_lease_is_a_failed_attempt(
    content: object, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DURATION_S", 60)

    async def run() -> None:
        logs.setup("info", "text", sys.stderr)
        api = GarbageApi(content, "POST", "GET", "GET")
        one = lease(api, "one")
        async with asyncio.timeout(5):
            await one.acquire()
        keeping = asyncio.ensure_future(one.renew_until_lost())
        api.garbled = ["PATCH"]
        await until(lambda: not api.garbled)
        renewed = api.renewals
        await until(lambda: api.renewals > renewed)
        assert (one.is_held, keeping.done()) == (True, False)
        keeping.cancel()

    run_simulated(run())
    text = capfd.readouterr().err
    assert "the answer is not a Lease" in text
    assert text.count("cannot read or create the lease") <= 2, "the problem, and that it is resolved"
