"""Delays between attempts, and that no other module of the product computes delays."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.backoff import Backoff, PassRetries, RetryDelays, RetryTimes

PROXY = Path(__file__).parents[2] / "proxy"
RULES = st.builds(
    Backoff,
    first=st.floats(0.001, 10),
    longest=st.floats(10, 1000),
    steady=st.floats(1, 100),
    tolerated=st.integers(0, 5),
    least=st.floats(0, 0.001),
)


def test_each_delay_is_twice_the_one_before_up_to_the_longest() -> None:
    rule = Backoff(0.5, 6.0, tolerated=2)
    assert [rule.delay(failures) for failures in range(1, 9)] == [0, 0, 0.5, 1, 2, 4, 6, 6]


@given(RULES, st.integers(1, 10_000))
def test_delays_never_shrink_and_have_bounds(rule: Backoff, failures: int) -> None:
    delay = rule.delay(failures)
    assert rule.least <= delay <= rule.longest
    assert delay <= rule.delay(failures + 1)
    if failures > rule.tolerated:
        assert delay >= rule.first
        assert rule.delay(failures + 1) in (2 * delay, rule.longest)
    else:
        assert delay == rule.least


@given(RULES, st.lists(st.one_of(st.none(), st.floats(0, 200)), max_size=60))
def test_a_success_or_a_steady_attempt_begins_the_sequence_again(
    rule: Backoff, attempts: list[float | None]
) -> None:
    delays, failures = RetryDelays(rule), 0
    for lasted in attempts:
        if lasted is None:
            delays.reset()
            failures = 0
            continue
        failures = 1 if lasted >= rule.steady else failures + 1
        assert delays.next(lasted) == rule.delay(failures)


@given(
    RULES,
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(("failed", "succeeded", "keep")), st.floats(0, 50))
    ),
)
def test_each_key_has_a_sequence_of_its_own(rule: Backoff, steps: list[tuple[str, str, float]]) -> None:
    times, known, now = RetryTimes[str](rule), dict[str, tuple[int, float]](), 0.0
    for key, what, seconds in steps:
        now += seconds
        if what == "failed":
            failures = known.get(key, (0, 0.0))[0] + 1
            known[key] = failures, now + rule.delay(failures)
            times.failed(key, now)
        elif what == "succeeded":
            known.pop(key, None)
            times.succeeded(key)
        else:
            known = {k: v for k, v in known.items() if k == key}
            times.keep({key})
        for any_key in "ab":
            until = known.get(any_key, (0, 0.0))[1]
            assert times.remaining(any_key, now) == pytest.approx(max(0.0, until - now))
            assert times.due(any_key, now) == (until <= now)
            assert times.due(any_key, until)


def test_a_few_reports_pass_at_once_and_later_ones_ever_more_rarely() -> None:
    retries, tried = PassRetries(), []
    for number in range(120):
        retries.start_pass({"a"})
        if retries.due("a"):
            tried.append(number)
            retries.failed("a")
    assert tried == [0, 1, 2, 3, 5, 9, 17, 33, 65, 97]
    assert retries.due("b")


def test_the_sequence_restarts_after_a_success_and_for_a_removed_key() -> None:
    retries = PassRetries()
    for there in ({"a"}, {"a"}, {"a"}, set()):
        retries.start_pass(there)
        for _ in range(9 if there else 0):
            retries.failed("a")
    assert retries.due("a")
    for _ in range(9):
        retries.failed("a")
    assert not retries.due("a")
    retries.succeeded("a")
    assert retries.due("a")


def doubles(node: ast.AST) -> bool:
    """Return whether an expression is a product with two, or a power of two."""
    if not isinstance(node, ast.BinOp):
        return False
    if isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        return any(isinstance(s, ast.Constant) and s.value == 2 for s in sides) or any(map(doubles, sides))
    one_or_two = isinstance(node.left, ast.Constant) and node.left.value in (1, 2)
    return isinstance(node.op, ast.Pow | ast.LShift) and one_or_two


def back_offs(source: str) -> list[int]:
    """Return the lines on which a value is doubled up to a limit."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "min"
        and any(map(doubles, node.args))
    ]


def test_there_is_one_back_off() -> None:
    assert back_offs("pause = min(2 * pause, 60)\nx = min(LIMIT, a.gap * 2)\ny = min(1 << n, 5)") == [1, 2, 3]
    assert back_offs("p = min(first * 2**n, 5.0)\nq = min(3 * rest, 4)") == [1]
    found = {
        str(path.relative_to(PROXY)): lines
        for path in PROXY.rglob("*.py")
        if (lines := back_offs(path.read_text()))
    }
    assert list(found) == ["model/backoff.py"]
