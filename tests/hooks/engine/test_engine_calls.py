"""Calls of hooks: their selection, their order, and the effect of their answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from proxy.hooks.answers import CLEAR, NOTHING, Adjustment, Veto
from proxy.hooks.engine import invoke
from proxy.hooks.events import PreStopContainer, Shutdown
from proxy.hooks.hook import NO_CHANGE, Hook, HookFailurePolicy, Outcome
from proxy.model.idset import CpuSet

PRE = "pre_create_container"
VALIDATE = "validate_create_container"
BOTH = pytest.mark.parametrize("policy", list(HookFailurePolicy))


def hook(name: str, answer: Any = None, point: str = PRE, **fields: Any) -> Hook:
    """Make a hook with a constant answer, or with the given function as its handler."""
    handler: Callable[..., Any] = answer if callable(answer) else lambda *_: answer
    return Hook(name, f"/hooks/{name}.py", {point: handler}, **fields)


def envs(**values: str) -> Adjustment:
    return Adjustment(envs=values)


def test_nothing_is_started_or_called_without_hooks(setup: Any) -> None:
    async def scenario() -> None:
        threads = set(threading.enumerate())
        answers = setup.engine.call_hooks(setup.create())
        assert answers.outcome is NO_CHANGE
        assert await answers.wait() is NO_CHANGE
        setup.engine.notify(setup.created())
        setup.use(hook("10-a", point="post_create_container"))
        assert (await setup.call()) is NO_CHANGE
        assert setup.engine.points == {"post_create_container"}
        assert set(threading.enumerate()) <= threads, "threads of other tests may end meanwhile"

    setup.run(scenario)


def test_hooks_are_called_by_name_and_their_adjustments_are_merged(setup: Any) -> None:
    called: list[str] = []

    def recording_hook(name: str, answer: Adjustment | None) -> Hook:
        def pre_create_container(event: Any) -> Adjustment | None:
            called.append(name)
            return answer

        return hook(name, pre_create_container)

    async def slowly(_: Any) -> Adjustment:
        await asyncio.sleep(0)
        called.append("20-b")
        return envs(B="2")

    async def scenario() -> None:
        setup.use(recording_hook("koordlet", None), recording_hook("10-a", envs(A="1")), hook("20-b", slowly),
                  recording_hook("05-x", Adjustment(cpus=CpuSet([1]), labels={"l": CLEAR})))  # fmt: skip
        outcome = await setup.call()
        assert called == ["05-x", "10-a", "20-b", "koordlet"]
        assert outcome.adjustment == Adjustment(
            cpus=CpuSet([1]), labels={"l": CLEAR}, envs={"A": "1", "B": "2"}
        )
        assert outcome.owners == {"cpus": "05-x", "labels[l]": "05-x", "envs[A]": "10-a", "envs[B]": "20-b"}
        assert outcome.refusal == ""

    setup.run(scenario)


def test_a_second_claim_of_a_field_drops_the_later_answer(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", envs(A="1")), hook("20-b", envs(A="2", B="2")), hook("30-c", envs(C="3")))
        outcome = await setup.call()
        assert outcome.adjustment == envs(A="1", C="3")
        assert setup.logged == [
            "hook 20-b: cannot set envs[A]: hook 10-a has set it, and both cannot be right"
        ]
        assert (setup.report("20-b").conflicts, setup.report("20-b").state) == (1, "ok")
        setup.use(hook("10-a", envs(A="1")), hook("20-b", envs(A="2"), policy=HookFailurePolicy.FAIL))
        outcome = await setup.call()
        assert outcome.refusal.startswith(
            "cannot create container ns/pod/main: hook 20-b: cannot set envs[A]"
        )
        assert "10-a" in outcome.refusal
        assert outcome.adjustment is NOTHING
        assert not outcome.owners

    setup.run(scenario)


@BOTH
def test_a_veto_refuses_under_any_policy_and_ends_the_sequence(setup: Any, policy: HookFailurePolicy) -> None:
    called: list[int] = []

    async def scenario() -> None:
        setup.use(hook("10-a", envs(A="1")), hook("20-b", Veto("no room"), policy=policy),
                  hook("30-c", lambda _: called.append(1)))  # fmt: skip
        outcome = await setup.call()
        assert outcome.refusal == "cannot create container ns/pod/main: hook 20-b: no room"
        assert outcome.adjustment is NOTHING
        assert called == []
        assert setup.logged == []
        assert setup.report("20-b").vetoes == 1

    setup.run(scenario)


def test_a_validating_hook_receives_all_changes_and_may_refuse(setup: Any) -> None:
    seen: list[Any] = []

    def validate(event: Any) -> Veto | None:
        seen.append((event.event.container.name, event.adjustment, dict(event.owners)))
        event.adjustment.envs["A"] = "changed"
        return Veto("not that") if "B" in event.adjustment.envs else None

    async def scenario() -> None:
        setup.use(hook("05-v", validate, VALIDATE), hook("10-a", envs(A="1")))
        outcome = await setup.call()
        assert seen == [("main", envs(A="changed"), {"envs[A]": "10-a"})]
        assert outcome.adjustment == envs(A="1")
        setup.use(hook("05-v", validate, VALIDATE), hook("10-a", envs(B="1")))
        outcome = await setup.call()
        assert outcome.refusal == "cannot create container ns/pod/main: hook 05-v: not that"
        assert outcome.adjustment is NOTHING

    setup.run(scenario)


def test_a_validating_hook_is_called_without_adjusting_hooks(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("05-v", Veto("never"), VALIDATE))
        assert setup.engine.points == {PRE, VALIDATE}
        assert "never" in (await setup.call()).refusal
        setup.use(hook("05-v", envs(A="1"), VALIDATE))
        assert await setup.call() is NO_CHANGE
        assert "cannot be changed at validate_create_container" in setup.logged[0]

    setup.run(scenario)


def deep(event: object) -> object:
    return deep(event)


def raising(error: BaseException) -> Callable[[Any], None]:
    def pre_create_container(event: Any) -> None:
        raise error

    return pre_create_container


def stopping(event: Any) -> None:
    raise StopIteration


FAULTS: dict[str, Any] = {
    "ValueError: no": raising(ValueError("no")),
    "SystemExit: 3": raising(SystemExit(3)),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "MemoryError": raising(MemoryError()),
    "StopIteration": stopping,
    "RecursionError: maximum": deep,
    "CancelledError": raising(asyncio.CancelledError()),
    "TypeError": lambda: None,
    "cannot use its answer at pre_create_container: it must be": lambda _: 1,
    "cannot set cpus of ns/pod/main to 7": lambda _: Adjustment(cpus=CpuSet([7])),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("kind", ["function", "coroutine"])
@pytest.mark.parametrize("error", list(FAULTS))
def test_a_failed_hook_fails_the_call_or_is_skipped_by_policy(
    setup: Any, policy: HookFailurePolicy, error: str, kind: str
) -> None:
    handler: Any = FAULTS[error]

    async def as_coroutine(event: Any) -> Any:
        return handler(event)

    async def scenario() -> None:
        used = handler if kind == "function" else as_coroutine
        setup.use(hook("10-a", envs(A="1")), hook("20-b", used, policy=policy), hook("30-c", envs(C="3")))
        outcome = await setup.call()
        expected = error if kind == "function" or error != "StopIteration" else "RuntimeError"
        assert setup.logged[0].startswith(f"hook 20-b: {expected}")
        if policy is HookFailurePolicy.FAIL:
            assert outcome.refusal.startswith(f"cannot create container ns/pod/main: hook 20-b: {expected}")
            assert outcome.adjustment is NOTHING
        else:
            assert outcome.adjustment == envs(A="1", C="3")
        report = setup.report("20-b")
        assert (report.state, sum(report.failures.values()), report.calls) == ("failing", 1, 1)
        assert (await setup.call()).adjustment == outcome.adjustment, "it is called for the next call as well"

    setup.run(scenario)


def test_a_call_that_cannot_be_refused_continues(setup: Any) -> None:
    async def scenario() -> None:
        event = setup.create()
        stop = PreStopContainer(event.pod, event.container, event.decision)
        setup.use(hook("10-a", Veto("stay"), "pre_stop_container", policy=HookFailurePolicy.FAIL))
        assert await setup.call(stop) is NO_CHANGE
        assert "cannot refuse at pre_stop_container" in setup.logged[0]

    setup.run(scenario)


@pytest.mark.parametrize("policy", [HookFailurePolicy.FAIL, HookFailurePolicy.IGNORE])
@pytest.mark.parametrize(
    "where", ["slots.HookSlots.acquire", "invoke.MergedAnswers.add", "invoke.MergedAnswers.outcome"]
)
def test_an_internal_error_is_reported_and_refuses_under_policy_fail(
    setup: Any, monkeypatch: pytest.MonkeyPatch, policy: HookFailurePolicy, where: str
) -> None:
    def fault(*_: Any) -> None:
        raise KeyError("ours")

    async def scenario() -> None:
        setup.use(hook("10-a", envs(A="1"), policy=policy), hook("20-b", envs(B="1")))
        monkeypatch.setattr(f"proxy.hooks.engine.{where}", fault)
        outcome = await setup.call()
        assert outcome.adjustment is NOTHING
        assert ("cannot be called: KeyError" in outcome.refusal) is (policy is HookFailurePolicy.FAIL)
        await setup.until(lambda: setup.logged)
        assert setup.logged == ["hook 10-a: calls cannot be taken through the hooks: KeyError: 'ours'"]

    setup.run(scenario)


def test_a_hook_that_skips_a_pod_is_not_called_for_it(setup: Any) -> None:
    def broken(labels: Any) -> bool:
        raise KeyError

    async def scenario() -> None:
        setup.use(hook("10-a", envs(A="1"), skip=lambda labels: labels["app"] == "db"),
                  hook("20-b", envs(B="1"), skip=lambda labels: "x" in labels),
                  hook("30-c", envs(C="1"), skip=broken),
                  hook("40-v", Veto("no"), VALIDATE, skip=lambda labels: True))  # fmt: skip
        assert (await setup.call()).adjustment == envs(B="1", C="1")
        assert setup.report("10-a").calls == 0

    setup.run(scenario)


def test_an_echoing_hook_receives_the_changes_of_earlier_hooks(setup: Any) -> None:
    def echo(event: Any, so_far: Any) -> Adjustment:
        return envs(SEEN=so_far.envs["A"])

    async def scenario() -> None:
        setup.use(hook("10-a", envs(A="1")), hook("20-b", echo, receives_earlier_changes=True))
        assert (await setup.call()).adjustment == envs(A="1", SEEN="1")

    setup.run(scenario)


def test_a_pending_call_keeps_the_hooks_that_it_began_with(setup: Any) -> None:
    inside = threading.Event()

    def wait(event: Any) -> Adjustment:
        inside.set()
        setup.gate.wait(30)
        return envs(A="old")

    async def scenario() -> None:
        old, last = hook("10-a", wait, timeout=60.0), hook("20-b", envs(B="old"))
        setup.use(old, last)
        answers = setup.engine.call_hooks(setup.create())
        await setup.until(inside.is_set)
        setup.use(hook("10-a", envs(A="new")), hook("30-c", envs(C="new")))
        await setup.engine.notify_one(old, Shutdown("replaced"))
        assert (await setup.call()).adjustment == envs(A="new", C="new")
        setup.gate.set()
        assert (await answers.wait()).adjustment == envs(A="old", B="old")
        setup.use()
        assert setup.engine.points == frozenset()
        assert await setup.call() is NO_CHANGE

    setup.run(scenario)


def test_hooks_that_stay_in_use_keep_their_statistics(setup: Any) -> None:
    async def scenario() -> None:
        kept_hook, other = hook("10-a", envs(A="1")), hook("20-b")
        setup.use(kept_hook)
        await setup.call()
        setup.use(other, kept_hook)
        await setup.call()
        setup.use(hook("10-a", envs(A="1")))
        assert setup.report("10-a").calls == 0
        setup.use(kept_hook)
        assert setup.report("10-a").calls == 2

    setup.run(scenario)


def test_quick_hooks_are_awaited_at_once_and_slow_ones_later(setup: Any) -> None:
    slow = [0.0]

    def pre_create_container(event: Any) -> Adjustment:
        time.sleep(slow[0])
        return envs(A="1")

    async def scenario() -> None:
        setup.use(hook("10-a", pre_create_container))

        def is_quick() -> bool:
            return bool(setup.engine._by_point[PRE].is_quick())

        assert not is_quick(), "the duration of its calls is not known yet"
        await setup.call()
        while not is_quick():
            await setup.call()
        slow[0] = 0.01
        await setup.call()
        slow[0], called = 0.0, 0
        while not is_quick():
            await setup.call()
            called += 1
        assert called >= 20

    setup.run(scenario)


def test_servers_and_coroutines_are_never_awaited_at_once(setup: Any) -> None:
    async def coroutine(event: Any) -> None:
        return None

    async def scenario() -> None:
        for other in (hook("20-b", remote=True), hook("20-b", coroutine), hook("20-b", coroutine, VALIDATE)):
            setup.use(hook("10-a"), other)
            for _ in range(50):
                await setup.call()
            assert not setup.engine._by_point[PRE].is_quick()

    setup.run(scenario)


def test_answers_may_have_several_waiters_or_none(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", lambda _: setup.gate.wait(30) and envs(A="1"), timeout=60.0))
        answers = setup.engine.call_hooks(setup.create())
        first, second = asyncio.create_task(answers.wait()), asyncio.create_task(answers.wait())
        await asyncio.sleep(0.01)
        first.cancel()
        setup.engine.call_hooks(setup.create())
        setup.gate.set()
        assert (await second).adjustment == envs(A="1")
        await setup.until(lambda: setup.report("10-a").calls == 2)

    setup.run(scenario)


def test_no_hook_is_called_after_closing(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", envs(A="1")))
        await setup.call()
        setup.engine.close()
        assert await setup.call() is NO_CHANGE
        assert setup.engine.report() == []
        reported: list[Any] = []
        setup.use(Hook("20-b", "b.py", {"post_create_container": reported.append}, timeout=30.0))
        setup.engine.notify(setup.created())
        await asyncio.sleep(0.05)
        assert reported == []
        setup.engine.close()
        await setup.until(lambda: not [t for t in threading.enumerate() if t.name.startswith("hooks-")])

    setup.run(scenario)


def test_an_internal_error_lets_the_call_pass_under_policy_ignore(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> None:
        raise LookupError

    async def scenario() -> None:
        monkeypatch.setattr("proxy.hooks.engine.invoke.invoke", fault)
        for policy, refusal in (
            (HookFailurePolicy.IGNORE, ""),
            (
                HookFailurePolicy.FAIL,
                "cannot create container ns/pod/main: its hooks cannot be called: LookupError",
            ),
        ):
            setup.use(hook("10-a", envs(A="1"), policy=policy, timeout=30.0))
            assert await setup.call() == Outcome(refusal=refusal)
        event = setup.create()
        stop = PreStopContainer(event.pod, event.container, event.decision)
        setup.use(
            hook("10-a", envs(A="1"), "pre_stop_container", policy=HookFailurePolicy.FAIL, timeout=30.0)
        )
        assert await setup.call(stop) == Outcome()
        assert setup.engine._context.runners.alive == 1, "the runner stays alive"

    setup.run(scenario)


def test_an_internal_error_in_validation_refuses_under_policy_fail(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = invoke.invoke

    def fault(hook: Hook, event: Any, tally: Any) -> Any:
        if event.NAME == VALIDATE:
            raise LookupError
        return function(hook, event, tally)

    async def scenario() -> None:
        monkeypatch.setattr("proxy.hooks.engine.invoke.invoke", fault)
        setup.use(
            hook("10-a", envs(A="1"), policy=HookFailurePolicy.FAIL, timeout=30.0),
            hook("20-v", None, VALIDATE, timeout=30.0),
        )
        assert "cannot be called: LookupError" in (await setup.call()).refusal

    setup.run(scenario)
