"""docs/metrics.md is generated from the declarations."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from proxy.telemetry import metrics
from proxy.telemetry.reference import reference

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
PAGES = [page for page in PAGE.parent.glob("*.md") if page != PAGE]


def test_the_page_is_generated_from_the_declarations() -> None:
    assert PAGE.read_text() == reference(), "make metrics writes it"


def test_every_metric_is_on_the_page_once_with_its_help() -> None:
    text = reference()
    for metric in (*metrics.DAEMON_METRICS, *metrics.EXTENDER_METRICS):
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        rows = [line for line in text.splitlines() if line.startswith(f"| `{metric.full_name()}{labels}` |")]
        assert len(rows) == 1, metric.name
        assert metric.help in rows[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_metric_that_does_not_exist(page: Path) -> None:
    known = {metric.full_name() for metric in (*metrics.DAEMON_METRICS, *metrics.EXTENDER_METRICS)}
    assert set(re.findall(r"\btopoproxy_[a-z_]+", page.read_text())) <= known


def test_metrics_are_declared_in_one_module() -> None:
    kinds = {"Counter", "Gauge", "Histogram"}
    found = set()
    for path in sorted((PAGE.parents[1] / "proxy").rglob("*.py")):
        tree = ast.parse(path.read_text())
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "proxy.telemetry.registry"
            for alias in node.names
        }
        calls = (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
        if kinds & imported & set(calls):
            found.add(path.name)
    assert found == {"metrics.py"}
