"""Koordinator's CPU accumulator: one request on a machine where others have CPUs."""

from __future__ import annotations

from proxy.allocation.koordinator.accumulator import accumulate
from proxy.allocation.koordinator.bind_request import Allocated, BindError
from proxy.allocation.packed import NotEnoughCpus
from tests.conformance import binding
from tests.conformance.cases import Case, Outcome, Topologies


def check(case: Case, _: Topologies) -> Outcome:
    topo, held = binding.topology(case), case.cpus("allocated")
    policy = binding.exclusive(case.optional("allocated_exclusive_policy", str))
    taken = Allocated(policies=dict.fromkeys(held, policy))  # all reference counts are 0
    wanted = "error" if case.optional("error", bool, default=False) else str(case.cpus("expected"))
    n = case.value("num_cpus", int)
    try:
        got = str(
            accumulate(topo, topo.cpus - held, n, binding.bind_request(case.fields), taken, degrade=False)
        )
    except (NotEnoughCpus, BindError):
        got = "error"
    return Outcome(wanted, got)
