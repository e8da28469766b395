"""The port through which the daemon reports what happens: ``Telemetry``.

A message is a constant text, and what varies is a key::

    telemetry.event("placed", pod="ns/web", container="main", cpus=cpus)
    telemetry.problem("cannot write the cpuset", **subject(container), err=error)
    telemetry.count(metrics.CREATES_PLACED)

The log (text, klog, JSON), the problems of ``topoproxy status`` and ``/metrics`` all derive from these calls.
What repeats is recognised by its message and its keys, never by its rendered text; the key ``err`` is the
cause of an error and does not count for that.

Keys in use: ``pod`` (namespace/name), ``container`` (its name), ``containerID``, ``cpus``, ``mems`` (NUMA
nodes), ``path`` (a file or a cgroup), ``method`` (of the CRI), ``hook``, ``worker``, ``resource`` (of a
device plug-in), ``reason`` (why it was decided so, or what is wrong in words), ``err`` (why it failed).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol, Unpack

from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.kinds import Counter, Histogram
from proxy.telemetry.metrics import Labels
from proxy.telemetry.problems import Problems
from proxy.telemetry.registry import Registry
from proxy.telemetry.text import identity, plain
from proxy.telemetry.throttle import PERIOD_S, TOTAL, Throttle

Listener = Callable[[str, Mapping[str, object]], None]
"""Is called with a message and its keys."""


class Sink(Protocol):
    """Where log records go."""

    def write(self, level: str, message: str, keys: Mapping[str, object], above: int) -> None:
        """Write a record.

        Args:
            level: debug, info, warning or error.
            message: A constant text.
            keys: What varies.
            above: How many callers are between this call and the one that reports.
        """

    def enabled(self, level: str) -> bool:
        """Return whether records of the level are written."""


class Report(Protocol):
    """A method of ``Telemetry`` that takes a message and keys, where a part needs only that one."""

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
        self, sink: Sink, clock: Callable[[], float], wall: Callable[[], float] | None = None
    ) -> None:
        """Begin with nothing counted.

        Args:
            sink: The log.
            clock: Seconds that never jump.
            wall: Seconds since the epoch, for people; ``clock`` if None.
        """
        self.registry = Registry()
        self._sink = sink
        self._lock = threading.Lock()
        self._problems = Problems(wall or clock)
        self._throttle = Throttle(wall or clock)
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
        """Whether debug records are written: what only they need is computed only then."""
        return self._sink.enabled("debug")

    def debug(self, message: str, /, **keys: object) -> None:
        """Log what is of use to developers only."""
        if self._sink.enabled("debug"):
            self._sink.write("debug", message, plain(keys), 1)

    def event(self, message: str, /, **keys: object) -> None:
        """Log what happened."""
        self._sink.write("info", message, plain(keys), 1)

    def listen(self, listener: Listener) -> None:
        """Register a listener for each warning and each problem, also for those that are not logged.

        Args:
            listener: Called from any thread.
        """
        self._listener = listener

    def warning(self, message: str, /, **keys: object) -> None:
        """Log what an operator should know, and what is not a problem that lasts."""
        if self._listener is not None:
            self._listener(message, keys)
        self._sink.write("warning", message, plain(keys), 1)

    def frequent(self, message: str, /, **keys: object) -> None:
        """Log what happened and what a client can cause at will: the first few, then one a minute."""
        facts = plain(keys)
        with self._lock:
            admitted = self._frequent.admit(identity(message, facts))
        if admitted is not None:
            self._write("info", message, facts, admitted)

    # -- problems -----------------------------------------------------------------------------------------

    def problem(self, message: str, /, **keys: object) -> None:
        """Record that something is wrong, and log it where it, or its cause (``err``), is new.

        What the keys quote of input is escaped and cut wherever it is shown.
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
        """End the problems with this message and these keys, and log that of each."""
        with self._lock:
            over = self._problems.resolve(message, plain(keys))
        for problem in over:
            self._sink.write("info", "resolved", {"problem": problem.message, **problem.keys}, 1)

    def forget(self, message: str, /, **keys: object) -> None:
        """Remove the problems with this message and these keys without a log record: they may not be over."""
        with self._lock:
            self._problems.resolve(message, plain(keys))

    def fault(self, error: BaseException) -> None:
        """Count and report a fault of topoproxy itself."""
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
            limit = {"count": others, "limit": TOTAL, "seconds": PERIOD_S}
            self._sink.write(level, "log lines were left out", limit, above)
        repeated = {"repeated": missed} if missed else {}
        self._sink.write(level, message, {**keys, **repeated}, above)


def subject_of(containers: Mapping[str, Container], container_id: str) -> dict[str, object]:
    """Return the keys that name a container, also where only its id is known."""
    container = containers.get(container_id)
    return {"containerID": container_id} if container is None else subject(container)


def subject(container: Container) -> dict[str, object]:
    """Return the keys that name a container; it has no id while it is being created."""
    container_id = None if container.phase is Phase.CREATING else container.id
    return {"pod": container.pod.ref, "container": container.name, "containerID": container_id}
