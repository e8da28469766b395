"""Upgrade and downgrade under load: no call fails, and no owner moves."""

from __future__ import annotations


def test_an_upgrade_and_a_downgrade_under_load_fail_no_call() -> None:
    import upgrade_figures

    out = upgrade_figures.measure(1, 12)
    assert out.failed == []
    assert out.wrong == []
    assert (len(out.took), len(out.pauses_s)) == (2, 2)
    assert out.calls > 50
