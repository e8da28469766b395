"""The types of metric declarations, and the values of counters and histograms; callable from any thread."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from proxy.telemetry import metrics

PREFIX = "topoproxy_"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A declared metric.

    Attributes:
        name: Its name, without ``topoproxy_`` and without the suffix of its kind.
        help: What it measures, one sentence.
        labels: Names of its labels.
        former: Its former name; it is exported under both names for one release.
        status_key: For a counter, its key in ``counters`` of ``topoproxy status --json`` if this is not the
            name. ``{label}`` is replaced by a value of the label, which gives one key for each value; values
            whose labels are not in the key are added up.
        buckets: For a histogram, its upper bounds in seconds, ascending; above the last one is ``+Inf``.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    former: str = ""
    status_key: str = ""
    buckets: tuple[float, ...] = ()

    def full_name(self, name: str = "") -> str:
        """Return the exported form of the metric's name, or of a former name."""
        return f"{PREFIX}{name or self.name}"

    def check(self, labels: Iterable[str]) -> None:
        """Check names of labels.

        Raises:
            ValueError: They are not those of the metric.
        """
        if set(labels) != set(self.labels):
            raise ValueError(f"cannot use labels {sorted(labels)} for {self.name}: it has {self.labels}")


class Counter(Metric):
    """A count of events since the daemon started. It never goes down.

    The counters of a hook begin at 0 again when another version of its file is loaded.
    """

    __slots__ = ()

    def full_name(self, name: str = "") -> str:
        """Return the exported form of the metric's name, or of a former name."""
        return f"{PREFIX}{name or self.name}_total"


class Gauge(Metric):
    """A figure that goes up and down."""

    __slots__ = ()


class Histogram(Metric):
    """The distribution of durations in seconds."""

    __slots__ = ()


_Key = tuple[str, ...]
"""Values of the labels, in the order of the declaration."""
_NONE: _Key = ()


class Registry:
    """Counts, and writes its counts in Prometheus' text format."""

    def __init__(self, declared: Iterable[Metric] | None = None) -> None:
        """Start with all counts at zero.

        Args:
            declared: The counters and histograms to write; those of the daemon if None.
        """
        self._declared = metrics.DAEMON_METRICS if declared is None else tuple(declared)
        self._lock = threading.Lock()
        self._counts: dict[Counter, dict[_Key, int]] = {}
        self._observed: dict[Histogram, dict[_Key, list[float]]] = {}

    def add(self, metric: Counter, n: int, labels: Mapping[str, object]) -> None:
        """Count something; 0 makes the combination of labels known.

        Raises:
            ValueError: ``n`` is negative, or the labels are not those of the metric.
        """
        if n < 0:
            raise ValueError(f"cannot add {n} to {metric.name}: a counter never goes down")
        key = _key(metric, labels) if labels or metric.labels else _NONE
        with self._lock:
            values = self._counts.get(metric)
            if values is None:
                values = self._counts[metric] = {}
            values[key] = values.get(key, 0) + n

    def observe(self, metric: Histogram, seconds: float, labels: Mapping[str, object]) -> None:
        """Count a duration.

        Raises:
            ValueError: The labels are not those of the metric.
        """
        key = _key(metric, labels) if labels or metric.labels else _NONE
        bucket = bisect_left(metric.buckets, seconds)
        with self._lock:
            rows = self._observed.get(metric)
            if rows is None:
                rows = self._observed[metric] = {}
            row = rows.get(key)
            if row is None:
                row = rows[key] = _empty(metric)
            row[bucket] += 1
            row[-1] += seconds

    def value(self, metric: Counter, labels: Mapping[str, object]) -> int:
        """Return the value of a counter; 0 if nothing was counted."""
        return self._counts.get(metric, {}).get(_key(metric, labels), 0)

    def values(self, metric: Counter) -> dict[tuple[str, ...], int]:
        """Return the values of a counter, by the values of its labels."""
        with self._lock:
            return dict(self._counts.get(metric, {}))

    def page(self) -> dict[str, int]:
        """Return all counters by their keys in the status; a renamed counter is under both keys."""
        with self._lock:
            known = {metric: dict(values) for metric, values in self._counts.items()}
        page: dict[str, int] = {}
        for metric, values in known.items():
            for key, n in values.items():
                for name in (metric.status_key or metric.name, metric.former):
                    if name:
                        shown = name.format(**_labels(metric, key))
                        page[shown] = page.get(shown, 0) + n
        return page

    def text(self) -> str:
        """Return all counters and histograms in Prometheus' text format, including those that are 0."""
        return "".join(self._families())

    def _families(self) -> Iterator[str]:
        from proxy.telemetry.exposition import family, histogram  # only for a scrape

        for metric in self._declared:
            if metric in metrics.HOOK_METRICS:
                continue
            if isinstance(metric, Counter):
                values = self.values(metric) or ({} if metric.labels else {_NONE: 0})
                yield family(metric, [(_labels(metric, key), n) for key, n in sorted(values.items())])
            elif isinstance(metric, Histogram):
                with self._lock:
                    seen = {key: list(row) for key, row in self._observed.get(metric, {}).items()}
                if not metric.labels:
                    seen.setdefault(_NONE, _empty(metric))
                rows = [
                    (_labels(metric, key), [int(n) for n in row[:-1]], row[-1])
                    for key, row in sorted(seen.items())
                ]
                yield histogram(metric, rows)


def _empty(metric: Histogram) -> list[float]:
    """Make the row of a histogram: a count for each bucket and for ``+Inf``, and the sum."""
    return [0.0] * (len(metric.buckets) + 2)


def _key(metric: Metric, labels: Mapping[str, object]) -> _Key:
    metric.check(labels)
    return tuple(str(labels[name]) for name in metric.labels)


def _labels(metric: Metric, key: _Key) -> dict[str, str]:
    return dict(zip(metric.labels, key, strict=True))
