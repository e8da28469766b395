"""Parts of the memory manager: what a pod requests, and masks that contradict what nodes serve."""

from __future__ import annotations

from proxy.allocation.memory.hints import violates_groups
from proxy.allocation.memory.request import pod_amounts
from proxy.model.idset import Mask
from tests.conformance import memory
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.pods import pod


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind == "pod_request":
        return Outcome(case.value("expected", (dict, type(None))) or {}, pod_amounts(pod(case)))
    if kind == "affinity_violates":
        mask = Mask(case.value("affinity", list))
        return Outcome(case.value("expected", bool), violates_groups(memory.state(case), mask))
    return Outcome(skipped=f"kind {kind!r} is not built yet")
