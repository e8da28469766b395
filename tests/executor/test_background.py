"""Worker threads: order, dropped jobs, running times, and a bounded shutdown.

A task of the daemon does not end because of a fault.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest

from proxy.engine.call_events import SavedCpusLearned
from proxy.executor import background
from proxy.executor.background import JobCounter, Threads, Worker, run_with_restarts
from proxy.model.backoff import Backoff
from proxy.telemetry import metrics
from tests.testkit.waiting import wait_until


def test_jobs_of_one_thread_are_done_in_order() -> None:
    threads, seen = Threads(1, "t"), list[int]()
    last = [threads.submit(seen.append, number) for number in range(100)][-1]
    last.result(30)
    assert seen == list(range(100))
    assert threads.shutdown(30)


def test_as_many_jobs_run_at_once_as_there_are_threads() -> None:
    threads, barrier = Threads(3, "t"), threading.Barrier(3)
    for _ in range(2):  # the second round finds the threads idle
        for future in [threads.submit(barrier.wait, 30) for _ in range(3)]:
            future.result(30)
    assert threads.shutdown(30)


def test_jobs_are_counted_from_their_submission_to_their_end() -> None:
    jobs, began, gate = JobCounter(), threading.Event(), threading.Event()
    first, second = Threads(1, "first", unfinished=jobs), Threads(1, "second", unfinished=jobs)

    def wait_for_gate() -> bool:
        began.set()
        return gate.wait(30)

    assert jobs.none_unfinished()
    running = first.submit(wait_for_gate)
    assert not jobs.none_unfinished()
    with pytest.raises(ZeroDivisionError):
        second.submit(lambda: 1 / 0).result(30)
    waiting = first.submit(int)
    assert began.wait(30), "a job that has not begun would be cancelled by the shutdown"
    assert not first.shutdown(0), "one job still runs"
    assert waiting.cancelled()
    assert not jobs.none_unfinished()
    gate.set()
    assert running.result(30)
    wait_until(jobs.none_unfinished)
    assert second.shutdown(30)


def test_a_job_without_a_thread_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = JobCounter()
    threads = Threads(1, "t", unfinished=jobs)

    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        threads.submit(int).result(30)
    assert jobs.none_unfinished()


def test_an_error_of_a_job_is_raised_where_its_result_is_awaited() -> None:
    threads = Threads(1, "t")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(30)
    assert threads.submit(lambda: 5).result(30) == 5, "the thread has survived"
    threads.shutdown(30)


def test_the_oldest_running_job_and_the_queue_can_be_seen() -> None:
    now, gate = [100.0], threading.Event()
    threads = Threads(1, "t", lambda: now[0])
    assert (threads.running_s(), threads.waiting) == (0.0, 0)
    began = threading.Event()
    running = threads.submit(lambda: (began.set(), gate.wait(30)))
    threads.submit(int)
    last = threads.submit(int)
    assert began.wait(30)
    now[0] = 107.0
    assert (threads.running_s(), threads.waiting) == (7.0, 2)
    gate.set()
    running.result(30)
    last.result(30)
    assert threads.shutdown(30)
    assert (threads.running_s(), threads.waiting) == (0.0, 0)


def test_a_job_without_its_requester_is_dropped() -> None:
    async def scenario() -> None:
        worker, gate, seen = Worker("w", lambda error: None), threading.Event(), list[str]()
        worker.start(gate.wait, 30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await worker.run(seen.append, "abandoned")
        gate.set()
        await worker.run(seen.append, "next")
        assert seen == ["next"]
        worker.close()

    asyncio.run(scenario())


def test_a_stuck_job_does_not_delay_the_shutdown_and_queued_jobs_are_cancelled() -> None:
    threads, gate, inside = Threads(1, "t"), threading.Event(), threading.Event()
    stuck = threads.submit(lambda: (inside.set(), gate.wait(60)))
    waits = threads.submit(int)
    assert inside.wait(30)
    began = time.monotonic()
    assert not threads.shutdown(0.1)
    assert time.monotonic() - began < 10
    with pytest.raises(CancelledError):
        waits.result(0)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(int)
    assert all(thread.daemon for thread in threads._threads), "the interpreter would join the others"
    gate.set()
    assert stuck.result(30) == (None, True)
    assert threads.shutdown(30)


def test_a_thread_that_cannot_be_started_is_started_for_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, gate, inside = Threads(2, "t"), threading.Event(), threading.Event()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(int).result(30)
    assert threads.waiting == 0
    stuck = threads.submit(lambda: (inside.set(), gate.wait(60)))
    assert inside.wait(30)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        waits = threads.submit(int)
    assert threads.submit(int).result(30) == 0, "the second thread has been started"
    gate.set()
    assert (stuck.result(30), waits.result(30)) == ((None, True), 0)
    assert threads.shutdown(30)


def test_a_result_is_recorded_although_its_requester_is_gone() -> None:
    noted: list[int] = []

    async def scenario() -> None:
        worker, begun, go = Worker("w", pytest.fail), threading.Event(), threading.Event()

        def job() -> int:
            begun.set()
            go.wait(60)
            return 7

        first = asyncio.create_task(worker.run_with_callback(noted.append, job))
        second = asyncio.create_task(worker.run_with_callback(noted.append, lambda: 8))
        await asyncio.to_thread(begun.wait, 60)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert noted == []
        go.set()
        assert await worker.run_with_callback(noted.append, lambda: 9) == 9
        await asyncio.sleep(0)
        worker.close()

    asyncio.run(scenario())
    assert noted == [7, 9], "a queued job is dropped"


def test_a_failure_of_a_job_without_a_requester_is_reported() -> None:
    failed: list[BaseException] = []

    async def scenario() -> None:
        worker, begun, go = Worker("w", failed.append), threading.Event(), threading.Event()

        def job() -> int:
            begun.set()
            go.wait(60)
            raise ValueError("late")

        task = asyncio.create_task(worker.run_with_callback(lambda result: None, job))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go.set()
        await worker.run(lambda: None)
        worker.close()

    asyncio.run(scenario())
    assert [str(error) for error in failed] == ["late"]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; none takes time."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def nap(seconds: float) -> None:
        found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(background.asyncio, "sleep", nap)
    return found


def run(faults: list[BaseException | None], reported: list[BaseException]) -> None:
    left = iter(faults)

    async def work() -> None:
        fault = next(left)
        if fault is not None:
            raise fault

    asyncio.run(run_with_restarts(work, reported.append))


def test_a_task_is_restarted_after_longer_and_longer_pauses(pauses: list[float]) -> None:
    reported: list[BaseException] = []
    run([ValueError("odd"), *[KeyError("x")] * 11, None], reported)
    assert len(reported) == 12
    assert isinstance(reported[0], ValueError)
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == background.PAUSES.longest


def test_a_steady_task_is_restarted_at_once(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES", Backoff(0.1, 60.0, steady=0.0))
    run([ValueError("odd")] * 3 + [None], [])
    assert pauses == [0.1] * 3


def test_a_task_whose_awaited_work_was_cancelled_is_restarted(pauses: list[float]) -> None:
    reported: list[BaseException] = []
    run([asyncio.CancelledError(), None], reported)
    assert len(reported) == 1


def test_a_cancelled_task_ends() -> None:
    async def scenario() -> None:
        reported: list[BaseException] = []
        task = asyncio.create_task(run_with_restarts(asyncio.Event().wait, reported.append))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not reported

    asyncio.run(scenario())


def test_the_runtime_sync_continues_after_an_internal_fault(run_scenario: Callable[..., None]) -> None:
    """A container that causes a fault must not prevent updates of other containers at the runtime."""

    async def scenario(world: Any) -> None:
        odd, good = (
            await world.run(await world.pod("odd", "LS")),
            await world.run(await world.pod("good", "LS")),
        )
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.quiet()
        carried = world.executor.quotas.carried

        def broken(container: Any) -> int:
            if container.id == odd:
                raise ZeroDivisionError("odd")
            return int(carried(container))

        world.executor.quotas.carried = broken
        for container_id in (odd, good):
            world.executor.store.handle(SavedCpusLearned(container_id, None))
            world.executor.sync_later(container_id)
        runtime_sync = world.make_runtime_sync()
        world.executor.run_always(runtime_sync.run)
        await world.until(lambda: world.runtime.specs[good] == "4-15")
        await world.until(lambda: world.executor.telemetry.value(metrics.TASKS_RESTARTED) == 1)
        assert any("ZeroDivisionError" in problem["what"] for problem in world.executor.telemetry.problems())
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)
