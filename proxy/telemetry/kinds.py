"""The types of metric declarations: counter, gauge and histogram."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "topoproxy_"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A declared metric.

    Attributes:
        name: Its name, without ``topoproxy_`` and without the suffix of its kind.
        help: What it measures, one sentence.
        labels: Names of its labels.
        former: The name that it had before; it is exported under both for one release.
        status_key: Of a counter, the key in ``counters`` of ``topoproxy status --json`` where it is not the
            name. A counter with labels has one key for each combination: ``{label}`` is replaced by a value.
        buckets: Of a histogram, upper bounds in seconds, ascending; above the last one is ``+Inf``.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    former: str = ""
    status_key: str = ""
    buckets: tuple[float, ...] = ()

    def full_name(self, name: str = "") -> str:
        """Return the exported name, or that of a former name."""
        return f"{PREFIX}{name or self.name}"

    def check(self, labels: Iterable[str]) -> None:
        """Check names of labels.

        Raises:
            ValueError: They are not those of the metric.
        """
        if set(labels) != set(self.labels):
            raise ValueError(f"cannot use labels {sorted(labels)} for {self.name}: it has {self.labels}")


class Counter(Metric):
    """A count of events since the daemon started. It never goes down."""

    __slots__ = ()

    def full_name(self, name: str = "") -> str:
        """Return the exported name, or that of a former name."""
        return f"{PREFIX}{name or self.name}_total"


class Gauge(Metric):
    """A figure that goes up and down."""

    __slots__ = ()


class Histogram(Metric):
    """How often something took how many seconds."""

    __slots__ = ()
