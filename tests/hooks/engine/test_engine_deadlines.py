"""Hooks that hang, spin or answer late, and many calls at once: no call waits past its deadline."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.hooks.answers import Adjustment
from proxy.hooks.engine import invoke, sequence
from proxy.hooks.engine.call_holder import CallHolder
from proxy.hooks.engine.errors import HookFailure
from proxy.hooks.engine.event_loops import LoopThread
from proxy.hooks.engine.invoke import EngineContext, HookTask
from proxy.hooks.engine.runners import JobResult, Runner
from proxy.hooks.engine.sequence import HookSequence
from proxy.hooks.engine.slots import MOST_CALLS, MOST_OVERDUE, HookSlots
from proxy.hooks.engine.thread_interrupt import OverdueError
from proxy.hooks.events import PreStartContainer
from proxy.hooks.hook import Hook, HookFailurePolicy
from proxy.model.backoff import Backoff

PRE = "pre_create_container"
SHORT_S = 0.05


def hook(name: str, handler: Any, point: str = PRE, **fields: Any) -> Hook:
    return Hook(name, f"/hooks/{name}.py", {point: handler}, **{"timeout": SHORT_S} | fields)


def good(event: Any) -> Adjustment:
    return Adjustment(envs={"GOOD": "1"})


def spin(event: Any) -> None:
    while True:
        pass


def stubborn(event: Any) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            while time.monotonic() < end:
                pass
        except BaseException:
            stubborn.hits += 1  # type: ignore[attr-defined]
            if stubborn.hits > 3:  # type: ignore[attr-defined]
                raise


async def asleep(event: Any) -> None:
    await asyncio.sleep(60)


async def spinning(event: Any) -> None:
    while True:
        pass


@pytest.mark.parametrize("policy", list(HookFailurePolicy))
@pytest.mark.parametrize("fault", ["hang", spin, asleep, spinning])
def test_a_hook_that_does_not_answer_is_left_behind(
    setup: Any, fault: Any, policy: HookFailurePolicy
) -> None:
    async def scenario() -> None:
        handler = setup.hang if fault == "hang" else fault
        setup.use(hook("10-a", handler, policy=policy), hook("20-b", good, timeout=30.0))
        outcome = await setup.call()
        error = "hook 10-a: no answer within 50 ms at pre_create_container"
        assert setup.logged == [error]
        if policy is HookFailurePolicy.FAIL:
            assert outcome.refusal == f"cannot create container ns/pod/main: {error}"
        else:
            assert outcome.adjustment.envs == {"GOOD": "1"}
        assert setup.report("10-a").failures == {"timeout": 1}
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").hung == 0)
        await setup.until(lambda: setup.engine._context.runners.stuck == 0)
        await setup.until(lambda: sys.getswitchinterval() > 0.001)

    setup.run(scenario)


def test_a_hook_that_catches_the_interrupt_is_interrupted_again(setup: Any) -> None:
    async def scenario() -> None:
        stubborn.hits = 0  # type: ignore[attr-defined]
        setup.use(hook("10-a", stubborn))
        started = time.monotonic()
        await setup.call()
        assert setup.report("10-a").hung == 1
        await setup.until(lambda: setup.report("10-a").hung == 0)
        assert stubborn.hits > 3  # type: ignore[attr-defined]
        assert time.monotonic() - started < 15

    setup.run(scenario)


def test_a_late_answer_is_not_used(setup: Any) -> None:
    returned = threading.Event()

    def late(event: Any) -> Adjustment:
        setup.gate.wait(30)
        returned.set()
        return Adjustment(envs={"LATE": "1"})

    def slow(event: Any) -> Adjustment:
        returned.wait(30)  # the first hook returns while the call is still pending
        return good(event)

    async def scenario() -> None:
        setup.use(hook("10-a", late), hook("20-b", slow, timeout=60.0))
        answers = setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").failures)
        setup.gate.set()
        outcome = await answers.wait()
        assert outcome.adjustment.envs == {"GOOD": "1"}
        assert dict(outcome.owners) == {"envs[GOOD]": "20-b"}
        await setup.until(lambda: setup.report("10-a").hung == 0)
        assert setup.report("10-a").failures == {"timeout": 1}

    setup.run(scenario)


def test_a_hanging_hook_delays_only_calls_that_use_it(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(
            hook("10-a", setup.hang, timeout=60.0), hook("20-b", good, "pre_start_container", timeout=30.0)
        )
        pending = [setup.engine.call_hooks(setup.create()) for _ in range(3 * MOST_CALLS)]
        event = setup.create()
        answers = setup.engine.call_hooks(PreStartContainer(event.pod, event.container, event.decision))
        await asyncio.wait_for(answers.wait(), 30)
        assert "cannot be changed at pre_start_container" in setup.logged[0], (
            "the other hook was called and has answered"
        )
        assert setup.report("10-a").running == MOST_CALLS
        assert setup.engine._context.runners.alive <= MOST_CALLS + 2
        assert not any(answer.outcome for answer in pending)
        setup.gate.set()
        for answer in pending:
            await asyncio.wait_for(answer.wait(), 30)
        assert setup.report("10-a").calls == 3 * MOST_CALLS
        assert setup.report("10-a").running == 0

    setup.run(scenario)


def test_three_failures_in_a_row_suspend_a_hook_until_a_probe_succeeds(setup: Any) -> None:
    bad = [True]

    def sometimes(event: Any) -> Adjustment:
        if bad[0]:
            raise OSError("away")
        return good(event)

    async def scenario() -> None:
        setup.now = 1000.0
        setup.use(hook("10-a", sometimes), hook("20-b", lambda event: Adjustment(envs={"B": "2"})))
        for _ in range(3):
            await setup.call()
        assert setup.report("10-a").state == "open"
        reported = len(setup.logged)
        assert (await setup.call()).adjustment.envs == {"B": "2"}
        report = setup.report("10-a")
        assert (report.calls, report.skipped, len(setup.logged)) == (3, 1, reported), (
            "a skipped call is not logged"
        )
        setup.now += 1.0
        await setup.call()
        assert setup.report("10-a").calls == 4
        assert setup.report("10-a").retry_in == 2.0
        bad[0] = False
        setup.now += 2.0
        assert (await setup.call()).adjustment.envs == {"GOOD": "1", "B": "2"}
        assert setup.report("10-a").state == "ok"

    setup.run(scenario)


def test_a_suspended_hook_with_policy_fail_refuses_with_the_next_try(setup: Any) -> None:
    def bad(event: Any) -> None:
        raise OSError("away")

    async def scenario() -> None:
        setup.now = 1000.0
        setup.use(hook("10-a", bad, policy=HookFailurePolicy.FAIL))
        for _ in range(3):
            await setup.call()
        setup.now += 0.25
        assert (await setup.call()).refusal == (
            "cannot create container ns/pod/main: hook 10-a: it is not called after 3 failures in a row; "
            "next try in 750 ms; last failure: OSError: away (test_engine_deadlines.py:"
            f"{bad.__code__.co_firstlineno + 1} in bad)"
        )
        assert setup.report("10-a").calls == 3

    setup.run(scenario)


def test_other_calls_do_not_wait_for_the_probe_of_a_hook(setup: Any) -> None:
    def bad(event: Any) -> None:
        if setup.report("10-a").calls >= 3:
            setup.gate.wait(30)
        raise OSError

    async def scenario() -> None:
        setup.use(hook("10-a", bad, timeout=60.0))
        for _ in range(3):
            await setup.call()
        await setup.until(lambda: setup.report("10-a").retry_in == 0)
        probe = setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").running)
        assert setup.report("10-a").state == "probing"
        await setup.call()
        assert probe.outcome is None
        setup.gate.set()
        await probe.wait()

    setup.run(scenario)


def test_a_hook_with_too_many_overdue_calls_is_not_called(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", setup.hang))
        for _ in range(MOST_OVERDUE):
            setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").hung == MOST_OVERDUE)
        await setup.call()
        report = setup.report("10-a")
        assert (report.state, report.calls, report.failures) == (
            "hangs",
            MOST_OVERDUE,
            {"timeout": 4, "hangs": 1},
        )
        assert "too many calls of it (4) have not returned" in setup.logged[-1]
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").hung == 0)
        assert setup.report("10-a").state == "open"

    setup.run(scenario)


def test_all_hooks_of_a_call_together_have_a_bound(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "LONGEST_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        setup.use(hook("10-a", setup.hang, timeout=60.0), hook("20-b", good, timeout=60.0))
        assert (await setup.call()).adjustment.envs == {}
        assert setup.report("10-a").failures == {"timeout": 1}
        assert setup.report("20-b").failures == {"queue": 1}

    setup.run(scenario)


def test_a_call_waits_for_a_slot_no_longer_than_its_deadline(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", setup.hang, timeout=60.0))
        for _ in range(MOST_CALLS):
            setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").running == MOST_CALLS)
        monkeypatch.setattr(sequence, "LONGEST_TIMEOUT_S", 0.1)
        await setup.call()
        assert setup.logged == ["hook 10-a: it did not begin in time: it is busy with other calls"]
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").running == 0)
        assert setup.report("10-a").calls == MOST_CALLS

    setup.run(scenario)


def test_a_hook_that_waited_for_a_slot_calls_the_next_ones_once(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that is requested twice would never be made."""
    monkeypatch.setattr("proxy.hooks.engine.breaker.OPEN_PAUSES", Backoff(0.05, 60.0, tolerated=2))
    failing = [True]

    async def nothing(event: Any) -> None:
        return None

    def third(event: Any) -> Adjustment:
        if failing:
            raise ValueError
        return good(event)

    async def scenario() -> None:
        first = Hook(
            "10-a", "/hooks/10-a.py", {PRE: setup.hang, "pre_start_container": setup.hang}, timeout=30.0
        )
        setup.use(first, hook("20-b", nothing, timeout=30.0), hook("30-c", third, timeout=30.0))
        setup.gate.set()
        for _ in range(3):
            await setup.call()
        assert setup.report("30-c").state == "open"
        setup.gate.clear()
        failing.clear()
        event = setup.create()
        for _ in range(MOST_CALLS):
            setup.engine.call_hooks(PreStartContainer(event.pod, event.container, event.decision))
        answers = setup.engine.call_hooks(event)
        await asyncio.sleep(0.1)
        setup.gate.set()
        assert (await asyncio.wait_for(answers.wait(), 30)).adjustment.envs == {"GOOD": "1"}
        assert setup.report("30-c").state == "ok"

    setup.run(scenario)


def test_the_second_hook_of_a_call_has_its_own_deadline(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", lambda event: time.sleep(0.02), timeout=60.0), hook("20-b", setup.hang))
        await setup.call()
        assert setup.report("20-b").failures == {"timeout": 1}

    setup.run(scenario)


def test_a_server_has_extra_time_for_its_own_error(setup: Any) -> None:
    def server(event: Any) -> None:
        time.sleep(SHORT_S + 0.01)
        raise OSError("deadline exceeded at koordlet.sock")

    def dead(event: Any) -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        ended.set()

    ended = threading.Event()

    async def scenario() -> None:
        setup.use(hook("koordlet", server, remote=True))
        await setup.call()
        assert setup.logged == ["hook koordlet: deadline exceeded at koordlet.sock"]
        setup.use(hook("koordlet", dead, remote=True))
        await setup.call()
        await setup.until(ended.is_set)

    setup.run(scenario)


def test_the_switch_interval_is_unchanged_during_a_server_call(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("koordlet", setup.hang, remote=True, timeout=30.0))
        answers = setup.engine.call_hooks(setup.create())
        before = sys.getswitchinterval()
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert sys.getswitchinterval() == before
        setup.gate.set()
        await answers.wait()

    setup.run(scenario)


def test_an_event_loop_blocked_by_a_hook_is_replaced(setup: Any) -> None:
    first = [True]

    async def sometimes(event: Any) -> Adjustment:
        if first[0]:
            first[0] = False
            setup.gate.wait(30)
        return good(event)

    async def scenario() -> None:
        setup.use(hook("10-a", sometimes, timeout=1.0))
        await setup.call()
        slots = setup.engine._by_point[PRE].hook_slots[0]
        blocked = slots.loop_thread()
        await setup.until(lambda: blocked.is_abandoned)
        assert (await setup.call()).adjustment.envs == {"GOOD": "1"}
        assert setup.report("10-a").hung == 1
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").hung == 0)

    setup.run(scenario)


def test_the_event_loop_runs_while_a_hook_spins(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", spin, timeout=1.0))
        await setup.until(lambda: sys.getswitchinterval() > 0.001)  # another engine's hook may still run
        usual, shortest = sys.getswitchinterval(), 1.0
        answers = setup.engine.call_hooks(setup.create())
        turns = 0
        while answers.outcome is None:
            await asyncio.sleep(0.001)
            turns += 1
            shortest = min(shortest, sys.getswitchinterval())
        assert turns > 20
        assert shortest < usual

    setup.run(scenario)


def test_a_hook_without_a_thread_fails(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def coroutine(event: Any) -> None:
        return None

    async def scenario() -> None:
        setup.use(
            hook("10-a", good), hook("20-b", coroutine), hook("30-c", good, policy=HookFailurePolicy.FAIL)
        )
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            outcome = await setup.call()
        assert "hook 30-c: it cannot be called: can't start new thread" in outcome.refusal
        assert len(setup.logged) == 3
        assert setup.engine._context.runners.alive == 0
        setup.use(hook("10-a", good, timeout=30.0))
        assert (await setup.call()).adjustment.envs == {"GOOD": "1"}

    setup.run(scenario)


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_late_answer_is_not_used_even_if_the_loop_was_busy(setup: Any, kind: str) -> None:
    def late(event: Any) -> Adjustment:
        time.sleep(2 * SHORT_S)
        return good(event)

    async def as_coroutine(event: Any) -> Adjustment:
        return late(event)

    async def scenario() -> None:
        setup.use(hook("10-a", late if kind == "function" else as_coroutine))
        answers = setup.engine.call_hooks(setup.create())
        time.sleep(6 * SHORT_S)
        assert (await answers.wait()).adjustment.envs == {}
        assert setup.report("10-a").failures == {"timeout": 1}

    setup.run(scenario)


def test_coroutines_cancelled_before_their_first_step_have_returned(setup: Any) -> None:
    async def blocking(event: Any) -> None:
        time.sleep(3 * SHORT_S)

    async def scenario() -> None:
        setup.use(hook("10-a", blocking))
        for answers in [setup.engine.call_hooks(setup.create()) for _ in range(MOST_CALLS)]:
            await asyncio.wait_for(answers.wait(), 30)
        await setup.until(lambda: setup.report("10-a").hung == 0)
        assert setup.report("10-a").running == 0

    setup.run(scenario)


def test_a_coroutine_whose_loop_ended_before_it_began_has_returned() -> None:
    has_ended = threading.Event()
    loop_thread = LoopThread("x", print, has_ended.set)
    loop_thread.close()
    assert has_ended.wait(30)
    slots = HookSlots(hook("10-a", asleep), print)
    slots.release(0, SHORT_S, HookFailure("timeout", "no answer"), 0.0, overdue=HookTask(loop_thread))
    assert slots.report(0.0, 0).hung == 0


def test_a_cancelled_coroutine_is_cancelled_only_once() -> None:
    loop_thread = LoopThread("x", print, lambda: None)
    invoke._check_cancelled(
        EngineContext(time.monotonic, print), HookTask(loop_thread, is_cancel_processed=True)
    )
    assert not loop_thread.is_abandoned
    loop_thread.close()


def test_an_error_in_an_abandoned_runner_does_not_end_the_call(setup: Any) -> None:
    slots = HookSlots(hook("10-a", good), print)
    call = HookSequence(EngineContext(time.monotonic, print), setup.create(), (slots,))
    has_ended, busy = Runner.__new__(Runner), Runner.__new__(Runner)
    assert call._take_from_hook(CallHolder([True], slots, has_ended, 0.0))
    assert not call._take_from_hook(CallHolder([], slots, busy, 0.0)), "the hook has just answered"
    assert call.on_internal_error(OverdueError(), has_ended) is JobResult.ABANDONED
    assert call.outcome is None
    assert call.on_internal_error(OverdueError(), busy) is JobResult.DONE
    assert call.outcome is not None


def test_a_late_hook_has_returned_even_if_the_next_one_began_late(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the next hook begins, the deadline of the late one is checked again and again."""
    run, begun = Runner._run_thread, list[Runner]()

    def run_second_late(runner: Runner) -> None:
        begun.append(runner)
        if len(begun) == 2:
            time.sleep(4 * SHORT_S)
        run(runner)

    monkeypatch.setattr(Runner, "_run_thread", run_second_late)

    async def scenario() -> None:
        setup.use(hook("10-a", setup.hang), hook("20-b", good, timeout=30.0))
        assert (await setup.call()).adjustment.envs == {"GOOD": "1"}
        assert setup.report("10-a").hung == 1
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").hung == 0)

    setup.run(scenario)


def test_an_internal_error_about_a_late_hook_ends_the_call(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> None:
        raise LookupError

    async def scenario() -> None:
        monkeypatch.setattr("proxy.hooks.engine.sequence.cancel", fault)
        setup.use(hook("10-a", setup.hang))
        assert (await setup.call()).refusal == ""

    setup.run(scenario)


def test_a_hook_gets_another_event_loop_when_its_own_is_closing() -> None:
    slots = HookSlots(hook("10-a", asleep), print)
    first = slots.loop_thread()
    assert slots.loop_thread() is first
    first.close()
    second = slots.loop_thread()
    assert second is not first
    slots.close()
    assert second.is_closing


def test_an_abandoned_event_loop_thread_ends() -> None:
    has_ended = threading.Event()
    loop_thread = LoopThread("x", print, has_ended.set)
    loop_thread.abandon()
    assert has_ended.wait(30)


@pytest.mark.parametrize("end", [LoopThread.abandon, LoopThread.close])
def test_a_coroutine_of_a_loop_that_begins_after_its_end_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[LoopThread], None]
) -> None:
    """On a busy machine, the thread may begin after the deadline of the call."""
    may_begin, has_returned, has_exited = threading.Event(), threading.Event(), threading.Event()
    run = LoopThread._run_thread

    def run_late(loop_thread: LoopThread) -> None:
        may_begin.wait(30)
        run(loop_thread)

    monkeypatch.setattr(LoopThread, "_run_thread", run_late)
    loop_thread = LoopThread("x", print, has_exited.set)
    loop_thread.start(partial(asleep, None), [], lambda task: has_returned.set())
    end(loop_thread)
    may_begin.set()
    assert has_exited.wait(30)
    assert has_returned.is_set()


def test_a_stuck_thread_is_interrupted_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invoke, "_INTERRUPT_PAUSES", Backoff(0.0, 5.0))
    interrupts: list[Any] = []

    async def scenario() -> None:
        runners = SimpleNamespace(switch_interval=SimpleNamespace(interrupt=interrupts.append))
        shared: Any = SimpleNamespace(loop=asyncio.get_running_loop(), runners=runners)
        hanging: Any = SimpleNamespace(has_returned=False)
        invoke._interrupt(shared, hanging, 0)
        for _ in range(3 * invoke._MOST_INTERRUPTS):
            await asyncio.sleep(0.001)
        assert len(interrupts) == invoke._MOST_INTERRUPTS

    asyncio.run(scenario())
