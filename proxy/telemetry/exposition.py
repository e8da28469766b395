"""Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from proxy.telemetry.registry import Counter, Histogram, Metric

LabelValues = Mapping[str, object]
Sample = tuple[LabelValues, float]


def family(metric: Metric, samples: Sequence[Sample]) -> str:
    """Write a counter or a gauge with all its samples, also under its former name if it has one.

    Args:
        metric: Its declaration.
        samples: Labels and value.

    Raises:
        ValueError: A sample has other labels than the metric.
    """
    for labels, _ in samples:
        metric.check(labels)
    kind = "counter" if isinstance(metric, Counter) else "gauge"
    return "".join(
        "".join(_lines(name, text, kind, (("", labels, value) for labels, value in samples)))
        for name, text in names(metric)
    )


def histogram(metric: Histogram, samples: Sequence[tuple[LabelValues, Sequence[int], float]]) -> str:
    """Write a histogram.

    Args:
        metric: Its declaration.
        samples: Labels, the count of each bucket by itself and of ``+Inf``, and the sum.
    """
    lines: list[tuple[str, LabelValues, float]] = []
    for labels, counts, total in samples:
        below = 0
        for bound, count in zip((*map(_number, metric.buckets), "+Inf"), counts, strict=True):
            below += count
            lines.append(("_bucket", {**labels, "le": bound}, below))
        lines += [("_sum", labels, total), ("_count", labels, below)]
    return "".join(_lines(metric.full_name(), metric.help, "histogram", lines))


def names(metric: Metric) -> Iterator[tuple[str, str]]:
    """Return the names under which a metric is exported, with the help of each."""
    yield metric.full_name(), metric.help
    if metric.former:
        yield metric.full_name(metric.former), f"Former name of {metric.full_name()}."


def _lines(
    name: str, text: str, kind: str, samples: Iterable[tuple[str, LabelValues, float]]
) -> Iterator[str]:
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for suffix, labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield (
            f"{name}{suffix}{{{inside}}} {_number(value)}\n"
            if inside
            else f"{name}{suffix} {_number(value)}\n"
        )


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(value: object) -> str:
    """Escape the value of a label; a lone surrogate, which UTF-8 cannot encode, is written as in Python."""
    text = str(value).encode(errors="backslashreplace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
