"""The port through which the daemon reports events: ``Telemetry``.

A message is a constant text; the varying facts are its keys::

    telemetry.event("placed", pod="ns/web", container="main", cpus=cpus)
    telemetry.problem("cannot write the cpuset", **subject(container), err=error)
    telemetry.count(metrics.CREATES_PLACED)

The log (text, klog, JSON), the problems of ``topoproxy status`` and ``/metrics`` all derive from these calls.
Repetitions are recognised by the message and its keys, never by the rendered text; the key ``err`` is the
cause of an error and is ignored for this.

Keys in use: ``pod`` (namespace/name), ``container`` (its name), ``containerID``, ``cpus``, ``mems`` (NUMA
nodes), ``path`` (a file or a cgroup), ``method`` (of the CRI), ``hook``, ``worker``, ``resource`` (of a
device plugin), ``reason`` (why a decision was made, or what is wrong, in words), ``err`` (why something
failed).

Problems are kept for the operator: each once, with the number and the times of its occurrences. The list is
bounded. A problem is identified by its message and its keys, without the cause (``err``): if a problem occurs
again with another cause, it is the same problem with a newer cause.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol, Unpack

from proxy.model.errors import ReplacedFilesError
from proxy.model.quoting import message as fit
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.metrics import Labels
from proxy.telemetry.registry import Counter, Histogram, Registry
from proxy.telemetry.text import CAUSE, Keys, identity, plain, rendered

Listener = Callable[[str, Mapping[str, object]], None]
"""A function that is called with a message and its keys."""

PROBLEM_LIMIT = 100
POD = "pod"
"""The key of problems that belong to a pod."""
HOOK = "hook"
"""The key of problems that a hook has caused."""
HOOK_FAILED = "a hook failed"

THROTTLE_PERIOD_S = 60.0
LINES_PER_KEY = 5
"""The most lines of one key that are written within a period after a quiet one."""
LINES_PER_PERIOD = 200
"""The most lines of all keys that are written within a period."""
THROTTLE_KEYS = 512
"""The most keys that are remembered; the least recently used one is forgotten first."""


@dataclass(slots=True)
class Problem:
    """One thing that went wrong (times are seconds since the epoch)."""

    message: str
    keys: Keys
    first: float
    last: float
    count: int = 1

    @property
    def what(self) -> str:
        """The message with its keys, as the log shows it."""
        return fit(rendered(self.message, self.keys))


class Problems:
    """A bounded list of problems; the one whose last occurrence is oldest is forgotten first.

    For one thread at a time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[object, ...], Problem] = OrderedDict()

    def note(self, message: str, keys: Keys) -> bool:
        """Record a problem; return whether the problem or its cause is new."""
        now = self._clock()
        known = self._known.get(what := identity(message, keys))
        if known is not None:
            known.count += 1
            known.last = now
            self._known.move_to_end(what)
            new = known.keys.get(CAUSE) != keys.get(CAUSE)
            known.keys = keys
            return new
        self._known[what] = Problem(message, keys, now, now)
        if len(self._known) > PROBLEM_LIMIT:
            # Authors of pods and hooks can cause problems at will, so theirs are forgotten before others.
            oldest = next(iter(self._known))
            at_will = (what for what, each in self._known.items() if POD in each.keys or HOOK in each.keys)
            del self._known[next(at_will, oldest)]
        return True

    def resolve(self, message: str, keys: Keys) -> list[Problem]:
        """Remove the problems with this message whose keys include the given ones, and return them."""
        over = {
            what: problem
            for what, problem in self._known.items()
            if problem.message == message and keys.items() <= problem.keys.items()
        }
        for what in over:
            del self._known[what]
        return list(over.values())

    def remove_unless(self, is_current: Callable[[Problem], bool]) -> None:
        """Remove the problems for which the function returns False."""
        for what in [what for what, problem in self._known.items() if not is_current(problem)]:
            del self._known[what]

    def page(self) -> list[dict[str, object]]:
        """Return all problems as plain data, the last to occur at the end."""
        return [
            {
                "what": p.what,
                "message": p.message,
                "keys": _plain(p.keys),
                "count": p.count,
                "first": p.first,
                "last": p.last,
            }
            for p in self._known.values()
        ]


def _plain(keys: Mapping[str, object]) -> dict[str, object]:
    return {key: fit(value) if isinstance(value, str) else value for key, value in keys.items()}


@dataclass(slots=True)
class _Window:
    """A period of one key."""

    since: float
    allowed: int
    count: int = 0
    missed: int = 0

    def admits(self, now: float, burst: int, after_a_flood: int) -> bool:
        """Count a line, and return whether it may be written; a clock that jumps begins a new period."""
        if not 0 <= now - self.since < THROTTLE_PERIOD_S:
            self.allowed = after_a_flood if self.count > self.allowed else burst
            self.since, self.count = now, 0
        self.count += 1
        if self.count > self.allowed:
            self.missed += 1
            return False
        return True

    def take_missed(self) -> int:
        """Return how many lines were left out since the last call."""
        missed, self.missed = self.missed, 0
        return missed


class Throttle:
    """Decides which lines are written. For one thread at a time."""

    def __init__(
        self, clock: Callable[[], float], *, burst: int = LINES_PER_KEY, total: int = LINES_PER_PERIOD
    ) -> None:
        """Begin with no line written.

        Args:
            clock: Seconds.
            burst: Lines of one key within a period.
            total: Lines of all keys within a period.
        """
        self._clock = clock
        self._burst = burst
        self._all = _Window(clock(), total)
        self._total = total
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()

    def admit(self, key: Hashable) -> tuple[int, int] | None:
        """Decide about a line.

        Returns:
            None if too many lines of its key, or of all keys, were written recently. Otherwise how many lines
            were left out: of this key since its last line, and of all keys since their common limit was
            reached.
        """
        now = self._clock()
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(now, self._burst)
            if len(self._windows) > THROTTLE_KEYS:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(key)
        if not window.admits(now, self._burst, 1):
            return None
        if not self._all.admits(now, self._total, self._total):
            window.missed += 1
            return None
        return window.take_missed(), self._all.take_missed()


class Sink(Protocol):
    """The destination of log records."""

    def write(self, level: str, message: str, keys: Mapping[str, object], above: int) -> None:
        """Write a record.

        Args:
            level: debug, info, warning or error.
            message: A constant text.
            keys: The varying facts.
            above: How many callers are between this call and the one that reports.
        """

    def enabled(self, level: str) -> bool:
        """Return whether records of the level are written."""


class Report(Protocol):
    """A method of ``Telemetry`` that takes a message and keys, for parts that need only this method."""

    def __call__(self, message: str, /, **keys: object) -> None:
        """Report something."""


def silent(message: str, /, **keys: object) -> None:
    """Report nothing."""


class Telemetry:
    """Counts, logs and keeps problems. Callable from any thread.

    Attributes:
        registry: The values of counters and histograms.
    """

    def __init__(
        self, sink: Sink, clock: Callable[[], float], wall_clock: Callable[[], float] | None = None
    ) -> None:
        """Begin with nothing counted.

        Args:
            sink: The log.
            clock: Seconds that never jump.
            wall_clock: Seconds since the epoch, for display; ``clock`` if None.
        """
        self.registry = Registry()
        self._sink = sink
        self._lock = threading.Lock()
        self._problems = Problems(wall_clock or clock)
        self._throttle = Throttle(wall_clock or clock)
        self._frequent = Throttle(clock)
        self._listener: Listener | None = None

    # -- metrics ------------------------------------------------------------------------------------------

    def count(self, metric: Counter, n: int = 1, /, **labels: Unpack[Labels]) -> None:
        """Add to a counter.

        Raises:
            ValueError: ``n`` is negative, or the labels are not those of the metric.
        """
        self.registry.add(metric, n, labels)

    def observe(self, metric: Histogram, seconds: float, /, **labels: Unpack[Labels]) -> None:
        """Add a duration to a histogram.

        Raises:
            ValueError: The labels are not those of the metric.
        """
        self.registry.observe(metric, seconds, labels)

    def value(self, metric: Counter, /, **labels: Unpack[Labels]) -> int:
        """Return the value of a counter."""
        return self.registry.value(metric, labels)

    # -- log ----------------------------------------------------------------------------------------------

    @property
    def verbose(self) -> bool:
        """Whether debug records are written; if not, their values need not be computed."""
        return self._sink.enabled("debug")

    def debug(self, message: str, /, **keys: object) -> None:
        """Log a record that is useful only to developers."""
        if self._sink.enabled("debug"):
            self._sink.write("debug", message, plain(keys), 1)

    def event(self, message: str, /, **keys: object) -> None:
        """Log an event."""
        self._sink.write("info", message, plain(keys), 1)

    def set_listener(self, listener: Listener) -> None:
        """Register a listener for each warning and each problem, including those that are not logged.

        Args:
            listener: Called from any thread.
        """
        self._listener = listener

    def warning(self, message: str, /, **keys: object) -> None:
        """Log an event that an operator should know, but that is not a lasting problem."""
        if self._listener is not None:
            self._listener(message, keys)
        self._sink.write("warning", message, plain(keys), 1)

    def frequent(self, message: str, /, **keys: object) -> None:
        """Log an event that a client can cause at will: the first few, then one a minute."""
        facts = plain(keys)
        with self._lock:
            admitted = self._frequent.admit(identity(message, facts))
        if admitted is not None:
            self._write("info", message, facts, admitted)

    # -- problems -----------------------------------------------------------------------------------------

    def problem(self, message: str, /, **keys: object) -> None:
        """Record a problem, and log it if the problem or its cause (``err``) is new.

        Input that the keys quote is escaped and cut wherever it is shown.
        """
        self._problem(message, keys)

    def _problem(self, message: str, keys: Mapping[str, object]) -> None:
        facts = plain(keys)
        if self._listener is not None:
            self._listener(message, facts)
        with self._lock:
            new = self._problems.note(message, facts)
            admitted = self._throttle.admit(identity(message, facts)) if new else None
        if admitted is not None:
            self._write("warning", message, facts, admitted, 3)

    def resolved(self, message: str, /, **keys: object) -> None:
        """End the problems with this message and these keys, and log the end of each."""
        with self._lock:
            over = self._problems.resolve(message, plain(keys))
        for problem in over:
            self._sink.write("info", "resolved", {"problem": problem.message, **problem.keys}, 1)

    def forget(self, message: str, /, **keys: object) -> None:
        """Remove the problems with this message and these keys without a log record: they may still exist."""
        with self._lock:
            self._problems.resolve(message, plain(keys))

    def forget_unless(self, is_current: Callable[[Problem], bool]) -> None:
        """Remove the problems for which the function returns False, without a log record."""
        with self._lock:
            self._problems.remove_unless(is_current)

    def fault(self, error: BaseException) -> None:
        """Count and report a fault of topoproxy itself, unless its files were replaced: that is no fault."""
        if isinstance(error, ReplacedFilesError):
            self._problem("cannot use a part of topoproxy before a restart", {"err": error})
            return
        self.count(metrics.INTERNAL_ERRORS)
        self._problem("internal error", {"fault": f"{type(error).__name__}: {error}"})

    def problems(self) -> list[dict[str, object]]:
        """Return all problems as plain data, the newest last."""
        with self._lock:
            return self._problems.page()

    def _write(
        self, level: str, message: str, keys: Mapping[str, object], left_out: tuple[int, int], above: int = 2
    ) -> None:
        missed, others = left_out
        if others:
            limit = {"count": others, "limit": LINES_PER_PERIOD, "seconds": THROTTLE_PERIOD_S}
            self._sink.write(level, "log lines were left out", limit, above)
        repeated = {"repeated": missed} if missed else {}
        self._sink.write(level, message, {**keys, **repeated}, above)


def subject_of(containers: Mapping[str, Container], container_id: str) -> dict[str, object]:
    """Return the keys that name a container, even if only its id is known."""
    container = containers.get(container_id)
    return {"containerID": container_id} if container is None else subject(container)


def subject(container: Container) -> dict[str, object]:
    """Return the keys that name a container; it has no id while it is being created."""
    container_id = None if container.phase is Phase.CREATING else container.id
    return {"pod": container.pod.ref, "container": container.name, "containerID": container_id}
