"""The writer of the ledger: a record that cannot be stored fails alone, and no other record is lost."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.ledger import file_ledger, open_ledger
from proxy.engine.reservation_events import LedgerLate, LedgerRejected, LedgerWritten
from proxy.executor import ledger_writer as module
from proxy.executor.background import Worker
from proxy.executor.ledger_writer import LedgerWriter
from proxy.model.defects import InputDefect
from proxy.model.errors import CannotCreateError
from proxy.model.workload import KubeQos, Pod, QosClass
from proxy.telemetry import metrics
from tests.testkit.captured_log import telemetry
from tests.testkit.changed_copy import changed_copy

EVIL = '{"numaNodeResources":[{"node":0,"resources":{"\\ud800":"abc"}}]}'
"""63 bytes that name a resource by a lone surrogate, which JSON can carry and UTF-8 cannot."""
HONEST = Pod("s-1", "u-1", "tenant-a", "payments", 0, QosClass.LS, KubeQos.BURSTABLE, "/kubepods/pod1")
POISONED = changed_copy(
    HONEST, sandbox_id="s-2", name="evil", defects=(InputDefect("\ud800 is no resource", decisive=True),)
)


class Memory(dict[str, Any]):
    """A ledger in memory; it raises the error that ``fault`` returns for a batch."""

    entries = property(lambda self: self)
    problem = ""
    fault = staticmethod(lambda changes: None)

    def write(self, changes: dict[str, Any]) -> None:
        if (error := self.fault(changes)) is not None:
            raise error
        for key, value in changes.items():
            if value is None:
                self.pop(key, None)
            else:
                self[key] = value

    def close(self) -> None:
        pass


class JournalBed:
    """A ledger writer, and the problems that it reports."""

    def __init__(self, ledger: Any, **options: Any) -> None:
        self.reported: list[str] = []
        self.telemetry = telemetry(self.reported)
        self.worker = Worker("ledger", lambda error: self.reported.append(repr(error)))
        self.ledger_writer = LedgerWriter(ledger, self.worker, self.telemetry, **options)

    async def __aenter__(self) -> JournalBed:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.worker.close()


def test_a_surrogate_in_one_record_costs_no_record_of_the_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        ledger, _ = open_ledger(tmp_path, "m1")
        async with JournalBed(ledger) as bench:
            bench.ledger_writer.put("p/s-2", POISONED)
            bench.ledger_writer.put("p/s-1", HONEST)
            assert await bench.ledger_writer.append({"i/call-1": {"own": "0-3"}}) == LedgerWritten()
            assert set(ledger.entries) == {"p/s-1", "p/s-2", "i/call-1"}
            assert bench.reported == []
        ledger.close()
        assert set(open_ledger(tmp_path, "m1")[0].entries) == {"p/s-1", "p/s-2", "i/call-1"}

    asyncio.run(scenario())


def test_only_the_record_that_cannot_be_stored_is_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        ledger, _ = open_ledger(tmp_path, "m1")
        async with JournalBed(ledger) as bench:
            bench.ledger_writer.put("p/s-1", HONEST)
            bench.ledger_writer.put("c/bad", {"x": object()})
            assert await bench.ledger_writer.append({"i/call-1": {"own": "0-3"}}) == LedgerWritten()
            assert set(ledger.entries) == {"p/s-1", "i/call-1"}
            await asyncio.sleep(0)
            assert bench.telemetry.value(metrics.RECORDS_REJECTED) == 1
            (problem,) = bench.reported
            assert "c/bad" in problem
            assert "payments" not in problem
            assert len(problem) < 200
        ledger.close()

    asyncio.run(scenario())


def test_the_requester_of_a_bad_record_learns_of_its_own_record_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        ledger, _ = open_ledger(tmp_path, "m1")
        async with JournalBed(ledger) as bench:
            bench.ledger_writer.put("p/s-1", HONEST)
            why = await bench.ledger_writer.append({"i/call-1": {"x": "y" * 100_000}})
            assert why == LedgerRejected("its record cannot be stored: it is longer than 65536 bytes")
            assert set(ledger.entries) == {"p/s-1"}
        ledger.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [TypeError("cannot keep {'p/s-1'...}"), AttributeError("x"), KeyError("y")])
def test_an_unforeseen_ledger_fault_loses_only_its_record(fault: Exception) -> None:
    async def scenario() -> None:
        ledger = Memory()
        ledger.fault = lambda changes: fault if "c/bad" in changes else None  # type: ignore[method-assign]
        async with JournalBed(ledger) as bench:
            bench.ledger_writer.put("p/s-1", HONEST)
            bench.ledger_writer.put("c/bad", {"name": "payments"})
            assert await bench.ledger_writer.append({"i/call-1": {"own": "0-3"}}) == LedgerWritten()
            assert set(ledger) == {"p/s-1", "i/call-1"}
            assert bench.reported == [
                f"cannot store a record in the ledger record=c/bad err={type(fault).__name__}"
            ]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "fault", [CannotCreateError("cannot write the ledger: no space left"), MemoryError()]
)
def test_records_that_cannot_be_written_are_kept_and_written_later(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)

    async def scenario() -> None:
        ledger = Memory()
        ledger.fault = lambda changes: fault  # type: ignore[method-assign]
        async with JournalBed(ledger) as bench:
            bench.ledger_writer.put("p/s-1", HONEST)
            await bench.ledger_writer.flush()
            assert not ledger
            assert bench.reported[0].startswith("cannot write the ledger")
            ledger.fault = lambda changes: None  # type: ignore[method-assign]
            async with asyncio.timeout(30):
                while "p/s-1" not in ledger:
                    await asyncio.sleep(0.005)

    asyncio.run(scenario())


def test_a_failed_compaction_is_reported_until_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        ledger, _ = open_ledger(tmp_path, "m1")
        async with JournalBed(ledger) as bench:

            async def write_until(lines: int) -> None:
                async with asyncio.timeout(60):
                    while len(bench.reported) < lines:
                        await bench.ledger_writer.append({"i/call-1": {"own": "0-3", "text": "x" * 60_000}})

            with monkeypatch.context() as patch:
                patch.setattr(file_ledger.os, "fsync", full)
                await write_until(1)
            problem = f"err={json.dumps(f'{ledger.path}: No space left on device')}"
            assert bench.reported == [f"cannot compact the ledger {problem}"]
            await write_until(2)
            assert bench.reported[1:] == [f'resolved problem="cannot compact the ledger" {problem}']
            assert bench.telemetry.problems() == []
        ledger.close()

    asyncio.run(scenario())


def test_a_flush_waits_for_a_batch_that_the_worker_has_not_come_to_yet() -> None:
    """After a flush all earlier records are durable, also those that the timer has handed over."""

    async def scenario() -> None:
        ledger, gate = Memory(), threading.Event()
        async with JournalBed(ledger) as bench:
            bench.worker.start(gate.wait, 30)
            bench.ledger_writer.put("i/call-1", {})
            bench.ledger_writer._start()  # as its timer does
            flush = asyncio.ensure_future(bench.ledger_writer.flush())
            await asyncio.sleep(0.05)
            assert not flush.done()
            gate.set()
            await flush
            assert set(ledger) == {"i/call-1"}

    asyncio.run(scenario())


def test_the_wait_for_a_ledger_that_does_not_answer_is_limited() -> None:
    async def scenario() -> None:
        ledger, gate = Memory(), threading.Event()
        async with JournalBed(ledger, limit=0.05) as bench:
            bench.worker.start(gate.wait, 30)
            assert await bench.ledger_writer.append({"i/call-1": {}}) == LedgerLate(
                "the ledger is not written in time"
            )
            await bench.ledger_writer.flush()
            assert bench.reported == ["the ledger is not written in time seconds=0.05"]
            gate.set()
            await bench.ledger_writer.close()
            await bench.worker.run(lambda: None)  # ``close`` waits no longer than the limit either
            assert set(ledger) == {"i/call-1"}, "a record is written although the wait for it timed out"

    asyncio.run(scenario())


# -- through the interceptors ---------------------------------------------------------------------------


def test_an_owner_is_created_although_another_pod_has_a_surrogate(
    run_scenario: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        await world.close()
        world.ledger, _ = open_ledger(tmp_path, "m1")
        world.boot()
        await world.sync.once()
        monkeypatch.setattr(module, "DELAY_S", 60.0)  # records go with the next flush
        honest = await world.pod("payments", "LSE", "", "0-3")
        await world.pod("evil", "LS", annotation=EVIL)
        call = await world.begin(honest)
        assert call.refused is None
        written = set(world.ledger.entries)
        assert {"p/s-payments", "p/s-evil"} <= written
        assert any(key.startswith("i/") for key in written)
        owner = world.finish(call, "owner")
        evil = await world.begin("s-evil")
        assert evil.refused is None
        world.finish(evil, "evil")
        await world.executor.ledger_writer.flush()
        assert {"c/owner", "c/evil"} <= set(world.ledger.entries)
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

        await world.close()
        world.ledger.close()
        world.ledger, notes = open_ledger(tmp_path, "m1")
        assert notes == []
        world.boot()
        await world.sync.once()
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0
        assert str(world.executor.state.owners[world.executor.state.containers[owner].owner].cpus) == "0-3"
        assert world.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 0, "the ledger knows everything"

    run_scenario(scenario)


def test_only_the_owner_with_an_unstorable_record_is_refused(
    run_scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = module.dump

    def odd(value: Any) -> Any:
        if getattr(value, "name", "") == "odd":
            raise AttributeError("pod tenant-a/payments")
        return dump(value)

    async def scenario(world: Any) -> None:
        monkeypatch.setattr(module, "DELAY_S", 60.0)
        monkeypatch.setattr(module, "dump", odd)
        one, two = await world.pod("one", "LSE", "", "0-1"), await world.pod("two", "LSE", "", "2-3")
        calls = await asyncio.gather(world.begin(one, "odd"), world.begin(two, "c"))
        code, message = calls[0].refused
        assert code == 9
        assert "its record cannot be stored" in message
        assert "payments" not in message
        assert "two" not in message
        assert calls[1].refused is None
        world.finish(calls[1], "two")
        assert [str(owner.cpus) for owner in world.executor.state.owners.values()] == ["2-3"]
        assert world.executor.telemetry.value(metrics.RECORDS_REJECTED) == 1

    run_scenario(scenario)


def test_a_durable_record_counts_as_late_although_the_next_batch_has_begun() -> None:
    async def scenario() -> None:
        ledger = Memory()
        go, hold = threading.Event(), threading.Event()

        def fault(changes: dict[str, Any]) -> Exception:
            (hold if "c/1" in changes else go).wait(10)
            return CannotCreateError("no room")

        ledger.fault = fault
        async with JournalBed(ledger) as bench:
            appended = asyncio.ensure_future(bench.ledger_writer.append({"m/x": {}}, durable=True))
            await asyncio.sleep(0)
            bench.ledger_writer.put("c/1", {})
            bench.ledger_writer._start()
            go.set()
            assert await appended == LedgerLate(module.UNWRITTEN)
            hold.set()

    asyncio.run(scenario())
