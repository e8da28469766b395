"""Reloads under load: no call fails, and a bad configuration changes nothing."""

from __future__ import annotations


def test_reloads_under_load_fail_no_call() -> None:
    import reload_day

    day = reload_day.measure(24)
    assert day.failed == []
    assert day.wrong == []
    assert (day.good, day.bad, day.compared) == (12, 12, 2)
    assert day.calls > 50
