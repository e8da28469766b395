"""Koordinator's CPU accumulator: orders, requests one after the other, and preferred CPUs."""

from __future__ import annotations

from proxy.allocation.koordinator.accumulator import accumulate
from proxy.allocation.koordinator.bind import take_preferred
from proxy.allocation.koordinator.bind_request import Allocated
from proxy.model.idset import CpuSet
from tests.conformance import binding
from tests.conformance.cases import BadCaseError, Case, Outcome, Topologies
from tests.oracles.binding_orders import free_cpus, spread_order
from tests.testkit.changed_copy import changed_copy as replace


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    return _KINDS[kind](case)


def _order(case: Case) -> Outcome:
    topo = binding.topology(case)
    return Outcome(case.expected(), spread_order(topo, topo.cpus, binding.bind_request(case.fields).strategy))


def _sequence(case: Case) -> Outcome:
    topo, taken, most = binding.topology(case), Allocated(), 1
    expected: list[str] = []
    got: list[str] = []
    for step in _steps(case):
        most = step.optional("max_ref_count", int, 1)
        free = free_cpus(taken, topo.cpus, most)
        n, bind_request = step.value("num_cpus", int), binding.bind_request(step.fields)
        got.append(str(accumulate(topo, free, n, bind_request, taken, degrade=False)))
        expected.append(str(step.cpus("expected")))
        policy = binding.exclusive(step.optional("record_exclusive_policy", str))
        taken = taken.add(step.cpus("expected"), policy)
    if case.optional("available_after", str) is not None:
        expected.append(str(case.cpus("available_after")))
        got.append(str(free_cpus(taken, topo.cpus, most)))
    return Outcome(expected, got)


def _preferred(case: Case) -> Outcome:
    topo = binding.topology(case)
    expected: list[str] = []
    got: list[str] = []
    for step in _steps(case):
        preferred = CpuSet()
        if step.value("call", str) == "take_preferred":
            preferred = step.cpus("preferred")
        bind_request = replace(binding.bind_request(step.fields), preferred=preferred)
        n, free = step.value("num_cpus", int), step.cpus("available")
        got.append(str(take_preferred(topo, free, n, bind_request, Allocated(), degrade=False)))
        expected.append(str(step.cpus("expected")))
    return Outcome(expected, got)


def _steps(case: Case) -> list[Case]:
    steps = case.value("steps", list)
    if not all(isinstance(step, dict) for step in steps):
        raise BadCaseError(f"it has unusable 'steps': {steps!r}")
    return [Case(case.index, step) for step in steps]


_KINDS = {"spread_order": _order, "allocate_sequence": _sequence, "preferred": _preferred}
