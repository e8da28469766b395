"""What is wholly free, in the order in which it would be taken."""

from __future__ import annotations

from tests.conformance.cases import Case, Outcome, Topologies
from tests.oracles.packed_orders import free_cores, free_cpus, free_nodes, free_sockets

_KINDS = {
    "free_sockets": free_sockets,
    "free_numa_nodes": free_nodes,
    "free_cores": free_cores,
    "free_cpus": free_cpus,
}


def check(case: Case, topologies: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    expected = case.value("expected", (list, type(None))) or []
    got = _KINDS[kind](topologies.of(case), case.cpus("available"))
    if case.optional("ordered", bool, default=True):
        return Outcome(expected, got)
    return Outcome(sorted(expected), sorted(got))
