"""Hooks that hang, spin, come late or come in crowds: no call waits for them longer than their time."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.hooks.answers import Adjustment
from proxy.hooks.engine import dispatch, invoke
from proxy.hooks.engine.dispatch import CallHolder, Dispatch
from proxy.hooks.engine.errors import HookFailure
from proxy.hooks.engine.event_loops import LoopThread
from proxy.hooks.engine.invoke import DispatchContext, HookTask
from proxy.hooks.engine.runners import JobResult, Runner
from proxy.hooks.engine.slots import MOST_OVERDUE, PLACES, HookSlots
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
@pytest.mark.parametrize("how", ["hang", spin, asleep, spinning])
def test_a_hook_that_does_not_answer_is_left_behind(setup: Any, how: Any, policy: HookFailurePolicy) -> None:
    async def scenario() -> None:
        handler = setup.hang if how == "hang" else how
        setup.use(hook("10-a", handler, policy=policy), hook("20-b", good, timeout=30.0))
        outcome = await setup.ask()
        words = "hook 10-a: no answer within 50 ms at pre_create_container"
        assert setup.logged == [words]
        if policy is HookFailurePolicy.FAIL:
            assert outcome.refusal == f"cannot create container ns/pod/main: {words}"
        else:
            assert outcome.adjustment.envs == {"GOOD": "1"}
        assert setup.report("10-a").failures == {"timeout": 1}
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").hung == 0)
        await setup.until(lambda: setup.engine._context.runners.stuck == 0)
        await setup.until(lambda: sys.getswitchinterval() > 0.001)

    setup.run(scenario)


def test_a_hook_that_catches_everything_is_thrown_at_again(setup: Any) -> None:
    async def scenario() -> None:
        stubborn.hits = 0  # type: ignore[attr-defined]
        setup.use(hook("10-a", stubborn))
        begun = time.monotonic()
        await setup.ask()
        assert setup.report("10-a").hung == 1
        await setup.until(lambda: setup.report("10-a").hung == 0)
        assert stubborn.hits > 3  # type: ignore[attr-defined]
        assert time.monotonic() - begun < 15

    setup.run(scenario)


def test_an_answer_that_comes_late_is_not_used(setup: Any) -> None:
    back = threading.Event()

    def late(event: Any) -> Adjustment:
        setup.gate.wait(30)
        back.set()
        return Adjustment(envs={"LATE": "1"})

    def slow(event: Any) -> Adjustment:
        back.wait(30)  # the first one is back while the call is still on its way
        return good(event)

    async def scenario() -> None:
        setup.use(hook("10-a", late), hook("20-b", slow, timeout=60.0))
        answers = setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").hung)
        setup.gate.set()
        outcome = await answers.wait()
        assert outcome.adjustment.envs == {"GOOD": "1"}
        assert dict(outcome.owners) == {"envs[GOOD]": "20-b"}
        await setup.until(lambda: setup.report("10-a").hung == 0)
        assert setup.report("10-a").failures == {"timeout": 1}

    setup.run(scenario)


def test_a_hook_that_hangs_delays_only_calls_that_use_it(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(
            hook("10-a", setup.hang, timeout=60.0), hook("20-b", good, "pre_start_container", timeout=30.0)
        )
        held = [setup.engine.call_hooks(setup.create()) for _ in range(3 * PLACES)]
        event = setup.create()
        answers = setup.engine.call_hooks(PreStartContainer(event.pod, event.container, event.decision))
        await asyncio.wait_for(answers.wait(), 30)
        assert "cannot be changed at pre_start_container" in setup.logged[0], "it was asked, and answered"
        assert setup.report("10-a").running == PLACES
        assert setup.engine._context.runners.alive <= PLACES + 2
        assert not any(answer.outcome for answer in held)
        setup.gate.set()
        for answer in held:
            await asyncio.wait_for(answer.wait(), 30)
        assert setup.report("10-a").calls == 3 * PLACES
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
            await setup.ask()
        assert setup.report("10-a").state == "open"
        reported = len(setup.logged)
        assert (await setup.ask()).adjustment.envs == {"B": "2"}
        report = setup.report("10-a")
        assert (report.calls, report.skipped, len(setup.logged)) == (3, 1, reported), "silently"
        setup.now += 1.0
        await setup.ask()
        assert setup.report("10-a").calls == 4
        assert setup.report("10-a").retry_in == 2.0
        bad[0] = False
        setup.now += 2.0
        assert (await setup.ask()).adjustment.envs == {"GOOD": "1", "B": "2"}
        assert setup.report("10-a").state == "ok"

    setup.run(scenario)


def test_a_suspended_hook_with_policy_fail_refuses_and_says_until_when(setup: Any) -> None:
    def bad(event: Any) -> None:
        raise OSError("away")

    async def scenario() -> None:
        setup.now = 1000.0
        setup.use(hook("10-a", bad, policy=HookFailurePolicy.FAIL))
        for _ in range(3):
            await setup.ask()
        setup.now += 0.25
        assert (await setup.ask()).refusal == (
            "cannot create container ns/pod/main: hook 10-a: it is not called after 3 failures in a row; "
            "next try in 750 ms; last failure: OSError: away (test_engine_deadlines.py:"
            f"{bad.__code__.co_firstlineno + 1} in bad)"
        )
        assert setup.report("10-a").calls == 3

    setup.run(scenario)


def test_while_it_is_probed_others_do_not_wait_for_the_probe(setup: Any) -> None:
    def bad(event: Any) -> None:
        if setup.report("10-a").calls >= 3:
            setup.gate.wait(30)
        raise OSError

    async def scenario() -> None:
        setup.use(hook("10-a", bad, timeout=60.0))
        for _ in range(3):
            await setup.ask()
        await setup.until(lambda: setup.report("10-a").retry_in == 0)
        probe = setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").running)
        assert setup.report("10-a").state == "probing"
        await setup.ask()
        assert probe.outcome is None
        setup.gate.set()
        await probe.wait()

    setup.run(scenario)


def test_with_too_many_overdue_calls_it_is_not_called(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", setup.hang))
        for _ in range(MOST_OVERDUE):
            setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").hung == MOST_OVERDUE)
        await setup.ask()
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
    monkeypatch.setattr(dispatch, "LONGEST_S", 0.1)

    async def scenario() -> None:
        setup.use(hook("10-a", setup.hang, timeout=60.0), hook("20-b", good, timeout=60.0))
        assert (await setup.ask()).adjustment.envs == {}
        assert setup.report("10-a").failures == {"timeout": 1}
        assert setup.report("20-b").failures == {"queue": 1}

    setup.run(scenario)


def test_a_call_waits_for_a_slot_no_longer_than_its_deadline(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", setup.hang, timeout=60.0))
        for _ in range(PLACES):
            setup.engine.call_hooks(setup.create())
        await setup.until(lambda: setup.report("10-a").running == PLACES)
        monkeypatch.setattr(dispatch, "LONGEST_S", 0.1)
        await setup.ask()
        assert setup.logged == ["hook 10-a: it did not begin in time: it is busy with other calls"]
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").running == 0)
        assert setup.report("10-a").calls == PLACES

    setup.run(scenario)


def test_a_hook_that_waited_for_a_slot_calls_the_next_ones_once(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that is asked for twice would never be made."""
    monkeypatch.setattr("proxy.hooks.engine.breaker.PAUSES", Backoff(0.05, 60.0, tolerated=2))
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
            await setup.ask()
        assert setup.report("30-c").state == "open"
        setup.gate.clear()
        failing.clear()
        event = setup.create()
        for _ in range(PLACES):
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
        await setup.ask()
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
        await setup.ask()
        assert setup.logged == ["hook koordlet: deadline exceeded at koordlet.sock"]
        setup.use(hook("koordlet", dead, remote=True))
        await setup.ask()
        await setup.until(ended.is_set)

    setup.run(scenario)


def test_turns_stay_long_while_a_server_is_waited_for(setup: Any) -> None:
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


def test_a_loop_that_a_hook_blocks_is_replaced(setup: Any) -> None:
    first = [True]

    async def sometimes(event: Any) -> Adjustment:
        if first[0]:
            first[0] = False
            setup.gate.wait(30)
        return good(event)

    async def scenario() -> None:
        setup.use(hook("10-a", sometimes, timeout=1.0))
        await setup.ask()
        slots = setup.engine._by_point[PRE].hook_slots[0]
        blocked = slots.loop_thread()
        await setup.until(lambda: blocked.lost)
        assert (await setup.ask()).adjustment.envs == {"GOOD": "1"}
        assert setup.report("10-a").hung == 1
        setup.gate.set()
        await setup.until(lambda: setup.report("10-a").hung == 0)

    setup.run(scenario)


def test_the_loop_turns_while_a_hook_spins(setup: Any) -> None:
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


def test_a_hook_that_cannot_be_given_a_thread_fails(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
            outcome = await setup.ask()
        assert "hook 30-c: it cannot be called: can't start new thread" in outcome.refusal
        assert len(setup.logged) == 3
        assert setup.engine._context.runners.alive == 0
        setup.use(hook("10-a", good, timeout=30.0))
        assert (await setup.ask()).adjustment.envs == {"GOOD": "1"}

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


def test_coroutines_that_are_cancelled_before_their_first_step_are_back(setup: Any) -> None:
    async def blocking(event: Any) -> None:
        time.sleep(3 * SHORT_S)

    async def scenario() -> None:
        setup.use(hook("10-a", blocking))
        for answers in [setup.engine.call_hooks(setup.create()) for _ in range(PLACES)]:
            await asyncio.wait_for(answers.wait(), 30)
        await setup.until(lambda: setup.report("10-a").hung == 0)
        assert setup.report("10-a").running == 0

    setup.run(scenario)


def test_a_coroutine_whose_loop_ended_before_it_began_has_returned() -> None:
    gone = threading.Event()
    loop_thread = LoopThread("x", print, gone.set)
    loop_thread.close()
    assert gone.wait(30)
    slots = HookSlots(hook("10-a", asleep), print)
    slots.leave(0, SHORT_S, HookFailure("timeout", "no answer"), 0.0, overdue=HookTask(loop_thread))
    assert slots.report(0.0, 0).hung == 0


def test_a_cancelled_coroutine_is_cancelled_only_once() -> None:
    loop_thread = LoopThread("x", print, lambda: None)
    invoke._check_cancelled(DispatchContext(time.monotonic, print), HookTask(loop_thread, reached=True))
    assert not loop_thread.lost
    loop_thread.close()


def test_a_fault_in_a_runner_that_was_abandoned_is_not_the_calls(setup: Any) -> None:
    slots = HookSlots(hook("10-a", good), print)
    call = Dispatch(DispatchContext(time.monotonic, print), setup.create(), (slots,))
    gone, busy = Runner.__new__(Runner), Runner.__new__(Runner)
    assert call._take_from_hook(CallHolder([True], slots, gone, 0.0))
    assert not call._take_from_hook(CallHolder([], slots, busy, 0.0)), "it has just answered"
    assert call.on_internal_error(OverdueError(), gone) is JobResult.LOST
    assert call.outcome is None
    assert call.on_internal_error(OverdueError(), busy) is JobResult.DONE
    assert call.outcome is not None


def test_a_fault_of_ours_about_a_late_hook_ends_the_call(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: Any) -> None:
        raise LookupError

    async def scenario() -> None:
        monkeypatch.setattr("proxy.hooks.engine.dispatch.cancel", fault)
        setup.use(hook("10-a", setup.hang))
        assert (await setup.ask()).refusal == ""

    setup.run(scenario)


def test_a_loop_that_is_given_up_ends_when_it_can() -> None:
    gone = threading.Event()
    loop_thread = LoopThread("x", print, gone.set)
    loop_thread.abandon()
    assert gone.wait(30)


def test_a_stuck_thread_is_interrupted_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invoke, "_PAUSES", Backoff(0.0, 5.0))
    thrown: list[Any] = []

    async def scenario() -> None:
        runners = SimpleNamespace(switch_interval=SimpleNamespace(interrupt=thrown.append))
        shared: Any = SimpleNamespace(loop=asyncio.get_running_loop(), runners=runners)
        never: Any = SimpleNamespace(has_returned=False)
        invoke._interrupt(shared, never, 0)
        for _ in range(3 * invoke._MOST):
            await asyncio.sleep(0.001)
        assert len(thrown) == invoke._MOST

    asyncio.run(scenario())
