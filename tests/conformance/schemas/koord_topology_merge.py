"""Koordinator's merge: providers' answers in, hint, admission and reasons out."""

from __future__ import annotations

from proxy.allocation.koordinator.scored_merge import Tenancy, align
from proxy.model.idset import Mask
from proxy.model.koordinator import NumaExclusive
from proxy.model.options import TopologyPolicy
from tests.conformance import binding
from tests.conformance.cases import Case, Outcome, Topologies


def check(case: Case, _: Topologies) -> Outcome:
    done = align(
        TopologyPolicy(case.value("policy", str)),
        [binding.answer(raw) for raw in case.optional("providers", list, [])],
        Mask(case.value("numa_nodes", list)),
        Tenancy(NumaExclusive(case.value("exclusive", str)), binding.status(case)),
    )
    expected: list[object] = [binding.plain(binding.hint(case.value("expected", dict)))]
    got: list[object] = [binding.plain(done.hint)]
    if (admit := case.optional("admit", bool)) is not None:
        expected.append(admit)
        got.append(done.admitted)
    if "expected_reasons" in case.fields:
        expected.append(case.fields["expected_reasons"] or [])
        got.append(list(done.reasons))
    return Outcome(expected, got)
