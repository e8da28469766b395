"""The static CPU policy as the files write it."""

from __future__ import annotations

from proxy.allocation.cpu_policy import Assignments, CpuPolicy, CpuState
from proxy.model.idset import CpuSet
from proxy.model.options import parse_cpu_options
from tests.conformance.cases import Case, Topologies


def policy(case: Case, topologies: Topologies) -> CpuPolicy:
    """Return the policy of a case.

    Raises:
        CpuStateError: Its CPUs cannot be reserved.
    """
    reserved = case.optional("reserved", str)
    amount = case.optional("reserved_count", int)
    cpus = None if reserved is None else CpuSet.parse(reserved)
    return CpuPolicy.of(
        topologies.of(case), parse_cpu_options(case.optional("options", dict, {})), cpus, amount
    )


def state(case: Case) -> CpuState:
    """Return the state that a case begins with."""
    return CpuState(case.cpus("default"), assignments(case.optional("assignments", dict, {})))


def assignments(raw: dict[str, dict[str, str] | None]) -> Assignments:
    return {uid: {name: CpuSet.parse(cpus) for name, cpus in (c or {}).items()} for uid, c in raw.items()}


def written(found: Assignments) -> dict[str, dict[str, str]]:
    """Write assignments as the files do; a pod that owns nothing is not in them."""
    return {uid: {name: str(cpus) for name, cpus in c.items()} for uid, c in found.items() if c}
