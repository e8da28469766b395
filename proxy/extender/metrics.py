"""The metrics of the extender, in the form of those of the daemon (``proxy.telemetry.metrics``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.telemetry.exposition import family, histogram
from proxy.telemetry.kinds import Counter, Gauge, Histogram

REQUESTS = Counter("extender_requests", "Requests of kube-scheduler, by verb and result.", ("verb", "result"))
SECONDS = Histogram(
    "extender_request_seconds",
    "Seconds until a request was answered, by verb.",
    ("verb",),
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
LEADER = Gauge("extender_leader", "Whether this replica holds the lease.")
AGE = Gauge("extender_view_age_seconds", "Seconds since the copy of the cluster was known to be current.")
NODES = Gauge("extender_nodes", "Nodes, by whether the extender can decide for them.", ("state",))
PENDING = Gauge(
    "extender_pending_pods", "Pods that are promised to a node whose object does not show them yet."
)
JUDGED = Counter("extender_judged", "Decisions that the engine has made.")


class RequestFigures:
    """Counts and times of requests."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._times: dict[str, list[float]] = {}

    def add(self, verb: str, result: str, seconds: float) -> None:
        """Count a request."""
        self._counts[verb, result] = self._counts.get((verb, result), 0) + 1
        row = self._times.setdefault(verb, [0.0] * (len(SECONDS.buckets) + 2))
        row[next((i for i, bound in enumerate(SECONDS.buckets) if seconds <= bound), -2)] += 1
        row[-1] += seconds

    def text(self, gauges: Mapping[Gauge | Counter, Sequence[tuple[Mapping[str, object], float]]]) -> str:
        """Write all in Prometheus' text format.

        Args:
            gauges: What is read at the moment: labels and values of each metric.
        """
        counted = [
            ({"verb": verb, "result": result}, n) for (verb, result), n in sorted(self._counts.items())
        ]
        rows = [
            ({"verb": verb}, [int(n) for n in row[:-1]], row[-1]) for verb, row in sorted(self._times.items())
        ]
        parts = [family(REQUESTS, counted), histogram(SECONDS, rows)]
        return "".join([*parts, *(family(metric, samples) for metric, samples in gauges.items())])
