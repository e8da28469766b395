"""BE suppression in words, for log lines and pages."""

from __future__ import annotations

from proxy.controller.be.usage import shares_of
from proxy.pools.be_suppression import Usage
from proxy.pools.quota import PERIOD, UNLIMITED


def quota_words(quota: int | None) -> str:
    """Name a quota."""
    return "no CFS quota" if quota in (None, UNLIMITED) else f"a CFS quota of {quota / PERIOD:.2f} CPUs"


def reason(figures: tuple[int, Usage] | None, threshold: int) -> str:
    """Say where a budget comes from.

    Args:
        figures: The budget in milli-CPUs and what it was computed from; None where usage is not known.
        threshold: Percent of the capacity.
    """
    if figures is None:
        return "usage is not known"
    milli, usage = figures
    shares, whole = shares_of(usage), usage.capacity / 1000
    kept = max(usage.capacity - usage.allocatable, usage.reservation, 0) / 1000
    system = f"{kept:.1f} are kept back" if kept > shares.system else f"the system uses {shares.system:.1f}"
    return (
        f"the budget is {milli / 1000:.1f} CPUs: {threshold} % of {whole:.0f} are"
        f" {whole * threshold / 100:.1f}, other pods use {shares.others:.1f}, {system}"
    )
