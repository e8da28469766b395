"""Whole merges: providers' answers in, hint and admission out."""

from __future__ import annotations

from proxy.allocation.policies import decide
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy, parse_topology_options
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.hints import answer, distances, hint, plain


def check(case: Case, _: Topologies) -> Outcome:
    options = parse_topology_options(case.optional("options", dict))
    table = case.optional("distances", (list, dict))
    providers = [raw and answer(raw) for raw in case.optional("providers", list, [])]
    decision = decide(
        TopologyPolicy(case.value("policy", str)),
        providers,
        Mask(case.value("numa_nodes", list)),
        distances(table) if options.prefer_closest_numa_nodes and table else None,
    )
    expected: list[object] = [plain(hint(case.value("expected", dict)))]
    got: list[object] = [plain(decision.hint)]
    if (admit := case.optional("admit", bool)) is not None:
        expected.append(admit)
        got.append(decision.verdict.admitted)
    return Outcome(expected, got)
