"""The circuit breaker, with a simulated clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.hooks.engine.breaker import FAILURES_TO_OPEN, OPEN_PAUSES, Breaker

FIRST_S, LONGEST_S = OPEN_PAUSES.first, OPEN_PAUSES.longest


def is_open(breaker: Breaker) -> bool:
    return breaker.is_open


def end(breaker: Breaker, action: str, token: int, now: float) -> None:
    if action == "good":
        breaker.succeeded(token)
    elif action == "bad":
        breaker.failed(token, now)
    else:
        breaker.unused(token)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(breaker.permit(now), now)
    return breaker


def test_three_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed(breaker.permit(0.0), 0.0)
    breaker.succeeded(breaker.permit(0.0))
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed(breaker.permit(0.0), 0.0)
    assert not is_open(breaker)
    assert breaker.failures == FAILURES_TO_OPEN - 1
    breaker.failed(breaker.permit(0.0), 0.0)
    assert is_open(breaker)
    assert breaker.permit(0.0) == 0
    assert breaker.seconds_until_probe(0.25) == pytest.approx(FIRST_S - 0.25)


def test_one_call_after_the_pause_may_close_the_breaker() -> None:
    breaker = opened()
    assert breaker.permit(FIRST_S - 0.01) == 0
    probe = breaker.permit(FIRST_S)
    assert probe
    assert breaker.is_probing
    assert breaker.permit(FIRST_S) == 0
    breaker.succeeded(probe)
    assert (is_open(breaker), breaker.is_probing) == (False, False)
    assert breaker.permit(FIRST_S)
    assert breaker.failures == 0


def test_each_failed_probe_doubles_the_pause_up_to_a_minute() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(9):
        pauses.append(breaker.seconds_until_probe(now))
        now += breaker.seconds_until_probe(now)
        breaker.failed(breaker.permit(now), now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, LONGEST_S]
    now += breaker.seconds_until_probe(now)
    breaker.succeeded(breaker.permit(now))
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(breaker.permit(now), now)
    assert breaker.seconds_until_probe(now) == FIRST_S


def test_a_probe_that_is_not_made_lets_the_next_one_through() -> None:
    breaker = opened()
    breaker.unused(breaker.permit(FIRST_S))
    assert is_open(breaker)
    assert breaker.permit(FIRST_S)


def test_a_call_from_before_the_opening_is_not_the_probe() -> None:
    breaker = Breaker()
    early = breaker.permit(0.0)
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(breaker.permit(0.0), 0.0)
    probe = breaker.permit(FIRST_S)
    breaker.failed(early, FIRST_S)
    breaker.succeeded(early)
    breaker.unused(early)
    assert is_open(breaker)
    assert breaker.is_probing
    breaker.succeeded(probe)
    assert not is_open(breaker)
    for late in (early, probe):
        breaker.failed(late, FIRST_S)
    assert breaker.failures == 0, "a call that ends after the closing does not count either"


@given(st.lists(st.tuples(st.sampled_from(["ask", "good", "bad", "unused"]), st.floats(0, 90)), max_size=60))
def test_the_breaker_never_passes_two_probes_and_never_stays_open(steps: list[tuple[str, float]]) -> None:
    breaker, now, held = Breaker(), 0.0, []
    for action, later in steps:
        now += later
        if action == "ask":
            shut = breaker.is_open
            if token := breaker.permit(now):
                held.append((token, shut))
        elif held:
            token, _ = held.pop(0)
            end(breaker, action, token, now)
        probes = [token for token, shut in held if shut]
        assert len(probes) == len(set(probes))
        assert breaker.seconds_until_probe(now) <= LONGEST_S
    for token, _ in held:
        breaker.unused(token)
    assert breaker.permit(now + LONGEST_S)
