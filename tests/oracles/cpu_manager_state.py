"""How kubelet's CPU manager checks the state that it has stored."""

from __future__ import annotations

from proxy.allocation.cpu_policy import CpuPolicy, CpuState, CpuStateError
from proxy.model.idset import CpuSet
from tests.testkit.changed_copy import changed_copy as replace


def managed(policy: CpuPolicy) -> CpuSet:
    """Return the CPUs that are in the default set or owned."""
    return policy.topo.cpus - policy.reserved if policy.options.strict_cpu_reservation else policy.topo.cpus


def start(policy: CpuPolicy, stored: CpuState | None = None) -> CpuState:
    """Check a stored state against the machine; an empty one becomes the initial state.

    Raises:
        CpuStateError: It does not fit.
    """
    state = stored or CpuState()
    if not state.default:
        if state.assigned:
            raise CpuStateError("default cpuset cannot be empty")
        return replace(state, default=managed(policy))
    reserved = policy.reserved
    if policy.options.strict_cpu_reservation:
        if both := reserved & state.default:
            raise CpuStateError(
                f'some of strictly reserved cpus: "{both}" are present in defaultCpuSet: "{state.default}"'
            )
    elif not reserved <= state.default:
        raise CpuStateError(
            f'not all reserved cpus: "{reserved}" are present in defaultCpuSet: "{state.default}"'
        )
    known = state.default
    for uid, containers in sorted(state.assigned.items()):
        for name, cpus in sorted(containers.items()):
            if not cpus.isdisjoint(state.default):
                raise CpuStateError(
                    f'pod: {uid}, container: {name} cpuset: "{cpus}" overlaps with default cpuset '
                    f'"{state.default}"'
                )
            known |= cpus
    for bubble in state.pod_level_cpus.values():
        known |= bubble
    if known != managed(policy):
        raise CpuStateError(
            f'current set of available CPUs "{managed(policy)}" doesn\'t match with CPUs in state "{known}"'
        )
    return state
