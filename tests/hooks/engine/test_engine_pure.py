"""Hooks that only compute: called on the event loop itself, and never for long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proxy.hooks.answers import Adjustment, Veto
from proxy.hooks.engine import loop_interrupt as alarms
from proxy.hooks.engine.loop_interrupt import Alarm, make_alarm
from proxy.hooks.engine.slots import ANSWERS_UNTIL_FORGIVEN, MOST_INTERRUPTED
from proxy.hooks.hook import Hook, HookFailurePolicy

# pytest's own time limit would use the signal.
pytestmark = pytest.mark.timeout(0)

PRE = "pre_create_container"


@pytest.fixture(autouse=True)
def _signal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(alarms, "CALL_LIMIT_S", 20.0)  # no quick hook is interrupted on a busy machine
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def pure(name: str, handler: Callable[[Any], Any], **fields: Any) -> Hook:
    return Hook(name, f"/hooks/{name}.py", {PRE: handler}, **({"timeout": 30.0, "pure": True} | fields))


def good(event: Any) -> Adjustment:
    return Adjustment(envs={"ON": threading.current_thread().name})


def on_loop(setup: Any) -> bool:
    """Call the hooks, and return whether the answer came at once from this thread."""
    answers = setup.engine.call_hooks(setup.create())
    assert answers.outcome is not None
    return bool(answers.outcome.adjustment.envs["ON"] == threading.main_thread().name)


def test_a_pure_hook_is_called_on_the_loop_and_others_are_not(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(pure("10-a", good))
        assert on_loop(setup)
        setup.use(pure("10-a", good, pure=False))
        assert (await setup.call()).adjustment.envs["ON"] != threading.main_thread().name
        others = Hook("20-b", "/b", {PRE: lambda event: None}, timeout=30.0)
        setup.use(pure("10-a", good), others)
        assert (await setup.call()).adjustment.envs["ON"] != threading.main_thread().name
        validates = {"validate_create_container": lambda event: None}
        setup.use(pure("10-a", good), Hook("20-b", "/b", validates, timeout=30.0))
        assert (await setup.call()).adjustment.envs["ON"] != threading.main_thread().name

    setup.run(scenario)


def spin() -> None:
    for _ in range(10**12):
        pass


def sleep() -> None:
    time.sleep(60)


def wait() -> None:
    threading.Event().wait(60)


def spin_and_catch_once() -> None:
    try:
        spin()
    except BaseException:
        spin()


@pytest.mark.parametrize("stay", [spin, sleep, wait, spin_and_catch_once])
def test_a_slow_pure_hook_is_interrupted_and_repeated_in_a_thread(
    setup: Any, stay: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "CALL_LIMIT_S", 0.02)
    threads: list[str] = []

    def hang_on_loop(event: Any) -> Adjustment:
        threads.append(threading.current_thread().name)
        if threads[-1] == threading.main_thread().name:
            stay()
        return good(event)

    async def scenario() -> None:
        setup.use(pure("10-a", hang_on_loop))
        for turn in range(MOST_INTERRUPTED):
            outcome = await setup.call()
            assert outcome.adjustment.envs["ON"] != threading.main_thread().name
            assert len(threads) == 2 * (turn + 1)
            report = setup.report("10-a")
            assert (report.interrupted, report.in_threads) == (turn + 1, turn + 1 == MOST_INTERRUPTED)
        await setup.call()
        assert len(threads) == 2 * MOST_INTERRUPTED + 1, "it is not called on the loop any more"
        assert setup.report("10-a").failures == {}
        assert setup.report("10-a").running == 0

    setup.run(scenario)


def test_a_pure_hook_returns_to_the_loop_when_it_has_been_quick_for_long(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.hooks.engine.stats.SLOW_ANSWER_S", 20.0)  # each answer here counts as quick
    delayed = False

    def delayed_on_loop(event: Any) -> Adjustment:
        if delayed and threading.current_thread() is threading.main_thread():
            sleep()  # as if the daemon did not run for so long
        return good(event)

    async def interrupt(times: int) -> None:
        nonlocal delayed
        delayed = True
        with monkeypatch.context() as short:
            short.setattr(alarms, "CALL_LIMIT_S", 0.02)
            for _ in range(times):
                outcome = await setup.call()
                assert outcome.adjustment.envs["ON"] != threading.main_thread().name
        delayed = False

    async def answer(times: int, *, in_loop: bool) -> None:
        for _ in range(times):
            outcome = await setup.call()
            assert (outcome.adjustment.envs["ON"] == threading.main_thread().name) is in_loop

    async def scenario() -> None:
        setup.use(pure("10-a", delayed_on_loop))
        for _ in range(MOST_INTERRUPTED):
            await interrupt(1)
            await answer(ANSWERS_UNTIL_FORGIVEN, in_loop=True)
        await interrupt(MOST_INTERRUPTED)
        # The repeated call in a thread is the first quick answer.
        await answer(ANSWERS_UNTIL_FORGIVEN - 1, in_loop=False)
        await answer(1, in_loop=True)

    setup.run(scenario)


def test_a_hanging_pure_hook_delays_a_call_by_its_deadline_only(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "CALL_LIMIT_S", 0.02)

    def hangs(event: Any) -> None:
        setup.gate.wait(60)

    async def scenario() -> None:
        setup.use(pure("10-a", hangs, timeout=0.1), pure("20-b", good))
        assert "ON" in (await setup.call()).adjustment.envs
        assert setup.report("10-a").failures == {"timeout": 1}
        setup.gate.set()

    setup.run(scenario)


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (lambda event: 1 / 0, "error"),
        (lambda event: 7, "answer"),
        (lambda event: Adjustment(cgroup_parent="/"), "answer"),
        (lambda event: Adjustment(envs={"ON": "conflict"}), "conflict"),
    ],
)
def test_failures_of_pure_hooks_are_reported_and_counted(setup: Any, handler: Any, kind: str) -> None:
    async def scenario() -> None:
        setup.use(pure("10-a", good), pure("20-b", handler))
        assert on_loop(setup)
        assert setup.report("20-b").failures == {kind: 1}
        setup.use(pure("10-a", good), pure("20-b", handler, policy=HookFailurePolicy.FAIL))
        assert "20-b" in setup.engine.call_hooks(setup.create()).outcome.refusal
        setup.use(pure("10-a", lambda event: Veto("no")), pure("20-b", handler))
        assert setup.engine.call_hooks(setup.create()).outcome.refusal.endswith("hook 10-a: no")

    setup.run(scenario)


def test_three_failures_of_a_pure_hook_open_the_breaker(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(pure("10-a", lambda event: 1 / 0))
        for _ in range(5):
            assert setup.engine.call_hooks(setup.create()).outcome is not None
        assert setup.report("10-a").calls == 3
        assert setup.report("10-a").state == "open"

    setup.run(scenario)


def test_there_is_no_alarm_if_the_signal_is_in_use_or_on_other_threads() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(make_alarm()))
    thread.start()
    thread.join()
    assert found == [None]
    signal.signal(signal.SIGALRM, lambda *_: None)
    assert make_alarm() is None
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    one = make_alarm()
    assert isinstance(one, Alarm)
    assert make_alarm() is None, "an alarm is in use"
    one.close()
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_an_alarm_passes_results_and_errors_and_is_off_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Alarm()
    assert one.call(divmod, 7, 2) == (3, 1)
    assert not one.interrupted
    with pytest.raises(ZeroDivisionError):
        one.call(divmod, 7, 0)
    monkeypatch.setattr(alarms, "CALL_LIMIT_S", 0.02)
    assert one.call(sleep) is None
    assert one.interrupted
    time.sleep(0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.raise_signal(signal.SIGALRM)  # outside of a hook nothing is interrupted
    monkeypatch.setattr(alarms, "CALL_LIMIT_S", 20.0)
    assert one.call(divmod, 7, 2) == (3, 1)


def test_a_hook_that_catches_the_first_alarm_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "CALL_LIMIT_S", 0.02)
    one = Alarm()
    assert one.call(spin_and_catch_once) is None
    assert one.interrupted


@pytest.mark.parametrize("policy", list(HookFailurePolicy))
def test_an_internal_error_drops_the_answers_and_keeps_the_policies(
    setup: Any, policy: HookFailurePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    async def scenario() -> None:
        setup.use(pure("10-a", good, policy=policy))
        monkeypatch.setattr("proxy.hooks.engine.invoke.invoke", broken)
        outcome = (setup.engine.call_hooks(setup.create())).outcome
        assert outcome is not None
        assert not outcome.adjustment
        assert ("cannot be called: KeyError" in outcome.refusal) is (policy is HookFailurePolicy.FAIL)
        assert "KeyError: 'ours'" in setup.logged[0]

    setup.run(scenario)
