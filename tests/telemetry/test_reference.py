"""docs/metrics.md is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from proxy.telemetry import metrics
from proxy.telemetry.reference import reference

PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def test_the_page_is_made_from_the_declarations() -> None:
    assert PAGE.read_text() == reference(), "make metrics writes it"


def test_every_metric_is_on_the_page_once_with_its_help() -> None:
    text = reference()
    for metric in metrics.ALL:
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        rows = [line for line in text.splitlines() if line.startswith(f"| `{metric.full_name()}{labels}` |")]
        assert len(rows) == 1, metric.name
        assert metric.help in rows[0]
