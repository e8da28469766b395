"""Threads that call hooks, and threads in which a hook does not return."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from proxy.hooks.engine import runners as runners_module
from proxy.hooks.engine.runners import JobResult, Runner, Runners
from proxy.hooks.engine.thread_interrupt import OverdueError, SwitchInterval
from tests.testkit.waiting import wait_until

LIMIT_S = 30.0


class Work:
    """A job that calls the given function."""

    def __init__(self, does: Callable[[], Any], result: JobResult = JobResult.DONE) -> None:
        self.does = does
        self.way = result
        self.runner: Runner | None = None
        self.notified = threading.Event()
        self.has_returned = threading.Event()
        self.errors: list[BaseException] = []

    def run(self, runner: Runner) -> JobResult:
        self.runner = runner
        self.does()
        return self.way

    def on_internal_error(self, error: BaseException, runner: Runner | None) -> JobResult:
        self.errors.append(error)
        return self.way

    def notify_outcome(self) -> None:
        self.notified.set()

    def on_returned(self, runner: Runner) -> None:
        self.has_returned.set()


@pytest.fixture
def runners() -> Any:
    pool = Runners()
    yield pool
    pool.close()


def test_a_runner_that_returns_before_it_is_abandoned_does_not_count_as_stuck(runners: Runners) -> None:
    """The thread detects that it has lost its call before the event loop abandons it."""
    work = Work(lambda: None, JobResult.ABANDONED)
    runners.start(work)
    assert work.has_returned.wait(LIMIT_S)
    assert work.runner is not None
    runners.abandon(work.runner)
    assert (runners.stuck, runners.alive) == (0, 0)


def test_an_idle_runner_is_used_again_and_a_second_one_only_if_busy(runners: Runners) -> None:
    gate = threading.Event()
    for _ in range(20):
        work = Work(lambda: None)
        runners.start(work)
        assert work.notified.wait(LIMIT_S)
    assert runners.alive == 1
    held = [Work(lambda: gate.wait(LIMIT_S)) for _ in range(3)]
    for work in held:
        runners.start(work)
    assert runners.alive == 3
    gate.set()
    assert all(work.notified.wait(LIMIT_S) for work in held)


def test_idle_runners_end_after_a_while_and_at_closing(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners_module, "IDLE_S", 0.02)
    runners.start(Work(lambda: None))
    wait_until(lambda: runners.alive == 0)
    assert runners.idle == []
    monkeypatch.setattr(runners_module, "IDLE_S", 60.0)
    gate = threading.Event()
    runners.start(Work(lambda: None))
    runners.start(Work(lambda: gate.wait(LIMIT_S)))
    runners.close()
    gate.set()
    wait_until(lambda: runners.alive == 0)


def test_many_jobs_at_once_are_all_done_while_runners_come_and_go(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners_module, "IDLE_S", 0.001)
    works = []
    for number in range(300):
        works.append(Work(lambda: None))
        runners.start(works[-1])
        if number % 10 == 0:
            time.sleep(0.002)
    assert all(work.notified.wait(LIMIT_S) for work in works)
    wait_until(lambda: runners.alive == 0)


def test_a_failing_job_does_not_end_its_runner(runners: Runners) -> None:
    def bad() -> None:
        raise SystemExit

    work = Work(bad)
    runners.start(work)
    assert work.notified.wait(LIMIT_S)
    assert isinstance(work.errors[0], SystemExit)
    assert runners.alive == 1


def spin() -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        pass


def test_an_abandoned_call_is_interrupted_and_ends(runners: Runners) -> None:
    work = Work(spin, JobResult.ABANDONED)
    runners.start(work)
    wait_until(lambda: work.runner is not None and work.runner.ident)
    assert work.runner is not None
    runners.abandon(work.runner)
    assert (runners.alive, runners.stuck) == (0, 1)
    begun = time.monotonic()
    while not work.has_returned.is_set() and time.monotonic() - begun < LIMIT_S:
        runners.switch_interval.interrupt(work.runner)
        time.sleep(0.01)
    assert time.monotonic() - begun < LIMIT_S / 2
    # The next exception may arrive before the first one is recorded.
    assert all(isinstance(error, OverdueError) for error in work.errors)
    wait_until(lambda: runners.stuck == 0)
    assert not work.notified.is_set()
    assert work.runner not in runners.idle


@pytest.mark.parametrize(
    "module", ["logging.config", "importlib", "threading", "asyncio.events", "grpc._channel"]
)
def test_code_that_may_hold_shared_locks_is_not_interrupted(runners: Runners, module: str) -> None:
    source = "def hold(until, call):\n    while not until():\n        call()\n"
    space: dict[str, Any] = {"__name__": module}
    exec(source, space)
    over = threading.Event()
    # The innermost frame is harmless; the one below it is not.
    work = Work(lambda: space["hold"](over.is_set, lambda: sum(range(50))), JobResult.ABANDONED)
    runners.start(work)
    wait_until(lambda: work.runner is not None and work.runner.ident)
    assert work.runner is not None
    runners.abandon(work.runner)
    for _ in range(20):
        runners.switch_interval.interrupt(work.runner)
        time.sleep(0.001)
    over.set()
    assert work.has_returned.wait(LIMIT_S)
    assert work.errors == []


def test_a_runner_that_has_returned_is_not_interrupted() -> None:
    class Back:
        ident = threading.get_ident()
        has_returned = True

    SwitchInterval().interrupt(Back())
    assert sum(range(1000)) == 499500


def test_switch_intervals_are_short_only_during_long_calls() -> None:
    class Slow:
        ident = 0
        has_returned = False

    usual, interval, one, other = sys.getswitchinterval(), SwitchInterval(), Slow(), Slow()
    interval.shorten(one)
    interval.shorten(other)
    interval.shorten(one)
    assert sys.getswitchinterval() < usual / 2
    interval.interrupt(one)
    interval.restore(one)
    interval.restore(one)
    assert sys.getswitchinterval() < usual / 2
    interval.restore(other)
    assert sys.getswitchinterval() == usual
    interval.interrupt(other)
    assert sys.getswitchinterval() == usual
