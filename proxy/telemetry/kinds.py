"""The kinds of metrics: what a declaration consists of."""

from __future__ import annotations

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
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    former: str = ""

    def full_name(self, name: str = "") -> str:
        """Return the exported name, or that of a former name."""
        return f"{PREFIX}{name or self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Counter(Metric):
    """A count of events since the daemon started. It never goes down.

    Attributes:
        status_key: The key in ``counters`` of ``topoproxy status --json`` where it is not the name. A counter
            with labels has one key for each combination: ``{label}`` stands for the value of a label.
    """

    status_key: str = ""

    def full_name(self, name: str = "") -> str:
        """Return the exported name, or that of a former name."""
        return f"{PREFIX}{name or self.name}_total"


@dataclass(frozen=True, slots=True, eq=False)
class Gauge(Metric):
    """A figure that goes up and down."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(Metric):
    """How often something took how many seconds.

    Attributes:
        buckets: Upper bounds in seconds, ascending; above the last one is ``+Inf``.
    """

    buckets: tuple[float, ...] = ()
