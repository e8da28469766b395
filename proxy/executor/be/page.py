"""BE suppression as ``topoproxy status`` shows it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from proxy.engine.be_usage import shares_of
from proxy.engine.state import NodeState
from proxy.engine.suppression import BeSuppression, SuppressionSettings, reason
from proxy.model.workload import Pool


def suppression_page(
    known: BeSuppression, settings: SuppressionSettings, state: NodeState
) -> Mapping[str, object]:
    """Return what ``topoproxy status`` shows: CPUs as lists, budgets in milli-CPUs, usage in CPUs."""
    found: dict[str, object] = {
        "mode": settings.mode.value,
        "threshold": settings.threshold,
        "min_percent": settings.least or 0,
        "cpus": str(state.pools.of(Pool.BE)),
        "pool": str(state.pools.be),
        "quota_us": known.quota,
        "group": known.above,
        "why": reason(known, settings),
    }
    if known.figures is not None:
        milli, usage = known.figures
        found["budget_milli"] = milli
        found["capacity_milli"] = usage.capacity
        found["usage"] = {name: round(used, 3) for name, used in structs.asdict(shares_of(usage)).items()}
    if known.change is not None:
        found["last_change"] = structs.asdict(known.change)
    return found
