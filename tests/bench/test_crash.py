"""The daemon as a process: killed at steps and at moments, and busy with a runtime that fails."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_a_daemon_killed_at_steps_breaks_no_promise() -> None:
    """Every eleventh step of the scenario; ``make crash`` takes them all."""
    import crash

    found, names = crash.steps(every=11)
    assert found.kills >= len(names) // 11 - 1
    assert not found.broken, (found.overlaps, found.lost, found.astray)
    assert {name.partition(":")[0] for name in names} >= {"ledger", "kernel", "CreateContainer"}


def test_a_daemon_killed_at_random_moments_breaks_no_promise() -> None:
    import crash

    found = crash.moments(10)
    assert found.kills == 10
    assert not found.broken, (found.overlaps, found.lost, found.astray)


def test_churn_with_a_failing_runtime_has_no_violations() -> None:
    import churn

    done = churn.measure(2000)
    assert done.wrong == []
    assert sum(done.calls.values()) >= 2000 - churn.CLIENTS
    assert max(done.ledger) < churn.LEDGER_KB * 1024


def test_each_attribute_with_a_growth_limit_exists() -> None:
    """The limit of a renamed attribute would not be applied."""
    import churn

    for name in churn.SIZE_LIMITS:
        owner_name, _, attribute = name.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        assert re.search(rf"\b{attribute}\b", inspect.getsource(owner)), name


def test_updates_of_a_reconciling_kubelet_are_counted() -> None:
    """All updates arrive; to measure their cost takes longer."""
    import reconcile_figures

    rows, _ = reconcile_figures.measure(2, reconciles=1)
    every, changed, unchanged = rows
    assert [row[1] for row in rows] == ["300", "300", "0"]
    assert every[-1] == changed[-1] == "0", "an unchanged cpuset is not written"
    assert unchanged[0].startswith("no calls")


def test_a_start_beside_a_few_containers_is_measured() -> None:
    import start_figures

    found = start_figures.measure(20, 1)
    table = start_figures.rows(found)
    assert [row[0] for row in table] == ["without a ledger", "with a ledger"]
    assert all(0 < each["cpu"] < 1000 and each["took"] > 0 for results in found.values() for each in results)
