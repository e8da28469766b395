"""BE (best effort) suppression on the status page.

As everywhere on that page, a part that is missing or something else than expected is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from proxy.report.parts import cut, one_line

_PERIOD_US = 100_000


def suppression(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the section: the usage, what is left for BE (best effort) pods, what they have, and since when.

    Args:
        data: ``beSuppress`` of what ``/status`` answered; empty where nothing is suppressed.
        width: Columns of the terminal; long lines are cut at it.
    """
    mode = one_line(data.get("mode"))
    if not mode:
        return
    yield ""
    yield f"BE suppression ({mode}, up to {one_line(data.get('threshold'))} % of the node)"
    yield from (cut(line, width) for line in _lines(data))


def _lines(data: Mapping[str, object]) -> Iterable[str]:
    usage, budget = data.get("usage"), data.get("budget_milli")
    if isinstance(usage, Mapping) and isinstance(budget, int):
        used = [
            f"{name} {value:.1f}"
            for name, key in (("other pods", "others"), ("BE pods", "be"), ("system", "system"))
            if isinstance(value := usage.get(key), int | float)
        ]
        yield f"  CPUs in use: {', '.join(used)}; for BE pods: {budget / 1000:.1f}"
    elif _is_on(data):
        yield "  usage is not known"
    quota = data.get("quota_us")
    if isinstance(quota, int) and quota > 0:
        group = one_line(data.get("group"))
        yield f"  quota: {quota / _PERIOD_US:.2f} CPUs{f' for /{group}' if group else ''}"
    elif data.get("mode") == "cpuset":
        now, pool = one_line(data.get("cpus")), one_line(data.get("pool"))
        yield f"  BE pods run on {now or '-'}" + ("" if now == pool else f" of {pool}")
    change = data.get("last_change")
    if isinstance(change, Mapping):
        when = change.get("when")
        ago = f" {max(0.0, time.time() - when):.0f} s ago" if isinstance(when, int | float) else ""
        yield f"  changed{ago} to {one_line(change.get('after'))} from {one_line(change.get('before'))}"
        yield f"    {one_line(change.get('why'))}"


def _is_on(data: Mapping[str, object]) -> bool:
    """Return whether something is to be suppressed."""
    return data.get("mode") in ("cpuset", "cfs-quota")
