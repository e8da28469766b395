"""``docs/metrics.md``, made from the declarations: ``python -m proxy.telemetry.reference`` prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from proxy.telemetry import metrics
from proxy.telemetry.registry import Counter, Histogram, Metric

HEAD = """\
# Metrics

`topoproxy status --metrics`, and `/metrics` of the admin socket, give these metrics in Prometheus' text
format. Counters and histograms begin with the process. A gauge that does not apply, such as one of BE
suppression if that is off, is left out. This page is generated from `proxy/telemetry/metrics.py` by `make
metrics`.

## Counters

The key is the one in `counters` of `topoproxy status --json`.

"""
HOOKS = "\n## Hooks\n\nEach hook has samples of its own.\n\n"
EXTENDER = """
## Scheduler extender

`/metrics` of `topoproxy scheduler-extender` ([scheduler.md](scheduler.md)) has these, and none of the others.

"""
FORMER = """
## Former names

These metrics, and their keys in `counters` of `topoproxy status --json`, were renamed. Both names are
exported for one release.

"""


def reference() -> str:
    """Return the page."""
    of_hooks = metrics.HOOK_METRICS | {metrics.HOOKS}
    plain = [metric for metric in metrics.DAEMON_METRICS if metric not in of_hooks]
    counters = [metric for metric in plain if isinstance(metric, Counter)]
    histograms = [metric for metric in plain if isinstance(metric, Histogram)]
    gauges = [metric for metric in plain if not isinstance(metric, Counter | Histogram)]
    hooks = [metric for metric in metrics.DAEMON_METRICS if metric in of_hooks]
    parts = (
        HEAD,
        *_table(("counter", "key", "what it counts"), (_counter(metric) for metric in counters)),
        "\n## Histograms\n\n",
        *_table(("histogram", "what it measures", "buckets (s)"), (_histogram(each) for each in histograms)),
        "\n## Gauges\n\n",
        *_table(("gauge", "what it measures"), ((_name(metric), metric.help) for metric in gauges)),
        HOOKS,
        *_table(("metric", "type", "what it measures"), ((_name(m), _type(m), m.help) for m in hooks)),
        EXTENDER,
        *_table(
            ("metric", "type", "what it measures"),
            ((_name(m), _type(m), m.help) for m in metrics.EXTENDER_METRICS),
        ),
        FORMER,
        *_table(("former name", "name"), _former()),
    )
    return "".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |\n"


def _name(metric: Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    return f"`{metric.full_name()}{labels}`"


def _type(metric: Metric) -> str:
    return type(metric).__name__.lower()


def _counter(metric: Counter) -> tuple[str, ...]:
    return _name(metric), f"`{metric.status_key or metric.name}`", metric.help


def _histogram(metric: Histogram) -> tuple[str, ...]:
    return _name(metric), metric.help, ", ".join(f"{bound:g}" for bound in metric.buckets)


def _former() -> Iterator[tuple[str, ...]]:
    for metric in metrics.DAEMON_METRICS:
        if metric.former:
            yield f"`{metric.full_name(metric.former)}`", f"`{metric.full_name()}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
