"""Files of cgroup v2: text in, values in the terms of v1 out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from proxy.backends.cgroup import v2_values
from proxy.model.errors import CgroupError
from tests.conformance.cases import Case, Outcome, Topologies
from tests.oracles import cgroup_v2_values


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    expected: object = "refused" if case.optional("error", bool) else case.expected()
    try:
        got: object = _KINDS[kind](case.value("input", (str, int)))
    except CgroupError:
        got = "refused"
    return Outcome(expected, got)


_KINDS: dict[str, Callable[[Any], object]] = {
    "cpu_max": v2_values.parse_quota,
    "weight_to_shares": cgroup_v2_values.shares_of,
    "shares_to_weight": cgroup_v2_values.weight_of,
    "cpu_stat_full": lambda text: dataclasses.asdict(cgroup_v2_values.cpu_times(text)),
    "cpu_usage": v2_values.parse_cpu_usage,
    "cpu_stat_throttle": lambda text: dataclasses.asdict(cgroup_v2_values.throttling(text)),
    "memory_stat": cgroup_v2_values.memory_figures,
    "memory_numa_stat": lambda text: [
        {"numa": node, "pages": pages} for node, pages in cgroup_v2_values.memory_pages(text).items()
    ],
}
