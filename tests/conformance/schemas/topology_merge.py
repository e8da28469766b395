"""Whole merges: providers' answers in, hint and admission out."""

from __future__ import annotations

from proxy.model.idset import Mask
from proxy.model.options import Policy, parse_topology_options
from proxy.place.policies import decide
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.hints import distances, hints, plain


def check(case: Case, topologies: Topologies) -> Outcome:
    options = parse_topology_options(case.value("options", dict))
    table = case.value("distances", (list, type(None)))
    providers = [
        provider and {name: None if raw is None else hints(raw) for name, raw in provider.items()}
        for provider in case.value("providers", list)
    ]
    decision = decide(
        Policy(case.value("policy", str)),
        providers,
        Mask(case.value("numa_nodes", list)),
        distances(table) if options.prefer_closest_numa_nodes and table is not None else None,
    )
    expected = (case.value("expected", dict), case.value("admit", bool))
    return Outcome(expected, (plain(decision.hint), decision.verdict.admitted))
