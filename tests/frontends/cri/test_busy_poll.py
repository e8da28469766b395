"""When the loop polls before it sleeps, with a clock and messages that the test controls; times are in us."""

from __future__ import annotations

import itertools

import pytest

from proxy.frontends.cri.busy_poll import MOST_SHORT_WAITS, SHORT_WAITS, Events, WaitHistory

LIMIT, POLL = 200, 1
EVENTS: Events = [(3, 1)]


class Messages:
    """Messages that arrive with given gaps, each counted from the end of the wait for the last one."""

    def __init__(self, *, starved: bool = False) -> None:
        """Begin at 0.

        Args:
            starved: The peer needs the CPU of the poller: no time passes for it while the loop polls.
        """
        self.now = 0.0
        self.polled = 0.0
        self.due = 0.0
        self.starved = starved
        self.history = WaitHistory()

    def poll(self, timeout: float | None) -> Events:
        if timeout == 0:
            self.now += POLL
            self.polled += POLL
            self.due += POLL if self.starved else 0
        elif timeout is None or self.due <= self.now + timeout:
            self.now = max(self.now, self.due)
        else:
            self.now += timeout
        return EVENTS if self.due <= self.now else []

    def wait(self, gap: float, timeout: float | None = None) -> float:
        """Wait for a message; return the time that was polled."""
        before, self.due = self.polled, self.now + gap
        assert self.history.wait(self.poll, timeout, LIMIT, lambda: self.now) == EVENTS
        return self.polled - before


def test_close_messages_are_polled_for_after_a_few_short_waits() -> None:
    messages = Messages()
    assert [messages.wait(50) for _ in range(SHORT_WAITS + 3)] == [0, 0, 0, 50, 50, 50]


@pytest.mark.parametrize("gap", [LIMIT, 2 * LIMIT, 1_000_000])
def test_messages_that_are_far_apart_are_never_polled_for(gap: int) -> None:
    messages = Messages()
    assert sum(messages.wait(gap) for _ in range(1000)) == 0


def test_short_waits_count_only_in_a_row() -> None:
    messages = Messages()
    assert sum(messages.wait(gap) for _ in range(100) for gap in (50, 50, 1000)) == 0


def test_a_burst_is_followed_by_one_useless_poll() -> None:
    messages = Messages()
    for _ in range(10):
        polled = [messages.wait(50) for _ in range(20)]
        assert polled == [0] * SHORT_WAITS + [50] * (20 - SHORT_WAITS)
        assert messages.wait(1_000_000) == LIMIT
        assert messages.wait(1_000_000) == 0


def test_polls_that_delay_the_peer_become_rare() -> None:
    messages = Messages(starved=True)
    polled = [messages.wait(50) > 0 for _ in range(10_000)]
    failures = [number for number, was in enumerate(polled) if was]
    between = [after - before - 1 for before, after in itertools.pairwise(failures)]
    assert failures[0] == SHORT_WAITS
    assert between[:8] == [SHORT_WAITS * 2**n for n in range(1, 9)]
    assert set(between[8:]) == {MOST_SHORT_WAITS}


def test_a_poll_that_succeeds_ends_the_caution() -> None:
    messages = Messages(starved=True)
    for _ in range(5000):
        messages.wait(50)
    messages.starved = False
    for _ in range(MOST_SHORT_WAITS):
        messages.wait(50)
    assert messages.wait(50) == 50
    assert messages.wait(1_000_000) == LIMIT
    assert [messages.wait(50) for _ in range(SHORT_WAITS + 1)] == [0, 0, 0, 50]


def test_a_quiet_time_does_not_make_polls_rare() -> None:
    messages = Messages()
    for _ in range(100):
        assert [messages.wait(50) for _ in range(SHORT_WAITS + 1)] == [0, 0, 0, 50]
        assert messages.wait(2 * LIMIT) == LIMIT


@pytest.mark.parametrize("timeout", [30, LIMIT, 1000])
def test_a_wait_ends_in_time_and_polls_no_longer(timeout: float) -> None:
    messages = Messages()
    for _ in range(SHORT_WAITS):
        messages.wait(50)
    began, messages.due = messages.now, messages.now + 10_000
    assert messages.history.wait(messages.poll, timeout, LIMIT, lambda: messages.now) == []
    assert timeout <= messages.now - began <= timeout + POLL
    assert messages.polled <= min(timeout, LIMIT) + POLL


def test_without_time_for_polling_the_loop_always_sleeps() -> None:
    messages = Messages()
    for _ in range(10):
        messages.due = messages.now + 50
        messages.history.wait(messages.poll, None, 0, lambda: messages.now)
    assert messages.polled == 0
