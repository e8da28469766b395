from __future__ import annotations

import asyncio
import threading

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import RuntimeSyncDue, SavedCpusLearned
from proxy.executor.background import Worker
from proxy.executor.ledger_codec import dump, load_container, load_pod
from proxy.executor.ledger_writer import LedgerWriter
from proxy.executor.status_data import node_page
from proxy.model.defects import InputDefect
from proxy.model.errors import CannotCreateError, RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.telemetry import metrics
from proxy.telemetry.port import PROBLEM_LIMIT
from tests.testkit.captured_log import telemetry
from tests.testkit.changed_copy import changed_copy

POD = Pod(
    "s",
    "u",
    "ns",
    "p",
    1,
    QosClass.LSR,
    KubeQos.BURSTABLE,
    "/kubepods",
    CpuSet.parse("1-2"),
    (InputDefect("odd", decisive=True),),
)
OWNER = Container(
    "id",
    "c",
    POD,
    Request(1, 2, 3, 4, "5", "6"),
    Placement(Pool.OWN, CpuSet.parse("1-2"), Mask((0, 3)), ("because",), True),
    Phase.STARTING,
    2,
    "u",
    "path",
)


def test_records_are_read_back_as_written() -> None:
    assert load_container(dump(OWNER)) == OWNER
    assert load_pod(dump(POD)) == POD
    assert dump(OWNER)["placement"]["own"] == "1-2"


def test_invalid_records_are_not_read() -> None:
    for broken in ({}, {**dump(OWNER), "phase": "flying"}, {**dump(OWNER), "placement": {"own": "x"}}):
        assert load_container(broken) is None
    assert load_pod({"uid": 3}) is None


def test_problems_are_reported_once_and_bounded() -> None:
    logged: list[str] = []
    now = [5.0]
    port = telemetry(logged, lambda: now[0])
    port.problem("a", pod="ns/p")
    now[0] = 6.0
    port.problem("a", pod="ns/p")
    assert logged == ["a pod=ns/p"]
    assert port.problems() == [
        {"what": "a pod=ns/p", "message": "a", "keys": {"pod": "ns/p"}, "count": 2, "first": 5.0, "last": 6.0}
    ]
    for number in range(PROBLEM_LIMIT):
        port.problem("b", number=number)
    assert [p["what"] for p in port.problems()] == [f"b number={n}" for n in range(PROBLEM_LIMIT)]


class Broken:
    """A ledger on a full disk."""

    problem = ""

    def __init__(self) -> None:
        self.entries: dict[str, object] = {}

    def write(self, changes: object) -> None:
        raise CannotCreateError("cannot write the ledger: no space left")

    def close(self) -> None:
        pass


def test_an_unwritable_ledger_is_reported_and_stops_no_call() -> None:
    async def scenario() -> None:
        reported: list[str] = []
        worker = Worker("w", lambda e: reported.append(repr(e)))
        ledger_writer = LedgerWriter(Broken(), worker, telemetry(reported))
        ledger_writer.put("c/x", OWNER)
        await ledger_writer.flush()
        assert reported == ['cannot write the ledger err="cannot write the ledger: no space left"']
        kept: dict[str, object] = {}
        ledger_writer._ledger.write = kept.update  # the disk has room again
        newer = changed_copy(OWNER, phase=Phase.RUNNING)
        ledger_writer.put("c/y", newer)
        await asyncio.sleep(0)
        await ledger_writer.flush()
        assert set(kept) == {"c/x", "c/y"}
        assert reported[1:] == [
            'resolved problem="cannot write the ledger" err="cannot write the ledger: no space left"'
        ]
        worker.close()

    asyncio.run(scenario())


class _Full(dict):
    """A ledger that can be full, and keeps its content."""

    entries = property(lambda self: self)
    problem = ""
    full = False

    def write(self, changes: dict[str, object]) -> None:
        if self.full:
            raise CannotCreateError("cannot write the ledger: no space left")
        self.update(changes)


def test_a_failed_record_never_replaces_a_newer_one() -> None:
    async def scenario() -> None:
        worker = Worker("k", lambda error: None)
        ledger = _Full()
        ledger.full = True
        ledger_writer = LedgerWriter(ledger, worker, telemetry())
        gate = threading.Event()
        worker.start(gate.wait, 30)
        writes = []
        for number in range(3):  # three batches wait for the worker, and all of them fail
            ledger_writer.put("q/pod", {"quota": number})
            writes.append(asyncio.ensure_future(ledger_writer.flush()))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*writes)
        await asyncio.sleep(0)
        ledger.full = False
        await ledger_writer.close()
        assert ledger == {"q/pod": {"quota": 2}}
        worker.close()

    asyncio.run(scenario())


def test_an_abandoned_wait_loses_no_record() -> None:
    async def scenario() -> None:
        worker = Worker("k", lambda error: None)
        ledger = _Full()
        ledger_writer = LedgerWriter(ledger, worker, telemetry())
        gate = threading.Event()
        worker.start(gate.wait, 30)
        ledger_writer.put("i/one", {})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ledger_writer.flush()
        ledger_writer.put("c/two", {})
        ledger_writer._start()  # as its timer does: the worker has not executed it at the shutdown
        gate.set()
        await ledger_writer.close()
        worker.close()
        assert set(ledger) == {"i/one", "c/two"}

    asyncio.run(scenario())


def test_the_worker_keeps_order_and_reports() -> None:
    async def scenario() -> None:
        seen: list[int] = []
        failed: list[BaseException] = []
        worker = Worker("w", failed.append)
        gate = threading.Event()
        worker.start(gate.wait, 30)
        for i in range(20):
            worker.start(seen.append, i)
        worker.start(lambda: 1 / 0)
        gate.set()
        assert await worker.run(lambda: len(seen)) == 20
        assert seen == list(range(20))
        worker.close()
        assert isinstance(failed[0], ZeroDivisionError)

    asyncio.run(scenario())


def test_moved_containers_are_sent_to_the_runtime_later(run_scenario) -> None:
    async def scenario(world) -> None:
        runtime_sync = world.make_runtime_sync()
        task = asyncio.create_task(runtime_sync.run())
        one, two = [await world.run(await world.pod(uid, "LS")) for uid in ("one", "two")]
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.until(lambda: world.executor.telemetry.value(metrics.RUNTIME_UPDATES) == 2)
        assert (world.runtime.specs[one], world.runtime.specs[two]) == ("4-15", "4-15")
        assert world.runtime.specs[lse] == "0-3"
        await world.clear_log()
        await world.quiet()
        assert world.log == [], "a saved set is not sent again"
        world.check()
        task.cancel()
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_an_update_of_the_runtime_sync_that_is_overtaken_is_corrected(run_scenario) -> None:
    async def scenario(world) -> None:
        runtime_sync = world.make_runtime_sync()
        task = asyncio.create_task(runtime_sync.run())
        ls = await world.run(await world.pod("ls", "LS"))
        gate, inside = threading.Event(), threading.Event()

        def slow(_: str) -> None:
            inside.set()
            gate.wait(60)

        world.runtime.on_update = slow
        await world.run(await world.pod("a", "LSE", "", "0"))
        await asyncio.to_thread(inside.wait, 60)
        second = asyncio.create_task(world.begin(await world.pod("b", "LSE", "", "1")))
        await asyncio.sleep(0.1)
        assert not second.done(), "the runtime may still write the set of its last update"
        gate.set()
        world.finish(await second, "b")
        assert world.on(ls) == "2-15"
        await world.until(lambda: world.runtime.specs[ls] == "2-15")
        world.check()
        task.cancel()
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_the_runtime_sync_survives_errors(run_scenario) -> None:
    async def scenario(world) -> None:
        runtime_sync = world.make_runtime_sync()
        task = asyncio.create_task(runtime_sync.run())
        ls = await world.run(await world.pod("ls", "LS"))
        for error in (RuntimeCallError("cannot: gone", 5), RuntimeCallError("cannot: odd", 2)):
            world.runtime.update_error = error
            world.executor.store.handle(RuntimeSyncDue((ls,)))
            world.executor.store.handle(SavedCpusLearned(ls, None))
            world.executor.runtime_sync_due.set()
            await world.quiet()
        await world.until(world.executor.telemetry.problems)
        assert [p["what"] for p in world.executor.telemetry.problems()] == [
            'cannot save a cpuset at the runtime pod=ns/ls container=c containerID=s-ls-c-1 err="cannot: odd"'
        ]
        world.now += 5
        world.runtime.update_error = UnavailableError("cannot: down")
        world.executor.store.handle(RuntimeSyncDue((ls,)))
        world.executor.store.handle(SavedCpusLearned(ls, None))
        world.executor.runtime_sync_due.set()
        await world.until(lambda: world.executor.state.inflight.orphans())
        world.runtime.update_error = None
        settled = world.executor.telemetry.value(metrics.RUNTIME_UPDATES)
        for _ in range(2):
            await world.sync.once()
            world.now += 3
        assert not world.executor.state.inflight.of(ls)
        world.now += 3
        world.executor.sync_later(ls)
        await world.until(lambda: world.executor.telemetry.value(metrics.RUNTIME_UPDATES) > settled)
        task.cancel()
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_the_page_shows_the_sandboxes(run_scenario) -> None:
    async def scenario(world) -> None:
        await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        gone = await world.run(await world.pod("gone", "LSR", "", "4"))
        await world.stop(gone)
        await world.executor.kernel_view.refresh()
        page = node_page(world.executor)
        assert page["ready"] is True
        assert page["pools"]["shared"] == page["pools"]["be"] == "4-15"
        assert page["pools"]["nodes"][0] == {"node": 0, "shared": "8-11", "be": "8-11"}
        assert page["exclusive"] == [
            {
                "owner": "lse",
                "cpus": "0-3",
                "desired_cpus": "0-3",
                "applied": True,
                "also_used_by": [],
                "also_used": 0,
                "hard": True,
                "resource_status": '{"cpuset":"0-3"}',
                "pod": "ns/lse",
                "container": "c",
            }
        ]
        rows = {c["ref"]: c for c in page["containers"]}
        assert rows["ns/lse/c"]["id"] == lse
        assert (rows["ns/lse/c"]["cpus"], rows["ns/gone/c"]["cpus"]) == ("0-3", "")
        assert page["violations"] == []

    run_scenario(scenario)


def test_the_start_of_an_exited_container_is_left_to_the_runtime_to_refuse(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.stop(ls)
        call = await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        assert call.sent == call.body
        world.wire.finished(call, 2)
        assert world.executor.state.containers[ls].phase is Phase.EXITED

    run_scenario(scenario)
