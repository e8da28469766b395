"""The metrics of hooks."""

from __future__ import annotations

from typing import Any

from proxy.observe.metrics import metrics

FINE: dict[str, Any] = {
    "name": "10-a",
    "state": "running",
    "broken": False,
    "breaker_open": False,
    "calls": 7,
    "failures": {"error": 2, "timeout": 1},
    "conflicts": 3,
    "vetoes": 4,
    "skipped": 5,
    "lost": 6,
    "hung": 1,
    "p50_s": 0.000025,
    "max_s": 0.5,
}
BROKEN: dict[str, Any] = {"name": '2"', "state": "broken", "broken": True}
MASKED: dict[str, Any] = {"name": "10-a", "state": "masked", "broken": True, "breaker_open": True}


def reported(*hooks: dict[str, Any]) -> list[str]:
    text = metrics({"hooks": {"hooks": list(hooks)}})
    return [line for line in text.splitlines() if line.startswith("topoproxy_hook")]


def test_hooks_have_metrics() -> None:
    assert reported(FINE, BROKEN, MASKED) == [
        'topoproxy_hooks{state="broken"} 1',
        'topoproxy_hooks{state="masked"} 1',
        'topoproxy_hooks{state="running"} 1',
        'topoproxy_hook_broken{hook="10-a"} 0',
        'topoproxy_hook_broken{hook="2\\""} 1',
        'topoproxy_hook_breaker_open{hook="10-a"} 0',
        'topoproxy_hook_calls_total{hook="10-a"} 7',
        'topoproxy_hook_conflicts_total{hook="10-a"} 3',
        'topoproxy_hook_vetoes_total{hook="10-a"} 4',
        'topoproxy_hook_skipped_total{hook="10-a"} 5',
        'topoproxy_hook_lost_total{hook="10-a"} 6',
        'topoproxy_hook_failures_total{hook="10-a",kind="error"} 2',
        'topoproxy_hook_failures_total{hook="10-a",kind="timeout"} 1',
        'topoproxy_hook_hung_calls{hook="10-a"} 1',
        'topoproxy_hook_call_seconds{hook="10-a",of="median"} 2.5e-05',
        'topoproxy_hook_call_seconds{hook="10-a",of="longest"} 0.5',
    ]


def test_without_hooks_there_are_no_metrics_of_them() -> None:
    assert reported() == []
    assert "topoproxy_hook" not in metrics({})
    assert "topoproxy_hook" not in metrics({"hooks": 3})


def test_hooks_that_were_never_called_have_no_counters() -> None:
    assert [line.partition("{")[0] for line in reported(BROKEN)] == [
        "topoproxy_hooks",
        "topoproxy_hook_broken",
    ]
