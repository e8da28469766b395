"""Statistics of one hook: calls, failures, times, and the report of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

QUICK_S = 0.0001
"""The loop blocks for a hook whose answers usually take less than this."""
SLOW_ANSWER_S = 0.0003
"""After one answer that takes longer than this, the loop does not block for the next ones."""
QUICK_ANSWERS = 20
"""After this many quick answers, the loop blocks for the hook again."""
_NEWEST_WEIGHT = 0.125
_KEPT_DURATIONS = 128


@dataclass(frozen=True, slots=True)
class HookReport:
    """The state and statistics of a hook.

    Attributes:
        name, source, policy, remote: As in ``Hook``.
        points: The points that it handles.
        timeout: Seconds for one answer.
        state: ``ok``; ``failing``: its last calls failed; ``open``: it is not called for a while;
            ``probing``: one call checks whether it works again; ``hangs``: it is not called until overdue
            calls return.
        retry_in: Seconds until it is called again, if it is ``open``.
        calls: How often it was called.
        failures: How often it failed, by kind: ``error``, ``answer``, ``conflict``, ``timeout``, ``hangs``,
            ``queue``.
        conflicts: How often it set a field that another hook had set.
        vetoes: How often it refused a call.
        skipped: How often it was not called because it is ``open``.
        lost: Events that were dropped because too many waited.
        waiting: Events that wait in its queue.
        running: Calls in progress.
        hung: Calls that have not returned after their deadline.
        quiet: Log records that were dropped.
        interrupted: Calls of a ``PURE`` hook that took too long on the loop since it was last quick.
        in_threads: True for a ``PURE`` hook that is called in threads because of such interruptions.
        last_error: The text of the last failure; empty if there was none. ``last_trace`` is its traceback.
        last_error_at: Its time in seconds since the epoch; 0 if there was none.
        p50_s, max_s: Seconds of one answer: median of the last ones, and the longest ever.
    """

    name: str
    source: str
    points: tuple[str, ...]
    policy: str
    timeout: float
    remote: bool = False
    state: str = "ok"
    retry_in: float = 0.0
    calls: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    conflicts: int = 0
    vetoes: int = 0
    skipped: int = 0
    lost: int = 0
    waiting: int = 0
    running: int = 0
    hung: int = 0
    quiet: int = 0
    interrupted: int = 0
    in_threads: bool = False
    last_error: str = ""
    last_trace: str = ""
    last_error_at: float = 0.0
    p50_s: float = 0.0
    max_s: float = 0.0


class HookStats:
    """Counters of one hook; guarded by the lock of its ``HookSlots``."""

    __slots__ = (
        "calls",
        "failures",
        "last_error",
        "last_error_at",
        "last_trace",
        "longest_s",
        "lost",
        "quick_in_a_row",
        "skipped",
        "times",
        "usual_s",
        "vetoes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls = 0
        self.failures: dict[str, int] = {}
        self.vetoes = 0
        self.skipped = 0
        self.lost = 0
        self.last_error = ""
        self.last_trace = ""
        self.last_error_at = 0.0
        self.times: deque[float] = deque(maxlen=_KEPT_DURATIONS)
        self.longest_s = 0.0
        self.usual_s = 1.0
        self.quick_in_a_row = QUICK_ANSWERS

    def record_duration(self, seconds: float) -> None:
        """Record the duration of a call."""
        if self.calls:
            self.usual_s += (seconds - self.usual_s) * _NEWEST_WEIGHT
        else:
            self.usual_s = seconds
        self.calls += 1
        self.times.append(seconds)
        if seconds > self.longest_s:
            self.longest_s = seconds
        self.quick_in_a_row = self.quick_in_a_row + 1 if seconds < SLOW_ANSWER_S else 0

    def record_failure(self, kind: str, text: str, trace: str, now: float) -> None:
        """Record a call that failed or could not be made (``now`` in seconds since the epoch)."""
        self.failures[kind] = self.failures.get(kind, 0) + 1
        self.last_error, self.last_trace, self.last_error_at = text, trace, now

    @property
    def is_quick(self) -> bool:
        """Whether its recent answers were quick."""
        return self.usual_s < QUICK_S and self.quick_in_a_row >= QUICK_ANSWERS

    def median(self) -> float:
        """Return the median time of the last answers."""
        times = sorted(self.times)
        return times[len(times) // 2] if times else 0.0
