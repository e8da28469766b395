"""Choosing n CPUs: options in, CPUs or kubelet's error text out."""

from __future__ import annotations

from proxy.allocation.distributed import take_distributed
from proxy.allocation.packed import NotEnoughCpus, take_packed
from tests.conformance.cases import Case, Outcome, Topologies

_KEYWORDS = {
    "prefer-align-cpus-by-uncorecache": "prefer_uncore",
    "distribute-cpus-across-cores": "spread",
}


def check(case: Case, topologies: Topologies) -> Outcome:
    algorithm = case.value("algorithm", str)
    if algorithm not in ("packed", "distributed"):
        return Outcome(skipped=f"algorithm {algorithm!r} is not built yet")
    options = {name for name, on in case.optional("options", dict, {}).items() if on}
    if unknown := sorted(options - set(_KEYWORDS)):
        return Outcome(skipped=f"option {unknown[0]!r} is not built yet")
    error = case.optional("error", str)
    expected: object = f"error: {error}" if error else str(case.cpus("expected"))
    topo, available, n = topologies.of(case), case.cpus("available"), case.value("num_cpus", int)
    try:
        if algorithm == "distributed":
            got = str(take_distributed(topo, available, n, group=case.optional("cpu_group_size", int, 1)))
        else:
            got = str(take_packed(topo, available, n, **{_KEYWORDS[name]: True for name in options}))
    except NotEnoughCpus as refused:
        got = f"error: {refused}"
    return Outcome(expected, got)
