"""The measurements of hooks in the real daemon, and the invariants while they misbehave."""

from __future__ import annotations

from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_no_call_hangs_or_is_misplaced_while_hooks_misbehave() -> None:
    """``make bench-hooks`` makes 10,000 calls."""
    import hooks_chaos

    chaos = hooks_chaos.measure(800, share=0.05)
    assert chaos.wrong == []
    assert (chaos.hung, chaos.deaths) == (0, 0), chaos.calls.slowest
    assert len(chaos.calls.took) >= 700


def test_the_cost_of_hooks_is_measured_on_creates_that_they_changed(tmp_path: Path) -> None:
    """The duration is not checked."""
    import hooks_figures

    rows = hooks_figures.rows(hooks_figures.measure(1, 20, tmp_path))
    assert [row[0] for row in rows] == list(hooks_figures.ROWS)
    assert all(float(row[1].split()[0]) > 0 for row in rows)
