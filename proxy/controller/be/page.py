"""BE suppression as ``topoproxy status`` and ``topoproxy explain`` show it."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.controller.be.suppression import Suppression
from proxy.controller.be.text import quota_words, reason
from proxy.controller.be.usage import shares_of
from proxy.engine.state import NodeState
from proxy.model.workload import Container, Pool
from proxy.pools.be_suppression import is_be
from proxy.pools.quota import UNLIMITED


def note_of(suppression: Suppression, state: NodeState, container: Container) -> str:
    """Say how a container is suppressed; empty where it is not."""
    why = reason(suppression.figures, suppression.settings.threshold)
    if container.placement.pool is Pool.BE and state.pools.be_now is not None:
        return f"BE is suppressed: it runs on {state.wanted(container)} now, of {state.pools.be}; {why}."
    quota, pod = suppression.quota.in_force, container.pod
    if quota not in (None, UNLIMITED) and is_be(pod.qos, pod.kube_qos):
        return f"BE is suppressed: all BE pods together have {quota_words(quota)}; {why}."
    return ""


def page(suppression: Suppression, state: NodeState) -> Mapping[str, object]:
    """Give what ``topoproxy status`` shows: CPUs as lists, budgets in milli-CPUs, usage in CPUs."""
    settings, change = suppression.settings, suppression.change
    found: dict[str, object] = {
        "mode": settings.mode.value,
        "threshold": settings.threshold,
        "min_percent": settings.least or 0,
        "cpus": str(state.pools.of(Pool.BE)),
        "pool": str(state.pools.be),
        "quota_us": suppression.quota.in_force,
        "group": suppression.above,
        "why": reason(suppression.figures, settings.threshold),
    }
    if suppression.figures is not None:
        milli, usage = suppression.figures
        shares = shares_of(usage)
        found["budget_milli"] = milli
        found["capacity_milli"] = usage.capacity
        names = ("node", "be", "others", "system")
        found["usage"] = {name: round(getattr(shares, name), 3) for name in names}
    if change is not None:
        fields = ("when", "before", "after", "why")
        found["last_change"] = {name: getattr(change, name) for name in fields}
    return found
