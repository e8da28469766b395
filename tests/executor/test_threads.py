"""Worker threads: order, jobs that are dropped, how long one has been running, and an end that is bounded."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import CancelledError

import pytest

from proxy.executor.threads import Threads
from proxy.executor.worker import Worker


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


def test_what_a_job_raises_comes_out_where_its_result_is_awaited() -> None:
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


def test_a_stuck_job_does_not_hold_up_the_end_and_what_waits_is_cancelled() -> None:
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


def test_a_result_is_noted_although_nothing_waits_for_it_any_more() -> None:
    noted: list[int] = []

    async def scenario() -> None:
        worker, begun, go = Worker("w", pytest.fail), threading.Event(), threading.Event()

        def job() -> int:
            begun.set()
            go.wait(10)
            return 7

        first = asyncio.create_task(worker.run_noted(noted.append, job))
        second = asyncio.create_task(worker.run_noted(noted.append, lambda: 8))
        await asyncio.to_thread(begun.wait, 10)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert noted == []
        go.set()
        assert await worker.run_noted(noted.append, lambda: 9) == 9
        await asyncio.sleep(0)
        worker.close()

    asyncio.run(scenario())
    assert noted == [7, 9], "a job that has not begun is dropped"


def test_a_job_that_fails_when_nothing_waits_any_more_is_reported() -> None:
    failed: list[BaseException] = []

    async def scenario() -> None:
        worker, begun, go = Worker("w", failed.append), threading.Event(), threading.Event()

        def job() -> int:
            begun.set()
            go.wait(10)
            raise ValueError("late")

        task = asyncio.create_task(worker.run_noted(lambda result: None, job))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go.set()
        await worker.run(lambda: None)
        worker.close()

    asyncio.run(scenario())
    assert [str(error) for error in failed] == ["late"]
