"""docs/metrics.md is what the declarations say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.extender import http_server as extender
from proxy.telemetry import metrics
from proxy.telemetry.reference import reference
from proxy.telemetry.registry import Counter, Gauge, Histogram

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
PAGES = [page for page in PAGE.parent.glob("*.md") if page != PAGE]
OF_EXTENDER = {
    value.full_name() for value in vars(extender).values() if isinstance(value, Counter | Gauge | Histogram)
}


def test_the_page_is_made_from_the_declarations() -> None:
    assert PAGE.read_text() == reference(), "make metrics writes it"


def test_every_metric_is_on_the_page_once_with_its_help() -> None:
    text = reference()
    for metric in metrics.ALL:
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        rows = [line for line in text.splitlines() if line.startswith(f"| `{metric.full_name()}{labels}` |")]
        assert len(rows) == 1, metric.name
        assert metric.help in rows[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_metric_that_does_not_exist(page: Path) -> None:
    known = {metric.full_name() for metric in metrics.ALL} | OF_EXTENDER
    assert set(re.findall(r"\btopoproxy_[a-z_]+", page.read_text())) <= known
