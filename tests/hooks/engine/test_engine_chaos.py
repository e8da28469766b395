"""Random chains of hooks: a call always ends, and no change of a failed hook is kept.

Koordinator v1.8.0 pkg/runtimeproxy/dispatcher/dispatcher.go has no timeout: it hangs with its hook server.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.hooks.answers import CLEAR, LEAVE, NOTHING, Adjustment, Update, Veto
from proxy.hooks.hook import Hook, HookFailurePolicy, Outcome
from proxy.model.idset import CpuSet, Mask

PRE, VALIDATE, POST = "pre_create_container", "validate_create_container", "post_create_container"
TIMEOUT_S = 0.03
GOOD: list[Adjustment | None] = [
    None,
    Adjustment(),
    Adjustment(cpus=CpuSet([0])),
    Adjustment(mems=Mask([0]), cpu_shares=5),
    Adjustment(envs={"A": "1"}),
    Adjustment(envs={"B": CLEAR}, labels={"l": "1"}),
    Adjustment(updates={"x": Update(cpus=CpuSet([9]))}),
    Adjustment(updates={"x": Update(cpu_shares=7)}, cpu_quota=-1),
]
INVALID: list[Any] = [
    1,
    "no",
    Adjustment(cpus=CpuSet([7])),
    Adjustment(cpus=CpuSet()),
    Adjustment(cpu_shares=1, envs={"LIE": "1"}),
    Adjustment(cgroup_parent="/x"),
    Adjustment(envs=["LIE"]),  # type: ignore[arg-type]
    Adjustment(labels={"LIE": "x" * 70_000}),
]
BAD = ["raise", "exit", "sleep", "spin", "gate", "late"]


async def endless() -> None:
    await asyncio.sleep(60)


def behave(what: Any, gate: Any) -> Any:
    """Behave as a hook of that kind; return its answer."""
    if what == "raise":
        raise ValueError("LIE")
    if what == "exit":
        raise SystemExit(1)
    if what == "sleep":
        time.sleep(TIMEOUT_S * 3)
    elif what == "late":
        time.sleep(TIMEOUT_S * 2)
        return Adjustment(annotations={"LATE": "1"})
    elif what == "spin":
        while not gate.is_set():  # until the test is over
            pass
    elif what == "gate":
        gate.wait(20)
    return what


def make_hook(number: int, spec: tuple[str, Any, list[str], HookFailurePolicy], gate: Any) -> Hook:
    kind, what, points, policy = spec

    def function(event: Any) -> Any:
        return behave(what, gate)

    async def coroutine(event: Any) -> Any:
        if what in ("sleep", "gate"):
            await endless()
        await asyncio.sleep(0)
        return behave(what, gate)

    handler = function if kind == "function" else coroutine
    # A hook without faults has a deadline that is long enough for a slow machine.
    timeout = TIMEOUT_S if isinstance(what, str) and what in ("sleep", "late", "spin", "gate") else 20.0
    return Hook(f"{number:02}", f"/{number}", dict.fromkeys(points, handler), policy, timeout)


HOOKS = st.lists(
    st.tuples(
        st.sampled_from(["function", "function", "coroutine"]),
        st.sampled_from(GOOD) | st.sampled_from(INVALID) | st.sampled_from(BAD) | st.just(Veto("no")),
        st.sampled_from([[PRE], [PRE], [PRE, VALIDATE], [VALIDATE], [PRE, POST]]),
        st.sampled_from([HookFailurePolicy.IGNORE, HookFailurePolicy.IGNORE, HookFailurePolicy.FAIL]),
    ),
    min_size=1,
    max_size=5,
)


def expected(specs: list[Any]) -> tuple[str, Adjustment]:
    """Compute the expected outcome in a slow, obvious way."""
    owners: set[str] = set()
    values: dict[str, Any] = {}
    for validating in (False, True):
        for number, (_, what, points, policy) in enumerate(specs):
            if (VALIDATE if validating else PRE) not in points:
                continue
            reported = names(what) if any(what is good for good in GOOD) else None
            if isinstance(what, Veto) or (
                (reported is None or reported & owners or (validating and reported))
                and policy is HookFailurePolicy.FAIL
            ):
                return f"{number:02}", NOTHING
            if not validating and reported and not reported & owners:
                owners |= reported
                add(values, what)
    return "", Adjustment(**values)


def names(answer: Any) -> set[str]:
    reported: set[str] = set()
    for field, value in answer.set_fields() if answer is not None else ():
        if field == "updates":
            for name in ("cpus", "cpu_shares"):
                reported |= {f"{key}.{name}" for key, new in value.items() if getattr(new, name) is not LEAVE}
        else:
            reported |= {f"{field}[{key}]" for key in value} if isinstance(value, dict) else {field}
    return reported


def add(values: dict[str, Any], answer: Adjustment) -> None:
    for field, value in answer.set_fields():
        if field == "updates":
            previous = values.get(field, {}).get("x", Update())
            new: Any = answer.updates["x"]
            cpus = new.cpus if isinstance(new.cpus, CpuSet) else previous.cpus
            shares = new.cpu_shares if isinstance(new.cpu_shares, int) else previous.cpu_shares
            values[field] = {"x": Update(cpus=cpus, cpu_shares=shares)}
        elif isinstance(value, dict):
            values[field] = values.get(field, {}) | value
        else:
            values[field] = value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs=HOOKS)
def test_a_call_always_ends_with_the_answers_of_good_hooks(setup: Any, specs: list[Any]) -> None:
    outcomes: list[Outcome] = []
    fresh = type(setup)()

    async def scenario() -> None:
        fresh.use(*(make_hook(number, spec, fresh.gate) for number, spec in enumerate(specs)))
        outcomes.append(await fresh.call())
        fresh.engine.notify(fresh.created())

    fresh.run(scenario)
    refused_by, adjustment = expected(specs)
    outcome = outcomes[0]
    if refused_by:
        assert f": hook {refused_by}: " in outcome.refusal
        assert outcome.adjustment is NOTHING
    else:
        assert outcome.refusal == ""
        assert outcome.adjustment == adjustment
        assert "LATE" not in outcome.adjustment.annotations
    assert all(reported.startswith("hook ") for reported in fresh.logged)


def test_hundreds_of_calls_among_hooks_that_misbehave_all_end(setup: Any) -> None:
    kinds: list[Any] = [GOOD[4], "raise", INVALID[4], GOOD[3], "sleep", "late", GOOD[2]]
    hooks = []
    for number, what in enumerate(kinds):
        points = [PRE] if isinstance(what, Adjustment) and what is not INVALID[4] else [PRE, POST]
        kind = "coroutine" if number % 3 == 2 else "function"
        hooks.append(make_hook(number, (kind, what, points, HookFailurePolicy.IGNORE), setup.gate))

    async def scenario() -> None:
        setup.use(*hooks)
        waiting = []
        for number in range(300):
            waiting.append(setup.engine.call_hooks(setup.create()))
            setup.engine.notify(setup.created())
            if number % 50 == 49:
                setup.use(*(hooks if number % 100 == 99 else hooks[:-1]))
                await asyncio.sleep(0.01)
        for answers in waiting:
            outcome = await asyncio.wait_for(answers.wait(), 60)
            reported = set(outcome.adjustment.envs) | set(outcome.adjustment.annotations)
            assert reported == {"A"}
            assert outcome.adjustment.cpu_shares == 5
            assert outcome.refusal == ""
        await setup.until(lambda: all(report.hung == 0 for report in setup.engine.report()))
        await setup.until(lambda: setup.engine._context.runners.stuck == 0)

    setup.run(scenario)
